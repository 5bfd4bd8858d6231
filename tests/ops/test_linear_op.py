"""linear as a user calls it: results and gradients, activations, fallbacks, torch.compile, bad input."""

import pytest
import torch
from formulas import linear as reference

from tilekern.ops.linear import _find, linear
from tilekern.runtime import dispatch


def leaves():
    return [torch.randn(shape, requires_grad=True) for shape in ((2, 5, 24), (19, 24), (19,))]


def counted():
    count = dispatch.counters("matmul")
    return count.launches, count.fallbacks


def test_only_the_gradients_that_are_wanted_are_computed():
    x, weight, bias = leaves()
    launches, _ = counted()
    linear(x, weight, bias).sum().backward()
    assert counted()[0] == launches + 3
    linear(x.detach(), weight, bias).sum().backward()
    assert counted()[0] == launches + 5
    linear(x, weight.detach(), bias.detach()).sum().backward()
    assert counted()[0] == launches + 7
    linear(x.detach(), weight.detach(), bias).sum().backward()
    assert counted()[0] == launches + 8


def test_autocast_gives_the_dtype_that_torch_gives():
    x, weight, bias = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    assert y.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(y, wanted)


def test_products_of_more_elements_than_32_bits_index_are_left_to_torch():
    x = torch.empty(1 << 16, 8)
    assert _find(False, x, torch.empty(1 << 14, 8), None, None) is not None
    assert _find(False, x, torch.empty(1 << 15, 8), None, None) is None


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_the_registered_op_is_sound(activation):
    inputs = [x.detach().requires_grad_() for x in leaves()]
    op = torch.ops.tilekern.linear.default
    torch.library.opcheck(op, (*inputs, activation))
    slope = torch.randn(2, 5, 19)
    got = torch.autograd.grad(op(*inputs, activation), inputs, slope)
    expected = torch.autograd.grad(reference(*inputs, activation), inputs, slope)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    x, weight, _ = inputs
    assert torch.autograd.grad(op(x, weight, None, None).sum(), weight)[0].shape == weight.shape
