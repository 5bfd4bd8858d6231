"""Softmax and sparsemax: large numbers, numbers that are not finite, ties, and elements beyond the end of a row."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, configs, each, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.kernels.sparsemax import by_sorting

SOFTMAX, SOFTMAX_BACKWARD = spec_named("softmax_forward"), spec_named("softmax_backward")
SPARSEMAX, SPARSEMAX_BACKWARD = spec_named("sparsemax_forward"), spec_named("sparsemax_backward")
both = each([SOFTMAX, SPARSEMAX])
lengths = pytest.mark.parametrize("columns", [83, 1500, 20000])


def ways(spec, problem):
    """Return a config of each number of passes and each width of tiles."""
    return one_of_each(spec, problem, "passes", "tile_n")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@both
@lengths
@pytest.mark.parametrize("level", [-1000.0, 1000.0])
def test_large_numbers_of_one_sign_cost_no_digits(spec, columns, level):
    """Without the maximum exponentials are 0 or infinite; zeros beyond the end would exceed negative rows."""
    problem = sized(spec, rows=3, columns=columns)
    assert_right(spec, problem, ways(spec, problem), {"x": normal(3, columns) + level}, most=1e-6)


@both
@examples(20)
@given(st.data())
def test_ties_and_numbers_that_are_not_finite_equal_the_reference(spec, data):
    numbers = st.sampled_from([-math.inf, -3e38, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0, 3e38, math.inf, math.nan])
    columns = data.draw(st.integers(1, 5))
    x = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=3, max_size=3)))
    problem = sized(spec, rows=3, columns=columns)
    assert_right(spec, problem, [data.draw(st.sampled_from(configs(spec, problem)))], {"x": x})


@pytest.mark.parametrize("x", [[-math.inf, -math.inf], [math.nan, 0.0], [math.inf, 0.0]])
@pytest.mark.parametrize("columns", [2, 20000])
def test_a_row_without_a_result_is_nan_and_the_others_are_not(x, columns):
    rows = torch.zeros(2, columns)
    rows[0], rows[0, 0] = x[1], x[0]
    problem = sized(SOFTMAX, rows=2, columns=columns)
    assert_right(SOFTMAX, problem, ways(SOFTMAX, problem), {"x": rows})


@lengths
def test_a_level_of_the_slopes_makes_no_difference(columns):
    """Results sum to 1 whatever x is, so the gradient sums to 0."""
    problem = sized(SOFTMAX_BACKWARD, rows=3, columns=columns)
    inputs = {"dy": normal(3, columns, seed=1) + 16, "y": normal(3, columns).double().softmax(-1).float()}
    assert_right(SOFTMAX_BACKWARD, problem, ways(SOFTMAX_BACKWARD, problem), inputs, most=1e-5)


def stairs(columns, ratio, height):
    """Return a row of groups of equal numbers; each has ``ratio`` times the size of the one above, and is nearer."""
    found, count, level = [0.0], 1, height
    while len(found) < columns:
        count, level = math.ceil(count * ratio), level / ratio
        found += [-height + level] * count
    return torch.tensor(found[:columns])


@lengths
def test_the_steps_reach_the_threshold_of_rows_that_take_many(columns):
    rows = [stairs(columns, ratio, height) for ratio in (1.3, 2, 4) for height in (0.3, 0.9)]
    rows += [-torch.logspace(-7, 0, columns), torch.linspace(-1, 0, columns), torch.zeros(columns)]
    x = torch.stack([*rows, 100 - torch.arange(columns) * 1e-6])
    problem = sized(SPARSEMAX, rows=len(x), columns=columns)
    assert_right(SPARSEMAX, problem, ways(SPARSEMAX, problem), {"x": x})


def test_the_reference_is_the_nearest_distribution():
    """It sums to 1; x less it is one number on the support, and at most that elsewhere."""
    x = normal(50, 20).double()
    y = by_sorting(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(50).double())
    left = x - y
    tau = left.where(y > 0, -math.inf).amax(-1, keepdim=True)
    assert ((left - tau).abs().where(y > 0, 0) < 1e-12).all()
    assert (left <= tau + 1e-12).all()


@pytest.mark.parametrize("columns", [83, 20000])
def test_outside_the_support_there_is_no_gradient_whatever_the_slope(columns):
    problem = sized(SPARSEMAX_BACKWARD, rows=3, columns=columns)
    inputs = plain_inputs(SPARSEMAX_BACKWARD, problem)
    inputs["dy"][inputs["y"] <= 0] = math.nan
    assert_right(SPARSEMAX_BACKWARD, problem, ways(SPARSEMAX_BACKWARD, problem), inputs, most=1e-6)
