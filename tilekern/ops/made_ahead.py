"""Losses of a language model's head, whose gradients are made with the loss: autograd around what makes them.

The gradients are kept for one backward, which multiplies them in place by what it is given; where that is 1, nothing is
read or written (:mod:`tilekern.kernels.scale`). Another backward through the same loss makes them once more. In float16
they would vanish without the factor that a scaler of losses puts in the backward, so there, and for the losses of
single rows, the logits are made twice: once for each direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilekern.kernels import scale as scaling
from tilekern.ops.registration import first_order, uncast
from tilekern.runtime.dispatch import count_fallback, plan_for

Gradients = tuple[torch.Tensor | None, ...]
# (*tensors) -> the total, and the gradients of the first of the tensors, None for one that is not wanted
MakeTotal = Callable[..., tuple[torch.Tensor, Gradients]]


def total(make: MakeTotal, graded: int, *tensors: torch.Tensor) -> torch.Tensor:
    """The total that ``make(*tensors)`` gives, with its gradients by the first ``graded`` tensors."""
    loss: torch.Tensor = _Total.apply(make, graded, *tensors)
    return loss


def rows(
    losses: Callable[..., torch.Tensor], gradients: Callable[..., Gradients], graded: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """The loss of each row that ``losses(*tensors)`` gives.

    ``gradients(slope, *tensors)`` are those of the sum of the losses times a float32 slope for each row.
    """
    loss: torch.Tensor = _Rows.apply(losses, gradients, graded, *tensors)
    return loss


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Callable[..., torch.Tensor], gradients: Callable[..., Gradients], graded: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(*tensors)
        ctx.gradients, ctx.graded = gradients, graded
        return losses(*tensors)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with torch.no_grad(), uncast(dloss.device.type):
            made = ctx.gradients(dloss.float().contiguous(), *tensors)
        return None, None, None, *_given_back(made, ctx.graded, tensors)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: MakeTotal, graded: int, *tensors: torch.Tensor) -> torch.Tensor:
        loss, made = make(*tensors)
        # Saved like the tensors, so that hooks on what is saved (offloading, checkpoints) have the gradients too.
        ctx.save_for_backward(*tensors, *made)
        ctx.make, ctx.graded, ctx.count, ctx.taken = make, graded, len(tensors), False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, made = saved[: ctx.count], saved[ctx.count :]
        # Whoever asks a second time (retain_graph) gets gradients of its own: the first ones belong to their taker.
        is_taken, ctx.taken = ctx.taken, True
        with torch.no_grad(), uncast(dloss.device.type):
            # With a version of its own, so that its taker may change it and the rest of what is saved still serves.
            made = ctx.make(*tensors)[1] if is_taken else tuple(None if x is None else x.data for x in made)
            factor = dloss.float().reshape(1)
            made = tuple(None if x is None else _scaled(x, factor) for x in made)
        return None, None, *_given_back(made, ctx.graded, tensors)


def _given_back(made: Gradients, graded: int, tensors: tuple[torch.Tensor, ...]) -> Gradients:
    """A gradient for each tensor, those that have one first."""
    return *first_order(made, *tensors[:graded]), *(None for _ in tensors[graded:])


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x`` times a factor in device memory, in place; a bias is too short for a kernel to matter."""
    if x.dim() < 2:
        return x.mul_(factor)
    plan = plan_for(scaling.SPEC, x.device, *x.shape, x.dtype)
    if plan is None:
        count_fallback(scaling.SPEC)
        return x.mul_(factor)
    plan.launch(x.get_device(), x, factor, x)
    return x
