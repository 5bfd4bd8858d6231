"""attention: softmax(scale q k^T) v with causal masks, windows, soft caps, sinks, groups of heads, packed sequences."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import attention_backward as backward_kernels
from tilekern.kernels.attention import SPEC as _FORWARD
from tilekern.kernels.attention_gradients import SPEC as _BACKWARD
from tilekern.ops.packing import check_starts
from tilekern.ops.registration import (
    check_devices,
    check_softcap,
    differentiable_once,
    disjoint,
    needs_gradient,
    register,
    register_gradient,
)
from tilekern.spec import KernelSpec

_DELTA, _DKDV, _DQ = backward_kernels.DELTA, backward_kernels.DKDV, backward_kernels.DQ


class Call(NamedTuple):
    """What, beside its tensors, one call of :func:`attention` asks for; the registered op's arguments in order."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    max_seqlen: int
    deterministic: bool


class Plans(NamedTuple):
    """The plans of a call; those of the backward are None where no gradient is asked for."""

    forward: Plan
    backward: Plan | None = None
    delta: Plan | None = None


_memo: dict[Any, Plans | None] = memo()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = True,
) -> torch.Tensor:
    """``softmax(scale q k^T) v``, head by head, each group of query heads with one key head.

    The last query stands at the last key. Softmax in float32; probabilities rounded to the dtype before they meet v.

    Args:
        q: [batch, queries, heads, head_dim]; bfloat16, float16 or float32, any strides, as are k and v.
        k, v: [batch, keys, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        causal: a query sees the keys up to its own position.
        scale: of the scores; head_dim ** -0.5 where None.
        window: a query sees the keys at a distance of less than ``window``; all where None.
        softcap: scores s become ``softcap * tanh(s / softcap)``; positive and finite.
        sinks: [heads], a logit that each head's denominator takes in; gets a gradient.
        cu_seqlens: [sequences + 1] int32: where each of the sequences that stand one after the other in a batch of
            one begins; it starts with 0, never falls, and ends with the number of tokens. Sequences do not see each
            other. Values on the CPU are checked; on a GPU they are not, as that would wait for the device, and with
            others the results mean nothing.
        max_seqlen: at least the length of the longest of them, and checked as they are; None reads it from
            ``cu_seqlens``, which waits for the device.
        deterministic: whether gradients must be the same, bit for bit, in every run. The kernels' always are.

    Returns:
        [batch, queries, heads, head_dim], contiguous; 0 where a query sees no key.

    Raises:
        ValueError: the shapes or the devices do not fit, or a number is out of its range.
    """
    _check(q, k, v, sinks, cu_seqlens)
    call = _call(q, k, causal, scale, window, softcap, cu_seqlens, max_seqlen, deterministic)
    if torch.compiler.is_compiling():
        return _op(q, k, v, sinks, cu_seqlens, *call)[0]
    graded = needs_gradient(q, k, v) or (sinks is not None and needs_gradient(sinks))
    plans = _plans(q, k, v, sinks, cu_seqlens, call, backward=graded)
    if plans is None:
        return fallback(q, k, v, sinks, cu_seqlens, call)
    if graded:
        return _Attention.apply(q, k, v, sinks, cu_seqlens, call, plans)
    return _launch_forward(plans.forward, q, k, v, sinks, cu_seqlens, call)[0]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> None:
    shapes = f"got q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q, k and v must be [batch, tokens, heads, head_dim], {shapes}")
    if not q.shape[3]:
        raise ValueError(f"attention: head_dim must be at least 1, {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[2] % max(1, k.shape[2]):
        raise ValueError(f"attention: one batch, and heads a multiple of the key heads, {shapes}")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"attention: sinks must have the shape [{q.shape[2]}], got {list(sinks.shape)}")
    check_devices("attention", q=q, k=k, v=v, sinks=sinks, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None and (q.shape[0] != 1 or q.shape[1] != k.shape[1]):
        raise ValueError(f"attention: packed sequences need a batch of one and as many queries as keys, {shapes}")


def _call(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, window: int | None, softcap: float | None,
    cu_seqlens: torch.Tensor | None, max_seqlen: int | None, deterministic: bool,
) -> Call:  # fmt: skip
    check_softcap("attention", softcap)
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be positive, got {window}")
    longest = max(q.shape[1], k.shape[1])
    if cu_seqlens is not None:
        check_starts("attention", cu_seqlens, q.shape[1], max_seqlen)
        longest = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
    # A window that holds every key is none, which needs no mask.
    short = window if window is not None and window < longest else None
    return Call(causal, q.shape[3] ** -0.5 if scale is None else scale, short, softcap, longest, deterministic)


def fallback(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    call: Call,
) -> torch.Tensor:  # fmt: skip
    """The op in torch's own operations, through SDPA where that can do it; counted."""
    count_fallback(_FORWARD)
    queries, keys = q.shape[1], k.shape[1]
    square = call.causal and call.window is None and cu_seqlens is None and queries == keys
    masked = (call.causal or call.window is not None or cu_seqlens is not None) and not square
    shown = _shown(q, k, cu_seqlens, call) if masked else None
    # A row that sees nothing is not a number in some of SDPA's implementations, nor is a causal one scaled below 0.
    if call.softcap is not None or sinks is not None or call.scale <= 0 or (masked and queries > keys):
        shown = _shown(q, k, cu_seqlens, call) if square else shown
        return formula(q, k, v, sinks, shown, call)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=shown,
        is_causal=square,
        scale=call.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def _shown(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, call: Call) -> torch.Tensor:
    return shown(q.shape[1], k.shape[1], q.device, call.causal, call.window, cu_seqlens)


def shown(
    queries: int, keys: int, device: torch.device, causal: bool, window: int | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Which keys each query sees, [queries, keys] bool; arguments as those of :func:`attention`."""
    key = torch.arange(keys, device=device)
    position = (torch.arange(queries, device=device) + keys - queries)[:, None]
    seen = key <= position if causal else torch.ones((queries, keys), dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & ((key - position).abs() < window)
    if cu_seqlens is not None:
        number = torch.searchsorted(cu_seqlens.to(torch.int64), key, right=True)
        seen = seen & (number[:, None] == number)
    return seen


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    shown: torch.Tensor | None,
    call: Call,
) -> torch.Tensor:
    """The op in torch's own operations, scores and all; ``shown``, which broadcasts to them, says who sees whom."""
    group = q.shape[2] // max(1, k.shape[2])
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if shown is not None:
        scores = scores.masked_fill(~shown, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    if shown is not None:
        weights = weights.masked_fill(~shown, 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(q.dtype), v).contiguous()


def _plans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    call: Call, *, backward: bool,
) -> Plans | None:  # fmt: skip
    """Plans of the forward and, where asked for, of the backward; None where torch must do the work."""
    if not q.is_cuda:
        return _find_plans(q, k, v, sinks, cu_seqlens, call, backward=backward)
    packed = None if cu_seqlens is None else cu_seqlens.shape
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, call, sinks is None, packed, backward)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(q, k, v, sinks, cu_seqlens, call, backward=backward))


def _find_plans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    call: Call, *, backward: bool,
) -> Plans | None:  # fmt: skip
    odd = cu_seqlens is not None and cu_seqlens.dtype != torch.int32
    if not q.dtype == k.dtype == v.dtype or v.shape != k.shape or call.scale <= 0 or odd:
        return None
    if not q.numel() or not k.numel():
        return None
    packed = cu_seqlens is not None
    values = {
        "batch": q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "queries": call.max_seqlen if packed else q.shape[1],
        "keys": call.max_seqlen if packed else k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "causal": call.causal,
        "windowed": call.window is not None,
        "capped": call.softcap is not None,
        "sinks": sinks is not None,
        "packed": packed,
        "dtype": q.dtype,
    }
    values["deterministic"] = call.deterministic
    square = not call.causal or values["queries"] == values["keys"]

    def found(spec: KernelSpec, **changes: Any) -> Plan | None:
        sizes = values | changes
        plan = plan_for(spec, q.device, *(sizes[d.name] for d in spec.dimensions))
        # A record serves a bucket of sizes; cuDNN's causal mask is another one where queries and keys differ.
        library = plan is not None and plan.config.get("implementation") == "cudnn"
        return plan if square or not library else None

    forward = found(_FORWARD)
    if forward is None or not backward:
        return None if forward is None else Plans(forward)
    gradients, delta = found(_BACKWARD), found(_DELTA, batch=q.shape[0], queries=q.shape[1])
    parts = [gradients, delta]
    if gradients is not None and gradients.config["implementation"] == "kernels":
        parts += [found(_DKDV), found(_DQ)]
    return None if None in parts else Plans(forward, gradients, delta)


@functools.lru_cache(maxsize=64)
def _placeholders(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for sinks and for the starts of sequences where a call has none."""
    return torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def _row_values(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 for each query of each head, [batch, heads, queries]."""
    batch, queries, heads, _ = q.shape
    return torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)


def _launch_forward(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, call: Call,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse)."""
    no_sinks, no_starts = _placeholders(q.device)
    starts = no_starts if cu_seqlens is None else cu_seqlens
    most = call.max_seqlen if cu_seqlens is not None else q.shape[1]
    logits = no_sinks if sinks is None else disjoint(sinks.float())
    numbers = (most, call.scale, call.softcap or 1.0, call.window or 1)
    inputs = (disjoint(q), disjoint(k), disjoint(v), logits, starts, starts, *numbers)
    out, lse = plan.run(q.get_device(), inputs, lambda: (q.new_empty(q.shape), _row_values(q)))
    return out, lse


def _gradients(
    plans: Plans, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None, call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsinks)."""
    assert plans.backward is not None
    assert plans.delta is not None
    device = q.get_device()
    q, k, v = disjoint(q), disjoint(k), disjoint(v)
    dout = disjoint(dout) if dout.stride(3) == 1 else dout.contiguous()
    starts = _placeholders(q.device)[1] if cu_seqlens is None else cu_seqlens
    most = (call.max_seqlen,) * 2 if cu_seqlens is not None else (q.shape[1], k.shape[1])
    numbers = (*most, call.scale, call.softcap or 1.0, call.window or 1)
    dq, dk, dv = plans.backward.run(device, (q, k, v, out, dout, lse, starts, starts, *numbers), tuple)
    if sinks is None:
        return dq, dk, dv, None
    (delta,) = plans.delta.run(device, (out, dout), lambda: (_row_values(q),))
    share = torch.exp(sinks.float()[None, :, None] - lse)
    return dq, dk, dv, -(share * delta).sum((0, 2)).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, call: Call, plans: Plans,
    ) -> torch.Tensor:  # fmt: skip
        out, lse = _launch_forward(plans.forward, q, k, v, sinks, cu_seqlens, call)
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens)
        ctx.call, ctx.plans = call, plans
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks, cu_seqlens = ctx.saved_tensors
        found = _gradients(ctx.plans, dout, q, k, v, out, lse, sinks, cu_seqlens, ctx.call)
        return (*found, None, None, None)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    call = Call(*numbers)
    plans = _plans(q, k, v, sinks, cu_seqlens, call, backward=False)
    if plans is None:
        # No backward kernel reads this: without a plan of the forward there is none of the backward.
        return fallback(q, k, v, sinks, cu_seqlens, call), _row_values(q).fill_(torch.nan)
    return _launch_forward(plans.forward, q, k, v, sinks, cu_seqlens, call)


def _run_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None, *numbers: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    call = Call(*numbers)
    plans = _plans(q, k, v, sinks, cu_seqlens, call, backward=True)
    if plans is not None:
        dq, dk, dv, dsinks = _gradients(plans, dout, q, k, v, out, lse, sinks, cu_seqlens, call)
        return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
        again = fallback(leaves[0], leaves[1], leaves[2], leaves[3] if sinks is not None else None, cu_seqlens, call)
        found = torch.autograd.grad(again, leaves, dout)
    dq, dk, dv, *rest = (x.contiguous() for x in found)
    return dq, dk, dv, rest[0] if rest else q.new_empty(0)


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty((*q.shape[:3], v.shape[3])), _row_values(q)


def _fake_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sinks: torch.Tensor | None, cu_seqlens: torch.Tensor | None, *numbers: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens)


def _backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *tensors, sinks, cu_seqlens = ctx.saved_tensors
    dq, dk, dv, dsinks = _op_backward(dout, *tensors, sinks, cu_seqlens, *ctx.call)
    return (dq, dk, dv, None if sinks is None else dsinks, None, *(None for _ in ctx.call))


_TENSORS = "Tensor? sinks, Tensor? cu_seqlens"
_NUMBERS = "bool causal, float scale, int? window, float? softcap, SymInt max_seqlen, bool deterministic"
_op = register(f"attention(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)", _run, _fake)
_op_backward = register(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TENSORS}, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
