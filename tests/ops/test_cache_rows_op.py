"""cache_rows writes the rows that transformers' static layer writes, or says that it has changed nothing."""

import pytest
import torch
from op_samples import DTYPES, LAYOUTS, laid_out, launched_by
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import StaticLayer

import tilekern
from tilekern.errors import NoVariant
from tilekern.ops.cache_rows import MOST_TOKENS, cache_rows
from tilekern.runtime import dispatch
from tilekern.runtime.plans import InterpretedPlan


def tensors(dtype=torch.float32, *, batch=2, heads=3, tokens=2, size=16, room=9, count=4, layout="contiguous"):
    """New tokens, transposed as a model gives them, and a cache full of NaN."""
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(batch, tokens, heads, size, generator=generator).to(dtype) for _ in "kv"]
    k, v = (laid_out(x, layout).transpose(1, 2) for x in new)
    cache = [torch.full((batch, heads, room, size), torch.nan, dtype=dtype) for _ in "kv"]
    return {"k": k, "v": v, "keys": cache[0], "values": cache[1], "count": torch.tensor(count)}


def by_transformers(given):
    """The cache and the count that transformers' own layer leaves."""
    layer = StaticLayer(given["keys"].shape[2])
    layer.keys, layer.values, layer.cumulative_length = (given[name].clone() for name in ("keys", "values", "count"))
    layer.device, layer.is_initialized = given["k"].device, True
    original = getattr(StaticLayer.update, "tilekern_original", StaticLayer.update)
    original(layer, given["k"], given["v"])
    return layer.keys, layer.values, layer.cumulative_length


def state(given):
    return [given[name].nan_to_num(7e4) for name in ("keys", "values", "count")]


def check(given):
    wanted = [x.nan_to_num(7e4) for x in by_transformers(given)]
    assert cache_rows(**given)
    assert all(torch.equal(x, y) for x, y in zip(state(given), wanted, strict=True))


SIZES = [{}, {"tokens": 1}, {"size": 24, "heads": 5}, {"count": 7}, {"room": 80, "tokens": MOST_TOKENS}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [{}, {"tokens": 1}, {"size": 24, "heads": 5}, {"count": 7}, {"room": 80, "tokens": 64}]
)
def test_one_launch_leaves_the_rows_and_the_count_of_transformers(sizes, dtype):
    assert launched_by(lambda: check(tensors(dtype, **sizes)))["cache_rows"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    check(tensors(layout=layout))


def test_tokens_behind_the_room_are_counted_and_not_written():
    given = tensors(count=8)
    assert cache_rows(**given)
    assert given["count"] == 10
    assert torch.equal(given["keys"][:, :, 8], given["k"][:, :, 0])
    assert given["keys"][:, :, :8].isnan().all()


UNSERVED = [
    {"size": 16, "dtype": torch.float64}, {"tokens": MOST_TOKENS + 1, "room": 99}, {"batch": 0},
]  # fmt: skip


@pytest.mark.parametrize("sizes", UNSERVED, ids=str)
def test_where_no_kernel_serves_nothing_is_changed(sizes):
    assert_untouched(tensors(**sizes))


def assert_untouched(given):
    before = state(given)
    assert not cache_rows(**given)
    assert all(torch.equal(x, y) for x, y in zip(state(given), before, strict=True))


def test_gradients_other_widths_and_tensors_of_other_kinds_are_left_to_torch():
    given = tensors()
    assert_untouched(given | {"k": given["k"].clone().requires_grad_()})
    assert_untouched(given | {"v": given["v"][..., :8], "values": given["values"][..., :8]})
    assert_untouched(given | {"k": given["k"].half(), "v": given["v"].half()})
    assert_untouched(given | {"keys": torch.nn.Parameter(given["keys"], requires_grad=False)})
    with FakeTensorMode() as mode:
        assert not cache_rows(**{name: mode.from_tensor(x) for name, x in given.items()})


def test_without_the_interpreter_the_cpu_is_torch_s(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    dispatch.forget()
    assert_untouched(tensors())
    dispatch.forget()


def test_a_copy_rounds_nothing_and_so_runs_in_the_invariant_mode():
    with tilekern.invariant():
        check(tensors(torch.bfloat16))


def test_a_graph_sees_that_the_cache_has_changed():
    given, leaf = tensors(), torch.ones((), requires_grad=True)
    product = leaf * given["keys"]
    with torch.no_grad():
        assert cache_rows(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        assert cache_rows(**tensors())


WRONG = [
    ({"k": torch.zeros(2, 3, 16)}, r"k must have four dimensions, got \[2, 3, 16\]"),
    ({"v": torch.zeros(2, 3, 1, 16)}, r"v must have the shape \[2, 3, 2, 16\], got \[2, 3, 1, 16\]"),
    ({"keys": torch.zeros(3, 3, 9, 16)}, r"keys must have the shape \[2, 3, 9, 16\]"),
    ({"values": torch.zeros(2, 3, 8, 16)}, r"values must have the shape \[2, 3, 9, 16\]"),
    ({"count": torch.zeros(2, dtype=torch.int64)}, r"count must be one number of int64, got \[2\]"),
    ({"count": torch.zeros(())}, "count must be one number of int64, got .* of torch.float32"),
    ({"values": torch.zeros(2, 3, 9, 16, device="meta")}, "values is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_arguments_are_named(changes, said):
    with pytest.raises(ValueError, match=f"^cache_rows: {said}"):
        cache_rows(**tensors() | changes)


def test_a_trace_notes_the_problem():
    with tilekern.trace(gpu="H200") as noted:
        cache_rows(**{name: x.to("meta") for name, x in tensors(torch.bfloat16).items()})
    assert [spec if isinstance(spec, str) else spec.name for spec, _ in noted.problems] == ["cache_rows"]


def test_where_no_variant_allows_the_arguments_torch_does_the_work(monkeypatch):
    def refuse(*_):
        raise NoVariant("cache_rows: none of the variants allows the arguments")

    monkeypatch.setattr(InterpretedPlan, "launch", refuse)
    with pytest.warns(RuntimeWarning, match="none of the variants"):
        assert_untouched(tensors())
