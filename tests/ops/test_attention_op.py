"""attention against the same formula in float64: through its kernels, through torch's operations, and compiled."""

import contextlib
import importlib
import math
import types

import pytest
import torch
from op_samples import assert_near

import tilekern
from tilekern.errors import TilekernWarning
from tilekern.kernels.attention import problem as attention_problem

module = importlib.import_module("tilekern.ops.attention")
attention, OP = module.attention, torch.ops.tilekern.attention.default

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


STARTS = starts(0, 5, 6, 23)
CASES = {
    "causal": {},
    "full": {"causal": False},
    "scaled": {"scale": 0.3},
    "window": {"window": 5},
    "window on both sides": {"window": 5, "causal": False},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "packed": {"cu_seqlens": STARTS},
    "packed, its longest known": {"cu_seqlens": STARTS, "max_seqlen": 17, "window": 4},
    "everything": {"window": 7, "softcap": 3.0, "sinks": True, "cu_seqlens": STARTS},
}


def tensors(batch=1, queries=23, keys=23, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, views=False):
    generator = torch.Generator().manual_seed(0)
    found = []
    for tokens, number in ((queries, heads), (keys, kv_heads), (keys, kv_heads)):
        shape = (batch, number, tokens, head_dim) if views else (batch, tokens, number, head_dim)
        x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        found.append(x.transpose(1, 2) if views else x)
    return found


def expected(q, k, v, *, causal=True, scale=None, window=None, softcap=None, sinks=None, cu_seqlens=None, **_):
    starts = torch.zeros(1, dtype=torch.int32) if cu_seqlens is None else cu_seqlens
    return attention_problem.formula(
        q, k, v, torch.zeros(1) if sinks is None else sinks, starts, starts, 0, 0,
        q.shape[3] ** -0.5 if scale is None else scale, softcap or 1.0, window or 1, causal,
        window is not None, softcap is not None, sinks is not None, cu_seqlens is not None,
    )["out"]  # fmt: skip


def check(call, inputs, case, dtype=torch.float32):
    """Result and gradients of ``call`` against float64."""
    options = dict(case)
    leaves = list(inputs)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, inputs[0].shape[2], dtype=dtype).requires_grad_()
        leaves.append(options["sinks"])
    out = call(*inputs, **options)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, slope)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    if "sinks" in options:
        options["sinks"] = wide[3]
    reference = expected(*wide[:3], **options)
    assert out.dtype == dtype
    assert_near(out, reference, TOLERANCE[dtype])
    for found, wanted in zip(gradients, torch.autograd.grad(reference, wide, slope.double()), strict=True):
        assert found.dtype == dtype
        assert_near(found, wanted, TOLERANCE[dtype])


def launches():
    return tilekern.stats().get("attention_forward", {}).get("launches", 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_match_float64_through_the_kernels(case):
    before = launches()
    check(attention, tensors(), case)
    assert launches() == before + 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_match_float64_through_torch(case, monkeypatch):
    monkeypatch.setattr(module, "plan_for", lambda *_: None)
    before = tilekern.stats().get("attention_forward", {}).get("fallbacks", 0)
    check(attention, tensors(), case)
    assert tilekern.stats()["attention_forward"]["fallbacks"] == before + 1


@pytest.mark.parametrize(("head_dim", "run"), [(module.WIDEST_HEAD, 1), (module.WIDEST_HEAD + 8, 0)])
def test_heads_that_would_take_the_compiler_too_long_run_in_torch_and_that_is_said(head_dim, run):
    before = launches()
    said = pytest.warns(TilekernWarning, match=f"head_dim is {head_dim}") if not run else contextlib.nullcontext()
    with said:
        check(attention, tensors(queries=5, keys=5, head_dim=head_dim), {})
    assert launches() == before + run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_registered_op_gives_the_same(case):
    def registered(q, k, v, sinks=None, cu_seqlens=None, max_seqlen=None, **options):
        numbers = {"causal": True, "scale": None, "window": None, "softcap": None} | options
        longest = int(cu_seqlens.diff().max()) if cu_seqlens is not None else max_seqlen
        return OP(q, k, v, sinks, cu_seqlens, *numbers.values(), longest, True)[0]

    check(registered, tensors(), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(23, 23), (1, 30), (30, 9)])
@pytest.mark.parametrize("kernels", [True, False])
def test_half_types_groups_and_lengths_that_differ(dtype, queries, keys, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(module, "plan_for", lambda *_: None)
    check(attention, tensors(2, queries, keys, 6, 2, 24, dtype), {}, dtype)


def test_views_of_heads_first_tensors_are_taken_as_they_are():
    check(attention, tensors(2, views=True), {})


def test_expanded_inputs_and_slopes_are_taken_as_well():
    q, k, v = tensors()
    one_head = [x.detach()[:, :, :1].expand(-1, -1, 2, -1).requires_grad_() for x in (k, v)]
    check(attention, [q.detach()[:, :1].expand(-1, 23, -1, -1).requires_grad_(), *one_head], {})
    alike = attention(q, k, v, sinks=torch.zeros(4))
    out = attention(q, k, v, sinks=torch.zeros(1).expand(4))
    assert torch.equal(out, alike)
    slope = torch.randn(1, 23, 16, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(alike, (q, k, v), slope[:, :, None].repeat(1, 1, 4, 1))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(2), (q, k, v), slope), wanted))


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = tensors(queries=9, keys=4)
    out = attention(q, k, v)
    assert torch.equal(out[:, :5], torch.zeros_like(out[:, :5]))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq[:, :5], torch.zeros_like(dq[:, :5]))
    assert bool(out[:, 5:].abs().amin() > 0)


def test_a_window_that_holds_all_keys_is_none():
    q, k, v = tensors()
    assert module._call(q, k, None, True, None, 23, None, None, True).window is None
    assert module._call(q, k, None, True, None, 22, None, None, True).window == 22
    assert torch.equal(attention(q, k, v, window=10**12), attention(q, k, v))


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_what_the_kernels_do_not_serve_goes_to_torch():
    q, k, v = tensors()
    before = launches()
    assert_near(attention(q, k, v[..., :8]), expected(q, k, v)[..., :8], 1e-5)
    assert_near(attention(q, k, v, scale=-0.2), expected(q, k, v, scale=-0.2), 1e-5)
    assert_near(attention(*(x.double() for x in (q, k, v))), expected(q, k, v), 1e-10)
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 23, 4, 16)
    assert launches() == before


def test_the_library_s_causal_mask_is_not_used_where_it_means_another(monkeypatch):
    library = types.SimpleNamespace(config={"implementation": "cudnn"})
    monkeypatch.setattr(module, "plan_for", lambda *_: library)
    q, k, v = tensors(queries=9, keys=12)
    assert_near(attention(q, k, v), expected(q, k, v), 1e-5)


def test_torch_agrees_that_the_op_is_registered_well():
    q, k, v = tensors()
    numbers = (True, 0.25, 5, None, 23, True)
    torch.library.opcheck(OP, (q, k, v, None, None, *numbers), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_the_least_and_the_most_soft_cap_give_numbers(softcap):
    q, k, v = (torch.randn(1, 23, 2, 16) for _ in range(3))
    out = attention(q, k, v, softcap=softcap)
    torch.testing.assert_close(out, attention(q, k, v) if softcap > 1 else attention(0 * q, k, v))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (1, 4, 16)}, "must be"),
        ({"k": (1, 22, 2, 16)}, "must be"),
        ({"q": (1, 23, 4, 8)}, "must be"),
        ({"q": (2, 23, 4, 16)}, "must be of one batch"),
        ({"q": (1, 23, 5, 16)}, "5 heads must be a multiple of the 2 key heads"),
        ({"sinks": (3,)}, r"sinks must have the shape \[4\]"),
        ({"window": 0}, "window must be positive, got 0"),
        ({"softcap": -1.0}, "softcap must be positive and finite .*, got -1.0"),
        ({"softcap": math.inf}, "softcap must be positive and finite .*, got inf"),
        ({"softcap": math.nan}, "softcap must be positive and finite .*, got nan"),
        ({"q": (1, 23, 4, 0), "k": (1, 23, 2, 0), "v": (1, 23, 2, 0)}, "head_dim must be at least 1"),
        ({"q": (1, 22, 4, 16), "cu_seqlens": starts(0, 9, 22)}, "packed sequences"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens must be \[sequences \+ 1\], got \[0\]"),
        ({"cu_seqlens": starts(1, 5, 23)}, "it starts with 1, its least step is 4, and it ends with 23"),
        ({"cu_seqlens": starts(0, 9, 5, 23)}, "never fall, .* its least step is -4"),
        ({"cu_seqlens": starts(0, 5, 22)}, "end with 23, the number of tokens; .* and it ends with 22"),
        ({"cu_seqlens": starts(0, 5, 24)}, "and it ends with 24"),
        ({"cu_seqlens": STARTS, "max_seqlen": 16}, "the longest sequence has 17 tokens, got max_seqlen 16"),
        ({"cu_seqlens": STARTS.to("meta"), "max_seqlen": 17}, "cu_seqlens is on meta, and must be on cpu as q is"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta, and must be on cpu as q is"),
        ({"v": torch.zeros(1, 23, 2, 16, device="meta")}, "v is on meta, and must be on cpu as q is"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    given = {"q": (1, 23, 4, 16), "k": (1, 23, 2, 16), "v": (1, 23, 2, 16)} | changes
    made = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        attention(**made)
