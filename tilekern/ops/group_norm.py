"""group_norm: normalisation of groups of channels; the backward computes the statistics again from x.

Its launches are written by hand: the kernels take x [batch, groups, channels per group, positions] and weights
[groups, channels per group], which do not follow from the shapes of the op's tensors, and the weights' gradients are
summed over the batch, not over blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilekern.kernels import column_sum
from tilekern.kernels.group_norm import BACKWARD, FORWARD
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, check_vectors, fresh, plans_of_both
from tilekern.runtime.dispatch import Plan, plan_for
from tilekern.spec import Array

Plans = tuple[Plan, Plan | None, Plan | None]
Gradients = tuple[Tensor, Tensor | None, Tensor | None]
_IMAGES = ("batch", "channels", "height", "width")


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, num_channels: int, num_groups: int, eps: float = 1e-6
) -> Tensor:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels, rounded once.

    Args:
        x: [batch, channels, ...], three dimensions or more; bfloat16, float16 or float32, any strides. Non-contiguous
            tensors are copied. With a DTensor each rank computes its own entries of the batch; other sharded dimensions
            are gathered.
        weight, bias: [channels], of the dtype of ``x`` or another of the three. If theirs differ, the formula runs.
        num_channels: the number of channels.
        num_groups: the number of groups of adjacent channels; divides ``num_channels``.
        eps: added to the variance, which is the mean square of the deviations.

    Returns:
        The shape of ``x`` in the dtype that torch promotes ``x``, ``weight`` and ``bias`` to, contiguous.

    Raises:
        ValueError: ``x`` does not have that many channels, ``num_groups`` does not divide them, weights have another
            shape, or the devices differ.
    """
    if x.dim() < 3 or x.shape[1] != num_channels:
        raise ValueError(f"group_norm: x must have the shape [batch, {num_channels}, ...], got {list(x.shape)}")
    if x.__class__ is not Tensor and is_dtensor(x, weight, bias):
        return by_shards(_groups, (x,), (weight, bias), num_groups, eps, gathered=x.dim() - 1)
    return _groups(x, weight, bias, num_groups, eps)


def _check(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> None:
    if x.dim() < 3:
        raise ValueError(f"group_norm_groups: x must have the shape [batch, channels, ...], got {list(x.shape)}")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"group_norm_groups: num_groups must divide the {channels} channels, got {num_groups}")
    check_vectors("group_norm_groups", channels, weight=weight, bias=bias)
    check_tensors("group_norm_groups", x=x, weight=weight, bias=bias)


def _find(graded: bool, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Plans | None:
    if not x.numel() or bias.dtype != weight.dtype:
        return None
    batch, channels = x.shape[:2]
    sizes = (batch, num_groups, channels // num_groups, math.prod(x.shape[2:]), x.dtype, weight.dtype)
    plans = plans_of_both(graded, x.device, (FORWARD, *sizes), (BACKWARD, *sizes))
    if plans is None or plans[1] is None:
        return None if plans is None else (*plans, None)
    summed = plan_for(column_sum.SPEC, x.device, batch, 2 * channels, weight.dtype)
    return None if summed is None else (*plans, summed)


def _cut(x: Tensor, num_groups: int) -> Tensor:
    """Return a view [batch, groups, channels per group, positions]."""
    batch, channels = x.shape[:2]
    return x.contiguous().view(batch, num_groups, channels // num_groups, math.prod(x.shape[2:]))


def _launch(plans: Plans, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = fresh(x, None if dtype == x.dtype else dtype)
    each = (num_groups, x.shape[1] // num_groups)
    arrays = (_cut(x, num_groups), weight.reshape(each), bias.reshape(each), _cut(y, num_groups))
    plans[0].launch(x.get_device(), *arrays, float(eps))
    return y


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int,
    eps: float,
) -> Gradients:  # fmt: skip
    _, backward, summed = plans
    assert backward is not None
    assert summed is not None
    batch, channels = x.shape[:2]
    each = (num_groups, channels // num_groups)
    dx, partial = fresh(x), torch.empty(batch, 2 * channels, dtype=torch.float32, device=x.device)
    shares = partial.view(batch, 2, *each)
    arrays = (_cut(dy, num_groups), _cut(x, num_groups), weight.reshape(each), _cut(dx, num_groups))
    backward.launch(x.get_device(), *arrays, *shares.unbind(1), float(eps))
    if not needs[1] and not needs[2]:
        return dx, None, None
    sums = torch.empty(2 * channels, dtype=weight.dtype, device=x.device)
    summed.launch(x.get_device(), partial, sums)
    dweight, dbias = sums.chunk(2)
    return dx, dweight, dbias


@operation(
    FORWARD, BACKWARD, name="group_norm_groups", sums=("weight", "bias"), reads=("x", "weight", "bias"),
    key=("num_groups",),
    arrays=(
        Array("x", "dtype", _IMAGES), Array("weight", "weight_dtype", ("channels",)),
        Array("bias", "weight_dtype", ("channels",)), Array("y", "dtype*weight_dtype", _IMAGES, "output"),
    ),
    check=_check, find=_find, launch=_launch, launch_backward=_launch_backward,
)  # fmt: skip
def _groups(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int = 1, eps: float = 1e-6) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if not x.numel():
        # torch refuses groups of no elements.
        return x.to(dtype) * weight.view(-1, *([1] * (x.dim() - 2))) + bias.view(-1, *([1] * (x.dim() - 2)))
    return torch.nn.functional.group_norm(x.to(wide), num_groups, weight.to(wide), bias.to(wide), eps).to(dtype)
