"""Losses over rows of two matrices, each row's total and the gradient of each element in one read of both.

A kernel is its formula, ``formula(first, second, *scalars)``, which gives two float32 tiles: what each element adds to
its row's loss, and the derivative of that by the first matrix. :func:`each_row` surrounds it: a row's loss and gradient
are multiplied by its ``slope``, and a row whose slope is 0 is not read, whatever it holds. Its spec is made by
:func:`spec`.

A loss has one kernel with the gradient and one without, which the flag ``graded`` tells apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays, bytes_of, drawn, tensors
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, grid_of, hints, load, power_of_two
from tilekern.spec import (
    Array,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    module_of,
    outputs_of,
    parameters_of,
)
from tilekern.spec.targets import Target

# Float32 values for each element of a tile: both inputs, the total, the derivative.
_LIVE = 4


def each_row(formula, first, second, slope, loss, gradient, scalars, columns, tile_n, persistent, tma):
    """Losses [rows] and, unless ``gradient`` is None, the gradient [rows, columns]: one row a block, or a loop."""
    if ct.static_eval(persistent):
        for row in range(ct.bid(0), first.shape[0], ct.num_blocks(0)):
            _row(formula, first, second, slope, loss, gradient, scalars, row, columns, tile_n, tma)
    else:
        _row(formula, first, second, slope, loss, gradient, scalars, ct.bid(0), columns, tile_n, tma)


def _row(formula, first, second, slope, loss, gradient, scalars, row, columns, tile_n, tma):
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
    """Zeros beyond the row's end, where a formula's roundings may add up to as much as a small loss."""
    if c == columns // tile_n:
        added = ct.where(c * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :] < columns, added, 0.0)
    return added


def expected(terms: Any, derivatives: Any, slope: Any, graded: bool) -> dict[str, Any]:
    """The results in float64 of what each element adds [rows, columns], and the derivatives of that."""
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


def _dimensions(flags: tuple[str, ...]) -> tuple[Dimension, ...]:
    sizes = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))
    return (*sizes, *(Dimension(flag, "flag") for flag in ("graded", *flags)))


def _arrays(inputs: tuple[str, str], scalars: tuple[ScalarParameter, ...], problem: Problem) -> Arrays:
    """In the order of the kernel."""
    matrices = [Array(name, "dtype", ROWS) for name in inputs]
    results = (_LOSS, _GRADIENT) if problem["graded"] else (_LOSS,)
    return (*matrices, _SLOPE, *results, *scalars)


def _default(problem: Problem, target: Target) -> Config:
    # Long rows of 16 bits are bound by arithmetic, which eight blocks overlap best; on sm_100 they would spill.
    many = problem["dtype"] != "float32" and problem["columns"] >= 1024 and target.capability < 100
    return _config(problem, *((1024, 8) if many else (2048, 4)), tma=target.capability >= 90)


def _implement(
    losses: Any, gradients: Any, inputs: tuple[str, str], scalars: tuple[ScalarParameter, ...],
    flags: tuple[str, ...], problem: Problem, config: Config,
) -> Implementation:  # fmt: skip
    function = gradients if problem["graded"] else losses
    parameters = parameters_of(_arrays(inputs, scalars, problem), _dimensions(flags), problem)
    return Implementation(
        function=function,
        parameters=parameters,
        constants=(
            ("columns", problem["columns"]),
            ("tile_n", config["tile_n"]),
            ("persistent", config["schedule"] == "persistent"),
            ("tma", config["tma"]),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )


def log_probabilities(x: Any) -> Any:
    """Of normal numbers, in their dtype: inputs for losses of log-probabilities, whose exponentials add up to 1."""
    return x.float().log_softmax(-1).to(x.dtype)


def spec(
    name: str, summary: str, losses: Any, gradients: Any, inputs: tuple[str, str],
    reference: Callable[..., dict[str, Any]], *, flops: int, scalars: tuple[ScalarParameter, ...] = (),
    flags: tuple[str, ...] = (), of_draws: Callable[[Any], Any] = lambda x: x,
) -> KernelSpec:  # fmt: skip
    """The spec of such a loss.

    Args:
        losses, gradients: the kernels without the gradient and with it. Their parameters are the inputs, ``slope``,
            ``loss``, ``gradient`` where there is one, the scalars, then ``columns``, ``tile_n``, ``persistent``,
            ``tma`` and the flags.
        inputs: the names of both matrices.
        reference: of the inputs, ``slope``, the scalars, ``graded`` and the flags, as :func:`expected` gives it.
        flops: floating-point operations for each element.
        scalars: with their samples.
        flags: names of dimensions that are True or False, of which the formula depends.
        of_draws: makes either input of normal numbers, where the loss does not take any number.
    """
    return KernelSpec(
        name=name,
        summary=summary,
        module=module_of(losses),
        dimensions=_dimensions(flags),
        space=Space(_axes, (_FITS, TMA_NEEDS_HOPPER)),
        implement=lambda problem, config: _implement(losses, gradients, inputs, scalars, flags, problem, config),
        default=_default,
        generic=lambda problem: _config(problem, 512, 1, tma=False),
        inputs=lambda problem, generator, device: {
            name: of_draws(x) if name in inputs else x
            for name, x in drawn(_arrays(inputs, scalars, problem), problem, generator, device).items()
        },
        outputs=lambda problem, blocks: outputs_of(_arrays(inputs, (), problem))(problem, blocks),
        reference=reference,
        bytes_moved=lambda problem: bytes_of(tensors(_arrays(inputs, (), problem)), problem),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        result_dtype=lambda problem: problem["dtype"],
    )
