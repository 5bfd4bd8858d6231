"""attention against the same formula in float64: through its kernels, through torch's operations, and compiled."""

import contextlib
import importlib
import types

import contract
import pytest
import torch
from formulas import attention as expected
from op_samples import assert_near

import tilekern
from tilekern.errors import TilekernWarning

module = importlib.import_module("tilekern.ops.attention")
attention, OP = module.attention, torch.ops.tilekern.attention.default


def tensors(batch=1, queries=23, keys=23, heads=4, kv_heads=2, head_dim=16):
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(batch, *shape, head_dim, requires_grad=True) for shape in shapes]


def check(*inputs):
    contract.check(contract.CASES["attention"], dict(zip("qkv", inputs, strict=True)))


def launches():
    return tilekern.stats().get("attention_forward", {}).get("launches", 0)


@pytest.mark.parametrize(("head_dim", "run"), [(module.WIDEST_HEAD, 1), (module.WIDEST_HEAD + 8, 0)])
def test_heads_that_would_take_the_compiler_too_long_run_in_torch_and_that_is_said(head_dim, run):
    before = launches()
    said = pytest.warns(TilekernWarning, match=f"head_dim is {head_dim}") if not run else contextlib.nullcontext()
    with said:
        check(*tensors(queries=5, keys=5, head_dim=head_dim))
    assert launches() == before + run


def test_expanded_inputs_and_slopes_are_accepted():
    q, k, v = tensors()
    one_head = [x.detach()[:, :, :1].expand(-1, -1, 2, -1).requires_grad_() for x in (k, v)]
    check(q.detach()[:, :1].expand(-1, 23, -1, -1).requires_grad_(), *one_head)
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


def test_a_window_over_all_keys_counts_as_no_window():
    q, k, v = tensors()
    assert module._call(q, k, None, None, True, None, 23, None, None, None, True).window is None
    assert module._call(q, k, None, None, True, None, 22, None, None, None, True).window == 22
    assert torch.equal(attention(q, k, v, window=10**12), attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
@pytest.mark.parametrize("more", [{}, {"sinks": torch.linspace(-1, 2, 4)}], ids=["plain", "sinks"])
@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_nothing_behind_the_last_sequence_is_seen_or_left_as_it_was(dtype, more):
    """Rows of NaN there, also of the incoming gradient, change no bit of the others, and give zeros."""
    whole = [x.detach().to(dtype) for x in tensors(queries=9, keys=17)]
    starts = {"cu_seqlens": torch.tensor([0, 1, 6]), "cu_seqlens_k": torch.tensor([0, 4, 14])}
    starts = {name: x.int() for name, x in starts.items()}
    sinks = {name: x.to(dtype).requires_grad_() for name, x in more.items()}
    slope, found = torch.randn_like(whole[0]), []
    for fill in (0.0, torch.nan):
        padded = [x.clone() for x in (*whole, slope)]
        for x, end in zip(padded, (6, 14, 14, 6), strict=True):
            x[:, end:] = fill
        leaves = [x.requires_grad_() for x in padded[:3]] + list(sinks.values())
        out = attention(*leaves[:3], **starts, **sinks)
        found.append([out, *torch.autograd.grad(out, leaves, padded[3])])
    assert all(map(torch.equal, *found))
    for x, end in zip(found[0], (6, 6, 14, 14), strict=False):
        assert not x[:, end:].any()
        assert bool(x[:, :end].abs().amax() > 0)


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
    numbers = (True, 0.25, 5, None, 23, None, True)
    torch.library.opcheck(OP, (q, k, v, None, None, None, *numbers), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_the_least_and_the_most_soft_cap_give_numbers(softcap):
    q, k, v = (torch.randn(1, 23, 2, 16) for _ in range(3))
    out = attention(q, k, v, softcap=softcap)
    torch.testing.assert_close(out, attention(q, k, v) if softcap > 1 else attention(0 * q, k, v))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_learns_is_refused_as_it_would_get_no_gradient(name):
    q, k, v = tensors()
    number = torch.tensor(0.5)
    assert attention(q, k, v, **{name: number}).isfinite().all()
    with pytest.raises(ValueError, match=f"{name} gets no gradient"):
        attention(q, k, v, **{name: number.requires_grad_()})
