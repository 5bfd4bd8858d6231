"""Offset, casting modes and missing weights of the norms; multipliers of swiglu."""

import pytest
import torch
from op_samples import assert_near

from tilekern.ops import fused_add_rms_norm, layer_norm, rms_norm, swiglu
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm
from tilekern.runtime import dispatch

EPS = 1e-3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
MODES = [(0.0, "gemma"), (1.0, "gemma"), (0.0, "none"), (0.5, "llama"), (0.0, "llama")]


def norm(x, weight, offset, mode, dtype):
    """The norm in float64; the cast of the llama mode goes to ``dtype``, with a slope of 1."""
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    if mode == "llama":
        normal = normal + (normal.detach().to(dtype).double() - normal.detach())
    return normal if weight is None else normal * (weight + offset)


def compare(call, reference, leaves):
    """Results and gradients of a call against those of the reference on float64 copies of the leaves."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results, references = call(*leaves), reference(*wide)
    slopes = [torch.randn_like(y) for y in results]
    found = (*results, *torch.autograd.grad(results, leaves, slopes))
    wanted = (*references, *torch.autograd.grad(references, wide, [slope.double() for slope in slopes]))
    for got, expected in zip(found, wanted, strict=True):
        assert_near(got, expected, max(TOLERANCE[x.dtype] for x in leaves))


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("offset", "mode"), MODES)
def test_norms_with_options_match_autograd_in_float64(offset, mode, dtype, weight_dtype):
    leaves = [leaf(3, 5, 48, dtype=dtype), *([] if weight_dtype is None else [leaf(48, dtype=weight_dtype)])]
    compare(
        lambda x, weight=None: (rms_norm(x, weight, EPS, offset, mode),),
        lambda x, weight=None: (norm(x, weight, offset, mode, dtype),),
        leaves,
    )
    expected = dtype if mode != "llama" or weight_dtype is None else torch.promote_types(dtype, weight_dtype)
    assert rms_norm(*leaves[:1], leaves[1] if leaves[1:] else None, EPS, offset, mode).dtype == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [("weight",), ("bias",), ()], ids=str)
def test_a_layer_norm_may_have_no_weight_or_bias(given, dtype):
    leaves = [leaf(3, 5, 48, dtype=dtype), *(leaf(48, dtype=dtype) for _ in given)]

    def with_nothing(function, x, *more):
        weights = dict(zip(given, more, strict=True))
        return (function(x, weights.get("weight"), weights.get("bias")),)

    compare(
        lambda *given: with_nothing(lambda x, *weights: layer_norm(x, *weights, EPS), *given),
        lambda *given: with_nothing(lambda x, *ws: torch.nn.functional.layer_norm(x, (48,), *ws, EPS), *given),
        leaves,
    )
    assert layer_norm(leaves[0], None, None).dtype == dtype


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("offset", "mode"), MODES)
def test_sums_with_options_match_autograd_in_float64(offset, mode, weighted):
    leaves = [leaf(3, 5, 48), leaf(3, 5, 48), *([leaf(48)] if weighted else [])]

    def reference(residual, x, weight=None):
        return residual + x, norm(residual + x, weight, offset, mode, torch.float32)

    compare(lambda r, x, weight=None: fused_add_rms_norm(r, x, weight, EPS, offset, mode), reference, leaves)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("offset", "mode"), MODES)
def test_norms_around_a_sum_match_autograd_in_float64(offset, mode, weighted):
    options = (EPS, offset, mode)
    leaves = [leaf(3, 5, 48), leaf(3, 5, 48), leaf(48), *([leaf(48)] if weighted else [])]

    def total(residual, x, weight):
        return residual + norm(x, weight, offset, mode, torch.float32)

    def both(residual, x, weight, following=None):
        y = total(residual, x, weight)
        return y, norm(y, following, offset, mode, torch.float32)

    absent = [] if weighted else [None]
    compare(lambda *given: fused_rms_norm_add_rms_norm(*given, *absent, *options), both, leaves)
    without = leaves[: 2 + weighted]
    compare(
        lambda r, x, weight=None: (fused_rms_norm_add(r, x, weight, *options),),
        lambda r, x, weight=None: (total(r, x, weight),), without,
    )  # fmt: skip


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_with_an_offset_of_which_one_result_is_used(used):
    leaves = [leaf(3, 48), leaf(3, 48), leaf(48)]
    found = torch.autograd.grad(
        fused_add_rms_norm(*leaves, EPS, 1.0, "gemma")[used].square().sum(), leaves, allow_unused=True
    )
    wide = [x.detach().double().requires_grad_() for x in leaves]
    total = wide[0] + wide[1]
    result = (total, norm(total, wide[2], 1.0, "gemma", None))[used]
    for got, wanted in zip(found, torch.autograd.grad(result.square().sum(), wide, allow_unused=True), strict=True):
        if wanted is None:
            assert got is None or not got.any()
        else:
            assert_near(got, wanted, 1e-5)


def test_gemma_rounds_its_result_alone():
    """In the llama mode the rounded row costs half a unit more."""
    x, weight = torch.randn(40, 256).bfloat16(), (torch.randn(256) / 8).bfloat16()
    wanted = norm(x.double(), weight.double(), 1.0, "gemma", None)

    def error(mode):
        return (rms_norm(x, weight, EPS, 1.0, mode).double() - wanted).norm() / wanted.norm()

    assert error("gemma") == error("none") < 0.8 * error("llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multipliers", [(0.88, 0.35), (1.0, 2.0), (3.0, 1.0)], ids=str)
def test_swiglu_with_multipliers_matches_autograd_in_float64(dtype, multipliers):
    of_gate, of_down = multipliers
    before = dispatch.counters("swiglu_scaled_backward").launches
    compare(
        lambda gate, up: (swiglu(gate, up, of_gate, of_down),),
        lambda gate, up: (torch.nn.functional.silu(gate * of_gate) * up * of_down,),
        [leaf(3, 5, 48, dtype=dtype), leaf(3, 5, 48, dtype=dtype)],
    )
    assert dispatch.counters("swiglu_scaled_backward").launches == before + 1


CALLS = {
    "norm": lambda x, weight: rms_norm(x, weight, EPS, 1.0, "gemma"),
    "sum": lambda x, weight: sum(fused_add_rms_norm(x, x, weight, EPS, 1.0, "gemma")),
    "no weight": lambda x, weight: rms_norm(x, None, EPS) * weight,
    "swiglu": lambda x, weight: swiglu(x, x * weight, 0.5, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_options_can_be_traced(call):
    torch._dynamo.reset()
    leaves = [leaf(3, 5, 16), leaf(16)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    for got, expected in zip(torch.autograd.grad(compiled(*leaves).square().sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_autocast_leaves_norms_and_swiglu_in_the_dtypes_of_their_arguments():
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert rms_norm(x, weight, EPS, 1.0, "gemma").dtype == torch.bfloat16
        assert swiglu(x.float(), x.float(), 0.5).dtype == torch.float32


def test_the_plain_ops_serve_what_the_options_leave_as_it_was():
    x, weight = torch.randn(3, 16), torch.randn(16)
    names = ("rms_norm_offset_forward", "swiglu_scaled_forward")
    with_options = {name: dispatch.counters(name).launches for name in names}
    rms_norm(x, weight, EPS, 0.0, "llama")
    rms_norm(x, None, EPS, 1.0, "llama")
    swiglu(x, x, 1.0, 1.0)
    assert with_options == {name: dispatch.counters(name).launches for name in names}


@pytest.mark.parametrize("op", [rms_norm, lambda x, *rest: fused_add_rms_norm(x, x, *rest)])
def test_an_unknown_casting_mode_is_refused(op):
    with pytest.raises(ValueError, match=r"rms_norm: casting_mode must be llama, gemma or none, got 'bloom'"):
        op(torch.ones(2, 8), torch.ones(8), EPS, 0.0, "bloom")
    with pytest.raises(ValueError, match=r"weight must have the shape \[8\], got \[7\]"):
        op(torch.ones(2, 8), torch.ones(7), EPS, 1.0)
