"""The generalised Jensen-Shannon divergence of two heads' logits, row by row, with its gradient in the student's place.

With ``x = log_softmax(student / t)`` and ``y = log_softmax(teacher / t)`` each element adds what
:mod:`tilekern.kernels.jsd` says, with the derivative g by x. The gradient by the student's logits is
``(g - softmax(student / t) * sum(g)) / t``. A row is read for both sums of exponentials, once more for the loss and
the sum of g, and a third time while the gradient is written.

A row's loss and gradient are multiplied by its ``slope``; a row whose slope is 0 is not read, whatever it holds. One
whose slope is not finite is NaN: infinity times a derivative near 0 would have the sign of a rounding error.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import jsd
from tilekern.kernels.common import losses
from tilekern.kernels.cross_entropy.problem import matrix, matrix_bytes
from tilekern.kernels.cross_entropy.problem import vector as rows_of
from tilekern.kernels.cross_entropy.tiles import INFINITY, LN_2, NAN, exponential, load_logits, store_row, store_zeros
from tilekern.kernels.log_probs import STEPS_FIT, scan_row
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, power_of_two
from tilekern.spec import (
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
)


def _left(logits, row, c, tile_n, bounded, scale, top, tma):
    """Tile ``c`` of a row, less its maximum; minus infinity beyond the edge."""
    return load_logits(logits, row, c, tile_n, bounded, tma) * scale - top


def _scanned(logits, row, columns, tile_n, unroll, scale):
    """The maximum of a row, its sum of exponentials above that, and the logarithm of the sum; (1, 1) each."""
    top, total, _ = scan_row(logits, logits, row, columns, tile_n, unroll, scale, 1.0, False, False, False)
    return top, total, ct.log2(total) * LN_2


def _terms(student, teacher, row, c, tile_n, bounded, scale, beta, known, pure, tma):
    """What each element adds, the derivative g, and the student's logits less their maximum."""
    of_student, of_teacher = known
    x = _left(student, row, c, tile_n, bounded, scale, of_student[0], tma)
    y = _left(teacher, row, c, tile_n, bounded, scale, of_teacher[0], tma)
    formula = jsd.at_end if ct.static_eval(pure) else jsd.between
    term, derivative = formula(x - of_student[2], y - of_teacher[2], beta)
    return term, derivative, x


def _store(student, teacher, gradient, row, c, tile_n, bounded, scale, beta, known, pure, tma, factor, pulled):
    _, derivative, x = _terms(student, teacher, row, c, tile_n, bounded, scale, beta, known, pure, tma)
    # Of these shares the sum is 1 but for the last bits: where g is alike in a few likely columns, little is left.
    by_logits = (derivative - exponential(x) * (pulled / known[0][1])) * factor
    ct.store(gradient, (row, c), by_logits.astype(gradient.dtype), check_bounds=bounded, allow_tma=False)


def _zeros(gradient, row, columns, tile_n):
    for c in range(gradient.shape[1] // tile_n):
        store_zeros(gradient, row, c, tile_n, False)
    if ct.static_eval(columns % tile_n != 0):
        store_zeros(gradient, row, ct.static_eval(columns // tile_n), tile_n, True)


def _row(student, teacher, slope, loss, gradient, beta, scale, row, columns, tile_n, unroll, pure, tma):
    factor = ct.load(slope, (row,), ())
    if factor == 0.0:
        store_row(loss, row, ct.zeros((1, 1), ct.float32))
        if ct.static_eval(gradient is not None):
            _zeros(gradient, row, columns, tile_n)
    else:
        factor = ct.where(ct.abs(factor) < INFINITY, factor, NAN)
        known = (
            _scanned(student, row, columns, tile_n, unroll, scale),
            _scanned(teacher, row, columns, tile_n, unroll, scale),
        )
        whole = ct.static_eval(columns // tile_n)
        total, pull = ct.zeros((1, tile_n), ct.float32), ct.zeros((1, tile_n), ct.float32)
        for c in range(student.shape[1] // tile_n):
            term, derivative, _ = _terms(student, teacher, row, c, tile_n, False, scale, beta, known, pure, tma)
            total, pull = total + term, pull + derivative
        if ct.static_eval(columns % tile_n != 0):
            term, derivative, _ = _terms(student, teacher, row, whole, tile_n, True, scale, beta, known, pure, tma)
            total, pull = total + term, pull + derivative
        store_row(loss, row, ct.sum(total, axis=1, keepdims=True) * factor)
        if ct.static_eval(gradient is not None):
            pulled, factor = ct.sum(pull, axis=1, keepdims=True), factor * scale
            # Last tile first: what the second read left in the L2 cache.
            if ct.static_eval(columns % tile_n != 0):
                _store(
                    student, teacher, gradient, row, whole, tile_n, True, scale, beta, known, pure, tma, factor,
                    pulled,
                )  # fmt: skip
            for step in range(student.shape[1] // tile_n):
                _store(
                    student, teacher, gradient, row, whole - 1 - step, tile_n, False, scale, beta, known, pure, tma,
                    factor, pulled,
                )  # fmt: skip


def _each_row(
    student, teacher, slope, loss, gradient, beta, scale, columns, tile_n, unroll, persistent, pure, tma
):  # fmt: skip
    if ct.static_eval(persistent):
        for row in range(ct.bid(0), student.shape[0], ct.num_blocks(0)):
            _row(student, teacher, slope, loss, gradient, beta, scale, row, columns, tile_n, unroll, pure, tma)
    else:
        _row(student, teacher, slope, loss, gradient, beta, scale, ct.bid(0), columns, tile_n, unroll, pure, tma)


@ct.kernel
def logits_jsd_losses(
    student, teacher, slope, beta, scale, loss, columns: ConstInt, tile_n: ConstInt, unroll: ConstInt,
    persistent: ConstBool, pure: ConstBool, tma: ConstBool,
):  # fmt: skip
    """student and teacher [rows, vocabulary], slope and loss [rows]."""
    _each_row(student, teacher, slope, loss, None, beta, scale, columns, tile_n, unroll, persistent, pure, tma)


@ct.kernel
def logits_jsd_gradients(
    student, teacher, slope, beta, scale, loss, gradient, columns: ConstInt, tile_n: ConstInt, unroll: ConstInt,
    persistent: ConstBool, pure: ConstBool, tma: ConstBool,
):  # fmt: skip
    """The same, and the gradient [rows, vocabulary], which may be the memory of the student's logits."""
    _each_row(student, teacher, slope, loss, gradient, beta, scale, columns, tile_n, unroll, persistent, pure, tma)


def arguments(beta: float, temperature: float) -> tuple[float, float]:
    """The scalars of the kernels."""
    return float(beta), 1.0 / temperature


def is_pure(beta: float) -> bool:
    """The flag ``pure`` for a beta."""
    return beta in (0, 1)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["vocabulary"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in (512, 1024, 2048)}),
        "unroll": [1, 2, 4],
        "num_worker_warps": [0, 8],
        "occupancy": [2, 4],
        "tma": [True, False],
    }


_THREADS_FULL = Constraint(
    "a tile gives each thread 4 or 8 elements, fewer only where a row is shorter than that",
    lambda problem, config, target: (
        config["tile_n"] // (32 * (config["num_worker_warps"] or 4)) in (4, 8)
        or config["tile_n"] == power_of_two(problem["vocabulary"]) < 2048
    ),
)
_ROW_IS_LONGER = Constraint(
    "a step of several tiles is no longer than a row",
    lambda problem, config, target: (
        config["unroll"] == 1 or config["tile_n"] * config["unroll"] <= problem["vocabulary"]
    ),
)


def _config(problem: Problem, most: int, unroll: int, *, tma: bool) -> Config:
    tile_n = min(most, power_of_two(problem["vocabulary"]))
    unroll = unroll if tile_n * unroll <= problem["vocabulary"] else 1
    return Config(schedule="persistent", tile_n=tile_n, unroll=unroll, num_worker_warps=0, occupancy=4, tma=tma)


def _implement(problem: Problem, config: Config) -> Implementation:
    graded = problem["graded"]
    return Implementation(
        function=logits_jsd_gradients if graded else logits_jsd_losses,
        parameters=(
            matrix("student", problem), matrix("teacher", problem), rows_of("slope"),
            ScalarParameter("beta", "float32"), ScalarParameter("scale", "float32"), rows_of("loss", role="output"),
            *([matrix("gradient", problem, "output")] if graded else []),
        ),
        constants=(
            ("columns", problem["vocabulary"]), ("tile_n", config["tile_n"]), ("unroll", config["unroll"]),
            ("persistent", config["schedule"] == "persistent"), ("pure", problem["pure"]),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )  # fmt: skip


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    dtype, size = getattr(torch, problem["dtype"]), (problem["rows"], problem["vocabulary"])
    slope = normal(problem["rows"])
    slope[5::11] = 0
    logits = {name: (2 * normal(*size)).to(dtype) for name in ("student", "teacher")}
    return logits | {"slope": slope, "beta": 0.25, "scale": 0.75}


def expected(
    student: Any, teacher: Any, slope: Any, beta: float, scale: float, graded: bool, pure: bool
) -> dict[str, Any]:
    """The losses of all rows of float64 logits, and their gradient by the student's."""
    x, y = (student * scale).log_softmax(-1), (teacher * scale).log_softmax(-1)
    terms, derivative = jsd.reference_terms(x, y, beta, pure)
    factor = slope.where(slope.isfinite(), float("nan"))
    by_logits = (derivative - x.exp() * derivative.sum(-1, keepdim=True)) * scale
    return losses.expected(terms, by_logits, factor, graded)


def reference(
    student: Any, teacher: Any, slope: Any, beta: float, scale: float, graded: bool, pure: bool
) -> dict[str, Any]:
    """The losses of all rows in float64, and their gradient by the student's logits."""
    return expected(student.double(), teacher.double(), slope, beta, scale, graded, pure)


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    loss: dict[str, tuple[tuple[int, ...], str]] = {"loss": ((problem["rows"],), "float32")}
    size = (problem["rows"], problem["vocabulary"])
    return loss | ({"gradient": (size, problem["dtype"])} if problem["graded"] else {})


SPEC = KernelSpec(
    name="logits_jsd",
    summary="loss = slope * JSD(softmax(teacher) || softmax(student)) of each row of logits, and its gradient in place",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("vocabulary", "exact"),
        Dimension("dtype", "dtype"),
        Dimension("graded", "flag"),
        Dimension("pure", "flag"),
    ),
    space=Space(_axes, (_THREADS_FULL, _ROW_IS_LONGER, STEPS_FIT, TMA_NEEDS_HOPPER)),
    ops=("fused_linear_jsd",),
    implement=_implement,
    # Loads of the passes over both rows that wait in registers, and not by TMA in shared memory, make them spill.
    default=lambda problem, target: _config(problem, 1024, 4, tma=target.capability >= 90),
    generic=lambda problem: _config(problem, 256, 1, tma=False),
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    bytes_moved=lambda problem: (2 + problem["graded"]) * matrix_bytes(problem) + 8 * problem["rows"],
    flops=lambda problem: (30 + 30 * problem["graded"]) * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)
SPECS = (SPEC,)
