"""Lay out a matrix for the products that read it: ``y = x`` or its transpose, rounded to another dtype.

An engine lays out a checkpoint's weights once. Hugging Face's GPT-2 stores them as [in, out] in float32, and the engine
reads [out, in] in bfloat16. ``y`` may be a part of a larger matrix, as where q, k and v stand one below the other in
one: its rows may be any distance apart, and nothing between them is written.

Rounding is to nearest even, and overflows to infinity, as that of torch's ``Tensor.to``. Tiles are read and written
along rows in both orientations. Kernels index with 32 bits: whoever plans must refuse a matrix that reaches over 2^31
elements, as :func:`tilekern.arrays.plan` does, and may lay it out in parts.
"""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of_tiles, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value

# The elements of 2 bytes in an access of 16.
_VECTOR = 8
# Widths of tiles that are turned, and of others; elements of a tile, and of all tiles on an SM.
_TURNED, _PLAIN = (32, 64), (256, 512, 1024, 2048)
_ELEMENTS, _MOST_ON_AN_SM = (1024, 2048, 4096), 16384


def _tile(n, x, y, tile_m, tile_n, transposed):
    columns, width = x.shape[1], y.shape[1]
    across = ct.cdiv(columns, tile_n)
    place = (n // across, n % across)
    # The record of a bucket serves any size. Only where the code itself cuts rows to whole vectors does the compiler
    # access memory by vectors.
    if (columns % _VECTOR == 0) & (width % _VECTOR == 0):
        x_even, y_even = x.slice(1, 0, columns // _VECTOR * _VECTOR), y.slice(1, 0, width // _VECTOR * _VECTOR)
        _copied(x_even, y_even, place, tile_m, tile_n, transposed)
    else:
        _copied(x, y, place, tile_m, tile_n, transposed)


def _copied(x, y, place, tile_m, tile_n, transposed):
    tile = load(x, place, (tile_m, tile_n), True, 0, False).astype(y.dtype)
    if ct.static_eval(transposed):
        ct.store(y, (place[1], place[0]), ct.transpose(tile), allow_tma=False)
    else:
        ct.store(y, place, tile, allow_tma=False)


@ct.kernel
def lay_out(x, y, tile_m: ConstInt, tile_n: ConstInt, transposed: ConstBool, persistent: ConstBool):
    """A tile a block, or resident blocks that loop; x [rows, columns], y [rows, columns] or [columns, rows]."""
    steps = ct.cdiv(x.shape[0], tile_m) * ct.cdiv(x.shape[1], tile_n)
    each_step(_tile, steps, persistent, (x, y, tile_m, tile_n, transposed))


def _arrays(problem: Problem) -> Arrays:
    turned = ROWS[::-1] if problem["transposed"] else ROWS
    return Array("x", "x_dtype", ROWS), Array("y", "dtype", turned, "output")


def _shape(problem: Problem, width: int, elements: int) -> tuple[int, int]:
    """Return the rows and columns of a tile: ``width`` columns, or more if the matrix has too few rows."""
    down, across = power_of_two(problem["rows"]), power_of_two(problem["columns"])
    columns = min(across, max(min(width, elements), elements // down))
    return min(down, elements // columns), columns


def _shapes(problem: Problem) -> set[tuple[int, int]]:
    widths = _TURNED if problem["transposed"] else _PLAIN
    return {_shape(problem, width, elements) for width in widths for elements in _ELEMENTS}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    tile_m, tile_n = (sorted(set(sizes)) for sizes in zip(*_shapes(problem), strict=True))
    return {
        "schedule": ["persistent", "block"],
        "tile_m": list(tile_m),
        "tile_n": list(tile_n),
        "occupancy": [4, 8],
        "num_worker_warps": [0],
    }


def _config(problem: Problem, schedule: str, side: int) -> Config:
    """Return a config with tiles of ``side * side`` elements."""
    tile_m, tile_n = _shape(problem, side if problem["transposed"] else 16 * side, side * side)
    return Config(schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=4, num_worker_warps=0)


SPEC = spec(
    "lay_out",
    "y = x or its transpose, rounded to another dtype",
    (
        Dimension("rows", "bucketed"),
        Dimension("columns", "bucketed"),
        Dimension("transposed", "flag"),
        Dimension("x_dtype", "dtype"),
        Dimension("dtype", "dtype"),
    ),
    _arrays,
    lambda x, transposed: {"y": (x.T if transposed else x).double()},
    function=lay_out,
    grid=grid_of_tiles,
    space=Space(
        _axes,
        (
            Constraint(
                f"a tile has {', '.join(map(str, _ELEMENTS))} elements, or all of a smaller matrix",
                lambda problem, config, target: (config["tile_m"], config["tile_n"]) in _shapes(problem),
            ),
            Constraint(
                f"tiles of more than {_MOST_ON_AN_SM} elements on an SM spill",
                lambda problem, config, target: (
                    config["tile_m"] * config["tile_n"] * config["occupancy"] <= _MOST_ON_AN_SM
                ),
            ),
        ),
    ),
    default=lambda problem, target: _config(problem, "block", 64),
    generic=lambda problem: _config(problem, "persistent", 32),
    flops=lambda problem: problem["rows"] * problem["columns"],
)

SPECS = (SPEC,)
