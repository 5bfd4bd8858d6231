"""rope: rotary position embedding of q and k in one launch, out of place."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import rope as kernels
from tilekern.ops.registration import check_devices, differentiable_once, needs_gradient, register, register_gradient

_SPEC = kernels.SPEC
Pair = tuple[torch.Tensor, torch.Tensor]
Plans = tuple[Plan, Plan | None]
_memo: dict[Any, Plans | None] = memo()


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, twice: bool = False) -> Pair:
    """Rotate the halves of every head of ``q`` and ``k`` by their positions' angles.

    Args:
        q: [batch, heads, tokens, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, kv_heads, tokens, head_dim], of the dtype of ``q``.
        cos, sin: [1 or batch, tokens, head_dim or head_dim / 2] (or without the first dimension); no gradient flows
            to them.
        twice: promises that the last dimension of cos and sin holds the same angles twice, as Hugging Face stores
            them; then only the first half is read.

    Returns:
        The rotated q and k in the layout of their inputs, in the dtype that torch promotes q and cos to.

    Raises:
        ValueError: the shapes do not go together, or the devices differ.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    if torch.compiler.is_compiling():
        _check(q, k, cos, sin)
        return _op(q, k, cos, sin, not twice)
    graded = needs_gradient(q, k)
    plans = _plans(q, k, cos, sin, not twice, backward=graded)
    if plans is None or cos.requires_grad or sin.requires_grad:
        return fallback(q, k, cos, sin)
    if graded:
        return _Rope.apply(q, k, cos, sin, plans)
    return _launch(plans[0], q, k, cos, sin, _product(q, cos))


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    batch, _, tokens, size = q.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:] or k.dtype != q.dtype:
        raise ValueError(f"rope: q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} may differ in heads only")
    fits = cos.shape[0] in (1, batch) and cos.shape[1] == tokens and cos.shape[2] in (size, size // 2)
    if size % 2 or not fits or cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"rope: cos {list(cos.shape)} and sin {list(sin.shape)} must have one shape and dtype, "
            f"[1 or {batch}, {tokens}, {size} or {size // 2}] with an even head size"
        )
    check_devices("rope", q=q, k=k, cos=cos, sin=sin)


def fallback(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """The op in torch's own operations, as Hugging Face writes it; counted."""
    count_fallback(_SPEC)
    half = q.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _plans(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool, *, backward: bool
) -> Plans | None:
    """Plans of the rotation and, where asked for, of its inverse; None where torch must do the work."""
    if not q.is_cuda:
        return _find_plans(q, k, cos, sin, full, backward=backward)
    devices = (q.get_device(), k.get_device(), cos.get_device(), sin.get_device())
    key = (q.shape, k.shape, cos.shape, sin.shape, q.dtype, k.dtype, cos.dtype, sin.dtype, devices, full, backward)
    try:
        return _memo[key]
    except KeyError:
        found = _find_plans(q, k, cos, sin, full, backward=backward)
        return keep(_memo, key, found)


def _find_plans(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool, *, backward: bool
) -> Plans | None:
    _check(q, k, cos, sin)
    if not q.numel() or not k.numel():
        return None
    forward = _plan(q, k, cos, full, q.dtype, inverse=False)
    if forward is None or not backward:
        return None if forward is None else (forward, None)
    gradient = _plan(q, k, cos, full, q.dtype, inverse=True)
    return None if gradient is None else (forward, gradient)


def _plan(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, full: bool, dtype: torch.dtype, *, inverse: bool
) -> Plan | None:
    batch, heads, tokens, size = q.shape
    full = full and cos.shape[2] == size
    return plan_for(_SPEC, q.device, tokens, batch, heads, k.shape[1], size, full, inverse, dtype, cos.dtype)


def _product(q: torch.Tensor, cos: torch.Tensor) -> torch.dtype:
    return q.dtype if q.dtype == cos.dtype else torch.promote_types(q.dtype, cos.dtype)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself unless its last dimension is spread out or some elements share memory."""
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and 0 not in strides else x.contiguous()


def _launch(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> Pair:
    q, k = _readable(q), _readable(k)
    q_out, k_out = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
    plan.launch(q.get_device(), q, k, _readable(cos), _readable(sin), q_out, k_out)
    return q_out, k_out


class _Rope(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plans: Plans) -> Pair:
        ctx.save_for_backward(cos, sin)
        ctx.plan, ctx.dtype = plans[1], q.dtype
        return _launch(plans[0], q, k, cos, sin, _product(q, cos))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (*_launch(ctx.plan, dq, dk, cos, sin, ctx.dtype), None, None, None)


def _run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> Pair:
    plans = _plans(q, k, cos, sin, full, backward=False)
    return fallback(q, k, cos, sin) if plans is None else _launch(plans[0], q, k, cos, sin, _product(q, cos))


def _run_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool, like: torch.Tensor
) -> Pair:
    plan = _plan(dq, dk, cos, full, like.dtype, inverse=True) if dq.numel() and dk.numel() else None
    if plan is not None:
        return _launch(plan, dq, dk, cos, sin, like.dtype)
    half = dq.shape[-1] // 2
    # The transpose of the rotation: each half's sine goes with the other half's gradient, with the signs changed.
    first, second = sin[..., :half], sin[..., -half:]
    turned = fallback(dq, dk, cos, torch.cat((-second, -first), -1) if cos.shape[-1] != half else -sin)
    return turned[0].to(like.dtype), turned[1].to(like.dtype)


def _fake(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, full: bool) -> Pair:
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)


def _fake_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    full: bool,
    like: torch.Tensor,
) -> Pair:
    return torch.empty_like(dq, dtype=like.dtype), torch.empty_like(dk, dtype=like.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, _, cos, sin, ctx.full = inputs
    ctx.save_for_backward(cos, sin)
    ctx.like = q.new_empty(0)


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_op_backward(dq, dk, *ctx.saved_tensors, ctx.full, ctx.like), None, None, None)


_op = register("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool full) -> (Tensor, Tensor)", _run, _fake)
_op_backward = register(
    "rope_backward(Tensor dq, Tensor dk, Tensor cos, Tensor sin, bool full, Tensor like) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
