"""cross_entropy: the loss of logits against class indices; the backward computes the softmax again from ``lse``.

Its launches are written by hand: another kernel checks and counts the labels first, the reduction is part of the op,
and the backward may overwrite the logits with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.cross_entropy import separate as kernels
from tilekern.ops.labels import checked, total
from tilekern.ops.operation import operation
from tilekern.ops.registration import (
    as_rows,
    by_autograd,
    check_ids,
    check_share,
    check_softcap,
    check_tensors,
    check_vectors,
    fresh,
    is_traced,
    keeps_graph,
    plans_of_both,
    shaped,
)
from tilekern.runtime.dispatch import Plan
from tilekern.spec import Array


@dataclass(frozen=True, slots=True)
class CrossEntropyOutput:
    """A loss and the other requested results, which have no gradient.

    Attributes:
        loss: the whole loss.
        z_loss: the part of it that ``z_loss`` adds, reduced likewise.
        token_accuracy: the share of counted rows whose largest logit is the target's, float32; for the reduction
            ``none`` 1 or 0 for each row, 0 for rows that do not count.
        predicted_tokens: the index of the largest logit of each row, int64; -1 for rows that do not count.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


_FORWARD, _BACKWARD = kernels.FORWARD, kernels.BACKWARD
_INT32 = torch.iinfo(torch.int32)
Plans = tuple[Plan, Plan | None]
Results = tuple[Tensor, ...]
_ROW = ("rows",)
_ARRAYS = (
    Array("logits", "dtype", ("rows", "vocabulary")),
    Array("target", "int32", _ROW),
    Array("weight", "float32", ("vocabulary",)),
    Array("loss", "float32", (), "output"),
    Array("lse", "float32", _ROW, "output"),
    Array("count", "float64", (), "output"),
    Array("labels", "int32", _ROW, "output"),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The arguments of :func:`cross_entropy` after logits and target, in their order."""

    class_weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float | None
    z_loss: float
    in_place: bool

    def given(self, device: torch.device) -> tuple[Any, ...]:
        """Return the kernels' arguments."""
        weight = None if self.class_weight is None else self.class_weight.float().contiguous()
        return kernels.option_arguments(
            weight, self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, device
        )


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, in_place: bool = False, *,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    z_loss_by_rows: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Compute cross entropy as ``torch.nn.functional.cross_entropy`` defines it, plus a soft cap and a z-loss.

    Args:
        logits: [..., vocabulary]; bfloat16, float16 or float32, any strides. Unlike in torch, classes are always last.
        target: [...] of an integer dtype: classes, or ``ignore_index`` for rows that do not count. A row with any other
            value has the loss NaN, and a later call raises; torch raises at once.
        weight: [vocabulary], a factor for each class, of any floating dtype; it gets no gradient.
        ignore_index: the target of rows that do not count.
        reduction: ``mean`` divides by the sum of the class weights of the rows that count, and is NaN if there are
            none; ``sum``; ``none`` gives the shape of ``target``.
        label_smoothing: from 0 to 1, the share of the target that is spread evenly over all classes.
        softcap: replaces the logits by ``softcap * tanh(logits / softcap)``; positive and finite.
        z_loss: adds ``z_loss * lse ** 2`` to each row that counts; lse is the logsumexp of its logits.
        in_place: let the backward overwrite the logits with their gradient, if nothing reads them afterwards. Autograd
            notices later uses that it knows of. Leaves are never overwritten, and neither are logits under
            ``torch.compile``, if other results are returned, or if the graph is kept for another backward.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return these too. The last two read the logits
            once more.
        z_loss_by_rows: with class weights and the reduction ``mean``, divide the z-loss by the number of rows that
            count, as Liger does; otherwise the whole loss is divided by the sum of their class weights.

    Returns:
        The loss in float32 (float64 for float64 logits); a :class:`CrossEntropyOutput` if other results are requested.

    Raises:
        ValueError: shapes do not fit, ``target`` is not of an integer dtype or on another device, an option has an
            invalid value, or an earlier call on this device got a label outside the vocabulary
            (:func:`tilekern.check_labels`).
    """
    if weight is not None and weight.requires_grad:
        raise ValueError("cross_entropy: weight gets no gradient; detach it")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    check_share("cross_entropy", "label_smoothing", label_smoothing)
    check_softcap("cross_entropy", softcap)
    if not _INT32.min <= ignore_index <= _INT32.max:
        # Kernels take targets as int32; those of a narrower dtype are never ignored here.
        target = target.masked_fill(target == ignore_index, _INT32.min) if target.dtype == torch.int64 else target
        ignore_index = _INT32.min
    if z_loss_by_rows and z_loss and weight is not None and reduction == "mean":
        weight = weights_by_rows(weight, target, ignore_index)
    if return_z_loss or return_token_accuracy or return_predicted_tokens:
        given = (logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, False)
        _check(*given)
        loss, lse, count, labels = torch.ops.tilekern.cross_entropy.default(*given)
        predicted = logits.detach().argmax(-1) if return_token_accuracy or return_predicted_tokens else None

        def total(rows: Tensor) -> Tensor:
            return _reduced(rows.view(target.shape), count.detach(), reduction)

        wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        options = _Options(*given[2:])
        return with_others(loss, wanted, lse.detach(), predicted, labels, options, total, by_row=reduction == "none")
    in_place = in_place and not logits.is_leaf and not is_traced(logits)
    return _loss(logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)


def weights_by_rows(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Rescale class weights so that they sum to the number of counted rows, by which a mean then divides."""
    valid = target != ignore_index
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    shares = wide[target.clamp(0, weight.shape[0] - 1).long()] * valid
    return wide * (valid.sum() / shares.sum())


def with_others(
    loss: Tensor, wanted: tuple[bool, bool, bool], lse: Tensor, predicted: Tensor | None, labels: Tensor, options: Any,
    total: Callable[[Tensor], Tensor], by_row: bool,
) -> CrossEntropyOutput:  # fmt: skip
    """Return a loss with the z-loss, the accuracy and the predicted tokens, if they are wanted.

    Args:
        loss: the reduced loss.
        wanted: which of the three are wanted.
        lse: the logsumexp of each row, [rows].
        predicted: the index of the largest logit of each row, in the shape of ``labels``; None if not needed.
        labels: the targets.
        options: has the fields ``ignore_index`` and ``z_loss``.
        total: applies the reduction to losses [rows].
        by_row: whether the reduction gives one loss per row.
    """
    valid, z, accuracy = labels != options.ignore_index, None, None
    if wanted[0]:
        z = total((options.z_loss * lse.square()).masked_fill(~valid.view(-1), 0))
    if wanted[1]:
        right = ((predicted == labels) & valid).to(torch.float32)
        accuracy = right if by_row else right.sum() / valid.sum()
    shown = predicted.masked_fill(~valid, -1) if predicted is not None and wanted[2] else None
    return CrossEntropyOutput(loss, z, accuracy, shown)


def _check(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> None:
    check_ids("cross_entropy", "target", target, logits=logits)
    check_tensors("cross_entropy", "target", logits=logits, target=target, weight=weight)
    check_vectors("cross_entropy", logits.shape[-1], weight=weight)


def _find(graded: bool, logits: Tensor, target: Tensor, *rest: Any) -> Plans | None:
    options = _Options(*rest)
    if not logits.numel():
        return None
    flags = (options.class_weight is not None, options.label_smoothing > 0, options.softcap is not None)
    sizes = (target.numel(), logits.shape[-1], logits.dtype, *flags)
    return plans_of_both(graded, logits.device, (_FORWARD, *sizes), (_BACKWARD, *sizes))


def composed(logits: Tensor, target: Tensor, options: Any) -> Tensor:
    """Compute the loss of each row by torch, in the shape of ``target``; float32 (float64 for float64 logits).

    ``options`` has the fields ``class_weight``, ``ignore_index``, ``label_smoothing``, ``softcap`` and ``z_loss``.
    """
    x = wide(logits, options.softcap)
    rows, labels = x.flatten(0, -2) if x.dim() > 1 else x[None], target.reshape(-1).long()
    weight = None if options.class_weight is None else options.class_weight.to(x.dtype)
    loss = torch.nn.functional.cross_entropy(
        rows, labels, weight, ignore_index=options.ignore_index, reduction="none",
        label_smoothing=options.label_smoothing,
    )  # fmt: skip
    if options.z_loss:
        # Filled, not multiplied by 0: if no row counts, the mean's gradient is infinite in every row.
        square = rows.logsumexp(-1).square().masked_fill(labels == options.ignore_index, 0)
        loss = loss + options.z_loss * square
    return loss.view(target.shape)


def wide(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the capped logits in float32 or float64."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _count(target: Tensor, options: _Options) -> Tensor:
    """Return the divisor of the mean: the class weights of the rows that count; empty for another reduction."""
    if options.reduction != "mean":
        return target.new_empty(0, dtype=torch.int64)
    valid, weight = target != options.ignore_index, options.class_weight
    if weight is None:
        return valid.sum()
    return (weight[target.clamp(0, weight.shape[0] - 1).long()] * valid).sum(dtype=torch.float64)


def _reduced(loss: Tensor, count: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / count.to(loss.dtype)


def _launch(plans: Plans, logits: Tensor, target: Tensor, *rest: Any) -> Results:
    options = _Options(*rest)
    labels, counted = checked("cross_entropy", target, logits.shape[-1], options.ignore_index)
    loss = torch.empty(labels.numel(), dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    given = options.given(logits.device)
    plans[0].launch(logits.get_device(), as_rows(logits), labels, *given, loss, lse)
    labels = shaped(labels, *target.shape)
    is_number = options.reduction == "mean" and options.class_weight is None
    count = total(counted) if is_number else _count(labels, options)
    return _reduced(shaped(loss, *target.shape), count, options.reduction), lse, count, labels


def _launch_backward(
    plans: tuple[Plan, Plan], needs: tuple[bool, ...], dloss: Tensor, logits: Tensor, lse: Tensor, count: Tensor,
    labels: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    options, rows = _Options(*rest), as_rows(logits)
    owned = rows.data_ptr() != logits.data_ptr()
    in_place = options.in_place and not owned and not keeps_graph()
    dlogits = rows if owned or in_place else fresh(rows)
    slope = dloss.float().reshape(-1)
    scale = (slope / count if options.reduction == "mean" else slope).expand(labels.numel()).contiguous()
    labels, given = labels.contiguous().view(-1), options.given(logits.device)
    plans[1].launch(logits.get_device(), rows, labels, lse.contiguous(), scale, *given, dlogits)
    if in_place:
        torch.autograd.graph.increment_version(logits)
        return logits.detach()
    return shaped(dlogits, *logits.shape)


def _fake(logits: Tensor, target: Tensor, *rest: Any) -> Results:
    options = _Options(*rest)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss = logits.new_empty(target.shape if options.reduction == "none" else (), dtype=dtype)
    lse, labels = logits.new_empty(target.numel(), dtype=dtype), target.new_empty(target.shape, dtype=torch.int32)
    return loss, lse, torch.empty_like(_count(target, options)), labels


def _rest(logits: Tensor, target: Tensor, *rest: Any) -> Results:
    options = _Options(*rest)
    lse = wide(logits, options.softcap).logsumexp(-1).view(-1)
    return lse, _count(target, options), target.to(torch.int32, copy=True, memory_format=torch.contiguous_format)


def _fallback_backward(
    dloss: Tensor, logits: Tensor, lse: Tensor, count: Tensor, labels: Tensor, *rest: Any
) -> Tensor | None:
    return by_autograd(_formula, (logits, labels, *rest), (0,), (dloss,))[0]


def _formula(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    softcap: float | None, z_loss: float, in_place: bool,
) -> Tensor:  # fmt: skip
    options = _Options(weight, ignore_index, reduction, label_smoothing, softcap, z_loss, in_place)
    return _reduced(composed(logits, target, options), _count(target, options), reduction)


# The reduction is part of the op, which saves autograd a function per step.
_loss = operation(
    _FORWARD, _BACKWARD, name="cross_entropy", ungraded=("target", "weight"), arrays=_ARRAYS,
    kept=("lse", "count", "labels"), reads=("logits", "lse", "count", "labels", "weight"),
    key=("label_smoothing > 0", "softcap is not None"), check=_check, find=_find, launch=_launch,
    launch_backward=_launch_backward, fake=_fake, fallback_backward=_fallback_backward, rest=_rest,
)(_formula)  # fmt: skip
