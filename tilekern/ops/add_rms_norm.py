"""add_rms_norm: a residual sum and the root mean square normalisation of it, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import add_rms_norm as kernels
from tilekern.kernels import column_sum
from tilekern.ops.registration import (
    as_rows,
    check_devices,
    differentiable_once,
    like_rows,
    needs_gradient,
    register,
    register_gradient,
)
from tilekern.ops.rms_norm import rms_norm

_FORWARD, _BACKWARD, _SUM = kernels.FORWARD, kernels.BACKWARD, column_sum.SPEC
Pair = tuple[torch.Tensor, torch.Tensor]
Plans = tuple[Plan, Plan | None, Plan | None]
_memo: dict[Any, Plans | None] = memo()


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Pair:
    """``total = residual + x`` and ``weight * cast(total / sqrt(mean(total^2) + eps))`` over the last dimension.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides.
        weight: [columns], of the dtype of ``x`` or another of the three.
        eps: added to the mean square.

    Returns:
        The sum, rounded to the dtype of its terms, and its norm, in the dtype that torch promotes the sum and
        ``weight`` to; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` does not have one value for each column, or
            the devices differ.
    """
    if torch.compiler.is_compiling():
        _check(residual, x, weight)
        return _op(residual, x, weight, eps)
    graded = needs_gradient(residual, x, weight)
    plans = _plans(residual, x, weight, backward=graded)
    if plans is None:
        return fallback(residual, x, weight, eps)
    if graded:
        return _AddRmsNorm.apply(residual, x, weight, eps, plans)
    return _launch_forward(plans[0], residual, x, weight, eps)


def _check(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual and x must have one shape, got {list(residual.shape)} and {list(x.shape)}"
        )
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"add_rms_norm: weight must have the shape [{x.shape[-1]}], got {list(weight.shape)}")
    check_devices("add_rms_norm", residual=residual, x=x, weight=weight)


def fallback(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """The sum by torch and the norm by its own op, as Hugging Face's layers take them; counted."""
    count_fallback(_FORWARD)
    total = residual + x
    return total, rms_norm(total, weight, eps)


def _plans(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, backward: bool) -> Plans | None:
    """Plans of the forward and, where asked for, of the backward and its sum; None where torch must do the work."""
    if not x.is_cuda:
        return _find_plans(residual, x, weight, backward=backward)
    devices = (residual.get_device(), x.get_device(), weight.get_device())
    key = (residual.shape, x.shape, weight.shape, residual.dtype, x.dtype, weight.dtype, devices, backward)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(residual, x, weight, backward=backward))


def _find_plans(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, backward: bool) -> Plans | None:
    _check(residual, x, weight)
    if not x.numel() or residual.dtype != x.dtype:
        return None
    columns = weight.shape[0]
    sizes = (x.numel() // columns, columns, x.dtype, weight.dtype)
    forward = plan_for(_FORWARD, x.device, *sizes)
    if forward is None or not backward:
        return None if forward is None else (forward, None, None)
    gradient = plan_for(_BACKWARD, x.device, *sizes)
    if gradient is None:
        return None
    total = plan_for(_SUM, x.device, gradient.blocks, columns, weight.dtype)
    return None if total is None else (forward, gradient, total)


def _launch_forward(plan: Plan, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    # The results are no views, so that autograd lets them be changed in place.
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    plan.launch(x.get_device(), as_rows(residual), as_rows(x), weight.contiguous(), eps, as_rows(total), as_rows(y))
    return total, y


def _launch_backward(
    plans: Plans,
    dtotal: torch.Tensor,
    dy: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _, gradient, summed = plans
    assert gradient is not None
    assert summed is not None
    rows, device = as_rows(total), total.get_device()
    dx = like_rows(rows, total.dtype)
    partial = torch.empty((gradient.blocks, weight.shape[0]), dtype=torch.float32, device=total.device)
    gradient.launch(device, as_rows(dtotal), as_rows(dy), rows, weight.contiguous(), eps, dx, partial)
    if not with_weight:
        return dx.view(total.shape), None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    summed.launch(device, partial, dweight)
    return dx.view(total.shape), dweight


class _AddRmsNorm(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, plans: Plans
    ) -> Pair:
        total, y = _launch_forward(plans[0], residual, x, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.plans = eps, plans
        return total, y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dtotal: torch.Tensor | None, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return dtotal, dtotal, None, None, None
        total, weight = ctx.saved_tensors
        dx: torch.Tensor
        dweight: torch.Tensor | None
        if dtotal is None:
            # Nothing reached the sum past the norm, so that the gradient is the norm's own.
            dx, dweight = torch.ops.tilekern.rms_norm_backward.default(dy, total, weight, ctx.eps)
        else:
            wanted = ctx.needs_input_grad[2]
            dx, dweight = _launch_backward(ctx.plans, dtotal, dy, total, weight, ctx.eps, with_weight=wanted)
        return dx, dx, dweight, None, None


def _run(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    plans = _plans(residual, x, weight, backward=False)
    if plans is not None:
        return _launch_forward(plans[0], residual, x, weight, eps)
    total, y = fallback(residual, x, weight, eps)
    return total.contiguous(), y.contiguous()


def _run_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float
) -> Pair:
    plans = _plans(total, total, weight, backward=True)
    if plans is not None:
        dx, dweight = _launch_backward(plans, dtotal, dy, total, weight, eps, with_weight=True)
        assert dweight is not None
        return dx, dweight
    count_fallback(_BACKWARD)
    dx, dweight = torch.ops.tilekern.rms_norm_backward.default(dy, total, weight, eps)
    return (dtotal + dx).contiguous(), dweight


def _fake(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    dtype = torch.promote_types(residual.dtype, x.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype))


def _fake_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float
) -> Pair:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    residual, x, weight, ctx.eps = inputs
    ctx.dtypes = residual.dtype, x.dtype
    ctx.save_for_backward(output[0], weight)


def _backward(ctx: Any, dtotal: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, dweight = _op_backward(dtotal, dy, *ctx.saved_tensors, ctx.eps)
    return dx.to(ctx.dtypes[0]), dx.to(ctx.dtypes[1]), dweight, None


_op = register("add_rms_norm(Tensor residual, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _run, _fake)
_op_backward = register(
    "add_rms_norm_backward(Tensor dtotal, Tensor dy, Tensor total, Tensor weight, float eps) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
