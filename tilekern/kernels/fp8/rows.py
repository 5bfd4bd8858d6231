"""Round a matrix to e4m3 with a scale for each row: ``x ~ scale * y``.

Scales are powers of two (:mod:`tilekern.kernels.fp8.scales`). Products along rows read ``y`` as it is.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS
from tilekern.kernels.families.tables import MATRIX, spec
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of, scaled_rows
from tilekern.kernels.fp8.space import HAS_FP8, check_target, threads
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# The most numbers that a thread holds of a row.
_HELD = 64
_WIDTHS = (1024, 2048, 4096, 8192)


def _row(n, x, y, scale, tile_n, chunks, held):
    largest, kept = ct.zeros((1, tile_n), ct.int32), ()
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            tile = load(x, (n, c), (1, tile_n), True, 0, False)
            largest, kept = ct.maximum(largest, bits_of(tile.astype(ct.float32))), kept + (tile,)
    else:
        for c in range(chunks):
            tile = load(x, (n, c), (1, tile_n), True, 0, False)
            largest = ct.maximum(largest, bits_of(tile.astype(ct.float32)))
    step, inverse = scale_of(ct.max(largest, 1, keepdims=True))
    ct.store(scale, (n,), ct.reshape(step, (1,)), allow_tma=False)
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            ct.store(y, (n, c), (kept[c].astype(ct.float32) * inverse).astype(y.dtype), allow_tma=False)
    else:
        for c in range(chunks):
            tile = load(x, (n, c), (1, tile_n), True, 0, False).astype(ct.float32)
            ct.store(y, (n, c), (tile * inverse).astype(y.dtype), allow_tma=False)


@ct.kernel
def fp8_rows(x, y, scale, tile_n: ConstInt, chunks: ConstInt, held: ConstBool, persistent: ConstBool):
    """A row a block, or resident blocks that loop; x and y [rows, columns], scale [rows].

    A row stays in registers if it is ``held``, else it is read twice.
    """
    each_step(_row, x.shape[0], persistent, (x, y, scale, tile_n, chunks, held))


def _is_held(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a thread holds fewer numbers than it has registers: code for 64 in 64 registers spilled."""
    numbers = config["tile_n"] * cdiv(problem["columns"], config["tile_n"])
    few = numbers <= _HELD * threads(config) and numbers * config["occupancy"] < target.registers
    return not config["held"] or bool(few)


def _widths(problem: Problem) -> list[Value]:
    return list(dict.fromkeys(min(width, power_of_two(problem["columns"])) for width in _WIDTHS))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_n": _widths(problem),
        "held": [True, False],
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
    }


def _default(problem: Problem, target: Target) -> Config:
    check_target(target)
    columns = problem["columns"]
    warps = 0 if columns <= 32 * 4 * 32 else 8
    tile_n = min(2048, power_of_two(columns))
    config = Config(schedule="block", tile_n=tile_n, held=True, occupancy=4, num_worker_warps=warps)
    choices = (config, config.but(occupancy=2), config.but(held=False))
    return next(config for config in choices if _is_held(problem, config, target))


def _reference(x: Any) -> dict[str, Any]:
    y, scale = scaled_rows(x)
    return {"y": y.double(), "scale": scale.double()}


SPEC = spec(
    "fp8_rows",
    "y = x / scale in e4m3, with the least power of two as scale of each row that keeps it inside 448",
    (*MATRIX,),
    (Array("x", "dtype", ROWS), Array("y", E4M3, ROWS, "output"), Array("scale", "float32", ("rows",), "output")),
    _reference,
    function=fp8_rows,
    grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
    constants=lambda problem, config: {"chunks": cdiv(problem["columns"], config["tile_n"])},
    space=Space(
        _axes,
        (
            HAS_FP8,
            Constraint(f"a thread holds at most {_HELD} numbers of a row, and fewer than it has registers", _is_held),
            Constraint(
                "a thread has 4 numbers of a tile or more",
                lambda problem, config, target: (
                    config["tile_n"] >= 4 * threads(config) or config["num_worker_warps"] == 0
                ),
            ),
        ),
    ),
    default=_default,
    generic=lambda problem: Config(schedule="persistent", tile_n=1024, held=False, occupancy=1, num_worker_warps=8),
    result_dtype=lambda problem: "float32",
    flops=lambda problem: 3 * problem["rows"] * problem["columns"],
)
