"""The generalised Jensen-Shannon divergence of two heads' logits, row by row, and its gradient in the student's place.

With ``x = log_softmax(student / t)`` and ``y = log_softmax(teacher / t)`` each element adds what
:mod:`tilekern.kernels.jsd` says, with the derivative g by x. The gradient by the student's logits is
``g - softmax(student / t) * sum(g)``, over t. Two kernels: the forward reads a row once for both sums of exponentials
and once more for the loss and the sum of g; the backward reads these sums of each row, so that each tile of the
gradient needs that tile of the logits alone. In one kernel all rows of a chunk would be in the same phase: of bfloat16
with 128256 columns, an H200 took 308 us for 512 rows and 1050 us for 2048.

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
from tilekern.kernels.cross_entropy.tiles import INFINITY, LN_2, LOG2_E, NAN, load_logits, store_row, store_zeros
from tilekern.kernels.log_probs import LOWEST, STEPS_FIT, TILES_FULL, backward_axes, backward_config
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
    cdiv,
)


def _power(x):
    return ct.exp2(x, flush_to_zero=True)


def _scan_step(peak, mass, logits, row, first, count, partial, tile_n, factor, tma):
    """Add ``count`` tiles, the last of them partial or not, to each lane's running maximum and sum."""
    tiles = ()
    for i in ct.static_iter(range(count)):
        bounded = ct.static_eval(partial and i == count - 1)
        tiles = tiles + (load_logits(logits, row, first + i, tile_n, bounded, tma),)
    top = peak
    for i in ct.static_iter(range(count)):
        top = ct.maximum(top, tiles[i])
    mass = mass * _power((peak - top) * factor)
    for i in ct.static_iter(range(count)):
        mass = mass + _power((tiles[i] - top) * factor)
    return top, mass


def _sums(logits, row, columns, tile_n, unroll, factor, tma):
    """A row's largest logit, and the logarithm to base 2 of its sum of powers of 2, over that; (1, 1) each."""
    peak, mass = ct.full((1, tile_n), LOWEST, ct.float32), ct.zeros((1, tile_n), ct.float32)
    whole = ct.static_eval(columns // (tile_n * unroll))
    for step in range(logits.shape[1] // (tile_n * unroll)):
        peak, mass = _scan_step(peak, mass, logits, row, step * unroll, unroll, False, tile_n, factor, tma)
    rest = ct.static_eval(-(-columns // tile_n) - whole * unroll)
    if rest > 0:
        peak, mass = _scan_step(
            peak, mass, logits, row, whole * unroll, rest, columns % tile_n != 0, tile_n, factor, tma
        )
    top = ct.max(peak, axis=1, keepdims=True)
    return top, ct.log2(ct.sum(mass * _power((peak - top) * factor), axis=1, keepdims=True))


def _logarithms(logits, row, c, tile_n, bounded, factor, sums, tma):
    """To base 2, of a tile's probabilities, shifted so that terms are in natural units.

    The largest logit goes off before the factor: of a large product and a rounded one, little but roundings would be
    left, and the product is not rounded where the compiler fuses it with the difference.
    """
    tile = load_logits(logits, row, c, tile_n, bounded, tma)
    return (tile - sums[0]) * factor - (sums[1] - jsd.LOG2_LN_2)


def _terms(student, teacher, row, c, tile_n, bounded, factor, beta, totals, form, tma):
    """The term of each element of a tile, the derivative g, and a multiple of the student's probability."""
    # So shifted, logarithms to base 2 have terms in natural units.
    x = load_logits(student, row, c, tile_n, bounded, tma) * factor - totals[0] + jsd.LOG2_LN_2
    y = load_logits(teacher, row, c, tile_n, bounded, tma) * factor - totals[1] + jsd.LOG2_LN_2
    return jsd.terms(x, y, beta, form[0], form[1])


def _added(total, pull, weight, student, teacher, row, c, tile_n, bounded, factor, beta, sums, form, tma):
    x = _logarithms(student, row, c, tile_n, bounded, factor, sums[0], tma)
    y = _logarithms(teacher, row, c, tile_n, bounded, factor, sums[1], tma)
    term, derivative, share = jsd.terms(x, y, beta, form[0], form[1])
    return total + term, pull + derivative, weight + share


def _forward_row(
    student, teacher, slope, loss, student_total, teacher_total, pull, beta, scale, row, columns, tile_n, unroll, pure,
    tma,
):  # fmt: skip
    of_row = ct.load(slope, (row,), ())
    if of_row == 0.0:
        for result in ct.static_iter((loss, student_total, teacher_total, pull)):
            store_row(result, row, ct.zeros((1, 1), ct.float32))
    else:
        factor = scale * LOG2_E
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
        of_row = ct.where(ct.abs(of_row) < INFINITY, of_row, NAN)
        store_row(loss, row, ct.sum(terms, axis=1, keepdims=True) * of_row)
        store_row(student_total, row, sums[0][0] * factor + sums[0][1])
        store_row(teacher_total, row, sums[1][0] * factor + sums[1][1])
        # Over the sum of the very shares that take it away: where g is alike in a few likely columns, little is left.
        pulled = ct.sum(derivatives, axis=1, keepdims=True) / ct.sum(shares, axis=1, keepdims=True)
        store_row(pull, row, pulled)


@ct.kernel
def logits_jsd_forward(
    student, teacher, slope, beta, scale, loss, student_total, teacher_total, pull, columns: ConstInt,
    tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, pure: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; student and teacher [rows, vocabulary], all others [rows]."""
    if ct.static_eval(persistent):
        for row in range(ct.bid(0), student.shape[0], ct.num_blocks(0)):
            _forward_row(
                student, teacher, slope, loss, student_total, teacher_total, pull, beta, scale, row, columns, tile_n,
                unroll, pure, tma,
            )  # fmt: skip
    else:
        _forward_row(
            student, teacher, slope, loss, student_total, teacher_total, pull, beta, scale, ct.bid(0), columns, tile_n,
            unroll, pure, tma,
        )  # fmt: skip


def _element(vector, row):
    return ct.reshape(ct.load(vector, (row,), (1,)), (1, 1))


def _backward_tile(
    student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, row, c, tile_n, bounded, form
):  # fmt: skip
    of_row = ct.load(slope, (row,), ())
    if of_row == 0.0:
        store_zeros(gradient, row, c, tile_n, bounded)
    else:
        totals = (_element(student_total, row), _element(teacher_total, row))
        _, derivative, share = _terms(
            student, teacher, row, c, tile_n, bounded, scale * LOG2_E, beta, totals, form, False
        )
        of_row = ct.where(ct.abs(of_row) < INFINITY, of_row, NAN) * scale
        by_logits = (share * -_element(pull, row) + derivative) * of_row
        ct.store(gradient, (row, c), by_logits.astype(gradient.dtype), check_bounds=bounded, allow_tma=False)


def _backward_item(
    student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, item, columns, tile_n, pure
):  # fmt: skip
    """One tile; only the last of a row has its bounds checked."""
    across = ct.static_eval(-(-columns // tile_n))
    row, c = item // across, item % across
    form = (pure, ct.static_eval(student.dtype == ct.float32 or columns < jsd.SHORT))
    if c < columns // tile_n:
        _backward_tile(
            student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, row, c, tile_n, False,
            form,
        )  # fmt: skip
    elif columns % tile_n != 0:
        _backward_tile(
            student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, row, c, tile_n, True,
            form,
        )  # fmt: skip


@ct.kernel
def logits_jsd_backward(
    student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, columns: ConstInt,
    tile_n: ConstInt, persistent: ConstBool, pure: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; the gradient [rows, vocabulary] may be the student's memory."""
    if ct.static_eval(persistent):
        tiles = student.shape[0] * ct.cdiv(columns, tile_n)
        for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
            _backward_item(
                student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, item, columns,
                tile_n, pure,
            )  # fmt: skip
    else:
        _backward_item(
            student, teacher, slope, student_total, teacher_total, pull, beta, scale, gradient, ct.bid(0), columns,
            tile_n, pure,
        )  # fmt: skip


def arguments(beta: float, temperature: float) -> tuple[float, float]:
    """The scalars of the kernels."""
    return float(beta), 1.0 / temperature


def is_pure(beta: float) -> bool:
    """The flag ``pure`` for a beta."""
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
_NO_LOOP_AROUND_TMA = Constraint(
    "resident blocks whose loops over a row load by TMA have hung on an H200 in their second row (tileiras 13.4)",
    lambda problem, config, target: not (config["tma"] and config["schedule"] == "persistent"),
)


def _forward_config(problem: Problem, schedule: str, most: int, unroll: int, *, tma: bool) -> Config:
    tile_n = min(most, power_of_two(problem["vocabulary"]))
    unroll = unroll if tile_n * unroll <= problem["vocabulary"] else 1
    return Config(schedule=schedule, tile_n=tile_n, unroll=unroll, num_worker_warps=0, occupancy=4, tma=tma)


_SCALARS = (ScalarParameter("beta", "float32"), ScalarParameter("scale", "float32"))
_SUMS = ("student_total", "teacher_total", "pull")


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=logits_jsd_forward,
        parameters=(
            matrix("student", problem), matrix("teacher", problem), rows_of("slope"), *_SCALARS,
            *(rows_of(name, role="output") for name in ("loss", *_SUMS)),
        ),
        constants=(
            ("columns", problem["vocabulary"]), ("tile_n", config["tile_n"]), ("unroll", config["unroll"]),
            ("persistent", config["schedule"] == "persistent"), ("pure", problem["pure"]), ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )  # fmt: skip


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    vocabulary, tile_n = problem["vocabulary"], config["tile_n"]
    return Implementation(
        function=logits_jsd_backward,
        parameters=(
            matrix("student", problem), matrix("teacher", problem), rows_of("slope"), *map(rows_of, _SUMS), *_SCALARS,
            matrix("gradient", problem, "output"),
        ),
        constants=(
            ("columns", vocabulary), ("tile_n", tile_n), ("persistent", config["schedule"] == "persistent"),
            ("pure", problem["pure"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"] * cdiv(vocabulary, tile_n), config, sm_count),
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
    return logits | {"slope": slope, "beta": 0.0 if problem["pure"] else 0.25, "scale": 0.75}


_PART_ROWS = 1024


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    inputs = _inputs(problem, generator, device)
    # In parts, since in float64 all logits at once may not fit.
    names, scalars = ("student", "teacher", "slope"), {name: inputs[name] for name in ("beta", "scale")}
    parts = zip(*(inputs[name].split(_PART_ROWS) for name in names), strict=True)
    known = [
        reference_forward(**dict(zip(names, part, strict=True)), **scalars, pure=problem["pure"]) for part in parts
    ]
    sums = {name: torch.cat([part[name] for part in known]).float() for name in _SUMS}
    # With the pull of the forward the gradient of a short row may be a small difference of rounded numbers.
    return inputs | sums | {"pull": sums["pull"] + 1}


def _multiple(beta: float, pure: bool) -> float:
    """The multiple of a probability in the formulas' last result."""
    return LN_2 * (1.0 if pure else 1.0 - beta)


def reference_forward(student: Any, teacher: Any, slope: Any, beta: float, scale: float, pure: bool) -> dict[str, Any]:
    """The results in float64: losses, logarithms to base 2 of sums of exponentials, and what pulls the gradient."""
    wide, other = student.double() * scale, teacher.double() * scale
    terms, derivative = jsd.reference_terms(wide.log_softmax(-1), other.log_softmax(-1), beta, pure)
    # A pure divergence's derivative is the teacher's alone; over the student's sum, too, since that may be no number.
    pull = derivative.sum(-1) / (_multiple(beta, pure) * wide.softmax(-1).sum(-1))
    sums = (wide.logsumexp(-1) / LN_2, other.logsumexp(-1) / LN_2, pull)
    factor = slope.where(slope.isfinite(), float("nan"))
    found = losses.expected(terms, derivative, factor, False)
    return found | {name: x.where(slope != 0, 0) for name, x in zip(_SUMS, sums, strict=True)}


def reference_backward(
    student: Any, teacher: Any, slope: Any, student_total: Any, teacher_total: Any, pull: Any, beta: float,
    scale: float, pure: bool,
) -> dict[str, Any]:  # fmt: skip
    """The gradient by the student's logits in float64, of the sums that are given."""
    x = student.double() * scale - student_total.double()[:, None] * LN_2
    y = teacher.double() * scale - teacher_total.double()[:, None] * LN_2
    _, derivative = jsd.reference_terms(x, y, beta, pure)
    pulled = x.exp() * (pull.double() * _multiple(beta, pure))[:, None]
    factor = slope.where(slope.isfinite(), float("nan")).double()[:, None] * scale
    return {"gradient": ((derivative - pulled) * factor).where(slope[:, None] != 0, 0)}


def expected(
    student: Any, teacher: Any, slope: Any, beta: float, scale: float, graded: bool, pure: bool
) -> dict[str, Any]:
    """The losses of all rows of float64 logits, and their gradient by the student's."""
    x, y = (student * scale).log_softmax(-1), (teacher * scale).log_softmax(-1)
    terms, derivative = jsd.reference_terms(x, y, beta, pure)
    factor = slope.where(slope.isfinite(), float("nan"))
    by_logits = (derivative - x.exp() * derivative.sum(-1, keepdim=True)) * scale
    return losses.expected(terms, by_logits, factor, graded)


_DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("vocabulary", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("pure", "flag"),
)
FORWARD = KernelSpec(
    name="logits_jsd_forward",
    summary="loss = slope * JSD(softmax(teacher) || softmax(student)) of each row of logits, and sums for its gradient",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(_forward_axes, (_THREADS_FULL, _ROW_IS_LONGER, STEPS_FIT, TMA_NEEDS_HOPPER, _NO_LOOP_AROUND_TMA)),
    implement=_implement_forward,
    default=lambda problem, target: _forward_config(problem, "block", 1024, 4, tma=target.capability >= 90),
    generic=lambda problem: _forward_config(problem, "persistent", 256, 1, tma=False),
    inputs=_inputs,
    outputs=lambda problem, blocks: dict.fromkeys(("loss", *_SUMS), ((problem["rows"],), "float32")),
    reference=reference_forward,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem) + 20 * problem["rows"],
    flops=lambda problem: 40 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)
BACKWARD = KernelSpec(
    name="logits_jsd_backward",
    summary="gradient of logits_jsd_forward by the student's logits, in place if asked",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(backward_axes, (TILES_FULL,)),
    implement=_implement_backward,
    default=lambda problem, target: backward_config(problem, "block", 2048, 8),
    generic=lambda problem: backward_config(problem, "persistent", 512, 4),
    inputs=_backward_inputs,
    outputs=lambda problem, blocks: {"gradient": ((problem["rows"], problem["vocabulary"]), problem["dtype"])},
    reference=reference_backward,
    bytes_moved=lambda problem: 3 * matrix_bytes(problem) + 16 * problem["rows"],
    flops=lambda problem: 30 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)
SPECS = (FORWARD, BACKWARD)
