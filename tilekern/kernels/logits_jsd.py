"""The generalised Jensen-Shannon divergence of two heads' logits, and its gradient, which may overwrite the student's.

With ``x = log_softmax(student / t)`` and ``y = log_softmax(teacher / t)`` each element adds the term of
:mod:`tilekern.kernels.jsd`, with the derivative g by x. The gradient by the student's logits is
``g - softmax(student / t) * sum(g)``, over t. Two kernels: the forward reads a row once for both sums of exponentials
and once more for the loss and the sum of g; the backward reads these sums of each row, so that each tile of the
gradient needs only that tile of the logits. In one kernel all rows of a chunk would be in the same phase: for bfloat16
with 128256 columns, an H200 took 308 us for 512 rows and 1050 us for 2048.

A row's loss and gradient are multiplied by its ``slope``; a row with the slope 0 is not read, whatever it holds. If the
slope is not finite, the row is NaN: infinity times a derivative near 0 would have the sign of a rounding error.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels import jsd
from tilekern.kernels.cross_entropy import tiles as shared
from tilekern.kernels.families import losses
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.log_probs import STEPS_FIT
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, each_step, power_of_two
from tilekern.spec import Array, Config, Constraint, Problem, ScalarParameter, Space, Value


def _power(x):
    return ct.exp2(x, flush_to_zero=True)


def _scan_step(sums, first, count, partial, logits, row, tile_n, factor, tma):
    """Add ``count`` tiles, the last of them partial or not, to each lane's running maximum and sum."""
    mass, peak = sums
    tiles = ()
    for i in ct.static_iter(range(count)):
        bounded = ct.static_eval(partial and i == count - 1)
        tiles = tiles + (shared.load_logits(logits, row, first + i, tile_n, bounded, tma),)
    top = peak
    for i in ct.static_iter(range(count)):
        top = ct.maximum(top, tiles[i])
    mass = mass * _power((peak - top) * factor)
    for i in ct.static_iter(range(count)):
        mass = mass + _power((tiles[i] - top) * factor)
    return mass, top


def _sums(logits, row, columns, tile_n, unroll, factor, tma):
    """Return a row's largest logit, and the logarithm to base 2 of its sum of powers of 2 over that; (1, 1) each."""
    none = ct.zeros((1, tile_n), ct.float32), ct.full((1, tile_n), shared.LOWEST, ct.float32)
    mass, peak = family.each_part(
        _scan_step, none, logits.shape[1] // (tile_n * unroll), columns, tile_n, unroll,
        (logits, row, tile_n, factor, tma),
    )  # fmt: skip
    top = ct.max(peak, axis=1, keepdims=True)
    return top, ct.log2(ct.sum(mass * _power((peak - top) * factor), axis=1, keepdims=True))


def _logarithms(logits, row, c, tile_n, bounded, factor, sums, tma):
    """Return a tile's logarithms of probabilities to base 2, shifted so that terms are in natural units.

    The largest logit is subtracted before the factor: the difference of a large product and a rounded one would be
    mostly rounding, and the compiler may fuse the product with the difference, which leaves it exact.
    """
    tile = shared.load_logits(logits, row, c, tile_n, bounded, tma)
    return (tile - sums[0]) * factor - (sums[1] - jsd.LOG2_LN_2)


def _terms(student, teacher, row, c, tile_n, bounded, factor, beta, totals, form, tma):
    """Return the term of each element of a tile, the derivative g, and a multiple of the student's probability."""
    # So shifted, logarithms to base 2 have terms in natural units.
    x = shared.load_logits(student, row, c, tile_n, bounded, tma) * factor - totals[0] + jsd.LOG2_LN_2
    y = shared.load_logits(teacher, row, c, tile_n, bounded, tma) * factor - totals[1] + jsd.LOG2_LN_2
    return jsd.terms(x, y, beta, form[0], form[1])


def _added(total, pull, weight, student, teacher, row, c, tile_n, bounded, factor, beta, sums, form, tma):
    x = _logarithms(student, row, c, tile_n, bounded, factor, sums[0], tma)
    y = _logarithms(teacher, row, c, tile_n, bounded, factor, sums[1], tma)
    term, derivative, share = jsd.terms(x, y, beta, form[0], form[1])
    return total + term, pull + derivative, weight + share


def _forward_row(
    row, student, teacher, slope, loss, student_total, teacher_total, pull, beta, scale, columns, tile_n, unroll, pure,
    tma,
):  # fmt: skip
    of_row = ct.load(slope, (row,), ())
    if of_row == 0.0:
        for result in ct.static_iter((loss, student_total, teacher_total, pull)):
            shared.store_row(result, row, ct.zeros((1, 1), ct.float32))
    else:
        factor = scale * shared.LOG2_E
        sums = (
            _sums(student, row, columns, tile_n, unroll, factor, tma),
            _sums(teacher, row, columns, tile_n, unroll, factor, tma),
        )
        form = (pure, ct.static_eval(student.dtype == ct.float32 or columns < jsd.SHORT))
        none = ct.zeros((1, tile_n), ct.float32)
        terms, derivatives, shares = none, none, none
        for c in range(student.shape[1] // tile_n):
            terms, derivatives, shares = _added(
                terms, derivatives, shares, student, teacher, row, c, tile_n, False, factor, beta, sums, form, tma
            )
        if ct.static_eval(columns % tile_n != 0):
            terms, derivatives, shares = _added(
                terms, derivatives, shares, student, teacher, row, ct.static_eval(columns // tile_n), tile_n, True,
                factor, beta, sums, form, tma,
            )  # fmt: skip
        of_row = ct.where(ct.abs(of_row) < shared.INFINITY, of_row, shared.NAN)
        shared.store_row(loss, row, ct.sum(terms, axis=1, keepdims=True) * of_row)
        shared.store_row(student_total, row, sums[0][0] * factor + sums[0][1])
        shared.store_row(teacher_total, row, sums[1][0] * factor + sums[1][1])
        # Divided by the sum of the same shares that subtract it later: if g is nearly equal in a few likely columns,
        # little is left.
        pulled = ct.sum(derivatives, axis=1, keepdims=True) / ct.sum(shares, axis=1, keepdims=True)
        shared.store_row(pull, row, pulled)


@ct.kernel
def logits_jsd_forward(
    student, teacher, slope, beta, scale, loss, student_total, teacher_total, pull, columns: ConstInt,
    tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, pure: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; student and teacher [rows, vocabulary], all others [rows]."""
    arguments = (
        student, teacher, slope, loss, student_total, teacher_total, pull, beta, scale, columns, tile_n, unroll, pure,
        tma,
    )  # fmt: skip
    each_step(_forward_row, student.shape[0], persistent, arguments)


def _backward_tile(
    row, c, bounded, student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, tile_n, form
):  # fmt: skip
    of_row = ct.load(slope, (row,), ())
    if of_row == 0.0:
        shared.store_zeros(gradient, row, c, tile_n, bounded)
    else:
        totals = (family.load_number(student_total, row), family.load_number(teacher_total, row))
        _, derivative, share = _terms(
            student, teacher, row, c, tile_n, bounded, scale * shared.LOG2_E, beta, totals, form, False
        )
        of_row = ct.where(ct.abs(of_row) < shared.INFINITY, of_row, shared.NAN) * scale
        by_logits = (share * -family.load_number(pull, row) + derivative) * of_row
        ct.store(gradient, (row, c), by_logits.astype(gradient.dtype), check_bounds=bounded, allow_tma=False)


@ct.kernel
def logits_jsd_backward(
    student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, columns: ConstInt,
    tile_n: ConstInt, persistent: ConstBool, pure: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; the gradient [rows, vocabulary] may be the student's memory."""
    form = (pure, ct.static_eval(student.dtype == ct.float32 or columns < jsd.SHORT))
    arguments = (student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, tile_n, form)
    family.each_tile(_backward_tile, student.shape[0], columns, tile_n, persistent, arguments)


def arguments(beta: float, temperature: float) -> tuple[float, float]:
    """Return the scalars of the kernels."""
    return float(beta), 1.0 / temperature


def is_pure(beta: float) -> bool:
    """Return the flag ``pure`` for a beta."""
    return beta in (0, 1)


def _forward_axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["vocabulary"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in (512, 1024, 2048)}),
        "unroll": [1, 2, 4],
        "num_worker_warps": [0, 8],
        "occupancy": [2, 4, 8],
        "tma": [True, False],
    }


_THREADS_FULL = family.tiles_full(4, 8, 2048)
_ROW_IS_LONGER = Constraint(
    "a step of several tiles is no longer than a row",
    lambda problem, config, target: (
        config["unroll"] == 1 or config["tile_n"] * config["unroll"] <= problem["vocabulary"]
    ),
)
_NO_LOOP_AROUND_TMA = Constraint(
    "resident blocks whose loops over a row load by TMA have hung on an H200 in their second row (tileiras 13.4)",
    lambda problem, config, target: not (config["tma"] and config["schedule"] == "persistent"),
)


def _forward_config(problem: Problem, schedule: str, most: int, unroll: int, *, tma: bool) -> Config:
    tile_n = min(most, power_of_two(problem["vocabulary"]))
    return family.step_config(schedule, tile_n, unroll if tile_n * unroll <= problem["vocabulary"] else 1, tma=tma)


_SCALARS = (ScalarParameter("beta", "float32"), ScalarParameter("scale", "float32"))
_SUMS = ("student_total", "teacher_total", "pull")
_READ = (Array("student", "dtype", family.LOGITS), Array("teacher", "dtype", family.LOGITS), *family.of_rows("slope"))


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    dtype, size = getattr(torch, problem["dtype"]), (problem["rows"], problem["vocabulary"])
    slope = normal(problem["rows"])
    slope[5::11] = 0
    logits = {name: (2 * normal(*size)).to(dtype) for name in ("student", "teacher")}
    return logits | {"slope": slope, "beta": 0.0 if problem["pure"] else 0.25, "scale": 0.75}


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    inputs = _inputs(problem, generator, device)
    scalars = {name: inputs[name] for name in ("beta", "scale")}
    known = functools.partial(reference_forward, **scalars, pure=problem["pure"])
    sums = family.by_parts(known, inputs["student"], inputs["teacher"], inputs["slope"], names=_SUMS)
    # With the forward's pull the gradient of a short row may be a small difference of rounded numbers.
    return inputs | sums | {"pull": sums["pull"] + 1}


def _multiple(beta: float, pure: bool) -> float:
    """Return the multiple of a probability in the formulas' last result."""
    return shared.LN_2 * (1.0 if pure else 1.0 - beta)


def reference_forward(student: Any, teacher: Any, slope: Any, beta: float, scale: float, pure: bool) -> dict[str, Any]:
    """Return the results in float64: losses, logarithms to base 2 of sums of exponentials, and the gradient's pull."""
    wide, other = student.double() * scale, teacher.double() * scale
    terms, derivative = jsd.reference_terms(wide.log_softmax(-1), other.log_softmax(-1), beta, pure)
    # Divided by the student's sum, too, since that may be NaN while a pure divergence's derivative is the teacher's.
    pull = derivative.sum(-1) / (_multiple(beta, pure) * wide.softmax(-1).sum(-1))
    sums = (wide.logsumexp(-1) / shared.LN_2, other.logsumexp(-1) / shared.LN_2, pull)
    factor = slope.where(slope.isfinite(), float("nan"))
    found = losses.expected(terms, derivative, factor, False)
    return found | {name: x.where(slope != 0, 0) for name, x in zip(_SUMS, sums, strict=True)}


def reference_backward(
    student: Any, teacher: Any, slope: Any, student_total: Any, teacher_total: Any, pull: Any, beta: float,
    scale: float, pure: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the gradient by the student's logits in float64, for the given sums."""
    x = student.double() * scale - student_total.double()[:, None] * shared.LN_2
    y = teacher.double() * scale - teacher_total.double()[:, None] * shared.LN_2
    _, derivative = jsd.reference_terms(x, y, beta, pure)
    pulled = x.exp() * (pull.double() * _multiple(beta, pure))[:, None]
    factor = slope.where(slope.isfinite(), float("nan")).double()[:, None] * scale
    return {"gradient": ((derivative - pulled) * factor).where(slope[:, None] != 0, 0)}


def expected(
    student: Any, teacher: Any, slope: Any, beta: float, scale: float, graded: bool, pure: bool
) -> dict[str, Any]:
    """Return the losses of all rows of float64 logits, and their gradient by the student's."""
    x, y = (student * scale).log_softmax(-1), (teacher * scale).log_softmax(-1)
    terms, derivative = jsd.reference_terms(x, y, beta, pure)
    factor = slope.where(slope.isfinite(), float("nan"))
    by_logits = (derivative - x.exp() * derivative.sum(-1, keepdim=True)) * scale
    return losses.expected(terms, by_logits, factor, graded)


FORWARD = family.spec(
    logits_jsd_forward,
    "loss = slope * JSD(softmax(teacher) || softmax(student)) of each row of logits, and sums for its gradient",
    (*_READ, *_SCALARS, *family.of_rows("loss", *_SUMS, role="output")),
    reference_forward,
    flags=("pure",),
    flops=40,
    space=Space(_forward_axes, (_THREADS_FULL, _ROW_IS_LONGER, STEPS_FIT, TMA_NEEDS_HOPPER, _NO_LOOP_AROUND_TMA)),
    default=lambda problem, target: _forward_config(problem, "block", 1024, 4, tma=target.has_tma),
    generic=lambda problem: _forward_config(problem, "persistent", 256, 1, tma=False),
    inputs=_inputs,
)
BACKWARD = family.spec(
    logits_jsd_backward,
    "gradient of logits_jsd_forward by the student's logits, in place if asked",
    (*_READ, *family.of_rows(*_SUMS), *_SCALARS, Array("gradient", "dtype", family.LOGITS, "output")),
    reference_backward,
    flags=("pure",),
    flops=30,
    space=family.SPACE_OF_TILES,
    default=lambda problem, target: family.tile_config(problem, "block", 2048, 8),
    generic=family.generic_tiles,
    inputs=_backward_inputs,
)
SPECS = (FORWARD, BACKWARD)
