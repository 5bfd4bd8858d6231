"""mlp: ``down(activation(up(x)))``, an MLP without a gate, as one function of autograd.

A layer saves two matrices [tokens, intermediate], before and after the activation; this saves only the first. In the
backward one kernel recomputes the activation, computes the gradient before it, and sums that over the tokens, which is
the gradient of the first bias. It reads two such matrices and writes two. An activation's own backward reads two and
writes one, which the bias's gradient then reads again. The biases are added inside the products.

It is written by hand and not declared, as it is a sequence of torch's matrix products around three launches. If it is
traced or needs no gradient, its parts run as ops of their own, so there is nothing to register.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.kernels import activation as kernels
from tilekern.kernels import column_sum
from tilekern.kernels.families.stripes import groups_of
from tilekern.ops.activation import Curve, activation, curve_of
from tilekern.ops.linear import product
from tilekern.ops.registration import (
    applied,
    as_products,
    check_tensors,
    differentiable_once,
    is_eager,
    needs_gradient,
    shaped,
)
from tilekern.runtime.dispatch import Plan, keep, memo, plan_for


class _Plans(NamedTuple):
    """The plans; ``sums`` is None if the backward does not recompute the activation, as no weight needs it."""

    forward: Plan
    backward: Plan
    sums: Plan | None


_plans: dict[Any, _Plans | None] = memo()


def mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    kind: str = "gelu",
) -> Tensor:  # fmt: skip
    """Return ``activation(x @ up_weight.T + up_bias, kind) @ down_weight.T + down_bias``.

    Args:
        x: [..., hidden].
        up_weight: [intermediate, hidden], of x's dtype, any strides, which its gradient shares. The transpose of a
            weight that is stored [hidden, intermediate], as in GPT-2, is not copied.
        up_bias: [intermediate], of x's dtype, or None.
        down_weight: [out, intermediate], of x's dtype, any strides.
        down_bias: [out], of x's dtype, or None.
        kind: as in :func:`tilekern.ops.activation`.

    Returns:
        [..., out].

    Raises:
        ValueError: the kind of activation is unknown, or the devices differ.
    """
    curve = curve_of("mlp", kind)
    tensors = (x, up_weight, up_bias, down_weight, down_bias)
    if not needs_gradient(*tensors):
        return _by_parts(kind, *tensors)
    made: Tensor = as_products(functools.partial(_trained, curve, kind), *tensors)
    return made


def _trained(
    curve: Curve, kind: str, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor,
    down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    tensors = (x, up_weight, up_bias, down_weight, down_bias)
    plans = _found(*tensors, curve) if is_eager(*tensors) else None
    if plans is None:
        return _by_parts(kind, *tensors)
    made: Tensor = _apply(*tensors, curve, plans)
    return made


def _by_parts(
    kind: str, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None
) -> Tensor:
    return product(activation(product(x, up_weight, up_bias), kind), down_weight, down_bias)


def _found(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None, curve: Curve
) -> _Plans | None:
    given = (x, up_weight, up_bias, down_weight, down_bias)
    remade = down_weight.requires_grad or (up_bias is not None and up_bias.requires_grad)
    told = tuple([None if one is None else (one.shape, one.dtype, one.get_device()) for one in given])
    key = (told, curve, remade)
    try:
        return _plans[key]
    except KeyError:
        check_tensors("mlp", x=x, up_weight=up_weight, up_bias=up_bias, down_weight=down_weight, down_bias=down_bias)
        found = _find(x, up_weight.shape[0], curve, remade=remade)
        return keep(_plans, key, found) if x.is_cuda else found


def _find(x: Tensor, columns: int, curve: Curve, *, remade: bool) -> _Plans | None:
    if not x.numel() or not columns:
        return None
    device, sizes = x.device, (x.numel() // x.shape[-1], columns, x.dtype, curve.erf, curve.relu)
    forward = plan_for(kernels.FORWARD, device, *sizes)
    backward = plan_for(kernels.REMAKE if remade else kernels.BACKWARD, device, *sizes)
    if forward is None or backward is None:
        return None
    if not remade:
        return _Plans(forward, backward, None)
    sums = plan_for(column_sum.SPEC, device, groups_of(backward.blocks, columns), columns, x.dtype)
    return None if sums is None else _Plans(forward, backward, sums)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
        curve: Curve, plans: _Plans,
    ) -> Tensor:  # fmt: skip
        linear = torch.nn.functional.linear
        value = linear(x.reshape(-1, x.shape[-1]), up_weight, up_bias)
        y = torch.empty_like(value)
        plans.forward.launch(x.get_device(), value, y, curve.linear, curve.cubic)
        ctx.save_for_backward(x, value, up_weight, down_weight)
        ctx.curve, ctx.plans = curve, plans
        return shaped(linear(y, down_weight, down_bias), *x.shape[:-1], down_weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, value, up_weight, down_weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        slope, rows = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
        dvalue, y, dup_bias = _before(ctx, torch.mm(slope, down_weight), value, biased=wants[2])
        ddown = _weight_gradient(slope, y, down_weight) if wants[3] and y is not None else None
        del y
        dx = shaped(torch.mm(dvalue, up_weight), *x.shape) if wants[0] else None
        dup = _weight_gradient(dvalue, rows, up_weight) if wants[1] else None
        return dx, dup, dup_bias, ddown, slope.sum(0) if wants[4] else None, None, None


def _before(ctx: Any, dy: Tensor, value: Tensor, *, biased: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient before the activation, the recomputed activation, and the gradient's sum over rows."""
    plans, numbers, device = ctx.plans, (ctx.curve.linear, ctx.curve.cubic), value.get_device()
    dvalue = torch.empty_like(value)
    if plans.sums is None:
        plans.backward.launch(device, dy, value, dvalue, *numbers)
        return dvalue, None, None
    y, columns = torch.empty_like(value), value.shape[1]
    partial = torch.empty(groups_of(plans.backward.blocks, columns), columns, dtype=torch.float32, device=value.device)
    plans.backward.launch(device, dy, value, dvalue, y, partial, *numbers)
    if not biased:
        return dvalue, y, None
    dbias = torch.empty(columns, dtype=value.dtype, device=value.device)
    plans.sums.launch(device, partial, dbias)
    return dvalue, y, dbias


def _weight_gradient(slope: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``slope.T @ rows`` [out, in] in the layout of the weight, so that autograd need not copy it."""
    if weight.is_contiguous():
        return torch.mm(slope.t(), rows)
    return torch.mm(rows.t(), slope).t()


_apply = applied(_Mlp)
