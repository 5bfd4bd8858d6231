"""fused_linear_jsd: the divergence of a student's head from a teacher's, with the arguments of Liger's function.

Neither head's logits [tokens, vocabulary] exist: the student's gradients are computed chunk by chunk together with the
loss (:mod:`tilekern.ops.made_ahead`). ``torch.compile`` gets torch's own operations, with logits.

It is written by hand and not declared: the forward computes the gradients for one backward, and it runs a composite
whose parts look up their own plans.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilekern.kernels.composites import fused_linear_jsd as composite
from tilekern.kernels.composites.fused_linear_jsd import Options
from tilekern.ops import made_ahead, row_losses
from tilekern.ops.jsd import terms
from tilekern.ops.registration import (
    cast_as_products,
    check_head,
    check_share,
    check_temperature,
    check_tensors,
    disjoint,
    is_traced,
    needs_gradient,
    uncast,
)
from tilekern.runtime.dispatch import Plan, count_fallback, own_op_runs, plan_for

_SPEC = composite.SPEC


def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None, *, wide_logits: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`tilekern.ops.jsd` of ``log_softmax(input @ weight.T / temperature)`` of a student and a teacher.

    Under autocast inputs and weights are cast as a linear layer's are. Only the student gets gradients, as in Liger.

    Args:
        student_input: [..., hidden]; bfloat16, float16 or float32, any strides.
        student_weight: [vocabulary, hidden].
        teacher_input: [..., teacher_hidden], with the leading dimensions of the student's.
        teacher_weight: [vocabulary, teacher_hidden]; all of one dtype, else the formula runs, with logits.
        shift_labels: [...] or None; rows whose label is ``ignore_index`` do not count.
        jsd_beta: from 0 to 1.
        ignore_index: the label of rows that do not count.
        temperature: positive and finite.
        accum_dtype: ``torch.float32`` adds up the gradient of the weight over chunks of rows in float32; None in the
            weight's dtype.
        wide_logits: keep logits in float32; otherwise they are rounded to the inputs' dtype. It is needed for a student
            close to its teacher: with bfloat16 inputs the gradient may otherwise be off by 10 %.

    Returns:
        The sum of the rows' divergences divided by the number of rows that count, a scalar in float32 (float64 for
        float64); 0 if no row counts.

    Raises:
        ValueError: shapes or devices do not fit, or an option has an invalid value.
    """
    given = {
        "student_input": student_input, "student_weight": student_weight, "teacher_input": teacher_input,
        "teacher_weight": teacher_weight,
    }  # fmt: skip
    _check(given, shift_labels)
    check_share("fused_linear_jsd", "jsd_beta", jsd_beta)
    check_temperature("fused_linear_jsd", temperature)
    if accum_dtype not in (None, torch.float32):
        raise ValueError(f"fused_linear_jsd: accum_dtype must be torch.float32 or None, got {accum_dtype}")
    given = dict(zip(given, cast_as_products(*given.values()), strict=True))
    given |= {name: given[name].detach() for name in ("teacher_input", "teacher_weight")}
    student, teacher = (given[name].reshape(-1, given[name].shape[-1]) for name in ("student_input", "teacher_input"))
    labels = None if shift_labels is None else shift_labels.reshape(-1)
    slope = row_losses.slopes("fused_linear_jsd", "student_input", student, labels, ignore_index, 1)
    options = Options(
        float(jsd_beta), float(temperature), student.requires_grad, given["student_weight"].requires_grad,
        accum_dtype == torch.float32, wide_logits and student.dtype in (torch.bfloat16, torch.float16),
    )  # fmt: skip
    with uncast(student_input.device.type):
        return _loss(student, given["student_weight"], teacher, given["teacher_weight"], slope, options)


def _check(given: dict[str, Tensor], labels: Tensor | None) -> None:
    student, student_weight, teacher, teacher_weight = given.values()
    check_head("fused_linear_jsd", student_input=student, student_weight=student_weight)
    check_head("fused_linear_jsd", teacher_input=teacher, teacher_weight=teacher_weight)
    if student.shape[:-1] != teacher.shape[:-1] or student_weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            "fused_linear_jsd: student and teacher must have the same rows and vocabulary, got "
            f"{list(student.shape[:-1])} and {list(teacher.shape[:-1])} rows, vocabularies of "
            f"{student_weight.shape[0]} and {teacher_weight.shape[0]}"
        )
    if labels is not None and labels.shape != student.shape[:-1]:
        raise ValueError(
            f"fused_linear_jsd: shift_labels must be {list(student.shape[:-1])} like the rows of student_input, got "
            f"{list(labels.shape)}"
        )
    check_tensors("fused_linear_jsd", "shift_labels", **given, shift_labels=labels)


def _loss(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, slope: Tensor, options: Options
) -> Tensor:
    tensors = (student, student_weight, teacher, teacher_weight)
    graded = needs_gradient(student, student_weight)
    options = options if graded else _ungraded(options)
    plan = None if is_traced(student) else _plan(*tensors, options)
    if plan is None:
        if not torch.compiler.is_compiling():
            count_fallback(_SPEC)
        return _composed(*tensors, slope, options)
    tensors = tuple(map(disjoint, tensors))
    if not graded:
        return _run(plan, *tensors, slope, options)[0].sum()
    if student.dtype == torch.float16:
        # The loss scale comes with the backward: the forward counts rows fully, and they are weighted afterwards.
        counted = (slope != 0).float()
        losses = made_ahead.rows(
            lambda *given: _run(plan, *given, counted, _ungraded(options))[0],
            lambda dloss, *given: _run(plan, *given, dloss * counted, options)[1:],
            2, *tensors,
        )  # fmt: skip
        return (slope * losses).sum()

    def total(*given: Tensor) -> tuple[Tensor, made_ahead.Gradients]:
        loss, *gradients = _run(plan, *given, slope, options)
        return loss.sum(), tuple(gradients)

    return made_ahead.total(total, 2, *tensors)


def _ungraded(options: Options) -> Options:
    return dataclasses.replace(options, hidden_gradient=False, weight_gradient=False)


def _plan(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, options: Options
) -> Plan | None:
    """Return the plan of the problem; None if torch must do the work."""
    dtype, vocabulary = student.dtype, student_weight.shape[0]
    tensors = (student, student_weight, teacher, teacher_weight)
    if any(x.dtype != dtype or not x.numel() for x in tensors):
        return None
    asked = (_SPEC, student.device, *student.shape, teacher.shape[1], vocabulary, dtype)
    plan = plan_for(*asked)
    if plan is None:
        return None
    found = composite.plans(plan_for, plan.config, student.device, len(student), vocabulary, dtype, options)
    if found is None:
        own_op_runs(*asked)
    return None if found is None else plan


def _run(plan: Plan, *inputs: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the loss of each row times its slope, and the gradients of the student's input and weight."""
    student, student_weight = inputs[:2]
    assert isinstance(student, Tensor)
    assert isinstance(student_weight, Tensor)
    loss, dstudent, dweight = plan.run(student.get_device(), inputs, tuple)
    return loss, dstudent, None if dweight is None else dweight.to(student_weight.dtype)


def _composed(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, slope: Tensor, options: Options
) -> Tensor:
    """Compute the loss in torch's own operations."""

    def log_probs(x: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.float32 if options.wide_logits else torch.promote_types(x.dtype, weight.dtype)
        logits = x.to(dtype) @ weight.to(dtype).t()
        return (logits.to(slope.dtype) / options.temperature).log_softmax(-1)

    x, y = log_probs(student, student_weight), log_probs(teacher, teacher_weight)
    return row_losses.total(terms, x, y, slope, options.beta)
