"""tiled_swiglu and tiled_geglu: the MLP that they are, what they keep, and what hooks on parameters see."""

import pytest
import torch
from op_samples import LAYOUTS, TOLERANCE, assert_like_float64, assert_near, laid_out

from tilekern.ops import tiled_geglu, tiled_swiglu
from tilekern.runtime.dispatch import counters

linear = torch.nn.functional.linear
GATES = {
    tiled_swiglu: torch.nn.functional.silu,
    tiled_geglu: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
both = pytest.mark.parametrize("op", GATES, ids=lambda op: op.__name__)


def leaves(shape=(2, 11, 24), dtype=torch.float32, intermediate=37):
    generator = torch.Generator().manual_seed(0)
    hidden = shape[-1]
    shapes = [shape, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    return [
        (torch.randn(size, generator=generator) / (size[-1] ** 0.5 if number else 1)).to(dtype).requires_grad_()
        for number, size in enumerate(shapes)
    ]


def expected(op, x, gate, up, down):
    return linear(GATES[op](linear(x, gate)) * linear(x, up), down)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "num_shards"), [((2, 11, 24), 3), ((50, 24), None), ((24,), None), ((3, 1, 24), 8)], ids=str
)
def test_results_and_gradients_match_float64(op, dtype, shape, num_shards):
    inputs = leaves(shape, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y, reference = op(*inputs, num_shards=num_shards), expected(op, *wide)
    assert y.dtype == dtype
    assert_near(y, reference, 2 * TOLERANCE[dtype])
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(y, inputs, slope)
    for got, wanted in zip(gradients, torch.autograd.grad(reference, wide, slope.double()), strict=True):
        assert got.dtype == dtype
        assert_near(got, wanted, 4 * TOLERANCE[dtype])


@both
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_weights", LAYOUTS)
def test_any_strides(op, layout, of_weights):
    layouts = (layout, *[of_weights] * 3)
    inputs = [laid_out(x.detach(), way).requires_grad_() for x, way in zip(leaves(), layouts, strict=True)]
    assert_like_float64(
        lambda *given: (op(*given, num_shards=3),), lambda *given: (expected(op, *given),), inputs, layout, (2, 4)
    )


@pytest.mark.parametrize(("tokens", "shards"), [(24, 1), (25, 2), (49, 3)])
def test_there_are_as_many_shards_as_a_sequence_is_longer_than_a_token(tokens, shards):
    before = counters("swiglu_forward").launches
    with torch.no_grad():
        tiled_swiglu(*leaves((2, tokens, 24)))
    assert counters("swiglu_forward").launches == before + shards


@both
def test_exact_gelu_and_frozen_weights(op):
    inputs = leaves()
    for weight in inputs[1:]:
        weight.requires_grad_(False)
    y = op(*inputs, num_shards=2)
    (dx,) = torch.autograd.grad(y.sum(), inputs[:1])
    assert_near(dx, torch.autograd.grad(expected(op, *inputs).sum(), inputs[:1])[0], 1e-5)
    exact = tiled_geglu(*inputs, num_shards=2, tanh=False)
    x, gate, up, down = inputs
    assert_near(exact, linear(torch.nn.functional.gelu(linear(x, gate)) * linear(x, up), down), 1e-5)


@both
def test_nothing_of_the_size_of_the_activations_is_kept(op):
    inputs = leaves((1, 64, 24))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = op(*inputs, num_shards=4)
    assert y.requires_grad
    assert all(x.shape[-1] == 24 for x in kept), [tuple(x.shape) for x in kept]


@both
def test_hooks_of_parameters_see_one_gradient_of_all_shards(op):
    inputs, seen = leaves(), []
    for weight in inputs[1:]:
        weight.register_post_accumulate_grad_hook(seen.append)
    op(*inputs, num_shards=4).sum().backward()
    assert sorted(map(id, seen)) == sorted(map(id, inputs[1:]))


@both
def test_autocast_holds_in_the_backward_too(op):
    inputs = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y = op(*inputs, num_shards=2)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), inputs)
    for got, wanted in zip(gradients, torch.autograd.grad(expected(op, *inputs).sum(), inputs), strict=True):
        assert got.dtype == torch.float32
        assert_near(got, wanted, 3e-2)


@both
def test_torch_compile_traces_it_whole(op):
    inputs = leaves()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs, num_shards=2).square().sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(op(*inputs, num_shards=2).square().sum(), inputs), strict=True):
        assert_near(a, b, 1e-5)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@both
def test_no_tokens_give_no_result(op):
    inputs = leaves((2, 0, 24))
    op(*inputs).sum().backward()
    assert inputs[0].grad.shape == (2, 0, 24)


@both
def test_what_does_not_fit_is_refused(op):
    x, gate, up, down = leaves()
    with pytest.raises(ValueError, match=rf"{op.__name__}: num_shards must be at least 1, or None, got 0"):
        op(x, gate, up, down, num_shards=0)
    with pytest.raises(ValueError, match=r"gate_weight and up_weight must have one shape, got .* and \[30, 24\]"):
        op(x, gate, up[:30], down)
    with pytest.raises(ValueError, match="up_weight is on meta, and must be on cpu as x is"):
        op(x, gate, up.to("meta"), down)
