import pytest
import torch
from op_samples import DTYPES, LAYOUTS, TOLERANCE, assert_near, laid_out
from transformers import Qwen2VLTextConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

import tilekern
from tilekern.ops import qwen2vl_mrope
from tilekern.ops.operation import DECLARED

SECTIONS = [1, 3, 2]


def given(dtype=torch.float32, layout="contiguous", batch=2, angle_batch=None, sections=SECTIONS):
    """q and k, which take gradients, and cos and sin of three positions that differ."""
    tokens, size = 5, 2 * sum(sections)
    q, k = (
        laid_out(torch.randn(batch, heads, tokens, size).to(dtype), layout).detach().requires_grad_()
        for heads in (4, 2)
    )
    half = torch.rand(3, angle_batch or batch, tokens, size // 2) * 6
    angles = torch.cat((half, half), -1)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def expected(q, k, cos, sin, sections=SECTIONS):
    """In float64, frequency by frequency."""
    q, k, cos, sin = (x.double() for x in (q, k, cos, sin))
    position = [i % 3 for i, width in enumerate(sections) for _ in range(width)]
    half = len(position)

    def turned(x):
        y = torch.empty_like(x)
        for i, axis in enumerate(position):
            c, s = cos[axis, :, None, :, i], sin[axis, :, None, :, i]
            y[..., i] = x[..., i] * c - x[..., half + i] * s
            y[..., half + i] = x[..., half + i] * c + x[..., i] * s
        return y

    return turned(q), turned(k)


def gradients(results, leaves):
    generator = torch.Generator().manual_seed(0)
    slopes = [torch.randn(y.shape, generator=generator) for y in results]
    return torch.autograd.grad(results, leaves, [s.to(y.dtype) for s, y in zip(slopes, results, strict=True)])


def counted(kernel="qwen2vl_mrope", what="launches"):
    return tilekern.stats().get(kernel, {}).get(what, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("angle_batch", [1, 2])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_results_and_gradients_match_float64(dtype, layout, angle_batch, unsqueeze_dim):
    q, k, cos, sin = given(dtype, layout, angle_batch=angle_batch)
    before, fallbacks = counted(), counted(what="fallbacks")
    if unsqueeze_dim == 1:
        results = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    else:
        turned = qwen2vl_mrope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, SECTIONS, unsqueeze_dim)
        results = [y.transpose(1, 2) for y in turned]
    found = gradients(results, (q, k))
    assert (counted(), counted(what="fallbacks")) == (before + 2, fallbacks)
    right = expected(q, k, cos, sin)
    for got, reference in zip((*results, *found), (*right, *gradients(right, (q, k))), strict=True):
        assert got.dtype == dtype
        assert_near(got, reference, TOLERANCE[dtype])


@pytest.mark.skipif(
    not hasattr(qwen2_vl.Qwen2VLRotaryEmbedding, "recomposition_frequencies"),
    reason="this transformers puts the sections together elsewhere",
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_transformers_computes_of_the_same_positions(dtype):
    config = Qwen2VLTextConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS},
    )  # fmt: skip
    embedding = qwen2_vl.Qwen2VLRotaryEmbedding(config)
    q, k, _, _ = given(dtype)
    positions = torch.randint(0, 50, (3, 2, 5))
    right = qwen2_vl.apply_rotary_pos_emb(q, k, *embedding(q, positions))
    half = positions[..., None].float() * embedding.inv_freq
    angles = torch.cat((half, half), -1)
    results = qwen2vl_mrope(q, k, angles.cos().to(dtype), angles.sin().to(dtype), SECTIONS)
    for got, reference in zip(
        (*results, *gradients(results, (q, k))), (*right, *gradients(right, (q, k))), strict=True
    ):
        assert_near(got, reference, TOLERANCE[dtype])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_the_layout_of_each_input_is_kept(unsqueeze_dim):
    q, k, cos, sin = given()
    for swapped in (False, True):
        leaves = [x if unsqueeze_dim == 1 else x.transpose(1, 2) for x in (q, k)]
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) if swapped else x for x in leaves]
        for x, y in zip(leaves, qwen2vl_mrope(*leaves, cos, sin, SECTIONS, unsqueeze_dim), strict=True):
            assert y.shape == x.shape
            assert y.stride() == x.stride()


def test_the_second_half_of_the_angles_is_not_read():
    q, k, cos, sin = given()
    right = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    for angles in (cos, sin):
        angles[..., sum(SECTIONS) :] = torch.nan
    for got, reference in zip(qwen2vl_mrope(q, k, cos, sin, SECTIONS), right, strict=True):
        assert torch.equal(got, reference)


@pytest.mark.parametrize("sections", [[4, 0, 2], [2, 2, 2], (1, 1, 1), [0, 0, 5], [3, 0, 0], [0, 46, 0]], ids=str)
def test_any_three_sections_take_one_launch_forward(sections):
    q, k, cos, sin = given(sections=sections)
    before = counted()
    results = qwen2vl_mrope(q, k, cos, sin, sections)
    assert counted() == before + 1
    for got, reference in zip(results, expected(q, k, cos, sin, sections), strict=True):
        assert_near(got, reference, 1e-5)


@pytest.mark.parametrize("sections", [[6], [2, 4], [1, 2, 1, 2], [1] * 6], ids=str)
def test_other_than_three_sections_are_turned_by_rope(sections):
    q, k, cos, sin = given(sections=sections)
    before, ropes = counted(), counted("rope")
    results = qwen2vl_mrope(q, k, cos, sin, sections)
    found = gradients(results, (q, k))
    assert (counted(), counted("rope")) == (before, ropes + 2)
    right = expected(q, k, cos, sin, sections)
    for got, reference in zip((*results, *found), (*right, *gradients(right, (q, k))), strict=True):
        assert_near(got, reference, 1e-5)


def test_float32_angles_of_bfloat16_heads_give_float32_and_bfloat16_gradients():
    q, k, cos, sin = given(torch.bfloat16)
    cos, sin = cos.float(), sin.float()
    results = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    found, right = gradients(results, (q, k)), expected(q, k, cos, sin)
    assert [x.dtype for x in (*results, *found)] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for got, reference in zip((*results, *found), (*right, *gradients(right, (q, k))), strict=True):
        assert_near(got, reference, TOLERANCE[got.dtype])


def test_angles_that_need_a_gradient_get_that_of_torch():
    leaves = [x.detach().requires_grad_() for x in given()]
    found = gradients(qwen2vl_mrope(*leaves, SECTIONS), leaves)
    for got, right in zip(found, gradients(expected(*leaves), leaves), strict=True):
        torch.testing.assert_close(got, right, check_dtype=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_kernel_of_its_own_it_is_turned_by_that_of_rope(monkeypatch, compiled):
    torch._dynamo.reset()
    q, k, cos, sin = given()
    right = qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    declared = DECLARED["qwen2vl_mrope_sections"].formula.__globals__["_turned"]
    monkeypatch.setitem(declared.functions, "plan_for", lambda *_: None)
    before, ropes = counted(), counted("rope")
    call = torch.compile(qwen2vl_mrope, fullgraph=True, backend="aot_eager") if compiled else qwen2vl_mrope
    results = call(q, k, cos, sin, SECTIONS)
    found = gradients(results, (q, k))
    assert (counted(), counted("rope")) == (before, ropes + 2)
    monkeypatch.undo()
    for got, reference in zip((*results, *found), (*right, *gradients(right, (q, k))), strict=True):
        assert torch.equal(got, reference)


@pytest.mark.parametrize("shape", [(0, 4, 5, 12), (2, 4, 0, 12), (2, 0, 5, 12)], ids=str)
def test_nothing_to_rotate(shape):
    q, k = torch.ones(shape, requires_grad=True), torch.ones(shape, requires_grad=True)
    angles = torch.ones(3, shape[0], shape[2], 12)
    results = qwen2vl_mrope(q, k, angles, angles, SECTIONS)
    assert [y.shape for y in results] == [q.shape, k.shape]
    for gradient in gradients(results, (q, k)):
        assert gradient.shape == shape


def test_compiled_it_gives_the_same_bits_in_one_graph():
    torch._dynamo.reset()
    q, k, cos, sin = given(torch.bfloat16)
    compiled = torch.compile(qwen2vl_mrope, fullgraph=True, backend="aot_eager")
    results, right = compiled(q, k, cos, sin, SECTIONS), qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    for got, reference in zip(
        (*results, *gradients(results, (q, k))), (*right, *gradients(right, (q, k))), strict=True
    ):
        assert torch.equal(got, reference)


@pytest.mark.usefixtures("without_interpreter")
def test_without_the_interpreter_the_cpu_runs_the_formula():
    q, k, cos, sin = given()
    before, fallbacks = counted(), counted(what="fallbacks")
    results, right = qwen2vl_mrope(q, k, cos, sin, SECTIONS), expected(q, k, cos, sin)
    assert (counted(), counted(what="fallbacks")) == (before, fallbacks + 1)
    for got, reference in zip(
        (*results, *gradients(results, (q, k))), (*right, *gradients(right, (q, k))), strict=True
    ):
        assert_near(got, reference, 1e-5)


@pytest.mark.parametrize(
    ("cos", "sin", "sections"),
    [
        ((2, 2, 5, 12), (2, 2, 5, 12), SECTIONS), ((2, 5, 12), (2, 5, 12), SECTIONS),
        ((3, 2, 5, 12), (3, 2, 5, 10), SECTIONS), ((3, 2, 5, 12), (3, 2, 5, 12), [1, 3, 3]),
        ((3, 2, 5, 12), (3, 2, 5, 12), [-1, 5, 2]), ((), (), SECTIONS),
    ],
)  # fmt: skip
def test_angles_and_sections_that_do_not_fit_are_refused(cos, sin, sections):
    q, k, _, _ = given()
    with pytest.raises(ValueError, match=r"^qwen2vl_mrope: cos .* must be \[3, batch, tokens, head_dim\]"):
        qwen2vl_mrope(q, k, torch.ones(cos), torch.ones(sin), sections)


def test_shapes_that_do_not_go_together_are_refused():
    q, k, cos, sin = given()
    with pytest.raises(ValueError, match=r"^qwen2vl_mrope_sections: "):
        qwen2vl_mrope(q, k[..., :4, :], cos, sin, SECTIONS)
    with pytest.raises(ValueError, match="unsqueeze_dim must be 1 or 2, got 3"):
        qwen2vl_mrope(q, k, cos, sin, SECTIONS, 3)
