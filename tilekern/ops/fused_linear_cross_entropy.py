"""fused_linear_cross_entropy: the loss of a language model's head, ``cross_entropy(hidden @ weight.T, target)``.

The logits [tokens, vocabulary] never exist: both gradients are computed chunk by chunk together with the loss
(:mod:`tilekern.ops.made_ahead`). In graphs of ``torch.compile`` this is one step.

It is written by hand and not declared: the forward computes the gradients for one backward, and it runs a composite
whose parts look up their own plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.composites import fused_linear_cross_entropy as composite
from tilekern.kernels.composites.fused_linear_cross_entropy import LossOptions
from tilekern.ops import made_ahead
from tilekern.ops.cross_entropy import CrossEntropyOutput, composed, weights_by_rows, wide, with_others
from tilekern.ops.labels import checked
from tilekern.ops.registration import (
    by_autograd,
    cast_as_products,
    check_head,
    check_ids,
    check_share,
    check_softcap,
    check_tensors,
    check_vectors,
    disjoint,
    first_order,
    is_traced,
    is_transformed,
    needs_gradient,
    refuse_gradient,
    register,
    register_gradient,
    scalar,
    uncast,
)
from tilekern.runtime.dispatch import Plan, count_fallback, own_op_runs, plan_for

_SPEC, _NAME = composite.SPEC, "fused_linear_cross_entropy"
_INT32 = torch.iinfo(torch.int32)


def fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    num_items: Tensor | float | None = None, wide_sums: bool = False, bias: Tensor | None = None,
    use_token_scaling: bool = False, accum_dtype: torch.dtype | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, z_loss_by_rows: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Compute cross entropy of ``hidden @ weight.T + bias`` against ``target``; torch's arguments have torch's meaning.

    Under autocast ``hidden``, ``weight`` and ``bias`` are cast as a linear layer's are.

    Args:
        hidden: [..., hidden].
        weight: [vocabulary, hidden], of the same dtype as ``hidden``.
        target: [...], of an integer dtype; ``ignore_index`` leaves a row out. Any other number that is not a class
            makes the loss NaN, and a later call raises; torch raises at once.
        class_weight: [vocabulary] or None; it gets no gradient.
        ignore_index: the target of rows that do not count.
        reduction: ``mean``, ``sum`` or ``none``. ``none`` computes the logits twice, once for each direction.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
        softcap: logits become ``softcap * tanh(logits / softcap)``; positive and finite.
        z_loss: weight of ``logsumexp(logits)^2``.
        num_items: ``mean`` divides by this instead of the (weighted) number of rows that count, like Hugging Face's
            ``num_items_in_batch``.
        wide_sums: add up the gradient of ``weight`` over the chunks in float32.
        bias: [vocabulary]; its gradient is added up in float32.
        use_token_scaling: multiply the loss of each row by the probability of its target, without a gradient through
            it. The logits are read twice more.
        accum_dtype: Liger's name for ``wide_sums``: float32 turns it on; None or the dtype of ``weight`` does nothing.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return these too. For the last two the logits are
            read once more.
        z_loss_by_rows: with class weights and the reduction ``mean``, divide the z-loss by the number of rows that
            count, as Liger does; otherwise the whole loss is divided by the sum of their class weights.

    Returns:
        float32 (float64 for float64): a scalar, or [...] if the reduction is ``none``; a
        :class:`tilekern.ops.cross_entropy.CrossEntropyOutput` if other results are requested.

    Raises:
        ValueError: shapes or devices do not fit, the target has another dtype, an option has an invalid value,
            ``num_items`` is not one number or the reduction is not ``mean``, or an earlier call on this device got a
            label outside the vocabulary (:func:`tilekern.check_labels`).
    """
    _check(hidden, weight, target, class_weight, bias)
    _check_options(reduction, num_items, label_smoothing, softcap)
    if accum_dtype not in (None, weight.dtype, torch.float32):
        raise ValueError(f"{_NAME}: accum_dtype must be float32 or {weight.dtype}, got {accum_dtype}")
    wide_sums = wide_sums or accum_dtype == torch.float32
    hidden, weight = cast_as_products(hidden, weight)
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
        graded = needs_gradient(rows, weight, options.bias)
        at_once = graded and reduction != "none" and rows.dtype != torch.float16
        plan = _plan(rows, weight, options, loss=not at_once or use_token_scaling, gradient=graded)
    elif is_transformed():
        count_fallback(_SPEC)
    if plan is not None:
        labels, counted = checked(_NAME, labels, weight.shape[0], ignore_index)
    factor = _factor(labels, counted, options, reduction, num_items, dtype)
    with uncast(hidden.device.type):
        loss = _loss(plan, rows, weight, labels, factor, options)
    if loss.dim():
        loss = loss.view(target.shape) if factor is None else loss.sum() * factor
    if not any(wanted):
        return loss

    def total(rows: Tensor) -> Tensor:
        rows = rows if beside.shares is None else rows * beside.shares
        return rows.view(target.shape) if factor is None else rows.sum() * factor

    predicted = None if beside.predicted is None else beside.predicted.view(target.shape)
    return with_others(loss, wanted, beside.lse, predicted, target, options, total, by_row=factor is None)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor | None, bias: Tensor | None) -> None:
    check_head(_NAME, hidden=hidden, weight=weight)
    check_ids(_NAME, "target", target, hidden=hidden)
    check_vectors(_NAME, weight.shape[0], class_weight=class_weight, bias=bias)
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError(f"{_NAME}: class_weight gets no gradient; detach it")
    check_tensors(_NAME, "target", hidden=hidden, weight=weight, target=target, class_weight=class_weight, bias=bias)


def _check_options(reduction: str, num_items: Any, label_smoothing: float, softcap: float | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{_NAME}: reduction must be mean, sum or none, got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{_NAME}: num_items goes with the reduction mean, not {reduction}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"{_NAME}: num_items must be one number, got {list(num_items.shape)}")
    check_share(_NAME, "label_smoothing", label_smoothing)
    check_softcap(_NAME, softcap)


def _factor(
    labels: Tensor, counted: Tensor | None, options: LossOptions, reduction: str, num_items: Any, dtype: torch.dtype
) -> Tensor | None:
    """Return the factor of the sum of all losses, a scalar of ``dtype``; None if the rows are not summed.

    ``counted`` sums to the number of labels that count; None if they were not counted.
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


def _loss(
    plan: Plan | None, rows: Tensor, weight: Tensor, target: Tensor, factor: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the total if its gradients are computed with it, else the loss of each row; by torch without a plan."""
    if is_traced(rows) and not is_transformed():
        at_once = needs_gradient(rows, weight, options.bias) and rows.dtype != torch.float16
        return _in_graph(rows, weight, target, factor if at_once else None, options)
    if plan is None:
        return _composed(rows, weight, target, options)
    rows, weight = disjoint(rows), disjoint(weight)
    if not needs_gradient(rows, weight, options.bias):
        return _losses(plan, rows, weight, target, options)
    sources = [rows, weight] if options.bias is None else [rows, weight, options.bias]
    # Everything that a backward may read again, so that autograd notices changes in between.
    weighting = [] if options.class_weight is None else [options.class_weight]
    tensors = *sources, *weighting, target

    def known(given: tuple[Tensor, ...]) -> LossOptions:
        return dataclasses.replace(options, class_weight=given[-2]) if weighting else options

    if factor is None or rows.dtype == torch.float16:
        return made_ahead.rows(
            lambda *given: _losses(plan, given[0], given[1], given[-1], known(given)),
            lambda slope, *given: _made(plan, slope, given, known(given))[1], len(sources), *tensors,
        )  # fmt: skip
    scale = factor.expand(target.shape).contiguous()

    def total(*given: Tensor) -> tuple[Tensor, made_ahead.Gradients]:
        loss, gradients = _made(plan, scale, given, known(given))
        return (loss * scale).sum(), gradients

    return made_ahead.total(total, len(sources), *tensors)


def _composed(rows: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Compute the loss of each row in torch's own operations."""
    logits = torch.nn.functional.linear(rows, weight, options.bias)
    loss = composed(logits, labels, options)
    if options.beside is None:
        return loss
    known = logits.detach()
    beside = composite.room_beside(options, wide(known, options.softcap).logsumexp(-1))
    composite.note(beside, slice(None), known, labels, options)
    return loss if beside.shares is None else loss * beside.shares


def _plan(rows: Tensor, weight: Tensor, options: LossOptions, *, loss: bool, gradient: bool) -> Plan | None:
    """Return the plan, for the loss alone or with its gradient; None, counted as a fallback, if torch must work."""
    fits = rows.dtype == weight.dtype and rows.numel() and weight.numel()
    plan = None
    if fits and _INT32.min <= options.ignore_index <= _INT32.max:
        asked = (_SPEC, rows.device, *rows.shape, weight.shape[0], rows.dtype)
        plan = plan_for(*asked)
        if plan and not composite.plans(plan_for, plan.config, rows, weight, options, loss=loss, gradient=gradient):
            own_op_runs(*asked)
            plan = None
    if plan is None:
        count_fallback(_SPEC)
    return plan


def _losses(plan: Plan, rows: Tensor, weight: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    loss: Tensor = plan.run(rows.get_device(), (rows, weight, target, None, options), tuple)[0]
    return loss


def _made(
    plan: Plan, scale: Tensor, given: tuple[Tensor, ...], options: LossOptions
) -> tuple[Tensor, made_ahead.Gradients]:
    """Compute the loss of each row, and the gradients of the sum of ``scale * loss`` by rows, weight and bias."""
    rows, weight, target = given[0], given[1], given[-1]
    loss, drows, dweight = plan.run(rows.get_device(), (rows, weight, target, scale, options), tuple)
    gradients = drows, None if dweight is None else dweight.to(weight.dtype)
    if options.bias is None:
        return loss, gradients
    beside = options.beside if options.bias_gradient else None
    return loss, (*gradients, None if beside is None else beside.dbias.to(weight.dtype))


# The registered ops for graphs of torch.compile: their arguments are the fields of LossOptions, in order.
_SCHEMA = (
    "Tensor rows, Tensor weight, Tensor labels, Tensor? class_weight, int ignore_index, float label_smoothing, "
    "float? softcap, float z_loss, bool hidden_gradient, bool weight_gradient, bool wide_sums, Tensor? bias, "
    "bool bias_gradient, bool token_scaling, bool predicted"
)
_BIAS = [field.name for field in dataclasses.fields(LossOptions)].index("bias")
# Results beside the loss; those that are not requested are empty.
_BESIDE = "Tensor lse, Tensor shares, Tensor predicted"


def _in_graph(rows: Tensor, weight: Tensor, labels: Tensor, factor: Tensor | None, options: LossOptions) -> Tensor:
    """Compute, in a graph of torch.compile, the total with its gradients; without a factor the loss of each row."""
    given = (
        rows, weight, labels, options.class_weight, options.ignore_index, options.label_smoothing, options.softcap,
        options.z_loss, options.hidden_gradient, options.weight_gradient, options.wide_sums, options.bias,
        options.bias_gradient, options.token_scaling, options.predicted,
    )  # fmt: skip
    loss: Tensor
    if factor is None:
        loss, *others = _BY_ROW(*given)
    else:
        loss, _, _, _, *others = _TOTAL(factor, *given)
    if options.beside is not None:
        options.beside.lse, shares, predicted = others
        options.beside.shares = shares if options.token_scaling else None
        options.beside.predicted = predicted if options.predicted else None
    return loss


def _run_by_row(rows: Tensor, weight: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Compute the loss of each row and the results beside it."""
    options = _with_room(others)
    plan = _plan(rows, weight, options, loss=True, gradient=False)
    if plan is None:
        loss = _composed(rows, weight, labels, options)
    else:
        target, _ = checked(_NAME, labels, weight.shape[0], options.ignore_index)
        loss = _losses(plan, disjoint(rows), disjoint(weight), target, options)
    return loss, *_told(options, loss)


def _run_gradients(slope: Tensor, rows: Tensor, weight: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of the sum of ``slope`` [rows] times the loss of each row."""
    return _with_gradients(slope, rows, weight, labels, _with_room(others))[1:]


def _run_total(factor: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Compute the sum of all losses times ``factor``, its gradients, and the results beside it."""
    rows, weight, labels, *others = given
    options, slope = _with_room(others), factor.expand(labels.shape)
    loss, *gradients = _with_gradients(slope, rows, weight, labels, options)
    return (loss * slope).sum(), *gradients, *_told(options, loss)


def _with_room(others: Sequence[Any]) -> LossOptions:
    return dataclasses.replace(LossOptions(*others), beside=composite.Beside())


def _told(options: LossOptions, loss: Tensor) -> tuple[Tensor, ...]:
    beside = options.beside or composite.Beside()
    empty = loss.new_empty(0), loss.new_empty(0, dtype=torch.int64)
    shares, predicted = (
        x if found is None else found for found, x in zip((beside.shares, beside.predicted), empty, strict=True)
    )
    return beside.lse, shares, predicted


def _with_gradients(
    slope: Tensor, rows: Tensor, weight: Tensor, labels: Tensor, options: LossOptions
) -> tuple[Tensor, ...]:
    """Compute the loss of each row and the gradients of ``(slope * loss).sum()`` by rows, weight and bias.

    Gradients that are not wanted are empty.
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


def _composed_with(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: LossOptions) -> Tensor:
    return _composed(rows, weight, labels, dataclasses.replace(options, bias=bias))


def _wanted(options: LossOptions) -> tuple[bool, bool, bool]:
    return options.hidden_gradient, options.weight_gradient, options.bias_gradient


def _fake_by_row(rows: Tensor, *given: Any) -> tuple[Tensor, ...]:
    loss = rows.new_empty(rows.shape[:1], dtype=torch.promote_types(rows.dtype, torch.float32))
    return loss, *_fake_told(loss, given)


def _fake_told(loss: Tensor, given: Sequence[Any]) -> tuple[Tensor, ...]:
    options = LossOptions(*given[2:])
    return (
        torch.empty_like(loss),
        loss.new_empty(loss.shape if options.token_scaling else (0,)),
        loss.new_empty(loss.shape if options.predicted else (0,), dtype=torch.int64),
    )


def _fake_gradients(_: Tensor, *given: Any) -> tuple[Tensor, ...]:
    rows, weight, options = *given[:2], LossOptions(*given[3:])
    shapes = rows.shape, weight.shape, weight.shape[:1]
    return tuple(
        rows.new_empty(shape if is_wanted else (0,)) for shape, is_wanted in zip(shapes, _wanted(options), strict=True)
    )


def _fake_total(factor: Tensor, *given: Any) -> tuple[Tensor, ...]:
    _, *told = _fake_by_row(*given)
    return torch.empty_like(factor), *_fake_gradients(factor, *given), *told


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    others = list(inputs[4:])
    ctx.save_for_backward(*inputs[:4], others[_BIAS - 1])
    others[_BIAS - 1] = None
    ctx.others = others


def _from_inputs(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    *saved, bias = ctx.saved_tensors
    others = [*ctx.others[: _BIAS - 1], bias, *ctx.others[_BIAS:]]
    return _by_inputs(_wanted(LossOptions(None, *others)), _GRADIENTS(dloss, *saved, *others))


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    _, rows, weight, *_ = inputs
    ctx.save_for_backward(*output[1:4], rows, weight, inputs[4 + _BIAS])
    ctx.wanted = _wanted(LossOptions(None, *inputs[5:]))


def _from_gradients(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    """Scale the saved gradients out of place: the graph owns them, and its compiler may fuse this."""
    *made, rows, weight, bias = ctx.saved_tensors
    made = [(x * dloss).to(x.dtype) for x in made]
    return None, *_by_inputs(ctx.wanted, first_order(made, rows, weight, bias))


def _by_inputs(wanted: Sequence[bool], made: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Arrange gradients like the inputs: rows, weight and labels, then the options."""
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
refuse_gradient(_GRADIENTS)
register_gradient(_BY_ROW, _from_inputs, _keep_inputs)
register_gradient(_TOTAL, _from_gradients, _keep_gradients)
