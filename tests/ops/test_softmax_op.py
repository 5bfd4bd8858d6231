import math

import pytest
import torch
from op_samples import launched_by

from tilekern.ops import softmax

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(83,), (4, 83), (3, 1, 5, 16)])
def test_result_and_gradient_match_torch_in_float64(dtype, shape):
    x = torch.randn(shape).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = softmax(x), wide.softmax(-1)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    for got, right in ((y, expected), (x.grad, wide.grad)):
        assert got.dtype == dtype
        assert (got.double() - right).norm() < BOUNDS[dtype] * right.norm()


def test_each_way_is_one_launch():
    x = torch.randn(4, 83, requires_grad=True)
    launched = launched_by(lambda: softmax(x).square().sum().backward())
    assert launched == {"softmax_forward": 1, "softmax_backward": 1}


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_tensors_give_what_torch_gives(shape):
    x = torch.zeros(shape, requires_grad=True)
    y = softmax(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape


def test_masked_columns_get_no_share_and_no_gradient():
    x = torch.tensor([[0.5, -math.inf, 1.0], [-math.inf] * 3], requires_grad=True)
    y = softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
    gradient = torch.autograd.grad(y[0, 0], x)[0]
    assert gradient[0, 1] == 0


def test_float64_runs_the_formula_in_float64():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = softmax(x)
    torch.testing.assert_close(y, x.softmax(-1))
    slope = torch.randn_like(y)
    expected = torch.autograd.grad(x.softmax(-1), x, slope)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, slope)[0], expected)
