"""fused_linear_cross_entropy: the loss of a language model's head, ``cross_entropy(hidden @ weight.T, target)``.

The logits [tokens, vocabulary] never exist: both gradients are made chunk by chunk together with the loss
(:mod:`tilekern.ops.made_ahead`). ``torch.compile`` takes them as one step of its graph.

It is written by hand and not declared: its forward makes the gradients, which one backward takes away, and what it
runs is a composite, whose parts look their plans up themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tilekern.kernels.composites import fused_linear_cross_entropy as composite
from tilekern.kernels.composites.fused_linear_cross_entropy import LossOptions
from tilekern.ops import made_ahead
from tilekern.ops.cross_entropy import CrossEntropyOutput, composed, weights_by_rows, wide, with_others
from tilekern.ops.labels import checked
from tilekern.ops.registration import (
    by_autograd,
    check_head,
    check_ids,
    check_share,
    check_softcap,
    check_tensors,
    disjoint,
    is_autocast,
    is_traced,
    is_transformed,
    needs_gradient,
    register,
    register_gradient,
    scalar,
)
from tilekern.runtime.dispatch import Plan, count_fallback, plan_for

_SPEC, _NAME = composite.SPEC, "fused_linear_cross_entropy"
_INT32 = torch.iinfo(torch.int32)


def fused_linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, class_weight: torch.Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None,
    z_loss: float = 0.0, num_items: torch.Tensor | float | None = None, wide_sums: bool = False,
    bias: torch.Tensor | None = None, use_token_scaling: bool = False, accum_dtype: torch.dtype | None = None,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    z_loss_by_rows: bool = False,
) -> torch.Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of ``hidden @ weight.T + bias`` against ``target``; the arguments that torch has too mean the same.

    Under autocast ``hidden``, ``weight`` and ``bias`` are cast as a linear layer's are.

    Args:
        hidden: [..., hidden].
        weight: [vocabulary, hidden], of the same dtype as ``hidden``.
        target: [...], of a whole-number dtype; ``ignore_index`` leaves a row out, any other number that is not a class
            makes the loss NaN, and a later call raises, where torch raises at once.
        class_weight: [vocabulary] or None; it gets no gradient.
        ignore_index: the target of rows that do not count.
        reduction: ``mean``, ``sum`` or ``none``. ``none`` makes the logits twice, once for each direction.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
        softcap: logits become ``softcap * tanh(logits / softcap)``; positive and finite.
        z_loss: weight of ``logsumexp(logits)^2``.
        num_items: what ``mean`` divides by in place of the (weighted) number of rows that count, as Hugging Face's
            ``num_items_in_batch``.
        wide_sums: add the gradient of ``weight`` up over the chunks in float32.
        bias: [vocabulary]; its gradient is added up in float32.
        use_token_scaling: multiply the loss of each row by the probability of its target, through which no gradient
            flows. The logits are read twice more.
        accum_dtype: float32 is ``wide_sums`` under Liger's name; that of ``weight``, or None, leaves it as it is.
        return_z_loss, return_token_accuracy, return_predicted_tokens: give these beside the loss. For the last two the
            logits are read once more.
        z_loss_by_rows: with class weights and the reduction ``mean``, divide the z-loss by the number of rows that
            count, as Liger does, where else the whole loss is divided by the sum of their class weights.

    Returns:
        float32 (float64 for float64): a scalar, or [...] where the reduction is ``none``; a
        :class:`tilekern.ops.cross_entropy.CrossEntropyOutput` where anything is returned beside it.

    Raises:
        ValueError: shapes or devices that do not fit, a target of another dtype, an option that has a value that it
            cannot have, ``num_items`` without ``mean`` or of several numbers, or an earlier call on this device got a
            label outside its vocabulary (:func:`tilekern.check_labels`).
    """
    _check(hidden, weight, target, class_weight, bias)
    _check_options(reduction, num_items, label_smoothing, softcap)
    wide_sums = wide_sums or _is_wide(accum_dtype, weight.dtype)
    kind = hidden.device.type
    cast = is_autocast(kind)
    if cast and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    if z_loss_by_rows and z_loss and class_weight is not None and reduction == "mean" and num_items is None:
        class_weight = weights_by_rows(class_weight, target, ignore_index)
    wanted, beside = (return_z_loss, return_token_accuracy, return_predicted_tokens), composite.Beside()
    is_graded = bias is not None and bias.requires_grad
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    options = LossOptions(
        None if class_weight is None else class_weight.to(dtype).contiguous(), ignore_index, label_smoothing,
        softcap, z_loss, hidden.requires_grad, weight.requires_grad, wide_sums, bias,
        is_graded, use_token_scaling, return_token_accuracy or return_predicted_tokens,
        beside if any(wanted) or use_token_scaling or is_graded else None,
    )  # fmt: skip
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    plan = counted = None
    if not is_traced(rows):
        graded = _is_graded(rows, weight, options)
        at_once = graded and reduction != "none" and rows.dtype != torch.float16
        plan = _plan(rows, weight, options, loss=not at_once or use_token_scaling, gradient=graded)
    elif is_transformed():
        count_fallback(_SPEC)
    if plan is not None:
        labels, counted = checked(_NAME, labels, weight.shape[0], ignore_index)
    factor = _factor(labels, counted, options, reduction, num_items, dtype)
    with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
        loss = _loss(plan, rows, weight, labels, factor, options)
    if loss.dim():
        loss = loss.view(target.shape) if factor is None else loss.sum() * factor
    if not any(wanted):
        return loss

    def total(rows: torch.Tensor) -> torch.Tensor:
        rows = rows if beside.shares is None else rows * beside.shares
        return rows.view(target.shape) if factor is None else rows.sum() * factor

    predicted = None if beside.predicted is None else beside.predicted.view(target.shape)
    return with_others(loss, wanted, beside.lse, predicted, target, options, total, by_row=factor is None)


def _is_wide(accum_dtype: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Whether sums are asked for in float32."""
    if accum_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"fused_linear_cross_entropy: accum_dtype must be float32 or {dtype}, got {accum_dtype}")
    return accum_dtype == torch.float32


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    check_head("fused_linear_cross_entropy", hidden=hidden, weight=weight)
    check_ids("fused_linear_cross_entropy", "target", target, hidden=hidden)
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        raise ValueError(
            f"fused_linear_cross_entropy: class_weight must be [{weight.shape[0]}], got {list(class_weight.shape)}"
        )
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("fused_linear_cross_entropy: class_weight gets no gradient; detach it")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"fused_linear_cross_entropy: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    check_tensors(
        "fused_linear_cross_entropy",
        "target",
        hidden=hidden,
        weight=weight,
        target=target,
        class_weight=class_weight,
        bias=bias,
    )


def _check_options(reduction: str, num_items: Any, label_smoothing: float, softcap: float | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"fused_linear_cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"fused_linear_cross_entropy: num_items goes with the reduction mean, not {reduction}")
    if isinstance(num_items, torch.Tensor) and num_items.numel() != 1:
        raise ValueError(f"fused_linear_cross_entropy: num_items must be one number, got {list(num_items.shape)}")
    check_share("fused_linear_cross_entropy", "label_smoothing", label_smoothing)
    check_softcap("fused_linear_cross_entropy", softcap)


def _factor(
    labels: torch.Tensor, counted: torch.Tensor | None, options: LossOptions, reduction: str, num_items: Any,
    dtype: torch.dtype,
) -> torch.Tensor | None:  # fmt: skip
    """The factor of the sum of all losses, a scalar of ``dtype``; None where the rows are not added up.

    ``counted`` adds up to the number of labels that count; None where nobody has counted them.
    """
    if reduction == "none":
        return None
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=labels.device)
    if num_items is None and options.class_weight is None and counted is not None:
        num_items = counted.sum()
    elif num_items is None:
        valid = (labels != options.ignore_index).to(dtype)
        if options.class_weight is not None:
            valid = valid * options.class_weight[labels.clamp(0, len(options.class_weight) - 1).long()]
        num_items = valid.sum()
    return scalar(num_items, dtype, labels.device).reciprocal()


def _is_graded(rows: torch.Tensor, weight: torch.Tensor, options: LossOptions) -> bool:
    return needs_gradient(rows, weight, *([] if options.bias is None else [options.bias]))


def _loss(
    plan: Plan | None, rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, factor: torch.Tensor | None,
    options: LossOptions,
) -> torch.Tensor:  # fmt: skip
    """The total where its gradients are made with it, else the loss of each row; by torch where there is no plan."""
    if is_traced(rows) and not is_transformed():
        at_once = _is_graded(rows, weight, options) and rows.dtype != torch.float16
        return _in_graph(rows, weight, target, factor if at_once else None, options)
    if plan is None:
        return _composed(rows, weight, target, options)
    rows, weight = disjoint(rows), disjoint(weight)
    if not _is_graded(rows, weight, options):
        return _losses(plan, rows, weight, target, options)
    sources = [rows, weight] if options.bias is None else [rows, weight, options.bias]
    # All that a backward may read again is among these, for autograd to notice what changes in between.
    weighting = [] if options.class_weight is None else [options.class_weight]
    tensors = *sources, *weighting, target

    def known(given: tuple[torch.Tensor, ...]) -> LossOptions:
        return dataclasses.replace(options, class_weight=given[-2]) if weighting else options

    if factor is None or rows.dtype == torch.float16:
        return made_ahead.rows(
            lambda *given: _losses(plan, given[0], given[1], given[-1], known(given)),
            lambda slope, *given: _made(plan, slope, given, known(given))[1], len(sources), *tensors,
        )  # fmt: skip
    scale = factor.expand(target.shape).contiguous()

    def total(*given: torch.Tensor) -> tuple[torch.Tensor, made_ahead.Gradients]:
        loss, gradients = _made(plan, scale, given, known(given))
        return (loss * scale).sum(), gradients

    return made_ahead.total(total, len(sources), *tensors)


def _composed(rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """The loss of each row in torch's own operations."""
    logits = torch.nn.functional.linear(rows, weight, options.bias)
    loss = composed(logits, labels, options)
    if options.beside is None:
        return loss
    known = logits.detach()
    beside = composite.room_beside(options, wide(known, options.softcap).logsumexp(-1))
    composite.note(beside, slice(None), known, labels, options)
    return loss if beside.shares is None else loss * beside.shares


def _plan(rows: torch.Tensor, weight: torch.Tensor, options: LossOptions, *, loss: bool, gradient: bool) -> Plan | None:
    """The plan of the problem, of the loss alone or with its gradient; None, which is counted, where torch works."""
    plan = _served(rows, weight, options, loss=loss, gradient=gradient)
    if plan is None:
        count_fallback(_SPEC)
    return plan


def _served(
    rows: torch.Tensor, weight: torch.Tensor, options: LossOptions, *, loss: bool, gradient: bool
) -> Plan | None:  # fmt: skip
    if rows.dtype != weight.dtype or not rows.numel() or not weight.numel():
        return None
    if not _INT32.min <= options.ignore_index <= _INT32.max:
        return None
    plan = plan_for(_SPEC, rows.device, *rows.shape, weight.shape[0], rows.dtype)
    if plan is None:
        return None
    found = composite.plans(plan_for, plan.config, rows, weight, options, loss=loss, gradient=gradient)
    return None if found is None else plan


def _losses(
    plan: Plan, rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    loss: torch.Tensor = plan.run(rows.get_device(), (rows, weight, target, None, options), tuple)[0]
    return loss


def _made(
    plan: Plan, scale: torch.Tensor, given: tuple[torch.Tensor, ...], options: LossOptions
) -> tuple[torch.Tensor, made_ahead.Gradients]:
    """The loss of each row, and the gradients of rows, weight and a bias of the sum of ``scale * loss``."""
    rows, weight, target = given[0], given[1], given[-1]
    loss, drows, dweight = plan.run(rows.get_device(), (rows, weight, target, scale, options), tuple)
    gradients = drows, None if dweight is None else dweight.to(weight.dtype)
    if options.bias is None:
        return loss, gradients
    beside = options.beside if options.bias_gradient else None
    return loss, (*gradients, None if beside is None else beside.dbias.to(weight.dtype))


# The registered ops, which torch.compile has in its graphs: their arguments are those of LossOptions by name.
_SCHEMA = (
    "Tensor rows, Tensor weight, Tensor labels, Tensor? class_weight, int ignore_index, float label_smoothing, "
    "float? softcap, float z_loss, bool hidden_gradient, bool weight_gradient, bool wide_sums, Tensor? bias, "
    "bool bias_gradient, bool token_scaling, bool predicted"
)
_BIAS = [field.name for field in dataclasses.fields(LossOptions)].index("bias")
# An op's results beside the loss, of which those that nobody asks for are empty.
_BESIDE = "Tensor lse, Tensor shares, Tensor predicted"


def _in_graph(
    rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor | None, options: LossOptions
) -> torch.Tensor:
    """The total with its gradients, in a graph of torch.compile; without a factor the loss of each row."""
    given = (
        rows, weight, labels, options.class_weight, options.ignore_index, options.label_smoothing, options.softcap,
        options.z_loss, options.hidden_gradient, options.weight_gradient, options.wide_sums, options.bias,
        options.bias_gradient, options.token_scaling, options.predicted,
    )  # fmt: skip
    loss: torch.Tensor
    if factor is None:
        loss, *others = _BY_ROW(*given)
    else:
        loss, _, _, _, *others = _TOTAL(factor, *given)
    if options.beside is not None:
        options.beside.lse, shares, predicted = others
        options.beside.shares = shares if options.token_scaling else None
        options.beside.predicted = predicted if options.predicted else None
    return loss


def _run_by_row(
    rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """The loss of each row, and what there is beside."""
    options = _with_room(others)
    plan = _plan(rows, weight, options, loss=True, gradient=False)
    if plan is None:
        loss = _composed(rows, weight, labels, options)
    else:
        target, _ = checked(_NAME, labels, weight.shape[0], options.ignore_index)
        loss = _losses(plan, disjoint(rows), disjoint(weight), target, options)
    return loss, *_told(options, loss)


def _run_gradients(
    slope: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of the sum of ``slope`` [rows] times the loss of each row."""
    return _with_gradients(slope, rows, weight, labels, _with_room(others))[1:]


def _run_total(factor: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """The sum of all losses times ``factor``, its gradients, and what there is beside."""
    rows, weight, labels, *others = given
    options, slope = _with_room(others), factor.expand(labels.shape)
    loss, *gradients = _with_gradients(slope, rows, weight, labels, options)
    return (loss * slope).sum(), *gradients, *_told(options, loss)


def _with_room(others: Sequence[Any]) -> LossOptions:
    return dataclasses.replace(LossOptions(*others), beside=composite.Beside())


def _told(options: LossOptions, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    beside = options.beside or composite.Beside()
    empty = loss.new_empty(0), loss.new_empty(0, dtype=torch.int64)
    shares, predicted = (
        x if found is None else found for found, x in zip((beside.shares, beside.predicted), empty, strict=True)
    )
    return beside.lse, shares, predicted


def _with_gradients(
    slope: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, ...]:
    """The loss of each row and the gradients by rows, weight and bias of their sum with slopes.

    One that is not wanted is empty.
    """
    plan = _plan(rows, weight, options, loss=options.token_scaling, gradient=True)
    if plan is None:
        loss = _composed(rows, weight, labels, options)
        places = [place for place, is_wanted in enumerate(_wanted(options)) if is_wanted]
        given = rows, weight, options.bias, labels, options
        made = by_autograd(_composed_with, given, places, (slope.to(loss.dtype),))
        found = dict(zip(places, made, strict=True))
    else:
        target, _ = checked(_NAME, labels, weight.shape[0], options.ignore_index)
        loss, made = _made(plan, slope.float().contiguous(), (disjoint(rows), disjoint(weight), target), options)
        found = {place: x for place, x in enumerate(made) if x is not None}
    return loss, *(found.get(place, rows.new_empty(0)) for place in range(3))


def _composed_with(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    return _composed(rows, weight, labels, dataclasses.replace(options, bias=bias))


def _wanted(options: LossOptions) -> tuple[bool, bool, bool]:
    return options.hidden_gradient, options.weight_gradient, options.bias_gradient


def _fake_by_row(rows: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    loss = rows.new_empty(rows.shape[:1], dtype=torch.promote_types(rows.dtype, torch.float32))
    return loss, *_fake_told(loss, given)


def _fake_told(loss: torch.Tensor, given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    options = LossOptions(*given[2:])
    return (
        torch.empty_like(loss),
        loss.new_empty(loss.shape if options.token_scaling else (0,)),
        loss.new_empty(loss.shape if options.predicted else (0,), dtype=torch.int64),
    )


def _fake_gradients(_: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    rows, weight, options = *given[:2], LossOptions(*given[3:])
    shapes = rows.shape, weight.shape, weight.shape[:1]
    return tuple(
        rows.new_empty(shape if is_wanted else (0,)) for shape, is_wanted in zip(shapes, _wanted(options), strict=True)
    )


def _fake_total(factor: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    _, *told = _fake_by_row(*given)
    return torch.empty_like(factor), *_fake_gradients(factor, *given), *told


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    others = list(inputs[4:])
    ctx.save_for_backward(*inputs[:4], others[_BIAS - 1])
    others[_BIAS - 1] = None
    ctx.others = others


def _from_inputs(ctx: Any, dloss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    *saved, bias = ctx.saved_tensors
    others = [*ctx.others[: _BIAS - 1], bias, *ctx.others[_BIAS:]]
    return _by_inputs(_wanted(LossOptions(None, *others)), _GRADIENTS(dloss, *saved, *others))


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:4])
    ctx.wanted = _wanted(LossOptions(None, *inputs[5:]))


def _from_gradients(ctx: Any, dloss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """A graph's saved gradients belong to it, and its compiler may multiply them in place."""
    made = tuple((x * dloss).to(x.dtype) for x in ctx.saved_tensors)
    return None, *_by_inputs(ctx.wanted, made)


def _by_inputs(wanted: Sequence[bool], made: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Gradients at their places among the inputs: rows, weight and labels, then the options."""
    drows, dweight, dbias = (x if is_wanted else None for x, is_wanted in zip(made, wanted, strict=True))
    by_option = [None] * (len(dataclasses.fields(LossOptions)) - 1)
    return drows, dweight, None, *by_option[:_BIAS], dbias, *by_option[_BIAS + 1 :]


_BY_ROW = register(f"linear_cross_entropy_by_row({_SCHEMA}) -> (Tensor loss, {_BESIDE})", _run_by_row, _fake_by_row)
_GRADIENTS = register(
    f"linear_cross_entropy_gradients(Tensor slope, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
)
_TOTAL = register(
    f"linear_cross_entropy_total(Tensor factor, {_SCHEMA}) -> "
    f"(Tensor total, Tensor drows, Tensor dweight, Tensor dbias, {_BESIDE})",
    _run_total,
    _fake_total,
)
register_gradient(_BY_ROW, _from_inputs, _keep_inputs)
register_gradient(_TOTAL, _from_gradients, _keep_gradients)
