import pytest
import torch
from op_samples import DTYPES, EPS, TOLERANCE, assert_like_float64, assert_near, laid_out, slopes_of

from tilekern.kernels import qk_norm_rope as kernels
from tilekern.ops.qk_norm_rope import qk_norm_rope
from tilekern.runtime import dispatch

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def inputs_of(shape=(2, 5, 3, 2, 12), dtypes=(FLOAT32,), layouts=("contiguous",), angle_batch=1, seed=0):
    """q, k, their weights, cos and sin; the first four take gradients."""
    batch, tokens, heads, kv_heads, size = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes):
        return torch.randn(sizes, generator=generator)

    half = torch.rand(angle_batch, tokens, size // 2, generator=generator) * 6
    angles = torch.cat((half, half), -1)
    values = [random(batch, tokens, heads, size), random(batch, tokens, kv_heads, size)]
    values += [1 + random(size) / 4, 1 + random(size) / 4, angles.cos(), angles.sin()]
    found = []
    for i, value in enumerate(values):
        # Angles keep their two equal halves whatever the layout.
        layout = layouts[i % len(layouts)]
        dtype = dtypes[(i // 2) % len(dtypes)]
        found.append(laid_out(value.to(dtype), layout).detach().requires_grad_(i < 4))
    return found


def reference(*inputs):
    return list(kernels.reference(*inputs, EPS).values())


def check(inputs, layout="contiguous"):
    assert_like_float64(lambda *inputs: qk_norm_rope(*inputs, EPS), reference, inputs, layout)


@pytest.mark.parametrize("one", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("angle", [FLOAT32, BFLOAT16])
def test_mixed_dtypes(one, weight, angle):
    inputs = inputs_of(dtypes=[one, weight, angle])
    before = dispatch.counters("qk_norm_rope_forward").launches
    promoted = torch.promote_types(torch.promote_types(one, weight), angle)
    assert all(y.dtype == promoted for y in qk_norm_rope(*inputs, EPS))
    assert dispatch.counters("qk_norm_rope_forward").launches == before + 1
    check(inputs)


@pytest.mark.parametrize("angles", ["per batch", "half", "2-dimensional"])
def test_angles_of_every_form(angles):
    *given_, cos, sin = inputs_of(angle_batch=2 if angles == "per batch" else 1)
    expected = qk_norm_rope(*given_, cos, sin, EPS)
    if angles == "half":
        cos, sin = cos[..., :6], sin[..., :6]
    elif angles == "2-dimensional":
        cos, sin = cos[0], sin[0]
    for interpreted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TILEKERN_INTERPRET", "1" if interpreted else "0")
            for got, other in zip(qk_norm_rope(*given_, cos, sin, EPS), expected, strict=True):
                assert_near(got, other, 1e-6)


def test_projections_as_attention_has_them():
    """q and k out of one fused projection, gradients that come back with heads before tokens."""
    batch, tokens, size = 2, 5, 16
    fused = torch.randn(batch, tokens, 5 * size, requires_grad=True)
    _, _, *rest = inputs_of((batch, tokens, 3, 2, size))

    def split(x):
        return x[..., : 3 * size].view(batch, tokens, 3, size), x[..., 3 * size :].view(batch, tokens, 2, size)

    slopes = [torch.randn(batch, heads, tokens, size).transpose(1, 2) for heads in (3, 2)]
    (got,) = torch.autograd.grad(qk_norm_rope(*split(fused), *rest, EPS), fused, slopes)
    wide = fused.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference(*split(wide), *rest), wide, [s.double() for s in slopes])
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nothing_uses(used):
    inputs = inputs_of()
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    gradients = torch.autograd.grad(qk_norm_rope(*inputs, EPS)[used].square().sum(), inputs[:4])
    expected = torch.autograd.grad(reference(*wide)[used].square().sum(), wide[:4], materialize_grads=True)
    for got, other in zip(gradients, expected, strict=True):
        assert_near(got, other, 1e-5)


def test_gradients_of_the_weights_can_be_added_to():
    q, k, q_weight, k_weight, *angles = inputs_of()
    for _ in range(2):
        sum(y.square().sum() for y in qk_norm_rope(q, k, q_weight, k_weight, *angles, EPS)).backward()
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, q_weight, k_weight, *angles)]
    sum(2 * y.square().sum() for y in reference(*wide)).backward()
    for got, other in zip((q, k, q_weight, k_weight), wide, strict=False):
        assert_near(got.grad, other.grad, 1e-5)


def test_angles_that_need_a_gradient_get_one():
    *given_, cos, sin = inputs_of()
    angles = [cos.detach().requires_grad_(), sin.detach().requires_grad_()]
    got = torch.autograd.grad(sum(y.sum() for y in qk_norm_rope(*given_, *angles, EPS)), angles)
    assert all(gradient.shape == angle.shape for gradient, angle in zip(got, angles, strict=True))


def test_float64_and_two_dtypes_run_torch_s_own_operations():
    before = dispatch.counters("qk_norm_rope_forward").fallbacks
    wide = [x.double() for x in inputs_of()]
    for got, expected in zip(qk_norm_rope(*wide, EPS), reference(*wide), strict=True):
        assert got.dtype == torch.float64
        assert_near(got, expected, 1e-6)
    q, k, *rest = inputs_of()
    q_out, k_out = qk_norm_rope(q, k.bfloat16(), *rest, EPS)
    assert_near(q_out, reference(q, k, *rest)[0], 1e-6)
    assert_near(k_out, reference(q, k.bfloat16(), *rest)[1], 1e-2)
    assert dispatch.counters("qk_norm_rope_forward").fallbacks == before + 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_of_what_torch_does_by_itself(dynamic):
    torch._dynamo.reset()
    inputs = inputs_of(dtypes=[torch.float64])
    compiled = torch.compile(qk_norm_rope, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results, own = compiled(*inputs, EPS), qk_norm_rope(*inputs, EPS)
    for got, other in zip(results, own, strict=True):
        assert torch.equal(got, other)
        assert got.stride() == other.stride()
    slopes = slopes_of(own)
    pairs = [torch.autograd.grad(some, inputs[:4], slopes) for some in (results, own)]
    for got, other in zip(*pairs, strict=True):
        assert_near(got, other, 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"k": (2, 6, 2, 8)}, {"k": (1, 5, 2, 8)}, {"k": (2, 5, 2, 6)}, {"k": (2, 5, 16)}, {"cos": (1, 6, 8)},
        {"cos": (3, 5, 8)}, {"cos": (1, 5, 6)}, {"sin": (1, 5, 4)}, {"q_weight": (7,)}, {"k_weight": (1, 8)},
        {"q": (2, 5, 4, 7), "k": (2, 5, 2, 7), "q_weight": (7,), "k_weight": (7,)},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_shapes_are_refused(changes):
    sizes = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "q_weight": (8,), "k_weight": (8,), "cos": (1, 5, 8)}
    sizes = sizes | {"sin": (1, 5, 8)} | changes
    with pytest.raises(ValueError, match=r"^qk_norm_rope: "):
        qk_norm_rope(*(torch.ones(size) for size in sizes.values()))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_it_is_what_the_attention_of_qwen3_computes(dtype):
    """In bfloat16 it is nearer to the truth than the modules are, as it rounds once where they round four times."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k, q_weight, k_weight, cos, sin = (x.detach() for x in inputs_of((2, 7, 4, 2, 32), [dtype]))
    norms = []
    for weight in (q_weight, k_weight):
        norms.append(Qwen3RMSNorm(32, eps=EPS).to(dtype))
        norms[-1].weight.data.copy_(weight)
    modules = apply_rotary_pos_emb(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    exact = reference(q, k, q_weight, k_weight, cos, sin)
    for own, other, truth in zip(qk_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS), modules, exact, strict=True):
        wide = other.detach().transpose(1, 2).double()
        assert float((own.double() - truth).norm()) <= float((wide - truth).norm()) + 1e-6 * float(truth.norm())
        assert_near(own, wide, TOLERANCE[dtype])
