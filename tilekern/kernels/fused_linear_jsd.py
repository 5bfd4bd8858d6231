"""The Jensen-Shannon divergence of a student's head from a teacher's, without the logits of either: chunk by chunk.

For each chunk of rows: the logits of both heads, the loss and the gradient in the place of the student's by one kernel
(:mod:`tilekern.kernels.logits_jsd`), then the products for the student's hidden states and weight
(:mod:`tilekern.kernels.common.head`). The teacher gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilekern.kernels import logits_jsd
from tilekern.kernels.common import head
from tilekern.kernels.common.head import Head, PlanFor, chunk_plans
from tilekern.spec import ITEM_BYTES, Config, Dimension, KernelSpec, LibraryCall, Problem

_HEADS = 2


@dataclass(frozen=True)
class Options:
    """What the loss is made of beside logits; which gradients are wanted, and whether the weight's is float32."""

    beta: float = 0.5
    temperature: float = 1.0
    hidden_gradient: bool = True
    weight_gradient: bool = True
    wide_sums: bool = False

    @property
    def flags(self) -> tuple[bool, bool]:
        """The flags of the kernel over rows, of which the first says whether it makes the gradient."""
        return self.hidden_gradient or self.weight_gradient, logits_jsd.is_pure(self.beta)


def loss_and_gradients(
    plan_for: PlanFor, config: Config, student_input: Any, student_weight: Any, teacher_input: Any,
    teacher_weight: Any, slope: Any, options: Options,
) -> tuple[Any, Any, Any] | None:  # fmt: skip
    """Loss of each row times its slope, and the gradients of the sum of these.

    Args:
        plan_for: gives the plan of the kernel over rows, and of the products.
        config: ``chunk`` rows have their logits at a time; ``products`` says who multiplies.
        student_input: [rows, hidden].
        student_weight: [vocabulary, hidden].
        teacher_input: [rows, teacher_hidden].
        teacher_weight: [vocabulary, teacher_hidden]; all of one dtype.
        slope: float32 [rows]; rows with 0 do not count.
        options: the loss.

    Returns:
        The losses, float32 [rows], dhidden and dweight of the student, None for a gradient that is not wanted; None
        where no kernel serves the problem.
    """
    import torch

    rows, vocabulary = len(slope), student_weight.shape[0]
    device, sizes = student_input.device, (rows, vocabulary, student_input.dtype, *options.flags)
    plans = chunk_plans(plan_for, logits_jsd.SPEC, config["chunk"], device, *sizes)
    if plans is None:
        return None
    most, graded = plans[0][0].stop, (options.hidden_gradient, options.weight_gradient, False)
    student = Head(plan_for, config, student_input, student_weight, most, graded, wide_sums=options.wide_sums)
    teacher = Head(plan_for, config, teacher_input, teacher_weight, most)
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    scalars = logits_jsd.arguments(options.beta, options.temperature)
    for part, plan in plans:
        logits, others = student.logits(part), teacher.logits(part)
        written = (loss[part], logits) if options.flags[0] else (loss[part],)
        plan.launch(student_input.get_device(), logits, others, slope[part], *scalars, *written)
        if options.flags[0]:
            student.take(part, logits)
    return loss, *student.gradients[:2]


_INPUTS = ("student_input", "student_weight", "teacher_input", "teacher_weight", "slope", "options")


def _implement(problem: Problem, config: Config) -> LibraryCall:
    def call(plan_for: PlanFor, *inputs: Any) -> Any:
        return loss_and_gradients(plan_for, config, *inputs)

    return LibraryCall(call, _INPUTS, composite=True)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    dtype, rows, vocabulary = getattr(torch, problem["dtype"]), problem["rows"], problem["vocabulary"]

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    def matrices(name: str, width: int) -> dict[str, Any]:
        weight = normal(vocabulary, width).div_(width**0.5).to(dtype)
        return {f"{name}_input": normal(rows, width).to(dtype), f"{name}_weight": weight}

    slope = torch.rand(rows, generator=generator, device=device) + 0.5
    slope[5::11] = 0
    if dtype == torch.float16:
        # As a scaler of losses has it: else the gradient of many logits is below float16's smallest number.
        slope *= 4096
    heads = matrices("student", problem["hidden"]) | matrices("teacher", problem["teacher_hidden"])
    return heads | {"slope": slope, "options": Options()}


def reference(
    student_input: Any, student_weight: Any, teacher_input: Any, teacher_weight: Any, slope: Any, options: Options
) -> dict[str, Any]:
    """Losses and gradients in float64 through logits and their gradient as they are held, for plain options.

    Where many columns are alike, all that is left of their sums may be what the rounding of each has made.
    """
    assert options == Options(), "the reference knows the plain loss only"
    x, w = student_input.double(), student_weight.double()
    dtype = student_input.dtype
    student = (x @ w.t()).to(dtype).double()
    teacher = (teacher_input.double() @ teacher_weight.double().t()).to(dtype).double()
    found = logits_jsd.expected(student, teacher, slope, options.beta, 1.0, True, False)
    dlogits = found["gradient"].to(dtype).double()
    return {"loss": found["loss"], "dhidden": dlogits @ w, "dweight": dlogits.t() @ x}


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    rows, width, dtype = problem["rows"], problem["hidden"], problem["dtype"]
    return {
        "loss": ((rows,), "float32"), "dhidden": ((rows, width), dtype),
        "dweight": ((problem["vocabulary"], width), dtype),
    }  # fmt: skip


def _bytes(problem: Problem) -> int:
    """Inputs and gradients."""
    widths = 2 * problem["hidden"] + problem["teacher_hidden"]
    return int(widths * (problem["rows"] + problem["vocabulary"]) * ITEM_BYTES[problem["dtype"]])


SPEC = KernelSpec(
    name="fused_linear_jsd",
    summary="Jensen-Shannon divergence of two heads and the student's gradients, without the logits",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("hidden", "exact"),
        Dimension("teacher_hidden", "exact"),
        Dimension("vocabulary", "exact"),
        Dimension("dtype", "dtype"),
    ),
    space=head.space(_HEADS),
    ops=("fused_linear_jsd",),
    implement=_implement,
    default=lambda problem, target: head.default(problem, target, _HEADS),
    generic=head.generic,
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: (
        (6 * problem["hidden"] + 2 * problem["teacher_hidden"]) * problem["rows"] * problem["vocabulary"]
    ),
    result_dtype=lambda problem: problem["dtype"],
    roundings=2,
)
SPECS = (SPEC,)
