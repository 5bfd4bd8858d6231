"""MLPs without a gate on the GPU: every activation, weights as GPT-2 stores them, and what a layer keeps."""

import formulas
import pytest
import torch
from gpu_tolerances import OF_OPS
from op_samples import assert_near

from tilekern.ops import mlp
from tilekern.ops.activation import CURVES
from tilekern.runtime import dispatch


def leaves(dtype, rows=1009, hidden=96, columns=1000):
    """The input, and weights and biases as GPT-2 has them."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(rows, hidden), (hidden, columns), (columns,), (columns, hidden), (hidden,)]
    found = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    found[1] /= hidden**0.5
    found[3] /= columns**0.5
    return [x.to(dtype).requires_grad_() for x in found]


def ours(x, up, up_bias, down, down_bias, kind):
    return mlp(x, up.t(), up_bias, down.t(), down_bias, kind)


def theirs(x, up, up_bias, down, down_bias, kind):
    return torch.addmm(down_bias, formulas.CURVES[kind](torch.addmm(up_bias, x, up)), down)


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("dtype", OF_OPS, ids=str)
def test_results_and_gradients_match_float64(dtype, kind, full_float32):
    inputs = leaves(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y, expected = ours(*inputs, kind), theirs(*wide, kind)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, slope)
    for got, right in zip(
        (y, *gradients), (expected, *torch.autograd.grad(expected, wide, slope.double())), strict=True
    ):
        assert_near(got, right, 2 * OF_OPS[dtype])
    assert [g.stride() for g in gradients] == [x.stride() for x in inputs]
    again = torch.autograd.grad(ours(*inputs, kind), inputs, slope)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True)), "sums have a fixed order"
    assert dispatch.counters("activation_backward_remake").launches == 2
    assert dispatch.counters("activation_forward").fallbacks == 0


def test_a_layer_keeps_one_matrix():
    inputs = leaves(torch.bfloat16, 8192, 768, 3072)
    matrix = 8192 * 3072 * 2
    # What cuBLAS works in, it keeps.
    ours(*inputs, "gelu_tanh"), theirs(*inputs, "gelu_tanh")

    def kept(run):
        before = torch.cuda.memory_allocated()
        y = run(*inputs, "gelu_tanh")
        return (torch.cuda.memory_allocated() - before - y.numel() * 2) / matrix

    assert kept(ours) < 1.1
    assert kept(theirs) > 1.9
