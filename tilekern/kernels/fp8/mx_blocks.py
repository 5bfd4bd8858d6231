"""Round a matrix to MXFP8, 32 numbers of a row or of a column with a scale, or both in the same read.

The three products of a linear layer read its input, its weight and its result's gradient along rows and along columns,
and each is rounded for each direction from its own dtype (:mod:`tilekern.kernels.fp8.mx_scales`).
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.fp8.block_scales import SIDE, UNIT, padded, whole
from tilekern.kernels.fp8.blocks import TMA_LOOPS, axes_of_squares, blocks_spec
from tilekern.kernels.fp8.mx_scales import EACH, EXPONENT, GROUP, HAS_MX, SCALES, check_target, mx_rows
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of
from tilekern.kernels.tiles import ConstBool, each_step, load
from tilekern.spec import Array, Config, Problem, Space
from tilekern.spec.targets import Target


def _store(tile, y, scale, index, tma):
    """Round a tile along its rows, and store it and its scales."""
    groups = ct.reshape(tile.astype(ct.float32), (SIDE, EACH, GROUP))
    step, inverse = scale_of(ct.max(bits_of(groups), 2, keepdims=True))
    ct.store(y, index, ct.reshape((groups * inverse).astype(y.dtype), (SIDE, SIDE)), allow_tma=tma)
    exponents = ((ct.bitcast(step, ct.int32) >> EXPONENT) & 0xFF).astype(ct.int8)
    placed = ct.permute(ct.reshape(exponents, (EACH, GROUP, EACH)), (1, 0, 2))
    ct.store(scale, (*index, 0, 0), ct.reshape(placed, (1, 1, *SCALES)), allow_tma=False)


def _tile(item, x, along, across, tma, whole_columns):
    columns = ct.cdiv(x.shape[1], SIDE)
    i, j = item // columns, item % columns
    if ct.static_eval(along is not None):
        _store(load(x, (i, j), (SIDE, SIDE), True, 0, tma), along[0], along[1], (i, j), whole_columns)
    if ct.static_eval(across is not None):
        _store(ct.transpose(load(x, (i, j), (SIDE, SIDE), True, 0, tma)), across[0], across[1], (j, i), True)


def _blocks(x, along, across, tma, whole_columns, persistent):
    steps = ct.cdiv(x.shape[0], SIDE) * ct.cdiv(x.shape[1], SIDE)
    each_step(_tile, steps, persistent, (x, along, across, tma, whole_columns))


@ct.kernel
def mxfp8_blocks_along(x, y, scale, tma: ConstBool, whole_columns: ConstBool, persistent: ConstBool):
    """A tile a block, or resident blocks that loop; x and y [rows, columns], scale [rows / 128, columns / 128, 32, 16].

    ``whole_columns`` means that the rows of y are whole 16 bytes, which TMA writes at once.
    """
    _blocks(x, (y, scale), None, tma, whole_columns, persistent)


@ct.kernel
def mxfp8_blocks_turned(x, turned, turned_scale, tma: ConstBool, persistent: ConstBool):
    """The turned matrix [columns, rows] with its scales [columns / 128, rows / 128, 32, 16]."""
    _blocks(x, None, (turned, turned_scale), tma, True, persistent)


@ct.kernel
def mxfp8_blocks_both(
    x, y, scale, turned, turned_scale, tma: ConstBool, whole_columns: ConstBool, persistent: ConstBool
):  # fmt: skip
    """Both."""
    _blocks(x, (y, scale), (turned, turned_scale), tma, whole_columns, persistent)


def _function(problem: Problem, config: Config) -> Any:
    if problem["both"]:
        return mxfp8_blocks_both
    return mxfp8_blocks_turned if problem["turned"] else mxfp8_blocks_along


def _arrays(problem: Problem) -> Arrays:
    along = (
        Array("y", E4M3, ROWS, "output"),
        Array("scale", "int8", ("down", "across", *map(str, SCALES)), "output"),
    )
    across = (
        Array("turned", E4M3, ("columns", "whole_rows"), "output"),
        Array("turned_scale", "int8", ("across", "down", *map(str, SCALES)), "output"),
    )
    x = (Array("x", "dtype", ROWS),)
    if problem["both"]:
        return x + along + across
    return x + across if problem["turned"] else x + along


def _reference(x: Any, both: bool, turned: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if both or not turned:
        y, scale = mx_rows(x)
        found |= {"y": y.double(), "scale": scale.double()}
    if both or turned:
        y, scale = mx_rows(padded(x.t(), x.shape[1], whole(x.shape[0])))
        found |= {"turned": y.double(), "turned_scale": scale.double()}
    return found


def _default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", occupancy=2, num_worker_warps=8, tma=True)


SPEC = blocks_spec(
    "mxfp8_blocks",
    "y = x / scale in e4m3, with a power of two as scale of each 32 numbers of a row, or of a column",
    ("both", "turned"),
    _arrays,
    _reference,
    function=_function,
    constants=lambda problem, config: {"whole_columns": problem["columns"] % UNIT == 0},
    space=Space(axes_of_squares, (HAS_MX, TMA_LOOPS)),
    default=_default,
    generic=lambda problem: Config(schedule="persistent", occupancy=1, num_worker_warps=8, tma=False),
)
