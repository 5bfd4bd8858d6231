"""A norm before a sum, and with the norm of the sum behind it."""

import pytest
import torch
from op_samples import DTYPES, EPS, TOLERANCE, assert_near, launched_by

from tilekern.kernels import fused_rms_norm_add as added
from tilekern.kernels import fused_rms_norm_add_rms_norm as normed
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm

OPS = {
    fused_rms_norm_add: (added.reference, "fused_rms_norm_add_forward", "rms_norm_offset_backward"),
    fused_rms_norm_add_rms_norm: (
        normed.reference_forward, "fused_rms_norm_add_rms_norm_forward", "fused_rms_norm_add_rms_norm_backward",
    ),
}  # fmt: skip
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
GEMMA = (EPS, 1.0, "gemma")


def leaves_of(op, shape, dtype=torch.float32, weight_dtype=None):
    generator = torch.Generator().manual_seed(0)
    vectors = 2 if op is fused_rms_norm_add_rms_norm else 1
    sizes = [(shape, dtype)] * 2 + [(shape[-1:], weight_dtype or dtype)] * vectors
    return [torch.randn(size, generator=generator).to(kind).requires_grad_() for size, kind in sizes]


def results_of(op, leaves, *options):
    results = op(*leaves, *options)
    return results if isinstance(results, tuple) else (results,)


def check(op, leaves, eps, offset, mode):
    """Results and gradients against autograd's of the reference in float64."""
    results = results_of(op, leaves, eps, offset, mode)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in results]
    gradients = torch.autograd.grad(results, leaves, slopes)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    references = tuple(OPS[op][0](*wide, eps, offset, mode == "llama").values())
    wanted = torch.autograd.grad(references, wide, [slope.double() for slope in slopes])
    tolerance = max(TOLERANCE[x.dtype] for x in leaves)
    for got, reference in zip((*results, *gradients), (*references, *wanted), strict=True):
        assert_near(got, reference, tolerance)
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    return results


@every_op
@pytest.mark.parametrize("mode", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_mixed_dtypes(op, dtype, weight_dtype, mode):
    """Llama's norm may have another dtype than the residual, and then so has the sum; any other runs the kernels."""
    leaves, results = leaves_of(op, (3, 5, 33), dtype, weight_dtype), []
    launched = launched_by(lambda: results.extend(check(op, leaves, EPS, 1.0, mode)))
    _, forward, backward = OPS[op]
    expected = torch.promote_types(dtype, weight_dtype) if mode == "llama" else dtype
    assert {y.dtype for y in results} == {expected}
    assert (forward in launched, backward in launched) == (expected == dtype,) * 2


@every_op
def test_torch_s_own_operations_serve_other_dtypes(op):
    leaves = leaves_of(op, (4, 24))
    residual, *others = leaves
    for given in ([residual, others[0].bfloat16(), *others[1:]], [x.double() for x in leaves]):
        wide = OPS[op][0](*given, EPS, 1.0, False).values()
        for got, wanted in zip(results_of(op, given, *GEMMA), wide, strict=True):
            assert_near(got, wanted, 1e-2 if given[1].dtype == torch.bfloat16 else 1e-6)
    assert OPS[op][1] not in launched_by(lambda: op(*(x.double() for x in leaves), *GEMMA))


@every_op
def test_torch_compile(op):
    torch._dynamo.reset()
    leaves = leaves_of(op, (2, 3, 16))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    ours, theirs = (
        torch.autograd.grad(sum(y.square().sum() for y in results_of(call, leaves, *GEMMA)), leaves)
        for call in (op, compiled)
    )
    for got, wanted in zip(theirs, ours, strict=True):
        torch.testing.assert_close(got, wanted)


@every_op
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_nothing_to_do(op, shape):
    leaves = leaves_of(op, shape)
    sum(y.sum() for y in results_of(op, leaves, *GEMMA)).backward()
    assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]


@every_op
def test_what_does_not_fit_is_refused(op):
    residual, x, *weights = (leaf.detach() for leaf in leaves_of(op, (2, 8)))
    with pytest.raises(ValueError, match=r"residual and x must have one shape, got \[1, 8\] and \[2, 8\]"):
        op(residual[:1], x, *weights)
    with pytest.raises(ValueError, match=r"weight must have the shape \[8\], got \[7\]"):
        op(residual, x, *(weight[:7] for weight in weights))
    with pytest.raises(ValueError, match=r"norm_add: casting_mode must be llama, gemma or none, got 'bloom'"):
        op(residual, x, *weights, EPS, 0.0, "bloom")


def test_a_sum_may_be_changed_in_place_where_nothing_behind_it_has_read_it():
    leaves = leaves_of(fused_rms_norm_add, (6, 12))
    wanted = torch.autograd.grad((fused_rms_norm_add(*leaves, *GEMMA) * 3).square().sum(), leaves)
    for got, expected in zip(
        torch.autograd.grad(fused_rms_norm_add(*leaves, *GEMMA).mul_(3).square().sum(), leaves), wanted, strict=True
    ):
        torch.testing.assert_close(got, expected)
    total, y = fused_rms_norm_add_rms_norm(*leaves, leaves[2], *GEMMA)
    total.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_op
def test_gradients_of_both_terms_do_not_share_memory_as_leaves(op):
    leaves = leaves_of(op, (6, 12))
    for _ in range(2):
        sum(y.square().sum() for y in results_of(op, leaves, *GEMMA)).backward()
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_result_that_nothing_uses(used, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    leaves = leaves_of(fused_rms_norm_add_rms_norm, (6, 12))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    result = fused_rms_norm_add_rms_norm(*leaves, *GEMMA)[used]
    reference = tuple(normed.reference_forward(*wide, EPS, 1.0, False).values())[used]
    gradients = torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
    for got, wanted in zip(
        gradients, torch.autograd.grad(reference.square().sum(), wide, allow_unused=True), strict=True
    ):
        if wanted is None:
            assert got is None
        else:
            assert_near(got, wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_what_the_layer_of_gemma_2_computes(dtype):
    """In float32 to rounding; in bfloat16 one unit away at most."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    residual, x, *weights = (leaf.detach() for leaf in leaves_of(fused_rms_norm_add_rms_norm, (2, 5, 48), dtype))
    norms = [Gemma2RMSNorm(48, eps=EPS).to(dtype) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data.copy_(weight)
    total, y = fused_rms_norm_add_rms_norm(residual, x, *weights, *GEMMA)
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-6}
    torch.testing.assert_close(total, residual + norms[0](x), **near)
    torch.testing.assert_close(y, norms[1](total), **near)
    assert torch.equal(total, fused_rms_norm_add(residual, x, weights[0], *GEMMA))
