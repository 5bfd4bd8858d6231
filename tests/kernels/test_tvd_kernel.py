import math

import pytest
import torch
from spec_samples import assert_right, one_of_each, sized

from tilekern.kernels import spec_named

LOSS = spec_named("tvd")
SPECS = [LOSS, spec_named("tvd_elements_forward"), spec_named("tvd_elements_backward")]
# The device function, and the shape of its tiles.
WAYS = ("schedule", "tile_m", "tile_n")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(spec):
    problem = sized(spec, rows=5, columns=83, flags=True)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["p"][1], inputs["q"][3] = math.nan, math.inf
    inputs["slope" if spec is LOSS else "counted"][[1, 3]] = 0
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("columns", [83, 5000])
def test_equal_elements_have_no_gradient_and_nan_spreads(graded, columns):
    problem = sized(LOSS, rows=3, columns=columns).but(graded=graded)
    inputs = LOSS.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["p"][0] = inputs["q"][0]
    inputs["p"][1, -1] = math.nan
    assert_right(LOSS, problem, one_of_each(LOSS, problem, *WAYS), inputs)
