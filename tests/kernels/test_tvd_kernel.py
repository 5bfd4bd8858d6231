import math

import pytest
import torch
from spec_samples import configs, interpret, sized

from tilekern.kernels import spec_named

LOSS = spec_named("tvd")
SPECS = [LOSS, spec_named("tvd_elements_forward"), spec_named("tvd_elements_backward")]


def one_of_each(spec, problem):
    """A config for each device function and each shape of its tiles."""
    found = {}
    for config in configs(spec, problem):
        found.setdefault((config["schedule"], config.get("tile_m"), config["tile_n"]), config)
    return found.values()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_that_do_not_count_add_nothing_whatever_they_hold(spec):
    problem = sized(spec, rows=5, columns=83, flags=True)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["p"][1], inputs["q"][3] = math.nan, math.inf
    inputs["slope" if spec is LOSS else "counted"][[1, 3]] = 0
    for config in one_of_each(spec, problem):
        check = interpret(spec, problem, config, inputs)
        assert check.passed, (config, check.reason)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("columns", [83, 5000])
def test_equal_elements_have_no_gradient_and_nan_spreads(graded, columns):
    problem = sized(LOSS, rows=3, columns=columns).but(graded=graded)
    inputs = LOSS.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["p"][0] = inputs["q"][0]
    inputs["p"][1, -1] = math.nan
    for config in one_of_each(LOSS, problem):
        check = interpret(LOSS, problem, config, inputs)
        assert check.passed, (config, check.reason)
