"""linear as a user calls it: results and gradients, activations, fallbacks, torch.compile, bad input."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, LAYOUTS, TOLERANCE, assert_near, laid_out

from tilekern.ops.linear import _find, linear
from tilekern.runtime import dispatch

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")


def reference(x, weight, bias=None, activation=None):
    y = torch.nn.functional.linear(x, weight, bias)
    if activation == "silu":
        return torch.nn.functional.silu(y)
    if activation is not None:
        return torch.nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y


def leaves(dtype=torch.float32, leading=(2, 5), features=24, out=19, biased=True, layouts=("contiguous",)):
    generator = torch.Generator().manual_seed(0)
    shapes = [(*leading, features), (out, features), *([(out,)] if biased else [])]
    found = []
    for number, shape in enumerate(shapes):
        values = torch.randn(shape, generator=generator).to(dtype)
        found.append(laid_out(values, layouts[number % len(layouts)]).detach().requires_grad_())
    return found


def counted():
    count = dispatch.counters("matmul")
    return count.launches, count.fallbacks


@examples(40)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    inputs = leaves(
        dtype,
        data.draw(st.sampled_from([(), (1,), (7,), (2, 5), (0,), (3, 1, 4)])),
        data.draw(st.integers(8, 80)),
        data.draw(st.integers(8, 80)),
        data.draw(st.booleans()),
        data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=3)),
    )
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    y = linear(*inputs, activation=activation)
    slope = laid_out(torch.randn(y.shape).to(dtype), data.draw(st.sampled_from(LAYOUTS)))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*wide, activation=activation)
    assert y.dtype == dtype
    assert_near(y, expected, TOLERANCE[dtype])
    got = torch.autograd.grad(y, inputs, slope)
    for leaf, gradient, wanted in zip(inputs, got, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        assert gradient.dtype == leaf.dtype
        assert_near(gradient, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_inference_takes_one_launch_and_agrees_with_training(activation, biased):
    inputs = leaves(biased=biased)
    trained = linear(*inputs, activation=activation)
    launches, fallbacks = counted()
    with torch.no_grad():
        y = linear(*inputs, activation=activation)
    assert counted() == (launches + 1, fallbacks)
    torch.testing.assert_close(y, trained.detach(), rtol=1e-5, atol=1e-5)


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


def test_what_the_kernel_does_not_serve_runs_by_torch_and_is_counted():
    x, weight, bias = leaves(torch.float64)
    launches, fallbacks = counted()
    y = linear(x, weight, bias, "silu")
    assert_near(y, reference(x, weight, bias, "silu"), 1e-12)
    assert counted() == (launches, fallbacks + 1)
    y.sum().backward()
    assert weight.grad is not None
    empty = linear(torch.randn(0, 8), torch.randn(3, 8))
    assert empty.shape == (0, 3)
    assert counted() == (launches, fallbacks + 2)


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


def test_checkpointing_and_a_kept_graph_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    inputs = leaves()
    y = linear(*inputs, activation="silu")
    slope = torch.randn_like(y)
    first = torch.autograd.grad(y, inputs, slope, retain_graph=True)
    again = torch.autograd.grad(y, inputs, slope)
    z = checkpoint(linear, *inputs, "silu", use_reentrant=False)
    for found in (again, torch.autograd.grad(z, inputs, slope)):
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_compile_traces_it_whole(activation):
    torch._dynamo.reset()
    inputs = leaves()

    def call(*inputs):
        return 2 * linear(*inputs, activation=activation)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    slope = torch.randn(2, 5, 19)
    expected = torch.autograd.grad(call(*inputs), inputs, slope)
    got = torch.autograd.grad(compiled(*inputs), inputs, slope)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), call(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(*inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
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


@pytest.mark.parametrize(
    ("x", "weight", "bias", "activation", "message"),
    [
        ((3, 8), (5, 7), None, None, r"weight must have the shape \[out_features, 8\], got \[5, 7\]"),
        ((3, 8), (8,), None, None, r"weight must have the shape \[out_features, 8\], got \[8\]"),
        ((), (5, 8), None, None, r"x must have the shape \[..., in_features\], got \[\]"),
        ((3, 8), (5, 8), (8,), None, r"bias must have the shape \[5\]"),
        ((3, 8), (5, 8), None, "relu", "activation must be one of"),
    ],
)
def test_bad_input_is_refused(x, weight, bias, activation, message):
    with pytest.raises(ValueError, match=f"linear: {message}"):
        linear(torch.randn(x), torch.randn(weight), None if bias is None else torch.randn(bias), activation)
