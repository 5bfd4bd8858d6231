import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, interpret, one_of_each, sized

from tilekern.kernels import spec_named

FORWARD, BACKWARD = spec_named("softmax_forward"), spec_named("softmax_backward")
# How rows are held, and the width of tiles.
WAYS = ("passes", "tile_n")


@pytest.mark.parametrize("columns", [83, 1500, 20000])
@pytest.mark.parametrize("level", [-1000.0, 1000.0])
def test_exponentials_neither_overflow_nor_take_in_what_is_beyond_the_end_of_a_row(columns, level):
    """Without the maximum all are 0 or infinite; zeros beyond the end would be the maximum of negative rows."""
    problem = sized(FORWARD, rows=3, columns=columns)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) + level
    for config in one_of_each(FORWARD, problem, *WAYS):
        check = interpret(FORWARD, problem, config, {"x": x})
        assert check.relative_error < 1e-6, (config, check.reason)


@examples(20)
@given(st.data())
def test_numbers_that_are_not_finite_give_what_torch_gives(data):
    numbers = st.sampled_from([-math.inf, -math.inf, -3e38, -1.0, 0.0, 2.0, 3e38, math.inf, math.nan])
    columns = data.draw(st.integers(1, 5))
    x = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=3, max_size=3)))
    problem = sized(FORWARD, rows=3, columns=columns)
    config = data.draw(st.sampled_from(configs(FORWARD, problem)))
    check = interpret(FORWARD, problem, config, {"x": x})
    assert check.passed, check.reason


@pytest.mark.parametrize("x", [[-math.inf, -math.inf], [math.nan, 0.0], [math.inf, 0.0]])
@pytest.mark.parametrize("columns", [2, 20000])
def test_a_row_without_a_result_is_nan_and_the_others_are_not(x, columns):
    rows = torch.zeros(2, columns)
    rows[0] = x[1]
    rows[0, 0] = x[0]
    problem = sized(FORWARD, rows=2, columns=columns)
    assert_right(FORWARD, problem, one_of_each(FORWARD, problem, *WAYS), {"x": rows})


@pytest.mark.parametrize("columns", [83, 1500, 20000])
def test_a_level_of_the_slopes_makes_no_difference(columns):
    """The gradient is of what sums to 1 whatever x is, so its own sum is 0."""
    problem = sized(BACKWARD, rows=3, columns=columns)
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, columns, generator=generator).double().softmax(-1).float()
    dy = torch.randn(3, columns, generator=generator) + 16
    for config in one_of_each(BACKWARD, problem, *WAYS):
        check = interpret(BACKWARD, problem, config, {"dy": dy, "y": y})
        assert check.relative_error < 1e-5, (config, check.reason)
