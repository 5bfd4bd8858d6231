"""attention: softmax(scale q k^T) v with causal masks, windows, soft caps, sinks, groups of heads, packed sequences.

Its launches are written by hand: a library may win either direction, the backward has up to three kernels, and missing
arguments are passed to them as placeholders.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.attention.backward import DELTA as _DELTA
from tilekern.kernels.attention.forward import SPEC as _FORWARD
from tilekern.kernels.attention.gradients import SPEC as _BACKWARD
from tilekern.kernels.attention.gradients import find, launched
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops import checkpoints, lean_attention
from tilekern.ops.operation import operation
from tilekern.ops.packing import check_starts, longest
from tilekern.ops.registration import check_softcap, check_tensors, check_vectors, disjoint, fresh, needs_gradient
from tilekern.runtime.dispatch import Plan, by_parts, composed, plan_for
from tilekern.spec import Array, KernelSpec
from tilekern.warning import warn_once

# Compiling the gradients of wider heads takes too long during a training step.
WIDEST_HEAD = 256
_QUERIES, _KEYS = ("batch", "queries", "heads", "head_dim"), ("batch", "keys", "kv_heads", "head_dim")
_ARRAYS = (
    Array("q", "dtype", _QUERIES),
    Array("k", "dtype", _KEYS),
    Array("v", "dtype", _KEYS),
    Array("sinks", "float32", ("heads",)),
    Array("cu_seqlens", "int32", ("starts",)),
    Array("cu_seqlens_k", "int32", ("starts",)),
    Array("out", "dtype", _QUERIES, "output"),
    Array("lse", "float32", ("batch", "heads", "queries"), "output"),
)


class Call(NamedTuple):
    """A call's arguments other than tensors, with defaults filled in; ``window`` is None if it would show every key."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    max_seqlen: int
    max_seqlen_k: int
    deterministic: bool


class Plans(NamedTuple):
    """The plans of a call; the backward's are None if no gradient is needed."""

    forward: Plan
    backward: Plan | None
    delta: Plan | None
    call: Call


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
    deterministic: bool = True, lean: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``softmax(scale q k^T) v`` for each head; each group of query heads shares one key head.

    The last query is at the position of the last key. The softmax is in float32; probabilities are rounded to the dtype
    before they are multiplied by v.

    Args:
        q: [batch, queries, heads, head_dim]; bfloat16, float16 or float32, any strides, as are k and v. Kernels take
            heads of up to 256; wider ones go through SDPA.
        k, v: [batch, keys, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        causal: a query sees the keys up to its own position.
        scale: factor of the scores; None for head_dim ** -0.5.
        window: a query sees the keys at a distance of less than ``window``; None for all keys.
        softcap: scores s become ``softcap * tanh(s / softcap)``; positive and finite.
        sinks: [heads], a logit that is added to each head's denominator; gets a gradient.
        cu_seqlens: [sequences + 1] int32, the first token of each packed sequence in a batch of one. It starts with 0,
            never decreases, and ends with the number of tokens. Sequences do not see each other. Values on the CPU are
            checked; values on a GPU are not, as that would wait for the device, and wrong ones give wrong results.
        max_seqlen: the length of the longest sequence or more, checked likewise. None reads it from ``cu_seqlens``,
            which waits for the device, once for consecutive calls with the same tensor. While a graph is traced or
            captured it is the number of tokens.
        cu_seqlens_k: [sequences + 1] int32, the first key of each sequence, where sequences have other numbers of keys
            than of queries: after a cache. Both may then end before the last token. Queries behind the last sequence
            give 0, and keys behind it are not seen.
        max_seqlen_k: as ``max_seqlen``, of keys.
        deterministic: whether gradients must be bitwise the same in every run. The kernels' gradients always are.
        lean: keep q and k for the backward only as what :func:`tilekern.ops.qk_norm_rope` made them of, and make them
            again there: the same bits for less memory and a launch more. Of other q and k, and inside checkpoints and
            other hooks on kept tensors, it changes nothing. Between the two ops nothing may write to q and k that torch
            does not count, as ``q.data.mul_()``.

    Returns:
        [batch, queries, heads, head_dim], contiguous; 0 if a query sees no key.

    Raises:
        ValueError: the shapes or the devices do not fit, or a number is out of its range.
    """
    check_softcap("attention", softcap)
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be positive, got {window}")
    if cu_seqlens is not None or cu_seqlens_k is not None:
        _check(q, k, v, sinks, cu_seqlens, cu_seqlens_k)
    if cu_seqlens is not None:
        check_starts("attention", cu_seqlens, q.shape[1], max_seqlen, is_whole=cu_seqlens_k is None)
        max_seqlen = longest(cu_seqlens, q.shape[1]) if max_seqlen is None else max_seqlen
        if cu_seqlens_k is not None:
            check_starts("attention", cu_seqlens_k, k.shape[1], max_seqlen_k, "_k", is_whole=False)
            max_seqlen_k = longest(cu_seqlens_k, k.shape[1]) if max_seqlen_k is None else max_seqlen_k
    given = (
        q, k, v, sinks, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k,
        deterministic,
    )  # fmt: skip
    found = lean_attention.lean(_attention.functions, *given) if lean else None  # type: ignore[attr-defined]
    return _attention(*given) if found is None else found


def _check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None,
    *numbers: Any,
) -> None:  # fmt: skip
    for name, number in zip(("scale", "softcap"), numbers[1:4:2], strict=False):
        if isinstance(number, Tensor) and number.requires_grad:
            raise ValueError(f"attention: {name} gets no gradient; pass a number, or a tensor without one")
    shapes = f"got q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q, k and v must be [batch, tokens, heads, head_dim], {shapes}")
    if not q.shape[3]:
        raise ValueError(f"attention: head_dim must be at least 1, {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"attention: q, k and v must be of one batch, {shapes}")
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} heads must be a multiple of the {k.shape[2]} key heads, {shapes}")
    check_vectors("attention", q.shape[2], sinks=sinks)
    starts = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    check_tensors("attention", *starts, q=q, k=k, v=v, sinks=sinks, **starts)
    if cu_seqlens_k is not None and (cu_seqlens is None or cu_seqlens.shape != cu_seqlens_k.shape):
        queries = None if cu_seqlens is None else list(cu_seqlens.shape)
        raise ValueError(
            f"attention: cu_seqlens_k needs a cu_seqlens of its shape, got {queries} and {list(cu_seqlens_k.shape)}"
        )
    if cu_seqlens is not None and (q.shape[0] != 1 or (cu_seqlens_k is None and q.shape[1] != k.shape[1])):
        raise ValueError(
            "attention: packed sequences need a batch of one, and as many queries as keys or a cu_seqlens_k, " + shapes
        )


def _call(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, causal: bool, scale: float | None,
    window: int | None, softcap: float | None, max_seqlen: int | None, max_seqlen_k: int | None, deterministic: bool,
) -> Call:  # fmt: skip
    most = q.shape[1], k.shape[1]
    if cu_seqlens is not None and max_seqlen is not None:
        most = max_seqlen, max_seqlen if cu_seqlens_k is None else most[1] if max_seqlen_k is None else max_seqlen_k
    # A window that covers every key needs no mask.
    short = window if window is not None and window < max(most) else None
    factors = q.shape[3] ** -0.5 if scale is None else float(scale), None if softcap is None else float(softcap)
    return Call(causal, factors[0], short, factors[1], *most, deterministic)


def shown(
    queries: int, keys: int, device: torch.device, causal: bool, window: int | None, cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return which keys each query sees, [queries, keys] bool; arguments as in :func:`attention`."""
    key = torch.arange(keys, dtype=torch.int64, device=device)
    position = torch.arange(queries, dtype=torch.int64, device=device)
    number = None
    if cu_seqlens is None:
        position = position + keys - queries
    else:
        starts, ends = (x.to(torch.int64) for x in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k))
        # Counted from 1; rows behind the last sequence have one more than that.
        number, of_key = (torch.searchsorted(x, rows, right=True) for x, rows in ((starts, position), (ends, key)))
        last = number.clamp(max=len(starts) - 1)
        position = position - starts[last] + ends[last]
    position = position[:, None]
    seen = key <= position if causal else torch.ones((queries, keys), dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & ((key - position).abs() < window)
    if number is not None:
        seen = seen & (number[:, None] == of_key) & (number == last)[:, None]
    return seen


def _behind(x: Tensor, starts: Tensor) -> Tensor:
    """Return which tokens of ``x`` [1, tokens, heads, head_dim] are behind the last sequence, broadcast to ``x``."""
    return (torch.arange(x.shape[1], dtype=torch.int64, device=x.device) >= starts[-1])[None, :, None, None]


def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shown: Tensor | None, call: Call) -> Tensor:
    """Compute the op in torch's own operations; ``shown`` broadcasts to the scores and is True for visible keys."""
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


def _find(
    graded: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None, *numbers: Any,
) -> Plans | None:  # fmt: skip
    call, packed = _call(q, k, cu_seqlens, cu_seqlens_k, *numbers), cu_seqlens is not None
    odd = any(x is not None and x.dtype != torch.int32 for x in (cu_seqlens, cu_seqlens_k))
    odd = odd or not q.dtype == k.dtype == v.dtype or v.shape != k.shape
    if odd or call.scale <= 0 or not q.numel() or not k.numel():
        return None
    if q.shape[3] > WIDEST_HEAD:
        warn_once(
            f"attention: head_dim is {q.shape[3]}, and kernels take {WIDEST_HEAD} at most; the model's own op runs"
        )
        return None
    values = {
        "batch": q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "queries": call.max_seqlen if packed else q.shape[1],
        "keys": call.max_seqlen_k if packed else k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "causal": call.causal,
        "windowed": call.window is not None,
        "capped": call.softcap is not None,
        "sinks": sinks is not None,
        "packed": packed,
        "dtype": q.dtype,
        "deterministic": call.deterministic,
    }
    square = not call.causal or values["queries"] == values["keys"]

    def found(spec: KernelSpec, **changes: Any) -> Plan | None:
        sizes = values | changes
        plan = plan_for(spec, q.device, *(sizes[d.name] for d in spec.dimensions))
        # A record serves a bucket of sizes; cuDNN's causal mask differs if queries and keys differ in number.
        library = plan is not None and plan.config.get("implementation") == "cudnn"
        return plan if square or not library else None

    forward = found(_FORWARD)
    if forward is None or not graded:
        return None if forward is None else Plans(forward, None, None, call)
    gradients, delta = found(_BACKWARD), found(_DELTA, batch=q.shape[0], queries=q.shape[1])
    if gradients is None or delta is None:
        return None
    config = gradients.config
    parts = by_parts(_BACKWARD, q.device, values, config, lambda: find(plan_for, config, values, q, k))
    if parts is None:
        return None
    if parts.plans and not q.is_meta:
        gradients = composed(_BACKWARD, gradients, functools.partial(launched, parts))
    return Plans(forward, gradients, delta, call)


def _row_values(q: Tensor) -> Tensor:
    """Return an uninitialised float32 for each query of each head, [batch, heads, queries]."""
    batch, queries, heads, _ = q.shape
    return torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)


def _launch(
    plans: Plans, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None, *numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse)."""
    call = plans.call
    kept: tuple[Tensor, Tensor] | None = checkpoints.taken(q, k, call)
    if kept is not None:
        return kept
    starts = _starts(q, cu_seqlens, cu_seqlens_k)
    most = q.shape[1] if cu_seqlens is None else call.max_seqlen
    logits = placeholder(1, torch.float32, q.device) if sinks is None else disjoint(sinks.float())
    factors = (most, call.scale, call.softcap or 1.0, call.window or 1)
    inputs = (disjoint(q), disjoint(k), disjoint(v), logits, *starts, *factors)
    out, lse = plans.forward.run(
        q.get_device(), inputs, lambda: (fresh(q), _row_values(q)) if cu_seqlens_k is None else _zeros(q)
    )
    checkpoints.keep(q, k, call, (out, lse))
    return out, lse


def _zeros(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse where kernels write nothing behind the last sequence."""
    return torch.zeros(q.shape, dtype=q.dtype, device=q.device), _row_values(q).zero_()


def _starts(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the starts of queries and of keys, or placeholders."""
    starts = placeholder(1, torch.int32, q.device) if cu_seqlens is None else cu_seqlens
    return starts, starts if cu_seqlens_k is None else cu_seqlens_k


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sinks: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, *numbers: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return (dq, dk, dv, dsinks)."""
    assert plans.backward is not None
    assert plans.delta is not None
    device, call = q.get_device(), plans.call
    q, k, v = disjoint(q), disjoint(k), disjoint(v)
    dout = disjoint(dout) if dout.stride(3) == 1 else dout.contiguous()
    starts = _starts(q, cu_seqlens, cu_seqlens_k)
    most = (q.shape[1], k.shape[1]) if cu_seqlens is None else (call.max_seqlen, call.max_seqlen_k)
    factors = (*most, call.scale, call.softcap or 1.0, call.window or 1)
    dq, dk, dv = plans.backward.run(device, (q, k, v, out, dout, lse, *starts, *factors), tuple)
    if cu_seqlens_k is not None:
        for slope, ends in ((dq, starts[0]), (dk, cu_seqlens_k), (dv, cu_seqlens_k)):
            slope.masked_fill_(_behind(slope, ends), 0)
    if sinks is None or not needs[3]:
        return dq, dk, dv, None
    (delta,) = plans.delta.run(device, (out, dout), lambda: (_row_values(q),))
    shares = torch.exp(sinks.float()[None, :, None] - lse) * delta
    if cu_seqlens_k is not None:
        shares = shares.masked_fill(_behind(q, starts[0])[..., 0].mT, 0)
    return dq, dk, dv, -shares.sum((0, 2)).to(sinks.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), _row_values(q)


def _rest(q: Tensor, *rest: Any) -> tuple[Tensor]:
    """Return a placeholder for lse; without a forward plan no backward kernel reads it."""
    return (_row_values(q).fill_(torch.nan),)


@operation(
    _FORWARD, _BACKWARD, name="attention", ungraded=("cu_seqlens", "cu_seqlens_k"), arrays=_ARRAYS, kept=("lse",),
    reads=("q", "k", "v", "out", "lse", "sinks", "cu_seqlens", "cu_seqlens_k"),
    key=("causal", "scale", "window", "softcap", "max_seqlen", "max_seqlen_k", "deterministic"), check=_check,
    find=_find, launch=_launch, launch_backward=_launch_backward, fake=_fake, rest=_rest,
)  # fmt: skip
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None,
    causal: bool, scale: float | None, window: int | None, softcap: float | None, max_seqlen: int | None,
    max_seqlen_k: int | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    call = _call(
        q, k, cu_seqlens, cu_seqlens_k, causal, scale, window, softcap, max_seqlen, max_seqlen_k, deterministic
    )
    queries, keys = q.shape[1], k.shape[1]
    square = causal and call.window is None and cu_seqlens is None and queries == keys
    masked = not square and (causal or call.window is not None or cu_seqlens is not None)
    # Some of SDPA's implementations give NaN for causal rows with a negative scale, and for rows that see no key.
    by_formula = softcap is not None or sinks is not None or call.scale <= 0
    mask = blind = None
    if masked or (square and by_formula):
        mask = shown(queries, keys, q.device, causal, call.window, cu_seqlens, cu_seqlens_k)
    if mask is not None and (queries > keys or cu_seqlens_k is not None):
        blind = ~mask.any(1)[None, :, None, None]
    if cu_seqlens is not None and cu_seqlens_k is not None:
        # Rows behind the last sequence may be NaN, also times 0.
        q = q.masked_fill(_behind(q, cu_seqlens), 0)
        k, v = (x.masked_fill(_behind(x, cu_seqlens_k), 0) for x in (k, v))
    if by_formula:
        out = formula(q, k, v, sinks, mask, call)
    else:
        if mask is not None and blind is not None:
            mask = mask | blind[0, :, :, 0]
        # Not by its name in torch.nn.functional, which context parallelism replaces by another attention. While
        # torch.jit traces, comparisons of sizes are tensors.
        out = torch._C._nn.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=bool(square), scale=call.scale,
            enable_gqa=bool(q.shape[2] != k.shape[2]),
        ).transpose(1, 2)  # fmt: skip
    return out.contiguous() if blind is None else out.masked_fill(blind, 0)


def serves(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, deterministic: bool, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
) -> bool:  # fmt: skip
    """Return whether kernels compute a causal :func:`attention` of these arguments, eagerly."""
    graded, starts = needs_gradient(q, k, v, sinks), (cu_seqlens, cu_seqlens_k)
    given = (q, k, v, sinks, *starts, True, scale, window, softcap, max_seqlen, max_seqlen_k, deterministic)
    return _attention.functions["plans_of"](graded, *given) is not None  # type: ignore[attr-defined]
