import pytest
import torch
from spec_samples import assert_right, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named

FORWARD, BACKWARD = spec_named("layer_norm_forward"), spec_named("layer_norm_backward")
both = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
# The axes by which rows are held, and the width of tiles.
WAYS = ("passes", "tile_n")


@both
@pytest.mark.parametrize("columns", [83, 1500, 9000])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(spec, columns):
    """The mean of the squares less the square of the mean would be off by 2e-3."""
    problem = sized(spec, rows=3, columns=columns)
    inputs = plain_inputs(spec, problem)
    inputs["x"] += 256
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs, most=1e-4)


def test_slopes_far_from_zero_are_not_rounded_with_the_weight():
    """The mean of dy * weight is subtracted: if the products were rounded, the rest would be lost."""
    problem = sized(BACKWARD, "bfloat16", rows=3, columns=84)
    inputs = plain_inputs(BACKWARD, problem)
    inputs["dy"] = 256 + 2 * (inputs["dy"] > 0).to(inputs["dy"].dtype)
    inputs["weight"].fill_(1.3)
    assert_right(BACKWARD, problem, one_of_each(BACKWARD, problem, *WAYS), inputs)


def test_a_row_of_one_value_gives_the_bias():
    problem = sized(FORWARD, rows=3, columns=84)
    inputs = plain_inputs(FORWARD, problem)
    inputs["x"] = torch.full_like(inputs["x"], 2.0)
    assert_right(FORWARD, problem, one_of_each(FORWARD, problem, *WAYS), inputs, most=1e-30)
