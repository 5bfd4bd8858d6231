"""poly_norm: a weighted sum of three normalised powers; the backward computes the norms again from x.

Its launches are written by hand: weight has three numbers and bias one, for any number of columns, and one sum over
partial [blocks, 4] gives the gradients of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import column_sum
from tilekern.kernels.poly_norm import BACKWARD, FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.registration import as_rows, check_tensors, fresh, plans_of_both
from tilekern.runtime.dispatch import Plan, plan_for
from tilekern.spec import Array

Plans = tuple[Plan, Plan | None, Plan | None]
Gradients = tuple[Tensor, Tensor | None, Tensor | None]
_ROWS = ("rows", "columns")


def _check(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> None:
    if not x.dim():
        raise ValueError("poly_norm: x must have the shape [..., columns], got []")
    if weight.shape != (3,):
        raise ValueError(f"poly_norm: weight must have the shape [3], got {list(weight.shape)}")
    if bias.shape not in ((), (1,)):
        raise ValueError(f"poly_norm: bias must be one number, of the shape [] or [1], got {list(bias.shape)}")
    check_tensors("poly_norm", x=x, weight=weight, bias=bias)


def _find(graded: bool, x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Plans | None:
    if not x.numel() or bias.dtype != weight.dtype:
        return None
    columns = x.shape[-1]
    sizes = (x.numel() // columns, columns, x.dtype, weight.dtype)
    plans = plans_of_both(graded, x.device, (FORWARD, *sizes), (BACKWARD, *sizes))
    if plans is None or plans[1] is None:
        return None if plans is None else (*plans, None)
    summed = plan_for(column_sum.SPEC, x.device, plans[1].blocks, 4, weight.dtype)
    return None if summed is None else (*plans, summed)


def _launch(plans: Plans, x: Tensor, weight: Tensor, bias: Tensor, eps: float, in_place: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = fresh(x, None if dtype == x.dtype else dtype)
    plans[0].launch(x.get_device(), as_rows(x), weight.contiguous(), bias.reshape(1), as_rows(y), float(eps))
    return y


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float,
    in_place: bool,
) -> Gradients:  # fmt: skip
    _, backward, summed = plans
    assert backward is not None
    assert summed is not None
    dx = fresh(x)
    partial = torch.empty(backward.blocks, 4, dtype=torch.float32, device=x.device)
    backward.launch(x.get_device(), as_rows(dy), as_rows(x), weight.contiguous(), as_rows(dx), partial, float(eps))
    if not needs[1] and not needs[2]:
        return dx, None, None
    sums = torch.empty(4, dtype=weight.dtype, device=x.device)
    summed.launch(x.get_device(), partial, sums)
    return dx, sums[:3] if needs[1] else None, sums[3:].view(bias.shape) if needs[2] else None


@operation(
    FORWARD, BACKWARD, sums=("weight", "bias"), reads=("x", "weight", "bias"), gathered=1,
    arrays=(
        Array("x", "dtype", _ROWS), Array("weight", "weight_dtype", ("terms",)), Array("bias", "weight_dtype", ()),
        Array("y", "dtype*weight_dtype", _ROWS, "output"),
    ),
    check=_check, find=_find, launch=_launch, launch_backward=_launch_backward,
)  # fmt: skip
def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """Return ``w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + bias``, where ``norm(u) = u / sqrt(mean(u^2) + eps)``.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides; DTensors as in :func:`tilekern.ops.rms_norm`.
        weight: [3], w0 to w2.
        bias: one number, of the shape [] or [1], of the dtype of ``weight``; if theirs differ, the formula runs.
        eps: added to each mean square.
        in_place: ignored; in Liger it lets the backward overwrite its incoming gradient.

    Returns:
        [..., columns] in the dtype that torch promotes ``x``, ``weight`` and ``bias`` to, contiguous.

    Raises:
        ValueError: ``weight`` or ``bias`` has another shape or is on another device.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    y = bias.to(wide.dtype)
    for w, power in zip(weight.to(wide.dtype), (wide * wide * wide, wide * wide, wide), strict=True):
        y = y + w * power * torch.rsqrt(power.square().mean(-1, keepdim=True) + eps)
    return y.to(dtype)
