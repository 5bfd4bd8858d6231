"""rms_norm: root mean square normalisation of the last dimension, Hugging Face's order of casts."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import column_sum
from tilekern.kernels import rms_norm as kernels
from tilekern.ops.registration import (
    as_rows,
    check_devices,
    differentiable_once,
    like_rows,
    register,
    register_gradient,
)

_FORWARD, _BACKWARD, _SUM = kernels.FORWARD, kernels.BACKWARD, column_sum.SPEC
Plans = tuple[Plan, Plan | None, Plan | None]
_memo: dict[Any, Plans | None] = memo()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``weight * cast(x / sqrt(mean(x^2) + eps))`` over the last dimension; the cast goes to the dtype of ``x``.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides.
        weight: [columns], of the dtype of ``x`` or another of the three.
        eps: added to the mean square.

    Returns:
        [..., columns] in the dtype that torch promotes ``x`` and ``weight`` to, contiguous.

    Raises:
        ValueError: ``weight`` does not have one value for each column, or is on another device.
    """
    if torch.compiler.is_compiling():
        _check(x, weight)
        return _op(x, weight, eps)
    # Written out, as every call of a helper shows in the host's time.
    graded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plans = _plans(x, weight, backward=graded)
    if plans is None:
        return fallback(x, weight, eps)
    if graded:
        return _RmsNorm.apply(x, weight, eps, plans)
    return _launch_forward(plans[0], x, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"rms_norm: weight must have the shape [{x.shape[-1]}], got {list(weight.shape)}")
    check_devices("rms_norm", x=x, weight=weight)


def fallback(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op in torch's own operations, as Hugging Face writes it; counted."""
    count_fallback(_FORWARD)
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _plans(x: torch.Tensor, weight: torch.Tensor, *, backward: bool) -> Plans | None:
    """Plans of the forward and, where asked for, of the backward and its sum; None where torch must do the work."""
    if not x.is_cuda:
        return _find_plans(x, weight, backward=backward)
    key = (x.shape, weight.shape, x.dtype, weight.dtype, x.get_device(), weight.get_device(), backward)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(x, weight, backward=backward))


def _find_plans(x: torch.Tensor, weight: torch.Tensor, *, backward: bool) -> Plans | None:
    _check(x, weight)
    if not x.numel():
        return None
    columns = weight.shape[0]
    sizes = (x.numel() // columns, columns, x.dtype, weight.dtype)
    device = x.device
    forward = plan_for(_FORWARD, device, *sizes)
    if forward is None or not backward:
        return None if forward is None else (forward, None, None)
    gradient = plan_for(_BACKWARD, device, *sizes)
    if gradient is None:
        return None
    total = plan_for(_SUM, device, gradient.blocks, columns, weight.dtype)
    return None if total is None else (forward, gradient, total)


def _launch_forward(plan: Plan, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = as_rows(x)
    # The result is no view of its rows, so that autograd lets it be changed in place.
    if x.dtype == weight.dtype and x.is_contiguous():
        y = torch.empty_like(x)
    else:
        y = like_rows(x, torch.promote_types(x.dtype, weight.dtype))
    out = y if x.dim() == 2 else y.view(rows.shape)
    plan.launch(x.get_device(), rows, weight if weight.is_contiguous() else weight.contiguous(), out, eps)
    return y


def _launch_backward(
    plans: Plans, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, *, with_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _, gradient, total = plans
    assert gradient is not None
    assert total is not None
    rows, device = as_rows(x), x.get_device()
    dx = like_rows(rows, x.dtype)
    partial = torch.empty((gradient.blocks, weight.shape[0]), dtype=torch.float32, device=x.device)
    gradient.launch(
        device, as_rows(dy), rows, weight if weight.is_contiguous() else weight.contiguous(), dx, partial, eps
    )
    shaped = dx if x.dim() == 2 else dx.view(x.shape)
    if not with_weight:
        return shaped, None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    total.launch(device, partial, dweight)
    return shaped, dweight


class _RmsNorm(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, plans: Plans) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.plans = eps, plans
        return _launch_forward(plans[0], x, weight, eps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _launch_backward(ctx.plans, dy, x, weight, ctx.eps, with_weight=ctx.needs_input_grad[1])
        return dx, dweight, None, None


def _run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    plans = _plans(x, weight, backward=False)
    return fallback(x, weight, eps) if plans is None else _launch_forward(plans[0], x, weight, eps)


def _run_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    plans = _plans(x, weight, backward=True)
    if plans is not None:
        dx, dweight = _launch_backward(plans, dy, x, weight, eps, with_weight=True)
        assert dweight is not None
        return dx, dweight
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        dx, dweight = torch.autograd.grad(fallback(x, weight, eps), (x, weight), dy)
    return dx.contiguous(), dweight


def _fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def _fake_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return (*_op_backward(dy, *ctx.saved_tensors, ctx.eps), None)


_op = register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _run, _fake)
_op_backward = register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
