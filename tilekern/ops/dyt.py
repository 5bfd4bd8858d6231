"""dyt: Dynamic Tanh, used instead of a norm; the backward recomputes tanh and saves only x.

Its launches are written by hand: the backward leaves partial sums for alpha, gamma and beta, and a kernel of its own
(``dyt_sums``) adds up all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.dyt import BACKWARD, FORWARD, SUMS
from tilekern.kernels.families.placeholders import placeholder
from tilekern.kernels.families.stripes import groups_of, stripes_of
from tilekern.ops.operation import operation
from tilekern.ops.registration import as_rows, check_tensors, check_vectors, fresh, plans_of_both
from tilekern.runtime.dispatch import Plan, plan_for

Plans = tuple[Plan, Plan | None, Plan | None]
Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _check(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    if not x.dim():
        raise ValueError("dyt: x must have the shape [..., columns], got []")
    if alpha.shape not in ((), (1,)):
        raise ValueError(f"dyt: alpha must be one number, of the shape [] or [1], got {list(alpha.shape)}")
    check_vectors("dyt", x.shape[-1], gamma=gamma, beta=beta)
    check_tensors("dyt", x=x, alpha=alpha, gamma=gamma, beta=beta)


def _find(graded: bool, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Plans | None:
    if not x.numel() or alpha.dtype != gamma.dtype or (beta is not None and beta.dtype != gamma.dtype):
        return None
    columns, shifted = x.shape[-1], beta is not None
    sizes = (x.numel() // columns, columns, x.dtype, gamma.dtype, shifted)
    plans = plans_of_both(graded, x.device, (FORWARD, *sizes), (BACKWARD, *sizes))
    if plans is None or plans[1] is None:
        return None if plans is None else (*plans, None)
    summed = plan_for(SUMS, x.device, groups_of(plans[1].blocks, columns), columns, gamma.dtype, shifted)
    return None if summed is None else (*plans, summed)


def _launch(plans: Plans, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, gamma.dtype)
    y = fresh(x, None if dtype == x.dtype else dtype)
    shift = placeholder(1, gamma.dtype, x.device) if beta is None else beta.contiguous()
    plans[0].launch(x.get_device(), as_rows(x), alpha.reshape(1), gamma.contiguous(), shift, as_rows(y))
    return y


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None
) -> Gradients:
    _, backward, summed = plans
    assert backward is not None
    assert summed is not None
    columns, device = x.shape[-1], x.device
    groups = groups_of(backward.blocks, columns)
    dx, width = fresh(x), columns if beta is None else 2 * columns
    partial = torch.empty(groups, width, dtype=torch.float32, device=device)
    slopes = torch.empty(groups * stripes_of(columns), dtype=torch.float32, device=device)
    arrays = (as_rows(dy), as_rows(x), alpha.reshape(1), gamma.contiguous(), as_rows(dx), partial, slopes)
    backward.launch(x.get_device(), *arrays)
    if not needs[2] and not needs[3]:
        return dx, slopes.sum().to(alpha.dtype).view(alpha.shape) if needs[1] else None, None, None
    dalpha, sums = (torch.empty(size, dtype=gamma.dtype, device=device) for size in (1, width))
    summed.launch(x.get_device(), partial, slopes, dalpha, sums)
    dgamma, dbeta = (sums, None) if beta is None else sums.chunk(2)
    return dx, dalpha.view(alpha.shape), dgamma, dbeta


@operation(
    FORWARD, BACKWARD, flags={"shifted": "beta is not None"}, sums=("gamma", "beta"),
    reads=("x", "alpha", "gamma", "beta"), check=_check, find=_find, launch=_launch, launch_backward=_launch_backward,
    gathered=1,
)  # fmt: skip
def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return ``gamma * tanh(alpha * x) + beta``, computed in float32 and rounded once.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides; DTensors as in :func:`tilekern.ops.rms_norm`.
        alpha: one number, of the shape [1] or [].
        gamma: [columns].
        beta: [columns], or None. All three have one dtype, that of ``x`` or another of the three; if theirs differ, the
            formula runs.

    Returns:
        [..., columns] in the dtype that torch promotes ``x``, ``alpha`` and ``gamma`` to, contiguous.

    Raises:
        ValueError: a weight has another shape or is on another device.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, alpha.dtype), gamma.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    y = gamma.to(wide) * torch.tanh(alpha.to(wide) * x.to(wide))
    return (y if beta is None else y + beta.to(wide)).to(dtype)
