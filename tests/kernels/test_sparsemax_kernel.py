import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, interpret, one_of_each, sized

from tilekern.kernels import spec_named
from tilekern.kernels.sparsemax import by_sorting

FORWARD, BACKWARD = spec_named("sparsemax_forward"), spec_named("sparsemax_backward")
# How rows are held, and the width of tiles.
WAYS = ("passes", "tile_n")


def stairs(columns, ratio, height):
    """A row of groups of equal numbers, each group ``ratio`` times as large as the one above and as much nearer."""
    found, count, level = [0.0], 1, height
    while len(found) < columns:
        count, level = math.ceil(count * ratio), level / ratio
        found += [-height + level] * count
    return torch.tensor(found[:columns])


@pytest.mark.parametrize("columns", [83, 1500, 20000])
def test_the_steps_reach_the_threshold_of_rows_that_take_many(columns):
    rows = [stairs(columns, ratio, height) for ratio in (1.3, 2, 4) for height in (0.3, 0.9)]
    rows += [-torch.logspace(-7, 0, columns), torch.linspace(-1, 0, columns), torch.zeros(columns)]
    x = torch.stack([*rows, 100 - torch.arange(columns) * 1e-6])
    problem = sized(FORWARD, rows=len(x), columns=columns)
    assert_right(FORWARD, problem, one_of_each(FORWARD, problem, *WAYS), {"x": x})


@examples(20)
@given(st.data())
def test_ties_and_numbers_that_are_not_finite_are_as_sorting_has_them(data):
    numbers = st.sampled_from([-math.inf, -3e38, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 3e38, math.inf, math.nan])
    columns = data.draw(st.integers(1, 5))
    x = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=3, max_size=3)))
    problem = sized(FORWARD, rows=3, columns=columns)
    config = data.draw(st.sampled_from(configs(FORWARD, problem)))
    check = interpret(FORWARD, problem, config, {"x": x})
    assert check.passed, check.reason


@pytest.mark.parametrize("level", [-1000.0, 1000.0])
@pytest.mark.parametrize("columns", [83, 20000])
def test_large_numbers_of_one_sign_cost_no_digits(columns, level):
    """And zeros beyond the end of a row are not in its support."""
    problem = sized(FORWARD, rows=3, columns=columns)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) + level
    for config in one_of_each(FORWARD, problem, *WAYS):
        check = interpret(FORWARD, problem, config, {"x": x})
        assert check.relative_error < 1e-6, (config, check.reason)


def test_the_reference_is_the_nearest_distribution():
    """It is one, and what it leaves of x is one number on the support and no more than that elsewhere."""
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).double()
    y = by_sorting(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(50).double())
    left = x - y
    tau = left.where(y > 0, -math.inf).amax(-1, keepdim=True)
    assert ((left - tau).abs().where(y > 0, 0) < 1e-12).all()
    assert (left <= tau + 1e-12).all()


@pytest.mark.parametrize("columns", [83, 20000])
def test_outside_the_support_there_is_no_gradient_whatever_the_slope(columns):
    problem = sized(BACKWARD, rows=3, columns=columns)
    inputs = BACKWARD.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    inputs["dy"][inputs["y"] <= 0] = math.nan
    for config in one_of_each(BACKWARD, problem, *WAYS):
        check = interpret(BACKWARD, problem, config, inputs)
        assert check.relative_error < 1e-6, (config, check.reason)
