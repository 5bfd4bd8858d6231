import math

import pytest
import torch
from op_samples import launched_by

from tilekern.kernels.sparsemax import by_sorting
from tilekern.ops import sparsemax

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def given(dtype, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((83,), 0), ((4, 83), -1), ((4, 83), 0), ((3, 4, 5), 1), ((3, 4, 5), -3)])
def test_result_and_gradient_match_sorting_in_float64_along_any_dimension(dtype, shape, dim):
    x = given(dtype, shape)
    wide = x.detach().double().requires_grad_()
    y, expected = sparsemax(x, dim), by_sorting(wide.transpose(dim, -1)).transpose(dim, -1)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    for got, right in ((y, expected), (x.grad, wide.grad)):
        assert got.dtype == dtype
        assert got.shape == shape
        assert (got.double() - right).norm() <= BOUNDS[dtype] * right.norm()


@pytest.mark.parametrize("dim", [-1, 0])
def test_each_way_is_one_launch(dim):
    x = given(torch.float32, (4, 83))
    launched = launched_by(lambda: sparsemax(x, dim=dim).square().sum().backward())
    assert launched == {"sparsemax_forward": 1, "sparsemax_backward": 1}


def test_examples_that_one_can_compute_by_hand():
    x = torch.tensor([[2.0, 1.5, 0.0], [3.0, 1.0, 0.0], [0.0, -math.inf, 0.0], [5.0, 5.0, 5.0]])
    expected = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(sparsemax(x), expected)
    assert sparsemax(torch.tensor([[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])).isnan().all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("dim", [-1, 0])
def test_empty_tensors_give_empty_ones(shape, dim):
    x = torch.zeros(shape, requires_grad=True)
    y = sparsemax(x, dim)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape


def test_float64_runs_the_formula_in_float64():
    x = given(torch.float64, (4, 5))
    y = sparsemax(x)
    torch.testing.assert_close(y, by_sorting(x))
    slope = torch.randn_like(y)
    expected = torch.autograd.grad(by_sorting(x), x, slope)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, slope)[0], expected)


def test_a_dimension_that_is_not_there_is_an_error():
    with pytest.raises(IndexError, match="Dimension out of range"):
        sparsemax(torch.zeros(2, 3), 2)
