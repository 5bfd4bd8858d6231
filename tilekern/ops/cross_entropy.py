"""cross_entropy: the loss of logits against class indices; the backward computes the softmax again from ``lse``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import cross_entropy as kernels
from tilekern.ops.registration import (
    as_rows,
    check_devices,
    check_softcap,
    first_order,
    like_rows,
    needs_gradient,
    register,
    register_gradient,
)

_FORWARD, _BACKWARD = kernels.FORWARD, kernels.BACKWARD
_INT32 = torch.iinfo(torch.int32)
Plans = tuple[Plan, Plan | None]
Pair = tuple[torch.Tensor, torch.Tensor]
_memo: dict[Any, Plans | None] = memo()


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """What a row's loss is made of beside logits and target, named as the arguments of :func:`cross_entropy`."""

    class_weight: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Cross entropy as ``torch.nn.functional.cross_entropy`` defines it, plus a soft cap and a z-loss.

    Args:
        logits: [..., vocabulary]; bfloat16, float16 or float32, any strides. Classes stand last, also where torch
            would have them second.
        target: [...] of an integer dtype: classes, or ``ignore_index`` for rows that do not count. The kernel gives a
            row with any other value the loss NaN, where torch raises; values are taken as int32.
        weight: [vocabulary], a factor for each class, of any floating dtype; it gets no gradient.
        ignore_index: the target of rows that do not count.
        reduction: ``mean`` divides by the sum of the class weights of the rows that count, and is NaN where there are
            none; ``sum``; ``none`` gives the shape of ``target``.
        label_smoothing: from 0 to 1, the share of the target that goes to all classes alike.
        softcap: replaces the logits by ``softcap * tanh(logits / softcap)``; positive and finite.
        z_loss: adds ``z_loss * lse ** 2`` to each row that counts, where lse is the log of the sum of exponentials.
        in_place: let the backward write the gradient over the logits, for where nothing needs them after it, as when a
            matrix product has made them. Autograd notices a later use that it knows of. Leaves keep their memory, and
            ``torch.compile`` plans memory by itself.

    Returns:
        The loss in float32, whatever the logits' dtype (float64 for float64 logits).

    Raises:
        ValueError: shapes do not fit, ``target`` is not of an integer dtype or on another device, or an option has a
            value that it cannot have.
    """
    _check(logits, target, weight, reduction, label_smoothing, softcap)
    if torch.compiler.is_compiling():
        loss, _ = _op(logits, target, weight, ignore_index, label_smoothing, softcap, z_loss)
        return _reduced(loss, _count(target, weight, ignore_index, reduction), reduction)
    options = _Options(weight, ignore_index, label_smoothing, softcap, z_loss)
    graded = needs_gradient(logits)
    plans = _plans(logits, options, backward=graded)
    if plans is None:
        count_fallback(_FORWARD)
        loss = composed(logits, target, options)
        return _reduced(loss, _count(target, weight, ignore_index, reduction), reduction)
    if graded:
        return _CrossEntropy.apply(logits, target, options, reduction, in_place and not logits.is_leaf, plans)
    loss, _ = _launch_forward(plans[0], logits, _rows_of(target), options)
    return _reduced(loss, _count(target, weight, ignore_index, reduction), reduction)


def _check(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, label_smoothing: float,
    softcap: float | None,
) -> None:  # fmt: skip
    if not logits.dim() or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target must have the shape of logits without the last dimension, got {list(target.shape)} "
            f"for {list(logits.shape)}"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"cross_entropy: target must hold class indices of an integer dtype, got {target.dtype}")
    check_devices("cross_entropy", logits=logits, target=target, weight=weight)
    if weight is not None and weight.shape != logits.shape[-1:]:
        raise ValueError(f"cross_entropy: weight must have the shape [{logits.shape[-1]}], got {list(weight.shape)}")
    if weight is not None and weight.requires_grad:
        raise ValueError("cross_entropy: weight gets no gradient; detach it")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must be from 0 to 1, got {label_smoothing}")
    check_softcap("cross_entropy", softcap)


def composed(logits: torch.Tensor, target: torch.Tensor, options: Any) -> torch.Tensor:
    """The loss of each row in torch's own operations: shape of ``target``, float32 (float64 for float64 logits).

    ``options`` has the fields ``class_weight``, ``ignore_index``, ``label_smoothing``, ``softcap`` and ``z_loss``.
    """
    x = _wide(logits, options.softcap)
    rows, labels = x.flatten(0, -2) if x.dim() > 1 else x[None], target.reshape(-1).long()
    weight = None if options.class_weight is None else options.class_weight.to(x.dtype)
    loss = torch.nn.functional.cross_entropy(
        rows, labels, weight, ignore_index=options.ignore_index, reduction="none",
        label_smoothing=options.label_smoothing,
    )  # fmt: skip
    if options.z_loss:
        # Filled rather than multiplied by 0: where no row counts, the mean hands infinity to every row.
        square = rows.logsumexp(-1).square().masked_fill(labels == options.ignore_index, 0)
        loss = loss + options.z_loss * square
    return loss.view(target.shape)


def _wide(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, reduction: str) -> torch.Tensor | None:
    """What the mean divides by: the class weights of the rows that count; None for another reduction."""
    if reduction != "mean":
        return None
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return (weight[target.clamp(0, weight.shape[0] - 1).long()] * valid).sum(dtype=torch.float64)


def _reduced(loss: torch.Tensor, count: torch.Tensor | None, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if count is None else loss.sum() / count.to(loss.dtype)


def _plans(logits: torch.Tensor, options: Any, *, backward: bool) -> Plans | None:
    """Plans of the forward and, where asked for, of the backward; None where torch must do the work."""
    if not _INT32.min <= options.ignore_index <= _INT32.max:
        return None
    flags = (options.class_weight is not None, options.label_smoothing > 0, options.softcap is not None)
    key = (logits.shape, logits.dtype, logits.device, flags, backward)
    if not logits.is_cuda:
        return _find_plans(*key)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(*key))


def _find_plans(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, flags: tuple[bool, ...], backward: bool
) -> Plans | None:
    if not shape.numel():
        return None
    sizes = (shape.numel() // shape[-1], shape[-1], dtype, *flags)
    forward = plan_for(_FORWARD, device, *sizes)
    if forward is None or not backward:
        return None if forward is None else (forward, None)
    gradient = plan_for(_BACKWARD, device, *sizes)
    return None if gradient is None else (forward, gradient)


def _rows_of(target: torch.Tensor) -> torch.Tensor:
    """Targets as the kernels take them: int32 [rows], contiguous."""
    return target.reshape(-1).to(torch.int32).contiguous()


def _arguments(options: Any, device: torch.device) -> tuple[Any, ...]:
    weight = options.class_weight
    return kernels.option_arguments(
        None if weight is None else weight.float().contiguous(), options.ignore_index,
        options.label_smoothing, options.z_loss, options.softcap, device,
    )  # fmt: skip


def _launch_forward(plan: Plan, logits: torch.Tensor, target: torch.Tensor, options: Any) -> Pair:
    """Loss and lse of every row, float32 of the shape of ``logits`` without its last dimension."""
    loss = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    arguments = _arguments(options, logits.device)
    plan.launch(logits.get_device(), as_rows(logits), target, *arguments, loss.view(-1), lse.view(-1))
    return loss, lse


def _launch_backward(
    plan: Plan, scale: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor,
    options: Any, *, in_place: bool,
) -> torch.Tensor:  # fmt: skip
    rows = as_rows(logits)
    owned = rows.data_ptr() != logits.data_ptr()
    dlogits = rows if owned or in_place else like_rows(rows, logits.dtype)
    arguments = _arguments(options, logits.device)
    plan.launch(logits.get_device(), rows, target, lse.view(-1), scale, *arguments, dlogits)
    if in_place and not owned:
        torch.autograd.graph.increment_version(logits)
        return logits.detach()
    return dlogits.view(logits.shape)


def _scale(dloss: torch.Tensor, count: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The upstream gradient of each row's loss, float32 [rows]."""
    dloss = dloss.float().reshape(-1)
    return (dloss if count is None else dloss / count).expand(rows).contiguous()


class _CrossEntropy(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op, reduction included."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: _Options, reduction: str, in_place: bool,
        plans: tuple[Plan, Plan],
    ) -> torch.Tensor:  # fmt: skip
        labels = _rows_of(target)
        loss, lse = _launch_forward(plans[0], logits, labels, options)
        count = _count(labels, options.class_weight, options.ignore_index, reduction)
        ctx.save_for_backward(logits, labels, lse, count)
        ctx.options, ctx.in_place, ctx.plan = options, in_place, plans[1]
        return _reduced(loss, count, reduction)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, lse, count = ctx.saved_tensors
        with torch.no_grad():
            scale = _scale(dloss, count, labels.shape[0])
            dlogits = _launch_backward(ctx.plan, scale, logits, labels, lse, ctx.options, in_place=ctx.in_place)
        return *first_order((dlogits,), logits), None, None, None, None, None


def _run(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int,
    label_smoothing: float, softcap: float | None, z_loss: float,
) -> Pair:  # fmt: skip
    options = _Options(weight, ignore_index, label_smoothing, softcap, z_loss)
    plans = _plans(logits, options, backward=False)
    if plans is None:
        count_fallback(_FORWARD)
        return composed(logits, target, options), _wide(logits, softcap).logsumexp(-1)
    return _launch_forward(plans[0], logits, _rows_of(target), options)


def _run_backward(
    dloss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float,
) -> torch.Tensor:  # fmt: skip
    options = _Options(weight, ignore_index, label_smoothing, softcap, z_loss)
    plans = _plans(logits, options, backward=True)
    if plans is not None and plans[1] is not None:
        labels = _rows_of(target)
        scale = _scale(dloss, None, labels.shape[0])
        return _launch_backward(plans[1], scale, logits, labels, lse.contiguous(), options, in_place=False).contiguous()
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        (dlogits,) = torch.autograd.grad(composed(leaf, target, options), leaf, dloss)
    return dlogits.contiguous()


def _fake(logits: torch.Tensor, target: torch.Tensor, *options: Any) -> Pair:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss = logits.new_empty(target.shape, dtype=dtype)
    return loss, torch.empty_like(loss)


def _fake_backward(dloss: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    logits, target, weight, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    """lse is for the backward alone, so a gradient of it cannot come in."""
    logits, target, lse, weight = ctx.saved_tensors
    dlogits = None if dloss is None else _op_backward(dloss, logits, target, lse, weight, *ctx.options)
    return dlogits, None, None, None, None, None, None


_op = register(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
    "float? softcap, float z_loss) -> (Tensor, Tensor)",
    _run,
    _fake,
)
_op_backward = register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse, Tensor? weight, int ignore_index, "
    "float label_smoothing, float? softcap, float z_loss) -> Tensor",
    _run_backward,
    _fake_backward,
)
register_gradient(_op, _backward, _save)
