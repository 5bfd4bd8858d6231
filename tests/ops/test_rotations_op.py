"""rope and its kin: transformers' rotations, layouts, angles with gradients, and what does not go together."""

import formulas
import pytest
import torch
from contract import CASES, Drawn
from op_samples import DTYPES, EPS, LAYOUTS, assert_near, slopes_of
from tolerances import FLOAT64, REORDERED, TOLERANCE
from transformers import Qwen2VLTextConfig
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from tilekern.ops import llama4_rope, qk_norm_rope, qwen2vl_mrope, rope
from tilekern.ops.operation import DECLARED, FUNCTIONS
from tilekern.runtime import dispatch

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SECTIONS = [1, 3, 2]


def given(name, dtype=FLOAT32, layout="contiguous", variant=0):
    """The arguments of a case."""
    return CASES[name].given(Drawn(variant=variant), dtype, layouts=(layout,))


def launches(name):
    return dispatch.counters(name).launches


def gradients(results, leaves):
    slopes = [slope.to(y.dtype) for slope, y in zip(slopes_of(results), results, strict=True)]
    return torch.autograd.grad(results, leaves, slopes)


def assert_alike(found, right, leaves, tolerance):
    """Results and gradients."""
    pairs = zip((*found, *gradients(found, leaves)), (*right, *gradients(right, leaves)), strict=True)
    for one, other in pairs:
        assert_near(one, other, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["complex", "real view", "conjugated twice"])
def test_llama4_rope_is_that_of_transformers(dtype, layout, form):
    xq, xk, freqs_cis = given("llama4_rope", dtype, layout).values()
    # Of float32 transformers takes pairs where they lie, for which some layouts are none.
    right = apply_rotary_emb(xq.contiguous(), xk.contiguous(), freqs_cis)
    if form == "real view":
        freqs_cis = torch.view_as_real(freqs_cis)
    elif form == "conjugated twice":
        freqs_cis = freqs_cis.conj().resolve_conj().conj()
    found = llama4_rope(xq, xk, freqs_cis)
    assert {y.dtype for y in found} == {dtype}
    assert_alike(found, right, (xq, xk), TOLERANCE[dtype])


@pytest.mark.skipif(
    not hasattr(qwen2_vl.Qwen2VLRotaryEmbedding, "recomposition_frequencies"),
    reason="this transformers puts the sections together elsewhere",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qwen2vl_mrope_is_that_of_transformers_of_the_same_positions(dtype):
    config = Qwen2VLTextConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS},
    )  # fmt: skip
    embedding = qwen2_vl.Qwen2VLRotaryEmbedding(config)
    q, k, *_ = given("qwen2vl_mrope", dtype).values()
    positions = torch.randint(0, 50, (3, q.shape[0], 5))
    right = qwen2_vl.apply_rotary_pos_emb(q, k, *embedding(q, positions))
    half = positions[..., None].float() * embedding.inv_freq
    angles = torch.cat((half, half), -1)
    found = qwen2vl_mrope(q, k, angles.cos().to(dtype), angles.sin().to(dtype), SECTIONS)
    assert_alike(found, right, (q, k), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_qk_norm_rope_is_what_the_attention_of_qwen3_computes(dtype):
    """In bfloat16 it is nearer to the truth than the modules are, as it rounds once where they round four times."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k, *weights = (torch.randn(*shape, 32).to(dtype) for shape in ((2, 7, 4), (2, 7, 2), (), ()))
    theta = torch.cat(2 * [6 * torch.rand(1, 7, 16)], -1)
    cos, sin = theta.cos().to(dtype), theta.sin().to(dtype)
    norms = [Qwen3RMSNorm(32, eps=EPS).to(dtype) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data.copy_(weight)
    modules = apply_rotary_pos_emb(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    exact = formulas.qk_norm_rope(*(x.double() for x in (q, k, *weights, cos, sin)), EPS)
    for own, other, truth in zip(qk_norm_rope(q, k, *weights, cos, sin, EPS), modules, exact, strict=True):
        wide = other.detach().transpose(1, 2).double()
        assert float((own.double() - truth).norm()) <= float((wide - truth).norm()) + 1e-6 * float(truth.norm())
        assert_near(own, wide, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["rope", "qk_norm_rope", "qk_norm_rope_general"])
def test_in_the_dtype_of_q_and_k_results_and_gradients_have_the_bits_of_casts(name, dtype):
    op, wide = (FUNCTIONS[each][each] for each in (f"{name}_to", name))
    q, k = (torch.randn(2, 5, heads, 16).to(dtype).requires_grad_() for heads in (4, 2))
    weights = [(1 + torch.randn(16) / 4).requires_grad_() for _ in range(2)]
    theta = 6 * torch.rand(1, 5, 8)
    angles = theta.cos(), theta.sin()
    if name == "rope":
        leaves, given = (q, k), (q.transpose(1, 2), k.transpose(1, 2), *angles, False)
    else:
        leaves, given = (q, k, *weights), (q, k, *weights, *angles, EPS)
    given = (*given, 1.0, False, False) if name == "qk_norm_rope_general" else given
    found, right = op(*given), [y.to(dtype) for y in wide(*given)]
    assert all(map(torch.equal, found, right))
    assert all(map(torch.equal, gradients(found, leaves), gradients(right, leaves)))


@pytest.mark.parametrize(
    ("name", "variant"), [("llama4_rope", 0), ("rope with options", 0), ("qwen2vl_mrope", 0), ("qwen2vl_mrope", 1)]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_layout_of_each_input_is_kept(name, variant, swapped):
    case, arguments = CASES[name], given(name, variant=variant)
    for key, x in list(arguments.items())[:2]:
        arguments[key] = x.detach().transpose(1, 2).contiguous().transpose(1, 2) if swapped else x.detach()
    for x, y in zip(arguments.values(), case.run(arguments), strict=False):
        assert y.stride() == x.stride()
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", ["rope with options", "llama4_rope", "qwen2vl_mrope", "qk_norm_rope with options"])
def test_angles_that_need_a_gradient_get_that_of_torch(name):
    case, arguments = CASES[name], given(name)
    for key in ("cos", "sin", "freqs_cis"):
        if key in arguments:
            arguments[key] = arguments[key].detach().requires_grad_()
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    assert_alike(case.run(arguments), case.reference(arguments), leaves, 10 * REORDERED)


def test_the_second_half_of_the_angles_of_sections_is_not_read():
    q, k, cos, sin, *_ = given("qwen2vl_mrope").values()
    right = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    for angles in (cos, sin):
        angles[..., sum(SECTIONS) :] = torch.nan
    assert all(map(torch.equal, qwen2vl_mrope(q, k, cos, sin, SECTIONS), right))


@pytest.mark.parametrize(
    "sections", [[4, 0, 2], [2, 2, 2], [0, 0, 5], [3, 0, 0], [0, 46, 0], [6], [2, 4], [1, 2, 1, 2], [1] * 6], ids=str
)
def test_three_sections_have_a_kernel_and_others_are_turned_by_rope(sections):
    size = 2 * sum(sections)
    q, k = (torch.randn(2, heads, 5, size, requires_grad=True) for heads in (4, 2))
    theta = torch.cat(2 * [6 * torch.rand(3, 2, 5, size // 2)], -1)
    before = launches("qwen2vl_mrope"), launches("rope")
    found = qwen2vl_mrope(q, k, theta.cos(), theta.sin(), sections)
    right = formulas.qwen2vl_mrope(q.double(), k.double(), theta.cos(), theta.sin(), sections)
    assert_alike(found, right, (q, k), TOLERANCE[FLOAT32])
    own = 2 * (len(sections) == 3)
    assert (launches("qwen2vl_mrope"), launches("rope")) == (before[0] + own, before[1] + 2 - own)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_kernel_of_its_own_it_is_turned_by_that_of_rope(monkeypatch, compiled):
    torch._dynamo.reset()
    q, k, cos, sin, *_ = given("qwen2vl_mrope").values()
    right = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    right = *right, *gradients(right, (q, k))
    declared = DECLARED["qwen2vl_mrope_sections"].formula.__globals__["_turned"]
    monkeypatch.setitem(declared.functions, "plan_for", lambda *_: None)
    before = launches("qwen2vl_mrope"), launches("rope")
    call = torch.compile(qwen2vl_mrope, fullgraph=True, backend="aot_eager") if compiled else qwen2vl_mrope
    found = call(q, k, cos, sin, SECTIONS)
    found = *found, *gradients(found, (q, k))
    assert (launches("qwen2vl_mrope"), launches("rope")) == (before[0], before[1] + 2)
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_is_one_launch_in_each_direction_and_the_rest_stays(interleaved):
    q, k = (torch.randn(3, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    theta = 6 * torch.rand(1, 5, 4)
    kernel = "llama4_rope" if interleaved else "rope"
    before = launches(kernel)
    results = rope(q, k, theta.cos(), theta.sin(), rotary_dim=8, interleaved=interleaved)
    sum(y.sum() for y in results).backward()
    assert launches(kernel) == before + 2
    assert all(torch.equal(y[..., 8:], x[..., 8:]) for x, y in zip((q, k), results, strict=True))
    assert all(bool((x.grad[..., 8:] == 1).all()) for x in (q, k))


def test_as_many_numbers_turn_as_there_are_angles():
    q, k, angles = torch.randn(3, 4, 5, 16), torch.randn(3, 2, 5, 16), torch.rand(1, 5, 12)
    assert all(map(torch.equal, rope(q, k, angles, angles), rope(q, k, angles, angles, rotary_dim=12)))


def test_projections_as_attention_has_them():
    """q and k out of one fused projection, gradients that come back with heads before tokens."""
    fused = torch.randn(2, 5, 5 * 16, requires_grad=True)
    weights, theta = [1 + torch.randn(16) / 4 for _ in range(2)], 6 * torch.rand(1, 5, 8)

    def split(x):
        return x[..., : 3 * 16].view(2, 5, 3, 16), x[..., 3 * 16 :].view(2, 5, 2, 16)

    slopes = [torch.randn(2, heads, 5, 16).transpose(1, 2) for heads in (3, 2)]
    rest = *weights, theta.cos(), theta.sin(), EPS
    (got,) = torch.autograd.grad(qk_norm_rope(*split(fused), *rest), fused, slopes)
    wide = fused.detach().double().requires_grad_()
    right = formulas.qk_norm_rope(*split(wide), *rest)
    assert_near(got, torch.autograd.grad(right, wide, [s.double() for s in slopes])[0], TOLERANCE[FLOAT32])


@pytest.mark.parametrize(("mode", "dtype"), [("llama", FLOAT32), ("gemma", BFLOAT16), ("none", BFLOAT16)], ids=str)
def test_the_casting_mode_says_which_dtypes_count(mode, dtype):
    arguments = given("qk_norm_rope", BFLOAT16)
    q, k, *weights, cos, sin = arguments.values()
    weights = [x.detach().float() for x in weights]
    how = {"eps": EPS, "offset": 1.0, "casting_mode": mode}
    assert {y.dtype for y in qk_norm_rope(q, k, *weights, cos, sin, **how)} == {dtype}
    expected = BFLOAT16 if mode == "none" else FLOAT32
    assert {y.dtype for y in qk_norm_rope(q, k, *weights, cos.float(), sin.float(), **how)} == {expected}


def test_what_is_qk_norm_rope_without_options_runs_that():
    *inputs, cos, sin = given("qk_norm_rope").values()
    angles = [torch.cat((x, x), -1) for x in (cos, sin)]
    names = ("qk_norm_rope_general_forward", "qk_norm_rope_forward")
    before = [launches(name) for name in names]
    for options in ({"casting_mode": "gemma"}, {"rotary_dim": inputs[0].shape[-1]}, {}):
        qk_norm_rope(*inputs, *angles, EPS, **options)
    assert [launches(name) for name in names] == [before[0], before[1] + 3]


def test_two_dtypes_run_torch_s_own_operations():
    q, k, *rest = given("qk_norm_rope").values()
    before = dispatch.counters("qk_norm_rope_forward").fallbacks
    results = qk_norm_rope(q, k.bfloat16(), *rest, EPS)
    right = formulas.qk_norm_rope(q, k.bfloat16().float(), *rest, EPS)
    for y, other, tolerance in zip(results, right, (FLOAT64, 1e-2), strict=True):
        assert_near(y, other, tolerance)
    assert dispatch.counters("qk_norm_rope_forward").fallbacks == before + 1


@pytest.mark.parametrize("shape", [(0, 4, 5, 12), (2, 4, 0, 12), (2, 0, 5, 12)], ids=str)
def test_nothing_to_rotate(shape):
    batch, _, tokens, size = shape
    q, k = torch.ones(shape, requires_grad=True), torch.ones(batch, 2, tokens, size, requires_grad=True)
    angles, freqs_cis = torch.ones(1, tokens, size), torch.ones(1, tokens, 6, dtype=torch.complex64)
    for results in (
        rope(q, k, angles, angles), qwen2vl_mrope(q, k, *2 * [angles.expand(3, batch, -1, -1)], SECTIONS),
        [y.transpose(1, 2) for y in llama4_rope(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)],
    ):  # fmt: skip
        assert [y.shape for y in results] == [q.shape, k.shape]
        assert [x.shape for x in gradients(results, (q, k))] == [q.shape, k.shape]
