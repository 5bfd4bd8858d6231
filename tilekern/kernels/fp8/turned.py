"""Transpose a matrix of e4m3 numbers, from a scale for each row to one for all: ``x^T ~ scale * y``.

A tensor core reads e4m3 operands along the sums alone, so the two gradients of a linear layer need its input, its
weight and its result's gradient turned. The scale of a turned row would have to be the largest of a column, which takes
a pass of its own over the matrix; the largest of the rows' scales is known already. All are powers of two, so a number
stays as it is unless it is below 2^-14 of the matrix's largest, where fewer bits are left of it, and at last none.

Rows of ``y`` have zeros up to the next 16 numbers, as TMA writes whole 16 bytes, and products read rows that begin at
such.

A weight may be given in its own dtype: it is rounded to its rows' scales first, to the numbers that the forward read.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.fp8.scales import E4M3, INFINITY, MAGNITUDE, reciprocal, scaled_rows, turned_rows
from tilekern.kernels.fp8.space import HAS_FP8, check_target
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of_tiles, load
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# Numbers that TMA writes at once; rows of y are whole ones.
UNIT = 16
# Scales in one load of those of all rows.
_SCALES = 1024
_SIDES = (32, 64, 128)


def _largest(scale):
    """Return the largest scale [1], NaN if one is NaN; they are positive, so that their bits are in their order."""
    largest = ct.zeros((_SCALES,), ct.int32)
    for n in range(ct.cdiv(scale.shape[0], _SCALES)):
        largest = ct.maximum(largest, ct.bitcast(load(scale, (n,), (_SCALES,), True, 0, False), ct.int32) & MAGNITUDE)
    return ct.max(largest, 0, keepdims=True)


def _turned(item, x, scale, y, common, largest, shrinking, tile_m, tile_n, tma):
    down = ct.cdiv(x.shape[0], tile_m)
    i, j = item % down, item // down
    step = load(scale, (i,), (tile_m,), True, 0, False)
    tile = load(x, (i, j), (tile_m, tile_n), True, 0, tma)
    if ct.static_eval(x.dtype != y.dtype):
        inverse = ct.reshape(reciprocal(ct.bitcast(step, ct.int32)), (tile_m, 1))
        tile = (tile.astype(ct.float32) * inverse).astype(y.dtype)
    moved = tile.astype(ct.float32) * ct.reshape(step * shrinking, (tile_m, 1))
    ct.store(y, (j, i), ct.transpose(moved.astype(y.dtype)), allow_tma=tma)
    if i == 0:
        ct.store(common, (j,), ct.bitcast(largest, ct.float32) * ct.full((tile_n,), 1.0, ct.float32), allow_tma=False)


@ct.kernel
def fp8_turned(
    x, scale, y, common, tile_m: ConstInt, tile_n: ConstInt, tma: ConstBool, persistent: ConstBool
):  # fmt: skip
    """A tile a block, or resident blocks that loop; x [rows, columns], scale [rows], y [columns, pitch], common
    [columns], whose elements are all the scale of y.
    """
    largest = _largest(scale)
    shrinking = ct.where(largest < INFINITY, reciprocal(largest), math.nan)
    if ct.static_eval(persistent):
        tiles = ct.cdiv(x.shape[0], tile_m) * ct.cdiv(x.shape[1], tile_n)
        for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
            _turned(item, x, scale, y, common, largest, shrinking, tile_m, tile_n, tma)
    else:
        _turned(ct.bid(0), x, scale, y, common, largest, shrinking, tile_m, tile_n, tma)


def _arrays(problem: Problem) -> Arrays:
    return (
        Array("x", E4M3 if problem["rounded"] else "dtype", ROWS),
        Array("scale", "float32", ("rows",)),
        Array("y", E4M3, ("columns", "pitch"), "output"),
        Array("common", "float32", ("columns",), "output"),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    shape = problem["rows"], problem["columns"]
    x = torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, problem["dtype"]))
    numbers, scale = scaled_rows(x)
    return {"x": numbers if problem["rounded"] else x, "scale": scale}


def _reference(x: Any, scale: Any, rounded: bool) -> dict[str, Any]:
    import torch

    y, common = turned_rows(x, scale)
    # The zeros behind a row have its scale too, which may be NaN.
    behind = (0 * common)[:, None].expand(len(common), pitch_of(x.shape[0]) - x.shape[0])
    return {"y": torch.cat([y.double(), behind.double()], 1), "common": common.double()}


def pitch_of(rows: int) -> int:
    """Return the numbers in a row of y, for so many rows of x."""
    return cdiv(rows, UNIT) * UNIT


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        "tile_m": list(_SIDES),
        "tile_n": list(_SIDES),
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0],
        "tma": [True, False],
    }


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    return bool(2048 <= config["tile_m"] * config["tile_n"] <= 32768 // config["occupancy"])


def _default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", tile_m=128, tile_n=64, occupancy=2, num_worker_warps=0, tma=True)


SPEC = spec(
    "fp8_turned",
    "y = x^T in e4m3, at the largest of the rows' scales",
    (
        Dimension("rows", "bucketed"),
        Dimension("columns", "exact"),
        Dimension("rounded", "flag"),
        Dimension("dtype", "dtype"),
    ),
    _arrays,
    _reference,
    function=fp8_turned,
    grid=grid_of_tiles,
    space=Space(
        _axes,
        (
            HAS_FP8,
            Constraint("a tile has 2048 numbers or more, and all on an SM up to 32768", _fits),
            Constraint(
                "blocks that loop are for tiles that TMA brings, whose loads run ahead",
                lambda problem, config, target: config["tma"] == (config["schedule"] == "persistent"),
            ),
        ),
    ),
    default=_default,
    generic=lambda problem: Config(
        schedule="persistent", tile_m=32, tile_n=64, occupancy=1, num_worker_warps=8, tma=False
    ),
    given=_inputs,
    sizes=lambda problem: {"pitch": pitch_of(problem["rows"])},
    result_dtype=lambda problem: "float32",
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
)
