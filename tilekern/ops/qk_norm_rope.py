"""qk_norm_rope: RMSNorm of each head of q and k and their rotary position embedding, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import column_sum, qk_norm_rope_backward
from tilekern.kernels import qk_norm_rope as kernels
from tilekern.ops.registration import check_devices, differentiable_once, needs_gradient, register, register_gradient

_FORWARD, _BACKWARD, _SUM = kernels.SPEC, qk_norm_rope_backward.SPEC, column_sum.SPEC
Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
Plans = tuple[Plan, Plan | None, Plan | None]
_memo: dict[Any, Plans | None] = memo()


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
) -> Pair:
    """Normalise every head of ``q`` and ``k`` to a root mean square of 1, scale it, and rotate its halves.

    Args:
        q: [batch, tokens, heads, head_dim]; bfloat16, float16 or float32, any strides.
        k: [batch, tokens, kv_heads, head_dim], any strides.
        q_weight, k_weight: [head_dim], the norms' weights.
        cos, sin: [1 or batch, tokens, head_dim] (or without the first dimension), of which the second half repeats
            the first, as Hugging Face stores angles, and is not read; or [.., head_dim / 2]. Where they need a
            gradient torch's own operations run.
        eps: added to the mean squares.

    Returns:
        The new q and k in the layout of the arguments, in the dtype that torch promotes q, its weight and cos to.

    Raises:
        ValueError: the shapes do not go together, or the devices differ.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    given = (q, k, q_weight, k_weight, cos, sin)
    if torch.compiler.is_compiling():
        _check(*given)
        return _op(*given, eps)
    graded = needs_gradient(q, k, q_weight, k_weight)
    plans = _plans(given, backward=graded)
    if plans is None or cos.requires_grad or sin.requires_grad:
        return fallback(*given, eps)
    if graded:
        return _QkNormRope.apply(*given, eps, plans)
    return _launch_forward(plans[0], given, eps)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"qk_norm_rope: q {list(q.shape)} and k {list(k.shape)} must be [batch, tokens, heads, head_dim] and may "
            "differ in heads only"
        )
    batch, tokens, _, size = q.shape
    if q_weight.shape != (size,) or k_weight.shape != (size,):
        raise ValueError(
            f"qk_norm_rope: q_weight {list(q_weight.shape)} and k_weight {list(k_weight.shape)} must be [{size}]"
        )
    fits = (
        cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens and cos.shape[2] in (size, size // 2)
    )
    if size % 2 or not fits or cos.shape != sin.shape:
        raise ValueError(
            f"qk_norm_rope: cos {list(cos.shape)} and sin {list(sin.shape)} must have one shape, [1 or {batch}, "
            f"{tokens}, {size} or {size // 2}], with an even head size"
        )
    check_devices("qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)


def fallback(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> Pair:
    """The op in torch's own operations, as Hugging Face writes it; counted."""
    count_fallback(_FORWARD)
    return _in_torch(q, k, q_weight, k_weight, cos, sin, eps)


def _in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> Pair:
    half = q.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        # Heads before tokens, as Hugging Face rotates them, so that sums in the backward have the same order.
        z = (weight * wide.to(x.dtype)).transpose(1, 2)
        return (z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin).transpose(1, 2)

    return turned(q, q_weight), turned(k, k_weight)


def _plans(given: Tensors, *, backward: bool) -> Plans | None:
    """Plans of the forward and, where asked for, of the backward and its sum; None where torch must do the work."""
    if not given[0].is_cuda:
        return _find_plans(given, backward=backward)
    q, k, q_weight, k_weight, cos, sin = given
    shapes = (q.shape, k.shape, q_weight.shape, k_weight.shape, cos.shape, sin.shape)
    dtypes = (q.dtype, k.dtype, q_weight.dtype, k_weight.dtype, cos.dtype, sin.dtype)
    key = (shapes, dtypes, tuple([x.get_device() for x in given]), backward)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(given, backward=backward))


def _find_plans(given: Tensors, *, backward: bool) -> Plans | None:
    _check(*given)
    q, k, q_weight, k_weight, cos, sin = given
    alike = q.dtype == k.dtype and q_weight.dtype == k_weight.dtype and cos.dtype == sin.dtype
    if not alike or not q.numel() or not k.numel():
        return None
    batch, tokens, heads, size = q.shape
    sizes = (tokens, batch, heads, k.shape[2], size, q.dtype, q_weight.dtype, cos.dtype)
    forward = plan_for(_FORWARD, q.device, *sizes)
    if forward is None or not backward:
        return None if forward is None else (forward, None, None)
    gradient = plan_for(_BACKWARD, q.device, *sizes)
    if gradient is None:
        return None
    total = plan_for(_SUM, q.device, gradient.blocks, 2 * size, q_weight.dtype)
    return None if total is None else (forward, gradient, total)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself unless its last dimension is spread out or some elements share memory."""
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and 0 not in strides else x.contiguous()


def _product(given: Tensors) -> torch.dtype:
    return torch.promote_types(torch.promote_types(given[0].dtype, given[2].dtype), given[4].dtype)


def _launch_forward(plan: Plan, given: Tensors, eps: float) -> Pair:
    q, k, dtype = given[0], given[1], _product(given)
    q_out = torch.empty(q.shape, dtype=dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=dtype, device=q.device)
    plan.launch(q.get_device(), *map(_readable, given), eps, q_out, k_out)
    return q_out, k_out


def _launch_backward(
    plans: Plans, dq_out: torch.Tensor, dk_out: torch.Tensor, given: Tensors, eps: float, *, with_weights: bool
) -> tuple[torch.Tensor | None, ...]:
    _, gradient, total = plans
    assert gradient is not None
    assert total is not None
    q, k, q_weight = given[:3]
    size, device = q.shape[3], q.get_device()
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    partial = torch.empty((gradient.blocks, 2 * size), dtype=torch.float32, device=q.device)
    gradient.launch(device, _readable(dq_out), _readable(dk_out), *map(_readable, given), eps, dq, dk, partial)
    if not with_weights:
        return dq, dk, None, None
    dweights = torch.empty(2 * size, dtype=q_weight.dtype, device=q.device)
    total.launch(device, partial, dweights)
    return dq, dk, dweights[:size], dweights[size:]


class _QkNormRope(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        plans: Plans,
    ) -> Pair:
        given = (q, k, q_weight, k_weight, cos, sin)
        ctx.save_for_backward(*given)
        ctx.eps, ctx.plans = eps, plans
        return _launch_forward(plans[0], given, eps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq_out: torch.Tensor, dk_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        found = _launch_backward(ctx.plans, dq_out, dk_out, ctx.saved_tensors, ctx.eps, with_weights=wanted)
        return (*found, None, None, None, None)


def _run(*given_and_eps: Any) -> Pair:
    given, eps = given_and_eps[:6], given_and_eps[6]
    plans = _plans(given, backward=False)
    if plans is not None:
        return _launch_forward(plans[0], given, eps)
    q_out, k_out = fallback(*given_and_eps)
    return q_out.contiguous(), k_out.contiguous()


def _run_backward(dq_out: torch.Tensor, dk_out: torch.Tensor, *given_and_eps: Any) -> Tensors:
    given, eps = given_and_eps[:6], given_and_eps[6]
    plans = _plans(given, backward=True)
    if plans is not None:
        found = _launch_backward(plans, dq_out, dk_out, given, eps, with_weights=True)
        # The results of a registered op may not share memory with each other.
        return tuple(x.clone() if x.dim() == 1 else x for x in found if x is not None)
    count_fallback(_BACKWARD)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in given[:4]]
        results = _in_torch(leaves[0], leaves[1], leaves[2], leaves[3], given[4], given[5], eps)
        gradients = torch.autograd.grad(results, leaves, (dq_out, dk_out))
    return tuple(x.contiguous() for x in gradients)


def _fake(*given_and_eps: Any) -> Pair:
    q, k = given_and_eps[:2]
    dtype = _product(given_and_eps)
    return q.new_empty(q.shape, dtype=dtype), k.new_empty(k.shape, dtype=dtype)


def _fake_backward(dq_out: torch.Tensor, dk_out: torch.Tensor, *given_and_eps: Any) -> Tensors:
    return tuple(x.new_empty(x.shape) for x in given_and_eps[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    *given, ctx.eps = inputs
    ctx.save_for_backward(*given)


def _backward(ctx: Any, dq_out: torch.Tensor, dk_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_op_backward(dq_out, dk_out, *ctx.saved_tensors, ctx.eps), None, None, None)


_GIVEN = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps"
_op = register(f"qk_norm_rope({_GIVEN}) -> (Tensor, Tensor)", _run, _fake)
_op_backward = register(
    f"qk_norm_rope_backward(Tensor dq_out, Tensor dk_out, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
