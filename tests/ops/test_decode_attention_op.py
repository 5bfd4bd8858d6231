"""decode_attention against its spec's reference in float64: through its kernels, torch's operations, and compiled."""

import dataclasses
import importlib
import threading

import pytest
import torch
from op_samples import DTYPES, LAYOUTS, assert_near, laid_out
from tolerances import TOLERANCE

import tilekern
from tilekern.errors import NoVariant
from tilekern.ops import attention, decode_attention
from tilekern.runtime import dispatch
from tilekern.runtime.plans import InterpretedPlan

module = importlib.import_module("tilekern.ops.decode_attention")
SPEC, OP = module.kernels.SPEC, torch.ops.tilekern.decode_attention.default


@pytest.fixture(params=[1, 4], ids=["one split", "four splits"])
def splits(request, monkeypatch):
    """Return the number of splits of every plan; kernels run in the interpreter."""
    spec = dataclasses.replace(SPEC, default=lambda *given: SPEC.default(*given).but(splits=request.param))
    monkeypatch.setattr(module.kernels, "SPEC", spec)
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    yield request.param
    dispatch.forget()


def tensors(dtype=torch.float32, batch=3, heads=6, kv_heads=2, room=70, head_dim=24, layout="contiguous"):
    shapes = {"q": (batch, heads, head_dim)} | dict.fromkeys(("keys", "values"), (batch, kv_heads, room, head_dim))
    found = {name: laid_out(torch.randn(shape).to(dtype), layout) for name, shape in shapes.items()}
    return found | {"lengths": torch.tensor([room, 33, 1, 50, 7][:batch], dtype=torch.int32)}


def in_pages(given, page_size=16):
    """The same cache in pages, whose order is not the sequences'."""
    batch, kv_heads, room, head_dim = given["keys"].shape
    most = -(-room // page_size)
    table = torch.randperm(batch * most, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    found = {"table": table.view(batch, most)}
    for name in ("keys", "values"):
        whole = given[name].new_zeros(batch, most * page_size, kv_heads, head_dim)
        whole[:, :room] = given[name].transpose(1, 2)
        pages = torch.empty_like(whole.view(-1, page_size, kv_heads, head_dim))
        pages[table.long()] = whole.view(-1, page_size, kv_heads, head_dim)
        found[name] = pages
    return given | found


def expected(q, keys, values, lengths, *, starts=None, table=None, sinks=None, scale=None, window=None, softcap=None):
    """The spec's reference, in the op's shapes."""
    kv_heads = keys.shape[1 if table is None else 2]
    group = q.shape[1] // kv_heads
    out = SPEC.reference(
        q.unflatten(1, (kv_heads, group)), keys, values, lengths, starts, table,
        None if sinks is None else sinks.view(kv_heads, group), q.shape[2] ** -0.5 if scale is None else scale, softcap,
        window, window is not None, softcap is not None, sinks is not None, starts is not None, table is not None,
    )["out"]  # fmt: skip
    return out.flatten(1, 2)


def check(given, **options):
    out = decode_attention(**given, **options)
    assert out.dtype == given["q"].dtype
    assert out.is_contiguous()
    assert_near(out, expected(**given, **options), 2 * TOLERANCE[out.dtype])
    return out


def launches():
    return {name: dispatch.counters(name).launches for name in ("decode_attention", "decode_join")}


OPTIONS = [
    {}, {"window": 20}, {"softcap": 2.0, "scale": 0.4}, {"sinks": torch.linspace(-1, 3, 6)},
    {"starts": torch.tensor([5, 0, 1])},
    {"window": 9, "softcap": 5.0, "sinks": torch.zeros(6).bfloat16(), "starts": torch.tensor([66, 30, 0])},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_and_dtypes_in_dense_and_paged_caches(options, dtype, splits):
    before = launches()
    given = tensors(dtype)
    out = check(given, **options)
    assert_near(check(in_pages(given), **options), out, 2 * TOLERANCE[dtype])
    after = launches()
    assert after["decode_attention"] == before["decode_attention"] + 2
    assert after["decode_join"] == before["decode_join"] + (2 if splits > 1 else 0)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_torch_s_own_operations_where_there_is_no_kernel(options, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    given, before = tensors(torch.float64), dispatch.counters("decode_attention").fallbacks
    given["lengths"][2] = 0
    for cache in (given, in_pages(given)):
        assert_near(decode_attention(**cache, **options), expected(**given, **options), 1e-6)
    assert dispatch.counters("decode_attention").fallbacks == before + 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, splits):
    given = tensors(layout=layout)
    check(given)
    check(in_pages(given) | {"lengths": given["lengths"].long()})
    check(given | {"lengths": torch.tensor(40, dtype=torch.int32).expand(3)})


def test_it_is_the_last_query_of_attention(splits):
    given = tensors()
    given["lengths"][:] = 70
    q, k, v = given["q"][:, None], given["keys"].transpose(1, 2), given["values"].transpose(1, 2)
    assert_near(decode_attention(**given), attention(q, k, v)[:, 0].detach(), 1e-6)


def test_nothing_to_do_and_what_kernels_do_not_take_goes_to_torch(splits):
    before = launches()
    assert decode_attention(**tensors(batch=0)).shape == (0, 6, 24)
    assert torch.equal(decode_attention(**tensors(room=0)), torch.zeros(3, 6, 24))
    check(tensors(heads=33, kv_heads=1, room=9, batch=1))
    check(tensors(head_dim=257, room=9, batch=1))
    check(tensors(), scale=-0.3)
    assert launches() == before
    check(tensors(heads=32, kv_heads=1, room=9, batch=1, head_dim=256))
    assert launches() != before


def test_where_no_variant_allows_the_arguments_torch_does_the_work(splits, monkeypatch):
    def refuse(*_):
        raise NoVariant("decode_attention: none of the variants allows the arguments")

    monkeypatch.setattr(InterpretedPlan, "launch", refuse)
    with pytest.warns(RuntimeWarning, match="none of the variants .*; the model's own op runs"):
        check(tensors())


def test_a_gradient_is_refused():
    given = tensors()
    for name in ("q", "keys", "values"):
        graded = given | {name: given[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
            decode_attention(**graded)
        with torch.no_grad():
            assert not decode_attention(**graded).requires_grad
    with pytest.raises(RuntimeError, match="has no gradient"):
        decode_attention(**given, sinks=torch.zeros(6, requires_grad=True))
    with pytest.raises(RuntimeError, match="has no gradient"):
        OP(given["q"].requires_grad_(), *list(given.values())[1:], *[None] * 6, False)


WRONG = [
    ({"q": torch.zeros(3, 1, 6, 24)}, r"q must be \[batch, heads, head_dim\]"),
    ({"values": torch.zeros(3, 2, 71, 24)}, r"keys and values \[batch, kv_heads, room, head_dim\], got q"),
    ({"keys": torch.zeros(3, 2, 70, 24).half()}, "keys and values must be torch.float32 as q is, got torch.float16"),
    ({"q": torch.zeros(2, 6, 24)}, "must be of one batch"),
    ({"q": torch.zeros(3, 5, 24)}, "5 heads must be a multiple of the 2 key heads"),
    ({"lengths": torch.zeros(2).int()}, r"lengths must have the shape \[3\]"),
    ({"lengths": torch.zeros(3)}, "lengths must be of an integer dtype"),
    ({"starts": torch.zeros(3, 1).int()}, r"starts must have the shape \[3\]"),
    ({"sinks": torch.zeros(2)}, r"sinks must have the shape \[6\]"),
    ({"sinks": torch.zeros(6, device="meta")}, "sinks is on meta"),
    ({"window": 0}, "window must be positive, got 0"),
    ({"softcap": 0.0}, "softcap must be positive and finite"),
    ({"table": torch.zeros(2, 1).int(), "q": torch.zeros(3, 70, 24)}, r"table must be \[3, most pages\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_arguments_are_named(changes, said):
    with pytest.raises(ValueError, match=f"^decode_attention: .*{said}"):
        decode_attention(**tensors() | changes)


def test_torch_s_own_checks_of_the_registered_op():
    given, options = in_pages(tensors()), OPTIONS[5]
    arguments = (*(given[name] for name in ("q", "keys", "values", "lengths")), options["starts"], given["table"])
    found = torch.library.opcheck(OP, (*arguments, options["sinks"], 0.3, options["window"], options["softcap"], False))
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_vmapped_and_on_meta(splits):
    given = tensors()
    right = decode_attention(**given, window=20)
    compiled = torch.compile(decode_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given, window=20), right)
    vmapped = torch.func.vmap(lambda q: decode_attention(**given | {"q": q}, window=20))(given["q"][None])
    assert_near(vmapped[0], right, 1e-6)
    meta = {name: x.to("meta") for name, x in given.items()}
    assert decode_attention(**meta).shape == right.shape
    with tilekern.trace(gpu="H200") as found:
        decode_attention(**{name: x.to("meta") for name, x in tensors(torch.bfloat16, room=4000).items()})
    names = [spec if isinstance(spec, str) else spec.name for spec, _ in found.problems]
    assert set(names) == {"decode_attention", *(["decode_join"] if splits > 1 else [])}


def test_a_growing_cache_is_one_kind_of_call_until_its_bucket_is_full(splits, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "plan_for", lambda *given: seen.append(given[3]) or None)
    for room in range(60, 68):
        decode_attention(**tensors(room=room))
    assert set(seen) == {64, 128}


def test_another_thread(splits):
    given, found = tensors(), []
    thread = threading.Thread(target=lambda: found.append(decode_attention(**given)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], decode_attention(**given))
