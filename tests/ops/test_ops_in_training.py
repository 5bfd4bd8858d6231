"""Ops as training uses them: graphs, checkpoints, autocast, torch.compile, frozen parameters, bad input."""

import contextlib
import functools

import pytest
import torch
from op_samples import EPS, OPS, SHIPPED, assert_near, inputs_of, public, scalars_of, tensors_of
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tilekern import interpreter, ops
from tilekern.ops import fused_linear_cross_entropy, gated_mlp, rms_norm, rope, swiglu
from tilekern.runtime import dispatch

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
SHAPE = (2, 3, 4, 10)
FLOAT32 = torch.float32


def leaves_of(op, dtype=FLOAT32):
    inputs = inputs_of(op, SHAPE, [dtype], ["contiguous"])
    return inputs, [x for x in inputs if x.requires_grad]


def gradients(op, inputs, leaves):
    return torch.autograd.grad(sum(y.float().square().sum() for y in op.run(*inputs)), leaves)


@every_op
def test_calls_run_the_kernel_and_count(op):
    before = dispatch.counters(op.kernel).launches, dispatch.counters(op.kernel).fallbacks
    inputs, _ = leaves_of(op)
    with torch.no_grad():
        op.run(*inputs)
    assert dispatch.counters(op.kernel).launches == before[0] + 1
    assert dispatch.counters(op.kernel).fallbacks == before[1]
    assert dispatch.stats()[op.kernel]["launches"] == before[0] + 1


@every_op
def test_float64_runs_the_model_s_own_op_and_counts(op):
    before = dispatch.counters(op.kernel)
    launches, fallbacks = before.launches, before.fallbacks
    inputs = inputs_of(op, SHAPE, [torch.float64], ["contiguous"])
    for result, reference in zip(op.run(*inputs), op.reference(*inputs), strict=True):
        assert result.dtype == torch.float64
        assert_near(result, reference, 1e-6)
    assert before.fallbacks == fallbacks + 1
    assert before.launches == launches


@every_op
def test_no_grad_and_inference_mode_keep_nothing(op):
    inputs, _ = leaves_of(op)
    expected = [y.detach() for y in op.run(*inputs)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = op.run(*inputs)
        assert all(not y.requires_grad for y in results)
        assert all(torch.equal(y, z) for y, z in zip(results, expected, strict=True))


@every_op
def test_one_op_twice_in_a_graph(op):
    inputs, leaves = leaves_of(op)

    def twice(call):
        first = call(*inputs)
        again = first[0] if first[0].shape == inputs[0].shape else inputs[0] * first[0].unsqueeze(-1)
        second = call(again, *inputs[1:])
        results, generator = (*first, *second), torch.Generator().manual_seed(0)
        # Of a distribution's sum there is no gradient.
        slopes = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in results]
        return torch.autograd.grad(results, leaves, slopes)

    for got, reference in zip(twice(op.run), twice(op.reference), strict=True):
        assert_near(got, reference, 1e-5)


@every_op
def test_a_graph_that_is_kept_gives_the_same_gradients_again(op):
    inputs, leaves = leaves_of(op)
    loss = sum(y.square().sum() for y in op.run(*inputs))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_op
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(op, use_reentrant):
    inputs, leaves = leaves_of(op)
    expected = gradients(op, inputs, leaves)
    results = checkpoint(op.run, *inputs, use_reentrant=use_reentrant)
    got = torch.autograd.grad(sum(y.square().sum() for y in results), leaves) if not use_reentrant else None
    if use_reentrant:
        sum(y.square().sum() for y in results).backward()
        got = [leaf.grad for leaf in leaves]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_input_that_is_changed_before_the_backward_is_noticed():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    hidden = x * 1
    y = rms_norm(hidden, weight)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused_and_not_wrong(power):
    for op in OPS.values():
        declared = SHIPPED[op.name]
        if power == 1 and not declared.gradients.keys() & declared.saved:
            continue  # The gradient of a sum is a constant, as of rotated numbers.
        inputs, leaves = leaves_of(op)
        loss = sum((y**power).sum() for y in op.run(*inputs))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (sum(g.square().sum() for g in first) + sum(leaf.sum() for leaf in leaves)).backward()


def _with_tangents(op):
    """For each float tensor of an op a call that takes it."""
    given, call = tensors_of(op), public(op)
    for name, x in given.items():
        if x.is_floating_point():
            yield f"{op.name} {name}", (lambda x, name=name: call(**{**given, name: x}), x)


# None of the tensors needs a gradient: an op that autograd has to know of is torch's to refuse.
_X, _MATRIX, _LABELS = torch.randn(2, 3, 16), torch.ones(9, 16), torch.ones(2, 3).long()
UNGRADED = dict(case for op in SHIPPED.values() for case in _with_tangents(op)) | {
    "gated_mlp": (lambda x: gated_mlp(x, _MATRIX, _MATRIX, _MATRIX.T), _X),
    "fused_linear_cross_entropy": (lambda x: fused_linear_cross_entropy(x, _MATRIX, _LABELS), _X),
}


@pytest.mark.parametrize(("call", "x"), UNGRADED.values(), ids=UNGRADED)
def test_forward_mode_derivatives_are_refused_and_not_lost(call, x):
    with forward_ad.dual_level():
        results = call(x)
        assert all(y.isfinite().all() for y in (results if isinstance(results, tuple) else (results,)))
        with pytest.raises(NotImplementedError, match=r"use forward(-mode)? AD with"):
            call(forward_ad.make_dual(x, x))
    # functorch's transforms run the formula, whose tangents are torch's.
    with contextlib.suppress(NotImplementedError):
        tangents = torch.func.jvp(call, (x,), (x,))[1]
        moved = (call(1.01 * x), call(x))
        pairs = zip(*(y if isinstance(y, tuple) else (y,) for y in (tangents, *moved)), strict=True)
        assert all(tangent.count_nonzero() or torch.equal(a, b) for tangent, a, b in pairs)


def test_torch_s_operations_that_run_in_an_op_s_place_keep_tangents():
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        got, wanted = (forward_ad.unpack_dual(y).tangent for y in (swiglu(dual, x), x * torch.nn.functional.silu(dual)))
    assert_near(got, wanted, 1e-6)


def test_autocast_as_in_a_model():
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 16, bias=False)
    weight = torch.ones(16, requires_grad=True)
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = linear(x)
        y = swiglu(linear(rms_norm(hidden, weight, EPS)), hidden)
    assert hidden.dtype == y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad.dtype == linear.weight.grad.dtype == torch.float32
    wide = linear.weight.detach().double().requires_grad_()
    normed = OPS["rms_norm"].reference(x.double() @ wide.T, torch.ones(16).double())[0]
    OPS["swiglu"].reference(normed @ wide.T, x.double() @ wide.T)[0].sum().backward()
    assert_near(linear.weight.grad, wide.grad, 2e-2)


@every_op
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.share(4)
def test_torch_compile_without_a_graph_break(op, dynamic):
    inputs, leaves = leaves_of(op)
    torch._dynamo.reset()
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = compiled(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    for got, reference in zip(results, op.run(*inputs), strict=True):
        assert torch.equal(got, reference)
        assert got.stride() == reference.stride()
    got = torch.autograd.grad(sum(y.square().sum() for y in results), leaves)
    for one, other in zip(got, gradients(op, inputs, leaves), strict=True):
        assert_near(one, other, 1e-6)


def test_torch_compile_of_strided_inputs():
    torch._dynamo.reset()
    q = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    k, angles = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.rand(1, 5, 8)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for got, reference in zip(compiled(q, k, angles, angles), rope(q, k, angles, angles), strict=True):
        assert torch.equal(got, reference)
        assert got.stride() == reference.stride()


def registered_arguments(name, optional):
    """Of a registered op or, after ``_backward``, of its gradient, as its declaration has them."""
    op = SHIPPED[name.removesuffix("_backward")]
    given = tensors_of(op, optional=optional) | scalars_of(op)
    for tensor in op.gradients:
        if given[tensor] is not None:
            given[tensor].requires_grad_()
    arguments = [given[name] for name in op.arguments]
    if name == op.name:
        return arguments
    results = getattr(torch.ops.tilekern, op.name).default(*arguments)
    found = given | dict(zip(op.results, results if isinstance(results, tuple) else (results,), strict=True))
    found |= {slope: torch.randn_like(found[name]) for slope, name in zip(op.slopes, op.shown, strict=True)}
    needs = [isinstance(x, torch.Tensor) and x.requires_grad for x in arguments]
    taken = map((found | {"needs": needs}).get, op.registered_backward_arguments)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in taken]


REGISTERED = [
    pytest.param(name, optional, id=f"{name} {'all' if optional else 'least'}")
    for op in SHIPPED.values()
    for name in (op.name, f"{op.name}_backward")
    for optional in ((True, False) if op.optional else (True,))
]


@pytest.mark.parametrize(("name", "optional"), REGISTERED)
@pytest.mark.share(4)
def test_torch_s_own_checks_of_a_registered_op(name, optional):
    op = getattr(torch.ops.tilekern, name).default
    result = torch.library.opcheck(op, registered_arguments(name, optional))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(7)), r"weight must have the shape \[8\], got \[7\]"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(1, 8)), r"weight must have the shape \[8\], got \[1, 8\]"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(())), r"weight must have the shape \[8\], got \[\]"),
        (lambda: swiglu(torch.ones(2, 8), torch.ones(2, 7)), r"one shape, got \[2, 8\] and \[2, 7\]"),
        (lambda: swiglu(torch.ones(2, 8), torch.ones(1, 8)), r"one shape, got \[2, 8\] and \[1, 8\]"),
    ],
)
def test_wrong_shapes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "changes",
    [
        {"k": (2, 2, 6, 8)}, {"k": (1, 2, 5, 8)}, {"k": (2, 2, 5, 6)}, {"cos": (1, 6, 8)}, {"cos": (3, 5, 8)},
        {"cos": (1, 5, 6)}, {"sin": (1, 5, 4)}, {"q": (2, 4, 5, 7), "k": (2, 2, 5, 7)},
    ],
    ids=str,
)  # fmt: skip
def test_rope_refuses_wrong_shapes(changes):
    sizes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "cos": (1, 5, 8), "sin": (1, 5, 8)} | changes
    with pytest.raises(ValueError, match=r"^rope(_part)?: "):
        rope(*(torch.ones(size) for size in sizes.values()))


def test_rope_refuses_two_dtypes():
    q, angles = torch.ones(2, 4, 5, 8), torch.ones(1, 5, 8)
    with pytest.raises(ValueError, match=r"rope: q .*float32 and k .*bfloat16 may differ in heads only"):
        rope(q, q.bfloat16(), angles, angles)
    with pytest.raises(ValueError, match="one shape and dtype"):
        rope(q, q, angles, angles.bfloat16())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0,)])
def test_nothing_to_do(shape):
    x, other = torch.ones(shape, requires_grad=True), torch.ones(shape, requires_grad=True)
    swiglu(x, other).sum().backward()
    assert x.grad.shape == other.grad.shape == x.shape
    weight = torch.ones(shape[-1:], requires_grad=True)
    x = torch.ones(shape, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 4, 0, 8), (2, 0, 5, 8)])
def test_rope_of_nothing(shape):
    batch, _, tokens, size = shape
    q, k = torch.ones(shape, requires_grad=True), torch.ones(batch, 2, tokens, size)
    angles = torch.ones(1, tokens, size)
    out, other = rope(q, k, angles, angles)
    assert out.shape == q.shape
    assert other.shape == k.shape
    (out.sum() + other.sum()).backward()
    assert q.grad.shape == q.shape


def test_angles_that_need_a_gradient_get_one():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = torch.rand(1, 5, 8, requires_grad=True), torch.rand(1, 5, 8, requires_grad=True)
    got = torch.autograd.grad(sum(y.sum() for y in rope(q, k, cos, sin)), (cos, sin))
    expected = torch.autograd.grad(sum(y.sum() for y in OPS["rope"].reference(q, k, cos, sin)), (cos, sin))
    for one, other in zip(got, expected, strict=True):
        assert_near(one, other, 1e-6)


def test_an_error_of_a_kernel_reaches_the_caller(monkeypatch):
    def broken(*args, **kwargs):
        raise interpreter.OutOfBounds("x")

    monkeypatch.setattr(interpreter, "launch", broken)
    with pytest.raises(interpreter.OutOfBounds):
        swiglu(torch.ones(2, 8), torch.ones(2, 8))


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "linear", "gated_mlp"])
def test_a_result_may_be_changed_in_place(name, interpreted):
    generator = torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, requires_grad=True)
    inputs = {
        "rms_norm": (random(2, 3, 16), random(16)), "swiglu": (random(2, 3, 16), random(2, 3, 16)),
        "linear": (random(2, 3, 16), random(8, 16)),
        "gated_mlp": (random(2, 3, 16), random(24, 16), random(24, 16), random(16, 24)),
    }[name]  # fmt: skip
    run = getattr(ops, name)
    once = torch.autograd.grad(run(*inputs).sum(), inputs)
    for twice, plain in zip(torch.autograd.grad(run(*inputs).mul_(2).sum(), inputs), once, strict=True):
        assert torch.equal(twice, 2 * plain)
