"""The Jensen-Shannon divergence of a student's head from a teacher's, without the logits of either: chunk by chunk.

For each chunk of rows: the student's logits; for each part of the chunk the teacher's logits, the loss, and the
gradient over the student's logits (:mod:`tilekern.kernels.logits_jsd`); then the products for the student's hidden
states and weight (:mod:`tilekern.kernels.composites.head`). The teacher gets no gradient, so its logits are not needed
after the student's gradient. If fewer teacher rows are in memory, the student's chunks may be longer: for 4096 rows by
128256 columns, two chunks of 2048 take 2 to 6 % less time on an H200 than three of 1408, which do not fill the last
wave of the product for the hidden states; each chunk also adds to the weight's gradient.

If two distributions are almost equal, their divergence is a small difference, and 16 bits of a logit are too few for
its gradient. With ``wide_logits`` the logits of both heads are float32, for one part of the chunk at a time, and only
the gradient is rounded. Chunks are half as long then, so that memory does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilekern.kernels import logits_jsd
from tilekern.kernels.composites.head import (
    GENERIC_CHUNK,
    STEP,
    Head,
    PlanFor,
    axes,
    chunk_plans,
    chunks,
    gradients_of,
    rows_that_fit,
    spec_of_head,
    split,
    whole,
)
from tilekern.spec import ITEM_BYTES, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# A chunk of the student's rows, and for each of its parts the plans of the loss and of the gradient.
Plans = list[tuple[slice, list[tuple[Any, ...]]]]
_PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Options:
    """The loss's parameters, the gradients to compute, and whether sums and logits are float32 for 16-bit inputs."""

    beta: float = 0.5
    temperature: float = 1.0
    hidden_gradient: bool = True
    weight_gradient: bool = True
    wide_sums: bool = False
    wide_logits: bool = False

    @property
    def graded(self) -> bool:
        """Return whether a gradient is wanted."""
        return self.hidden_gradient or self.weight_gradient


def _rows_of_part(config: Config) -> int:
    """Return the number of the teacher's rows whose logits are held at the same time."""
    return min(int(config["chunk"]), whole(cdiv(config["chunk"], config["parts"])))


def plans(
    plan_for: PlanFor, config: Config, device: Any, rows: int, vocabulary: int, dtype: Any, options: Options
) -> Plans | None:
    """Return the plans of all chunks, or None if a kernel has none; the gradient's is None if it is not wanted."""
    import torch

    if options.wide_logits:
        # Half as many rows are held, and the logits of a quarter of them.
        config = config.but(chunk=max(STEP, config["chunk"] // 2 // STEP * STEP), parts=max(_PARTS))
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
    """Return the loss of each row times its slope, and the gradients of their sum.

    Args:
        plan_for: gives the plans of the kernels over rows, and of the products.
        config: the student's logits are in memory for ``chunk`` rows, the teacher's for one of ``parts`` parts of a
            chunk; ``products`` chooses the implementation of products.
        student_input: [rows, hidden].
        student_weight: [vocabulary, hidden].
        teacher_input: [rows, teacher_hidden].
        teacher_weight: [vocabulary, teacher_hidden]; all of one dtype.
        slope: float32 [rows]; rows with 0 do not count.
        options: the loss.

    Returns:
        The losses, float32 [rows], dhidden and dweight of the student, None for a gradient that is not wanted; None if
        no kernel serves the problem.
    """
    import torch

    rows, vocabulary, device = len(slope), student_weight.shape[0], student_input.device
    found = plans(plan_for, config, device, rows, vocabulary, student_input.dtype, options)
    if found is None:
        return None
    most, most_of_part = found[0][0].stop, found[0][1][0][0].stop
    graded = (options.hidden_gradient, options.weight_gradient, False)
    student = Head(plan_for, config, student_input, student_weight, most, graded=graded, wide_sums=options.wide_sums)
    # Wide logits are held for one part of a chunk.
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
        # Like a loss scaler: else the gradient of many logits is below float16's smallest number.
        slope *= 4096
    heads = matrices("student", problem["hidden"]) | matrices("teacher", problem["teacher_hidden"])
    return heads | {"slope": slope, "options": Options()}


def reference(
    student_input: Any, student_weight: Any, teacher_input: Any, teacher_weight: Any, slope: Any, options: Options
) -> dict[str, Any]:
    """Return losses and gradients in float64 through rounded logits and their rounded gradient, for a plain loss.

    If many columns are equal, their sums may consist only of rounding errors.
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
    """Return whether both heads' logits fit the limit of one head's logits; the smallest chunk always fits."""
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
    """Return the student's largest chunk, for the fewest sums of the weight's gradient, and the largest part."""
    found = SPEC.space.candidates(problem, target)
    return min((config for config in found if config["products"] == "cublas"), key=lambda c: (-c["chunk"], c["parts"]))


def _bytes(problem: Problem) -> int:
    widths = 2 * problem["hidden"] + problem["teacher_hidden"]
    return int(widths * (problem["rows"] + problem["vocabulary"]) * ITEM_BYTES[problem["dtype"]])


SPEC = spec_of_head(
    loss_and_gradients,
    ("hidden", "teacher_hidden", "vocabulary"),
    name="fused_linear_jsd",
    summary="Jensen-Shannon divergence of two heads and the student's gradients, without the logits",
    space=Space(_axes, (_FEW_BYTES, _FEW_CHUNKS, _WHOLE)),
    default=_default,
    generic=lambda problem: Config(chunk=GENERIC_CHUNK, products="cublas", parts=1),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"loss": ((problem["rows"],), "float32")} | gradients_of(problem),
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: (
        (6 * problem["hidden"] + 2 * problem["teacher_hidden"]) * problem["rows"] * problem["vocabulary"]
    ),
)
SPECS = (SPEC,)
