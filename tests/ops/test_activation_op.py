import pytest
import torch
from op_samples import ONCE

from tilekern.ops import activation
from tilekern.ops.activation import CURVES

functional = torch.nn.functional
REFERENCES = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", CURVES)
def test_result_and_gradient_match_autograd_in_float64(kind, dtype):
    x = torch.randn(3, 5, 83).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = activation(x, kind), REFERENCES[kind](wide)
    slope = torch.randn_like(y)
    (dx,), (reference,) = torch.autograd.grad(y, x, slope), torch.autograd.grad(expected, wide, slope.double())
    for got, right in ((y, expected), (dx, reference)):
        assert got.dtype == dtype
        assert (got.double() - right).norm() <= ONCE[dtype] * right.norm()


@pytest.mark.parametrize("kind", CURVES)
def test_the_formula_is_of_the_same_form(kind):
    x = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(activation(x, kind), REFERENCES[kind](x), rtol=1e-6, atol=1e-7)
