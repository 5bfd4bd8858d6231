"""Losses over rows of two matrices: each row's total, and the gradient of each element, in one read of both.

A kernel is its formula and :func:`each_row` around it. ``formula(first, second, *scalars)`` returns two float32 tiles:
each element's term of its row's loss, and the derivative of the term by the first matrix. A row's loss and gradient are
multiplied by its ``slope``; a row with the slope 0 is not read. :func:`spec` makes the spec.

A loss has one kernel with the gradient and one without; the flag ``graded`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import tables
from tilekern.kernels.families.arrays import ROWS, Arrays, bytes_of, drawn, tensors
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, each_step, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, KernelSpec, Problem, ScalarParameter, Space, Value, module_of
from tilekern.spec.targets import Target

# Float32 values for each element of a tile: both inputs, the total, the derivative.
_LIVE = 4


def each_row(formula, first, second, slope, loss, gradient, scalars, columns, tile_n, persistent, tma):
    """Compute losses [rows] and, if ``gradient`` is not None, the gradient [rows, columns], a row a block or a loop."""
    arguments = (formula, first, second, slope, loss, gradient, scalars, columns, tile_n, tma)
    each_step(_row, first.shape[0], persistent, arguments)


def _row(row, formula, first, second, slope, loss, gradient, scalars, columns, tile_n, tma):
    bounded = ct.static_eval(columns % tile_n != 0)
    factor = ct.load(slope, (row,), ())
    total = ct.zeros((1, tile_n), ct.float32)
    if factor == 0.0:
        if ct.static_eval(gradient is not None):
            for c in range(ct.cdiv(first.shape[1], tile_n)):
                zeros = ct.zeros((1, tile_n), gradient.dtype)
                ct.store(gradient, (row, c), zeros, check_bounds=bounded, allow_tma=tma)
    else:
        for c in range(ct.cdiv(first.shape[1], tile_n)):
            one = load(first, (row, c), (1, tile_n), bounded, 0, tma).astype(ct.float32)
            other = load(second, (row, c), (1, tile_n), bounded, 0, tma).astype(ct.float32)
            added, derivative = formula(one, other, *scalars)
            total = total + (_within(added, c, columns, tile_n) if ct.static_eval(bounded) else added)
            if ct.static_eval(gradient is not None):
                scaled = (derivative * factor).astype(gradient.dtype)
                ct.store(gradient, (row, c), scaled, check_bounds=bounded, allow_tma=tma)
    ct.store(loss, (row,), ct.sum(total, axis=1) * factor, allow_tma=False)


def _within(added, c, columns, tile_n):
    """Zero elements beyond the row's end, where roundings may add up to as much as a small loss."""
    if c == columns // tile_n:
        added = ct.where(c * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :] < columns, added, 0.0)
    return added


def expected(terms: Any, derivatives: Any, slope: Any, graded: bool) -> dict[str, Any]:
    """Return the results in float64, from the terms of all elements [rows, columns] and their derivatives."""
    factor, counted = slope.double()[:, None], slope[:, None] != 0
    losses = (terms.sum(-1, keepdim=True) * factor).where(counted, 0)[:, 0]
    return {"loss": losses} | ({"gradient": (derivatives * factor).where(counted, 0)} if graded else {})


_SLOPE = Array("slope", "float32", ("rows",))
_LOSS, _GRADIENT = Array("loss", "float32", ("rows",), "output"), Array("gradient", "dtype", ROWS, "output")
_FITS = Constraint(
    "tiles of so many columns exceed the SM's registers at this occupancy",
    lambda problem, config, target: config["tile_n"] * _LIVE * config["occupancy"] <= target.registers,
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["columns"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in (1024, 2048, 4096)}),
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


def _config(problem: Problem, most: int, occupancy: int, *, tma: bool) -> Config:
    tile_n = min(most, power_of_two(problem["columns"]))
    return Config(schedule="persistent", tile_n=tile_n, occupancy=occupancy, num_worker_warps=0, tma=tma)


def _default(problem: Problem, target: Target) -> Config:
    # Long rows of 16 bits are bound by arithmetic, which eight blocks overlap best; on sm_100 they would spill.
    many = problem["dtype"] != "float32" and problem["columns"] >= 1024 and not target.is_blackwell
    return _config(problem, *((1024, 8) if many else (2048, 4)), tma=target.has_tma)


def log_probabilities(x: Any) -> Any:
    """Make log-probabilities of normal numbers, in their dtype; their exponentials add up to 1."""
    return x.float().log_softmax(-1).to(x.dtype)


def spec(
    name: str, summary: str, losses: Any, gradients: Any, inputs: tuple[str, str],
    reference: Callable[..., dict[str, Any]], *, flops: int, scalars: tuple[ScalarParameter, ...] = (),
    flags: tuple[str, ...] = (), of_draws: Callable[[Any], Any] = lambda x: x,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a loss.

    Args:
        losses, gradients: the kernels without the gradient and with it. Their parameters are the inputs, ``slope``,
            ``loss``, ``gradient`` if there is one, the scalars, then ``columns``, ``tile_n``, ``persistent``,
            ``tma`` and the flags.
        inputs: the names of both matrices.
        reference: (inputs, ``slope``, scalars, ``graded``, flags) -> the results, as :func:`expected` returns them.
        flops: floating-point operations for each element.
        scalars: scalars with their samples.
        flags: names of dimensions that are True or False, on which the formula depends.
        of_draws: makes either input from normal numbers, if the loss does not accept all numbers.
    """

    def arrays(problem: Problem) -> Arrays:
        results = (_LOSS, _GRADIENT) if problem["graded"] else (_LOSS,)
        return (*(Array(name, "dtype", ROWS) for name in inputs), _SLOPE, *results, *scalars)

    def given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
        values = drawn(arrays(problem), problem, generator, device)
        return values | {name: of_draws(values[name]) for name in inputs}

    return tables.spec(
        name,
        summary,
        tables.dimensions_of((), ("graded", *flags)),
        arrays,
        reference,
        module=module_of(losses),
        function=lambda problem, config: gradients if problem["graded"] else losses,
        grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
        space=Space(_axes, (_FITS, TMA_NEEDS_HOPPER)),
        default=_default,
        generic=lambda problem: _config(problem, 512, 1, tma=False),
        given=given,
        bytes_moved=lambda problem: bytes_of(tensors(arrays(problem)), problem),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        result_dtype=lambda problem: problem["dtype"],
    )
