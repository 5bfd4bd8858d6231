"""append_to_cache has the bits of the norms, the rotation and a copy, in caches of any layout."""

import pytest
import torch
from op_samples import DTYPES, LAYOUTS, laid_out, launched_by

import tilekern
from tilekern.errors import NoVariant
from tilekern.ops import append_to_cache, decode_attention, qk_norm_rope, rope
from tilekern.runtime.plans import InterpretedPlan

OP = torch.ops.tilekern.append_to_cache.default
NORMS = ("q_weight", "k_weight")


def tensors(
    dtype=torch.float32, *, batch=2, tokens=3, heads=6, kv_heads=2, head_dim=16, room=9, width=16, layout="contiguous",
    normed=True, weight_dtype=None, angle_dtype=None,
):  # fmt: skip
    """The tokens of some sequences, at rows that are not in order, and caches full of NaN."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, kind=dtype):
        return laid_out(torch.randn(shape, generator=generator).to(kind or dtype), layout)

    angles = torch.rand(1, tokens, width // 2, generator=generator) * 6
    angles = torch.cat((angles, angles), -1)
    given = {"q": drawn(batch, tokens, heads, head_dim)}
    given |= {name: drawn(batch, tokens, kv_heads, head_dim) for name in "kv"}
    given |= {"cos": angles.cos().to(angle_dtype or dtype), "sin": angles.sin().to(angle_dtype or dtype)}
    nan = torch.full((batch, kv_heads, room, head_dim), torch.nan, dtype=dtype)
    given |= {"keys": laid_out(nan, layout), "values": laid_out(nan, layout)} if layout != "expanded" else {
        "keys": nan, "values": nan.clone()
    }  # fmt: skip
    given["positions"] = torch.rand(batch, room, generator=generator).argsort(1)[:, :tokens].to(torch.int32)
    return given | ({name: drawn(head_dim, kind=weight_dtype) for name in NORMS} if normed else {})


def in_pages(given, page_size=4):
    """The same call for a cache in pages, whose order is not the sequences'."""
    batch, kv_heads, room, head_dim = given["keys"].shape
    most = -(-room // page_size)
    pages = torch.full((batch * most + 1, page_size, kv_heads, head_dim), torch.nan, dtype=given["keys"].dtype)
    table = torch.randperm(batch * most, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    return given | {"table": table.view(batch, most), "keys": pages, "values": pages.clone()}


def whole(cache, table, room):
    """A cache in pages as [batch, kv_heads, room, head_dim]."""
    return cache if table is None else cache[table.long()].flatten(1, 2).transpose(1, 2)[:, :, :room]


def by_other_ops(given, **how):
    """The new q and k by the ops of training."""
    q, k, cos, sin = (given[name] for name in ("q", "k", "cos", "sin"))
    if "q_weight" in given:
        return qk_norm_rope(q, k, given["q_weight"], given["k_weight"], cos, sin, **how)
    turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, twice=True, **how)
    return tuple(x.transpose(1, 2) for x in turned)


def check(given, room=9, *, untouched=torch.nan, **how):
    """Hold a call to the bits of other ops and a copy; other rows of the cache stay as they are."""
    with torch.no_grad():
        q, k = by_other_ops(given, **how)
        found = append_to_cache(**given, **how)
    assert found.dtype == q.dtype
    assert found.is_contiguous()
    assert torch.equal(found, q)
    for name, rows in (("keys", k), ("values", given["v"])):
        cache = whole(given[name], given.get("table"), room)
        expected = torch.full_like(cache, untouched, memory_format=torch.contiguous_format)
        for b, row in enumerate(given["positions"].expand(len(expected), -1).tolist()):
            for t, place in enumerate(row):
                if 0 <= place < room:
                    expected[b, :, place] = rows[b, t].to(cache.dtype)
        assert torch.equal(cache.nan_to_num(7e4), expected.nan_to_num(7e4)), name


FORMS = [
    ({}, {}), ({"weight_dtype": torch.float32}, {"eps": 1e-2}), ({}, {"offset": 1.0}), ({}, {"norm_last": True}),
    ({"width": 8}, {"rotary_dim": 8}), ({}, {"interleaved": True}),
    ({"width": 6, "angle_dtype": torch.float32}, {"rotary_dim": 6, "interleaved": True, "norm_last": True}),
    ({"normed": False}, {}), ({"normed": False, "angle_dtype": torch.float32}, {}),
    ({"normed": False, "width": 8}, {"rotary_dim": 8}), ({"normed": False}, {"interleaved": True}),
    ({"head_dim": 24, "width": 24, "heads": 3, "kv_heads": 3}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "how"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_has_the_bits_of_training_s_ops_and_a_copy(sizes, how, dtype):
    assert launched_by(lambda: check(tensors(dtype, **sizes), **how))["append_to_cache"] == 1
    check(in_pages(tensors(dtype, **sizes)), **how)


@pytest.mark.parametrize(("sizes", "how"), FORMS[3:8], ids=str)
def test_torch_s_operations_where_there_is_no_kernel(sizes, how, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    check(tensors(torch.float64, **sizes), **how)
    check(in_pages(tensors(torch.float64, **sizes)), **how)
    assert append_to_cache(**tensors(torch.float64, batch=0, **sizes), **how).shape == (0, 3, 6, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    check(tensors(layout=layout))
    check(in_pages(tensors(torch.bfloat16, layout=layout, normed=False)))


@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_rows_that_are_nowhere_are_not_written(interpreted, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", interpreted)
    given = tensors() | {"positions": torch.tensor([[-1, 3, 9]])}
    check(given)
    paged = in_pages(tensors() | {"positions": torch.tensor([[-1, 3, 12], [2, -7, 5]])})
    check(paged)
    paged = in_pages(tensors(tokens=1) | {"positions": torch.tensor([[0]])})
    paged["table"][1, 0] = -1
    append_to_cache(**paged)
    assert int(paged["keys"].isfinite().all(-1).all(-1).sum()) == 1


def test_rows_over_all_pages_are_those_of_one_sequence():
    given = tensors(batch=1, room=8) | {"positions": torch.tensor([[17, 2, 30]])}
    pages = torch.full((8, 4, 2, 16), torch.nan)
    keys, values = (pages.flatten(0, 1).transpose(0, 1)[None] for pages in (pages, pages.clone()))
    check(given | {"keys": keys, "values": values}, room=32)
    assert pages[4, 1].isfinite().all()


def test_tokens_one_by_one_leave_what_all_at_once_do_and_can_be_attended_to():
    given = tensors(torch.bfloat16, tokens=5) | {"positions": torch.arange(5)[None]}
    other = given | {name: given[name].clone() for name in ("keys", "values")}
    q = append_to_cache(**given)
    for t in range(5):
        one = {name: other[name][:, t : t + 1] for name in ("q", "k", "v", "cos", "sin", "positions")}
        assert torch.equal(append_to_cache(**other | one), q[:, t : t + 1])
    for name in ("keys", "values"):
        assert torch.equal(given[name][:, :, :5], other[name][:, :, :5])
    out = decode_attention(q[:, -1], given["keys"], given["values"], torch.tensor([5, 5]))
    assert out.isfinite().all()


def test_a_gradient_is_refused_and_a_graph_sees_that_the_cache_has_changed():
    given = tensors()
    with pytest.raises(RuntimeError, match="append_to_cache has no gradient"):
        append_to_cache(**given | {"k": given["k"].requires_grad_()})
    leaf = torch.ones((), requires_grad=True)
    product = leaf * given["keys"]
    with torch.no_grad():
        append_to_cache(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        append_to_cache(**tensors())


WRONG = [
    ({"q": torch.zeros(2, 3, 16)}, r"q must have the shape \[batch, tokens, heads, head_dim\]"),
    ({"k": torch.zeros(2, 4, 2, 16)}, r"k must have the shape \[2, 3, kv_heads, 16\], got \[2, 4, 2, 16\]"),
    ({"v": torch.zeros(2, 3, 1, 16)}, r"v must have the shape \[2, 3, 2, 16\]"),
    ({"keys": torch.zeros(2, 2, 16)}, r"keys must have the shape \[2, 2, room, 16\]"),
    ({"values": torch.zeros(2, 2, 8, 16)}, r"values must have the shape \[2, 2, 9, 16\]"),
    ({"values": torch.zeros(2, 2, 9, 16).half()}, "values must be torch.float32 as q is, got torch.float16"),
    ({"table": torch.zeros(2, 3).int()}, r"keys must have the shape \[pages, page_size, 2, 16\]"),
    ({"table": torch.zeros(3, 3).int(), "keys": torch.zeros(4, 4, 2, 16), "values": torch.zeros(4, 4, 2, 16)},
     r"table must have the shape \[2, pages\]"),
    ({"positions": torch.zeros(3, 3).int()}, r"positions must have the shape \[2, 3\]"),
    ({"positions": torch.zeros(2, 3)}, "positions must be of an integer dtype"),
    ({"q_weight": None}, "q_weight and k_weight must both be given"),
    ({"k_weight": torch.zeros(15)}, r"k_weight must have the shape \[16\]"),
    ({"cos": torch.zeros(1, 3, 5)}, "must have one shape"),
    ({"rotary_dim": 18}, "rotary_dim must be from 2 to 16"),
    ({"keys": torch.zeros(2, 2, 9, 16, device="meta")}, "keys is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_arguments_are_named(changes, said):
    with pytest.raises(ValueError, match=f"^append_to_cache: .*{said}"):
        append_to_cache(**tensors() | changes)


def test_compiled_and_on_meta():
    given, right = tensors(torch.bfloat16), tensors(torch.bfloat16)
    q = append_to_cache(**right)
    with torch.no_grad():
        found = torch.compile(append_to_cache, backend="aot_eager", fullgraph=True)(**given)
    assert torch.equal(found, q)
    for name in ("keys", "values"):
        assert torch.equal(given[name].nan_to_num(7e4), right[name].nan_to_num(7e4))
    meta = {name: x.to("meta") for name, x in tensors().items()}
    assert append_to_cache(**meta).shape == q.shape
    with tilekern.trace(gpu="H200") as noted:
        append_to_cache(**{name: x.to("meta") for name, x in tensors(torch.bfloat16).items()})
    assert [spec if isinstance(spec, str) else spec.name for spec, _ in noted.problems] == ["append_to_cache"]


def test_where_no_variant_allows_the_arguments_torch_does_the_work(monkeypatch):
    def refuse(*_):
        raise NoVariant("append_to_cache: none of the variants allows the arguments")

    given, right = tensors(), tensors()
    q = append_to_cache(**right)
    monkeypatch.setattr(InterpretedPlan, "launch", refuse)
    with pytest.warns(RuntimeWarning, match="none of the variants"):
        torch.testing.assert_close(append_to_cache(**given), q)
    torch.testing.assert_close(given["keys"], right["keys"], equal_nan=True)
