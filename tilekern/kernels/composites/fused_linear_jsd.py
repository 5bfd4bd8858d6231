"""The Jensen-Shannon divergence of a student's head from a teacher's, without the logits of either: chunk by chunk.

For each chunk of rows: the student's logits; part by part of the chunk the teacher's, the loss and the gradient in the
place of the student's (:mod:`tilekern.kernels.logits_jsd`); then the products for the student's hidden states and
weight (:mod:`tilekern.kernels.composites.head`). The teacher gets no gradient, so its logits are of no use once the
student's gradient is made. The fewer of its rows are held, the more of the student's may be: of 4096 rows by 128256
columns, two chunks of 2048 in the place of three of 1408 take 2 to 6 % less time on an H200, where 1408 rows do not
fill the last wave of the product for the hidden states and each chunk adds to the weight's gradient.

Where two distributions are almost alike, their divergence is a small difference, and 16 bits of a logit are too few for
its gradient. With ``wide_logits`` the logits of both heads are float32, of a part of the chunk at a time, and the
gradient is rounded when it is made. Chunks are half as long then, so that no more memory is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilekern.kernels import logits_jsd
from tilekern.kernels.composites.head import (
    STEP,
    Head,
    PlanFor,
    axes,
    chunk_plans,
    chunks,
    generic,
    gradients_of,
    implemented_by,
    rows_that_fit,
    split,
    whole,
)
from tilekern.spec import ITEM_BYTES, Config, Constraint, Dimension, KernelSpec, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# A chunk of the student's rows with, for each part of it, the plans of the loss and of the gradient.
Plans = list[tuple[slice, list[tuple[Any, ...]]]]
_PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Options:
    """The loss's parameters beside logits; which gradients are wanted; what is float32 for inputs of 16 bits."""

    beta: float = 0.5
    temperature: float = 1.0
    hidden_gradient: bool = True
    weight_gradient: bool = True
    wide_sums: bool = False
    wide_logits: bool = False

    @property
    def graded(self) -> bool:
        """Whether a gradient is wanted."""
        return self.hidden_gradient or self.weight_gradient


def _rows_of_part(config: Config) -> int:
    """The teacher's rows whose logits are held at the same time."""
    return min(int(config["chunk"]), whole(cdiv(config["chunk"], config["parts"])))


def _of_options(config: Config, options: Options) -> Config:
    """The config of the rows that are held; with ``wide_logits`` half as many, and of a quarter of them the logits."""
    if not options.wide_logits:
        return config
    return config.but(chunk=max(STEP, config["chunk"] // 2 // STEP * STEP), parts=max(_PARTS))


def plans(
    plan_for: PlanFor, config: Config, device: Any, rows: int, vocabulary: int, dtype: Any, options: Options
) -> Plans | None:
    """All chunks; None where a kernel over rows has no plan. Without a gradient the second plan of a part is None."""
    import torch

    config = _of_options(config, options)
    specs = (logits_jsd.FORWARD, logits_jsd.BACKWARD if options.graded else None)
    sizes = (vocabulary, torch.float32 if options.wide_logits else dtype, logits_jsd.is_pure(options.beta))
    found: Plans = []
    for chunk in split(rows, config["chunk"]):
        parts = chunk_plans(plan_for, specs, _rows_of_part(config), device, chunk.stop - chunk.start, *sizes)
        if parts is None:
            return None
        found.append((chunk, parts))
    return found


def loss_and_gradients(
    plan_for: PlanFor, config: Config, student_input: Any, student_weight: Any, teacher_input: Any,
    teacher_weight: Any, slope: Any, options: Options,
) -> tuple[Any, Any, Any] | None:  # fmt: skip
    """Loss of each row times its slope, and the gradients of the sum of these.

    Args:
        plan_for: gives the plans of the kernels over rows, and of the products.
        config: ``chunk`` rows have the student's logits at a time, and one of so many ``parts`` of them the teacher's;
            ``products`` says who multiplies.
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

    rows, vocabulary, device = len(slope), student_weight.shape[0], student_input.device
    found = plans(plan_for, config, device, rows, vocabulary, student_input.dtype, options)
    if found is None:
        return None
    most, most_of_part = found[0][0].stop, found[0][1][0][0].stop
    graded = (options.hidden_gradient, options.weight_gradient, False)
    student = Head(plan_for, config, student_input, student_weight, most, graded=graded, wide_sums=options.wide_sums)
    # For wide logits, which are held for a part of a chunk alone.
    wide = Head(plan_for, config, student_input, student_weight, most_of_part, wide_logits=True)
    teacher = Head(plan_for, config, teacher_input, teacher_weight, most_of_part, wide_logits=options.wide_logits)
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    sums = [torch.empty_like(loss[:most_of_part]) for _ in range(3)]
    scalars, number = logits_jsd.arguments(options.beta, options.temperature), student_input.get_device()
    for chunk, parts in found:
        logits = None if options.wide_logits else student.logits(chunk)
        for part, forward, backward in parts:
            of_all = slice(chunk.start + part.start, chunk.start + part.stop)
            mine = wide.logits(of_all) if logits is None else logits[part]
            others, of_rows = teacher.logits(of_all), slope[of_all]
            of_part = [x[: part.stop - part.start] for x in sums]
            forward.launch(number, mine, others, of_rows, *scalars, loss[of_all], *of_part)
            if backward is not None:
                backward.launch(number, mine, others, of_rows, *of_part, *scalars, mine)
                if logits is None:
                    student.room(chunk)[part].copy_(mine)
        if options.graded:
            student.take(chunk)
    return loss, *student.gradients[:2]


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
    """Losses and gradients in float64 through logits and their gradient as they are held, for a plain loss.

    Where many columns are alike, all that is left of their sums may be what the rounding of each has made.
    """
    assert options in (Options(), Options(wide_logits=True)), "the reference knows the plain loss only"
    x, w, y = student_input.double(), student_weight.double(), teacher_input.double()
    dtype = student_input.dtype
    student, teacher = x @ w.t(), y @ teacher_weight.double().t()
    if not options.wide_logits:
        student, teacher = (logits.to(dtype).double() for logits in (student, teacher))
    found = logits_jsd.expected(student, teacher, slope, options.beta, 1.0, True, False)
    dlogits = found["gradient"].to(dtype).double()
    return {"loss": found["loss"], "dhidden": dlogits @ w, "dweight": dlogits.t() @ x}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return axes(problem) | {"parts": [*_PARTS]}


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    """Whether both heads' logits take no more than those of one head may; the least chunk always does."""
    chunk = config["chunk"]
    return chunk == min(chunks(problem)) or chunk + _rows_of_part(config) <= rows_that_fit(problem)


def _is_large(problem: Problem, config: Config, target: Target) -> bool:
    pairs = ((chunk, config.but(chunk=chunk, parts=parts)) for chunk in chunks(problem) for parts in _PARTS)
    return bool(2 * config["chunk"] > max(chunk for chunk, other in pairs if _fits(problem, other, target)))


_FEW_BYTES = Constraint("the student's and the teacher's logits take more than 700 MiB together", _fits)
_FEW_CHUNKS = Constraint("twice as many rows fit, which read and write the weight's gradient half as often", _is_large)
_WHOLE = Constraint(
    "parts are less than a tile of the products",
    lambda problem, config, target: config["parts"] == 1 or config["chunk"] >= STEP * config["parts"],
)


def _default(problem: Problem, target: Target) -> Config:
    """The student's largest chunk: the fewest sums of the weight's gradient. Then the teacher's largest part."""
    found = SPEC.space.candidates(problem, target)
    return min((config for config in found if config["products"] == "cublas"), key=lambda c: (-c["chunk"], c["parts"]))


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
    space=Space(_axes, (_FEW_BYTES, _FEW_CHUNKS, _WHOLE)),
    implement=implemented_by(
        loss_and_gradients,
        ("student_input", "student_weight", "teacher_input", "teacher_weight", "slope", "options"),
    ),
    default=_default,
    generic=lambda problem: generic(problem).but(parts=1),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"loss": ((problem["rows"],), "float32")} | gradients_of(problem),
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: (
        (6 * problem["hidden"] + 2 * problem["teacher_hidden"]) * problem["rows"] * problem["vocabulary"]
    ),
    result_dtype=lambda problem: problem["dtype"],
    roundings=2,
)
SPECS = (SPEC,)
