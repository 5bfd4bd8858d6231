"""linear_cross_entropy: the loss of a language model's head, ``cross_entropy(hidden @ weight.T, target)``.

The logits [tokens, vocabulary] never exist: both gradients are made chunk by chunk together with the loss, and the
backward only multiplies them by what it is given, which costs nothing where that is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tilekern.dispatch import Plan, count_fallback, plan_for
from tilekern.kernels import cross_entropy, cross_entropy_fused
from tilekern.kernels import linear_cross_entropy as kernels
from tilekern.kernels import scale as scaling
from tilekern.kernels.linear_cross_entropy import LossOptions
from tilekern.ops.cross_entropy import composed
from tilekern.ops.registration import needs_gradient

_SPEC = kernels.SPEC


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, class_weight: torch.Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None,
    z_loss: float = 0.0, num_items: torch.Tensor | float | None = None, wide_sums: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Cross entropy of ``hidden @ weight.T`` against ``target``; the arguments that torch has too mean the same.

    Args:
        hidden: [..., hidden].
        weight: [vocabulary, hidden], of the same dtype as ``hidden``.
        target: [...], of a whole-number dtype; ``ignore_index`` leaves a row out, any other number that is no class
            makes the loss NaN.
        class_weight: [vocabulary] or None.
        ignore_index: the target of rows that do not count.
        reduction: ``mean``, ``sum`` or ``none``. ``none`` makes the logits twice, once for each direction.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        z_loss: weight of ``logsumexp(logits)^2``.
        num_items: what ``mean`` divides by in place of the (weighted) number of rows that count, as Hugging Face's
            ``num_items_in_batch``.
        wide_sums: add the gradient of ``weight`` up over the chunks in float32.

    Returns:
        float32: a scalar, or [...] where the reduction is ``none``.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, or ``num_items`` without ``mean``.
    """
    _check(hidden, weight, target, reduction, num_items)
    options = LossOptions(
        None if class_weight is None else class_weight.float(), ignore_index, label_smoothing, softcap, z_loss,
        hidden.requires_grad, weight.requires_grad, wide_sums,
    )  # fmt: skip
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).to(torch.int32)
    graded = needs_gradient(hidden, weight)
    plan = _plan(rows, weight, options, loss=not graded or reduction == "none", gradient=graded)
    if plan is None:
        count_fallback(_SPEC)
        loss = composed(rows @ weight.t(), wanted, options)
    elif not graded:
        loss = _losses(plan, rows, weight, wanted, options)
    elif reduction == "none":
        loss = _Rows.apply(rows, weight, wanted, options, plan)
    else:
        scale = _scale(wanted, options, reduction, num_items)
        return _Total.apply(rows, weight, wanted, scale, options, plan)
    if reduction == "none":
        return loss.view(target.shape)
    return (loss * _scale(wanted, options, reduction, num_items)).sum()


def _check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: str, num_items: Any) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: weight must be [vocabulary, {hidden.shape[-1]}], got {list(weight.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: target must be {list(hidden.shape[:-1])} like hidden, got {list(target.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"linear_cross_entropy: num_items goes with the reduction mean, not {reduction}")


def _plan(rows: torch.Tensor, weight: torch.Tensor, options: LossOptions, *, loss: bool, gradient: bool) -> Plan | None:
    """The plan of the problem, of the loss alone or with its gradient; None where torch must do the work."""
    if rows.dtype != weight.dtype or not rows.numel() or not weight.numel():
        return None
    plan = plan_for(_SPEC, rows.device, *rows.shape, weight.shape[0], rows.dtype)
    specs = [cross_entropy.FORWARD] * loss + [cross_entropy_fused.FUSED] * gradient
    if plan is None:
        return None
    chunk, vocabulary = plan.config["chunk"], weight.shape[0]
    found = [kernels.chunk_plans(plan_for, spec, chunk, rows, vocabulary, options) for spec in specs]
    return None if None in found else plan


def _scale(target: torch.Tensor, options: LossOptions, reduction: str, num_items: Any) -> torch.Tensor:
    """What each row's loss is multiplied by, float32 [rows]."""
    if reduction == "sum":
        return torch.ones(target.shape, dtype=torch.float32, device=target.device)
    if num_items is None:
        counted = (target != options.ignore_index).float()
        if options.class_weight is not None:
            counted = counted * options.class_weight[target.clamp(0, len(options.class_weight) - 1).long()]
        num_items = counted.sum()
    divisor = torch.as_tensor(num_items, dtype=torch.float32, device=target.device)
    return divisor.reciprocal().expand(target.shape).contiguous()


def _losses(
    plan: Plan, rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    loss = kernels.losses(plan_for, plan.config["chunk"], rows, weight, target, options)
    plan.launches += 1
    return loss


def _gradients(plan: Plan, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return plan.run(inputs[0].get_device(), inputs, tuple)


class _Rows(torch.autograd.Function):
    """The loss of each row. Its gradient needs what the backward is given for each row, so the logits come twice."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: LossOptions, plan: Plan
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, target)
        ctx.options, ctx.plan = options, plan
        return _losses(plan, rows, weight, target, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, target = ctx.saved_tensors
        _, drows, dweight = _gradients(ctx.plan, rows, weight, target, dloss.float().contiguous(), ctx.options)
        return drows, _narrow(dweight, weight), None, None, None


class _Total(torch.autograd.Function):
    """The sum of ``scale * loss``; the gradients are made in the forward and kept for one backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, scale: torch.Tensor,
        options: LossOptions, plan: Plan,
    ) -> torch.Tensor:  # fmt: skip
        loss, drows, dweight = _gradients(plan, rows, weight, target, scale, options)
        ctx.save_for_backward(rows, weight, target, scale)
        ctx.options, ctx.plan, ctx.made = options, plan, (drows, _narrow(dweight, weight))
        return (loss * scale).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, target, scale = ctx.saved_tensors
        # Whoever asks a second time (retain_graph) gets gradients of its own: the first ones belong to their taker.
        made, ctx.made = ctx.made, None
        if made is None:
            _, drows, dweight = _gradients(ctx.plan, rows, weight, target, scale, ctx.options)
            made = drows, _narrow(dweight, weight)
        factor = dloss.float().reshape(1)
        return (*(None if x is None else _scaled(x, factor) for x in made), None, None, None, None)


def _narrow(dweight: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    return None if dweight is None else dweight.to(weight.dtype)


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x`` times a factor in device memory, in place."""
    plan = plan_for(scaling.SPEC, x.device, *x.shape, x.dtype)
    if plan is None:
        count_fallback(scaling.SPEC)
        return x.mul_(factor)
    plan.launch(x.get_device(), x, factor, x)
    return x
