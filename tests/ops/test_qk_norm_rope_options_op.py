"""qk_norm_rope with options: offset, casting modes, no weights, parts of heads, pairs, the norm last."""

import pytest
import torch
from op_samples import EPS, TOLERANCE, assert_near, laid_out

from tilekern.ops.qk_norm_rope import qk_norm_rope
from tilekern.runtime import dispatch

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
GENERAL = "qk_norm_rope_general_forward"
# The options, and what part of the angles' sizes each head has: Gemma 3's, Qwen3.5's, GLM 4.5's, HunYuan's, NanoChat's,
# Llama 4's, and all at once.
OPTIONS = {
    "gemma3": {"offset": 1.0, "casting_mode": "gemma"},
    "qwen3_5": {"offset": 1.0, "casting_mode": "gemma", "rotary_dim": 6},
    "glm4_moe": {"rotary_dim": 6},
    "hunyuan": {"norm_last": True},
    "nanochat": {"norm_last": True, "casting_mode": "gemma", "weighted": False},
    "llama4": {"norm_last": True, "interleaved": True, "casting_mode": "none", "weighted": False},
    "all": {"offset": 0.5, "rotary_dim": 8, "interleaved": True, "norm_last": True},
}
every_form = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def given(options, dtypes=(FLOAT32,) * 3, size=12, layout="contiguous", twice=True, batch=1):
    """q, k, their weights, cos and sin; the first four take gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes, dtype):
        return laid_out(torch.randn(sizes, generator=generator).to(dtype), layout).requires_grad_()

    q, k = (random(2, 5, heads, size, dtype=dtypes[0]) for heads in (3, 2))
    weights = [random(size, dtype=dtypes[1]) if options.get("weighted", True) else None for _ in range(2)]
    theta = torch.rand(batch, 5, options.get("rotary_dim", size) // 2, generator=generator) * 6
    if twice:
        theta = theta.repeat_interleave(2, -1) if options.get("interleaved") else torch.cat((theta, theta), -1)
    return [q, k, *weights, theta.cos().to(dtypes[2]), theta.sin().to(dtypes[2])]


def expected(options, q, k, q_weight, k_weight, cos, sin):
    """In float64."""
    pairs, interleaved = options.get("rotary_dim", q.shape[-1]) // 2, options.get("interleaved", False)
    if cos.shape[-1] != pairs:
        cos, sin = (x[..., ::2] if interleaved else x[..., :pairs] for x in (cos, sin))
    c, s = cos[:, :, None], sin[:, :, None]

    def turned(x):
        part, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        both = one * c - other * s, other * c + one * s
        return torch.cat((torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1)

    def norm(x, weight):
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return normal if weight is None else normal * (weight + options.get("offset", 0.0))

    if options.get("norm_last"):
        return norm(turned(q), q_weight), norm(turned(k), k_weight)
    return turned(norm(q, q_weight)), turned(norm(k, k_weight))


def call(options, *inputs):
    chosen = {name: value for name, value in options.items() if name != "weighted"}
    return qk_norm_rope(*inputs, EPS, **chosen)


def leaves_of(inputs):
    return [x for x in inputs if x is not None and x.requires_grad]


@every_form
@pytest.mark.parametrize(
    ("dtypes", "layout"),
    [((FLOAT32,) * 3, "transposed"), ((BFLOAT16,) * 3, "contiguous"), ((BFLOAT16, FLOAT32, FLOAT32), "contiguous")],
    ids=["float32", "bfloat16", "mixed"],
)
def test_options_match_autograd_in_float64(options, dtypes, layout):
    inputs = given(options, dtypes, layout=layout, twice=layout == "contiguous", batch=2)
    wide = [x if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    before = dispatch.counters(GENERAL).launches
    results, references = call(options, *inputs), expected(options, *wide)
    assert dispatch.counters(GENERAL).launches == before + 1
    slopes = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, leaves_of(inputs), slopes)
    wanted = torch.autograd.grad(references, leaves_of(wide), [slope.double() for slope in slopes])
    tolerance = max(TOLERANCE[x.dtype] for x in inputs if x is not None)
    for got, reference in zip((*results, *found), (*references, *wanted), strict=True):
        assert_near(got, reference, tolerance)
    assert [x.dtype for x in found] == [x.dtype for x in leaves_of(inputs)]


@pytest.mark.parametrize(("mode", "dtype"), [("llama", FLOAT32), ("gemma", BFLOAT16), ("none", BFLOAT16)], ids=str)
def test_the_casting_mode_says_which_dtypes_count(mode, dtype):
    inputs = given({}, (BFLOAT16, FLOAT32, BFLOAT16))
    assert {y.dtype for y in call({"offset": 1.0, "casting_mode": mode}, *inputs)} == {dtype}
    angles = [x.float() for x in inputs[4:]]
    expected = BFLOAT16 if mode == "none" else FLOAT32
    assert {y.dtype for y in call({"offset": 1.0, "casting_mode": mode}, *inputs[:4], *angles)} == {expected}


def test_what_is_qk_norm_rope_without_options_runs_that():
    inputs = given({})
    before = dispatch.counters(GENERAL).launches, dispatch.counters("qk_norm_rope_forward").launches
    for options in ({"casting_mode": "gemma"}, {"rotary_dim": 12}, {}):
        call(options, *inputs)
    after = dispatch.counters(GENERAL).launches, dispatch.counters("qk_norm_rope_forward").launches
    assert after == (before[0], before[1] + 3)


@every_form
def test_torch_s_own_operations_are_as_exact(options, monkeypatch):
    inputs = given(options, size=13 if "rotary_dim" in options else 12)
    kernel = call(options, *inputs)
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    for got, other in zip(call(options, *inputs), kernel, strict=True):
        assert_near(got, other, 1e-6)


def test_options_can_be_traced():
    torch._dynamo.reset()
    options = OPTIONS["all"]
    inputs = given(options)
    compiled = torch.compile(lambda *given: call(options, *given), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(*inputs), call(options, *inputs), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotary_dim": 7}, "rotary_dim must be even, at most 12"),
        ({"rotary_dim": 14}, "rotary_dim must be even, at most 12"),
        ({"rotary_dim": 8}, r"that of cos \[1, 5, 12\] or twice that, got 8"),
        ({"casting_mode": "float"}, "casting_mode must be llama, gemma or none, got 'float'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=rf"^qk_norm_rope: .*{words}"):
        call(options, *given({}))


def test_one_weight_without_the_other_is_refused():
    q, k, q_weight, _, cos, sin = given({})
    with pytest.raises(ValueError, match="must both be there, or both None"):
        qk_norm_rope(q, k, q_weight, None, cos, sin)
