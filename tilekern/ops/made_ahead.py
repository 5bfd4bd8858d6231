"""Autograd for losses of a language model's head whose gradients are computed together with the loss.

The gradients are kept for one backward, which scales them in place by its incoming gradient; if that is 1, nothing is
read or written (:mod:`tilekern.kernels.scale`). Another backward through the same loss computes them again. In float16
they would vanish without the loss scale of the backward, so for float16 and for losses of single rows the logits are
computed twice: once per direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import scale as scaling
from tilekern.ops.registration import first_order, uncast
from tilekern.runtime.dispatch import count_fallback, plan_for

Gradients = tuple[Tensor | None, ...]
# (*tensors) -> the total, and the gradients of the first tensors; None for those that are not needed
MakeTotal = Callable[..., tuple[Tensor, Gradients]]


def total(make: MakeTotal, graded: int, *tensors: Tensor) -> Tensor:
    """Return the total of ``make(*tensors)``, differentiable with respect to the first ``graded`` tensors."""
    loss: Tensor = _Total.apply(make, graded, *tensors)
    return loss


def rows(losses: Callable[..., Tensor], gradients: Callable[..., Gradients], graded: int, *tensors: Tensor) -> Tensor:
    """Return the loss of each row, ``losses(*tensors)``.

    ``gradients(slope, *tensors)`` are the gradients of the sum of the losses times one float32 slope per row.
    """
    loss: Tensor = _Rows.apply(losses, gradients, graded, *tensors)
    return loss


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Callable[..., Tensor], gradients: Callable[..., Gradients], graded: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.gradients, ctx.graded = gradients, graded
        return losses(*tensors)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with torch.no_grad(), uncast(dloss.device.type):
            made = ctx.gradients(dloss.float().contiguous(), *tensors)
        return None, None, None, *_given_back(made, ctx.graded, tensors)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: MakeTotal, graded: int, *tensors: Tensor) -> Tensor:
        loss, made = make(*tensors)
        # Saved like the tensors, so that hooks on saved tensors (offloading, checkpoints) see the gradients too.
        ctx.save_for_backward(*tensors, *made)
        ctx.make, ctx.graded, ctx.count, ctx.taken = make, graded, len(tensors), False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, made = saved[: ctx.count], saved[ctx.count :]
        # A second backward (retain_graph) gets new gradients: the first backward owns the ones that were kept.
        is_taken, ctx.taken = ctx.taken, True
        with torch.no_grad(), uncast(dloss.device.type):
            # `.data` has its own version counter: the caller may change a gradient in place.
            made = ctx.make(*tensors)[1] if is_taken else tuple(None if x is None else x.data for x in made)
            factor = dloss.float().reshape(1)
            made = tuple(None if x is None else _scaled(x, factor) for x in made)
        return None, None, *_given_back(made, ctx.graded, tensors)


def _given_back(made: Gradients, graded: int, tensors: tuple[Tensor, ...]) -> Gradients:
    """Return a gradient or None for each tensor."""
    return *first_order(made, *tensors[:graded]), *(None for _ in tensors[graded:])


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``x`` in place by a factor in device memory; a bias is too short to need a kernel."""
    if x.dim() < 2:
        return x.mul_(factor)
    plan = plan_for(scaling.SPEC, x.device, *x.shape, x.dtype)
    if plan is None:
        count_fallback(scaling.SPEC)
        return x.mul_(factor)
    plan.launch(x.get_device(), x, factor, x)
    return x
