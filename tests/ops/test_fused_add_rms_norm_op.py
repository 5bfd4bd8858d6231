import pytest
import torch
from op_samples import DTYPES, EPS, assert_like_float64, assert_near, laid_out, slopes_of

from tilekern.kernels.fused_add_rms_norm import reference_forward
from tilekern.ops.fused_add_rms_norm import fused_add_rms_norm
from tilekern.runtime import dispatch


def inputs_of(shape, dtype=torch.float32, weight_dtype=None, layouts=("contiguous",), seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    values.append((1 + torch.randn(shape[-1:], generator=generator) / 4).to(weight_dtype or dtype))
    pairs = [(value, layouts[i % len(layouts)]) for i, value in enumerate(values)]
    return [laid_out(value, layout).detach().requires_grad_() for value, layout in pairs]


def reference(*inputs):
    return list(reference_forward(*inputs, EPS).values())


def check(inputs, layout="contiguous"):
    assert_like_float64(lambda *inputs: fused_add_rms_norm(*inputs, EPS), reference, inputs, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    inputs = inputs_of((3, 5, 33), dtype, weight_dtype)
    before = dispatch.counters("fused_add_rms_norm_forward").launches
    total, y = fused_add_rms_norm(*inputs, EPS)
    assert dispatch.counters("fused_add_rms_norm_forward").launches == before + 1
    assert total.dtype == dtype
    assert y.dtype == torch.promote_types(dtype, weight_dtype)
    check(inputs)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_result_that_nothing_uses(used, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    inputs = inputs_of((6, 12))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(fused_add_rms_norm(*inputs, EPS)[used].square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(reference(*wide)[used].square().sum(), wide, allow_unused=True)
    for got, other in zip(gradients, expected, strict=True):
        if other is None:
            assert got is None
        else:
            assert_near(got, other, 1e-5)


def test_gradients_of_both_terms_do_not_share_memory_as_leaves():
    inputs = inputs_of((6, 12))
    for _ in range(2):
        sum(y.sum() for y in fused_add_rms_norm(*inputs, EPS)).backward()
    residual, x, _ = inputs
    assert torch.equal(residual.grad, x.grad)
    assert residual.grad.data_ptr() != x.grad.data_ptr()


def test_a_sum_that_is_changed_before_the_backward_is_noticed():
    total, y = fused_add_rms_norm(*inputs_of((6, 12)), EPS)
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_two_dtypes_of_terms_and_float64_run_torch_s_own_operations():
    before = dispatch.counters("fused_add_rms_norm_forward").fallbacks
    residual, x, weight = inputs_of((4, 24))
    total, y = fused_add_rms_norm(residual, x.bfloat16(), weight, EPS)
    assert total.dtype == y.dtype == torch.float32
    for got, expected in zip((total, y), reference(residual.double(), x.bfloat16().double(), weight), strict=True):
        assert_near(got, expected, 1e-6)
    wide = [value.double() for value in (residual, x, weight)]
    for got, expected in zip(fused_add_rms_norm(*wide, EPS), reference(*wide), strict=True):
        assert_near(got, expected, 1e-6)
    assert dispatch.counters("fused_add_rms_norm_forward").fallbacks == before + 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_of_what_torch_does_by_itself(dynamic):
    torch._dynamo.reset()
    inputs = inputs_of((2, 3, 16), torch.float64)
    compiled = torch.compile(fused_add_rms_norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results, own = compiled(*inputs, EPS), fused_add_rms_norm(*inputs, EPS)
    for got, other in zip(results, own, strict=True):
        assert torch.equal(got, other)
        assert got.stride() == other.stride()
    slopes = slopes_of(own)
    for got, other in zip(
        torch.autograd.grad(results, inputs, slopes), torch.autograd.grad(own, inputs, slopes), strict=True
    ):
        assert_near(got, other, 1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0,)])
def test_nothing_to_do(shape):
    inputs = inputs_of(shape)
    results = fused_add_rms_norm(*inputs, EPS)
    sum(y.sum() for y in results).backward()
    assert all(y.shape == shape for y in results)
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"residual and x must have one shape, got \[1, 8\] and \[2, 8\]"):
        fused_add_rms_norm(torch.ones(1, 8), torch.ones(2, 8), torch.ones(8))
    for bad in (torch.ones(7), torch.ones(1, 8), torch.ones(())):
        with pytest.raises(ValueError, match=r"weight must have the shape \[8\], got"):
            fused_add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_layer_of_qwen3_computes(dtype):
    """In float32 to rounding; in bfloat16 the sum is the very same and the norm one unit away at most."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    residual, x, weight = (value.detach() for value in inputs_of((2, 5, 48), dtype))
    norm = Qwen3RMSNorm(48, eps=EPS).to(dtype)
    norm.weight.data.copy_(weight)
    total, y = fused_add_rms_norm(residual, x, weight, EPS)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, norm(residual + x), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
