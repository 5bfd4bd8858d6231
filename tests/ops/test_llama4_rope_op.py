import pytest
import torch
from op_samples import DTYPES, LAYOUTS, TOLERANCE, assert_near, laid_out
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

import tilekern
from tilekern.ops import llama4_rope

forms = pytest.mark.parametrize("form", ["complex", "real view", "conjugated twice"])


def given(dtype=torch.float32, shape=(2, 5, 4, 12), kv_heads=2, layout="contiguous", angle_batch=2):
    """xq and xk, which take gradients, and freqs_cis."""
    batch, tokens, heads, size = shape
    xq, xk = (
        laid_out(torch.randn(batch, tokens, n, size).to(dtype), layout).detach().requires_grad_()
        for n in (heads, kv_heads)
    )
    turns = torch.rand(angle_batch, tokens, size // 2) * 6
    return xq, xk, 1.5 * torch.polar(torch.ones_like(turns), turns)


def formed(freqs_cis, form):
    if form == "real view":
        return torch.view_as_real(freqs_cis)
    return freqs_cis.conj().resolve_conj().conj() if form == "conjugated twice" else freqs_cis


def counted():
    """Launches and fallbacks of the kernel."""
    counts = tilekern.stats().get("llama4_rope", {})
    return counts.get("launches", 0), counts.get("fallbacks", 0)


def gradients(results, leaves, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in results]
    return torch.autograd.grad(results, leaves, slopes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@forms
@pytest.mark.parametrize("angle_batch", [1, 2])
def test_results_and_gradients_are_those_of_transformers(dtype, layout, form, angle_batch):
    xq, xk, freqs_cis = given(dtype, layout=layout, angle_batch=angle_batch)
    # Of float32 transformers takes pairs where they lie, for which some layouts are none.
    expected = apply_rotary_emb(xq.contiguous(), xk.contiguous(), freqs_cis)
    launches, fallbacks = counted()
    results = llama4_rope(xq, xk, formed(freqs_cis, form))
    found = gradients(results, (xq, xk))
    assert counted() == (launches + 2, fallbacks)
    for got, right in zip((*results, *found), (*expected, *gradients(expected, (xq, xk))), strict=True):
        assert got.dtype == right.dtype == dtype
        assert_near(got, right, TOLERANCE[dtype])


@pytest.mark.parametrize("size", [2, 80, 92, 128])
@pytest.mark.parametrize("kv_heads", [1, 5, 7])
def test_head_sizes_and_numbers_of_heads(size, kv_heads):
    xq, xk, freqs_cis = given(torch.bfloat16, shape=(1, 3, 5, size), kv_heads=kv_heads, angle_batch=1)
    for got, right in zip(llama4_rope(xq, xk, freqs_cis), apply_rotary_emb(xq, xk, freqs_cis), strict=True):
        assert_near(got, right, TOLERANCE[torch.bfloat16])


@forms
def test_the_batch_of_freqs_cis_can_be_left_out(form):
    xq, xk, freqs_cis = given(angle_batch=1)
    expected = llama4_rope(xq, xk, freqs_cis)
    for got, right in zip(llama4_rope(xq, xk, formed(freqs_cis[0], form)), expected, strict=True):
        assert torch.equal(got, right)


def test_the_layout_of_each_input_is_kept():
    xq, xk, freqs_cis = given(shape=(2, 5, 4, 12))
    for heads_first in (False, True):
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x for x in (xq, xk)]
        for x, y in zip(leaves, llama4_rope(*leaves, freqs_cis), strict=True):
            assert y.stride() == x.stride()
            assert y.data_ptr() != x.data_ptr()


@forms
def test_compiled_it_gives_the_same_bits_in_one_graph(form):
    torch._dynamo.reset()
    xq, xk, freqs_cis = given(torch.bfloat16)
    freqs_cis = formed(freqs_cis, form)
    compiled = torch.compile(llama4_rope, fullgraph=True, backend="aot_eager")
    results, expected = compiled(xq, xk, freqs_cis), llama4_rope(xq, xk, freqs_cis)
    for got, right in zip(
        (*results, *gradients(results, (xq, xk))), (*expected, *gradients(expected, (xq, xk))), strict=True
    ):
        assert torch.equal(got, right)


def test_freqs_cis_that_need_a_gradient_get_that_of_torch():
    xq, xk, freqs_cis = given()
    freqs_cis.requires_grad_()
    leaves = (xq, xk, freqs_cis)
    found = gradients(llama4_rope(*leaves), leaves)
    for got, right in zip(found, gradients(apply_rotary_emb(*leaves), leaves), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.usefixtures("without_interpreter")
def test_without_the_interpreter_the_cpu_runs_the_formula():
    xq, xk, freqs_cis = given(torch.float16)
    launches, fallbacks = counted()
    results, expected = llama4_rope(xq, xk, freqs_cis), apply_rotary_emb(xq, xk, freqs_cis)
    assert counted() == (launches, fallbacks + 1)
    for got, right in zip(
        (*results, *gradients(results, (xq, xk))), (*expected, *gradients(expected, (xq, xk))), strict=True
    ):
        assert_near(got, right, TOLERANCE[torch.float16])


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8)])
def test_nothing_to_rotate(shape):
    xq, xk, freqs_cis = given(shape=shape, angle_batch=1)
    results = llama4_rope(xq, xk, freqs_cis)
    assert [y.shape for y in results] == [xq.shape, xk.shape]
    for gradient, x in zip(gradients(results, (xq, xk)), (xq, xk), strict=True):
        assert gradient.shape == x.shape


@pytest.mark.parametrize(
    "changes",
    [
        {"k": (2, 6, 2, 8)}, {"k": (1, 5, 2, 8)}, {"k": (2, 5, 2, 6)}, {"freqs": (3, 5, 4)}, {"freqs": (1, 6, 4)},
        {"freqs": (1, 5, 8)}, {"freqs": (5, 1, 4)}, {"freqs": (4,)}, {"q": (2, 5, 4, 7), "k": (2, 5, 2, 7)},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_shapes_are_refused(changes):
    sizes = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "freqs": (1, 5, 4)} | changes
    with pytest.raises(ValueError, match=r"^llama4_rope"):
        llama4_rope(torch.ones(sizes["q"]), torch.ones(sizes["k"]), torch.ones(sizes["freqs"], dtype=torch.complex64))


def test_angles_that_have_lost_their_imaginary_parts_are_refused():
    xq, xk, freqs_cis = given()
    with pytest.raises(ValueError, match=r"freqs_cis \[2, 5, 6\] torch.float32 must be complex"):
        llama4_rope(xq, xk, freqs_cis.real)


def test_two_dtypes_are_refused():
    xq, xk, freqs_cis = given()
    with pytest.raises(ValueError, match=r"float32 and k .*bfloat16 .* may differ in heads only"):
        llama4_rope(xq, xk.bfloat16(), freqs_cis)
