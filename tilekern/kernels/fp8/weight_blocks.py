"""Round a weight to e4m3 by blocks of 128 x 128 numbers, as it is or turned.

The forward reads the weight along its rows and the input's gradient along its columns. A block has one scale in both
directions, so the turned matrix has the numbers of the other, and their scales turned. Each direction reads the weight
in its own dtype when it needs it: e4m3 copies would take a byte for each parameter from forward to backward.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.fp8.block_scales import SIDE, UNIT, block_squares, padded, whole
from tilekern.kernels.fp8.blocks import TMA_LOOPS, axes_of_squares, blocks_spec
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of
from tilekern.kernels.fp8.space import HAS_FP8, check_target
from tilekern.kernels.tiles import ConstBool, each_step, load
from tilekern.spec import Array, Config, Problem, Space
from tilekern.spec.targets import Target


def _tile(item, x, y, scale, turned, tma, whole):
    across = ct.cdiv(x.shape[1], SIDE)
    i, j = item // across, item % across
    tile = load(x, (i, j), (SIDE, SIDE), True, 0, tma).astype(ct.float32)
    largest = ct.max(ct.max(bits_of(tile), 1, keepdims=True), 0, keepdims=True)
    step, inverse = scale_of(largest)
    numbers = (tile * inverse).astype(y.dtype)
    if ct.static_eval(turned):
        ct.store(y, (j, i), ct.transpose(numbers))
        ct.store(scale, (j, i), step, allow_tma=False)
    else:
        ct.store(y, (i, j), numbers, allow_tma=whole)
        ct.store(scale, (i, j), step, allow_tma=False)


@ct.kernel
def fp8_weight_blocks(x, y, scale, turned: ConstBool, tma: ConstBool, whole: ConstBool, persistent: ConstBool):
    """A tile a block, or resident blocks that loop; x [rows, columns], y and scale [rows / 128, columns / 128] as x or
    turned.

    ``whole`` means that the rows of x and y are whole 16 bytes; those of a turned y always are.
    """
    steps = ct.cdiv(x.shape[0], SIDE) * ct.cdiv(x.shape[1], SIDE)
    each_step(_tile, steps, persistent, (x, y, scale, turned, tma, whole))


def _arrays(problem: Problem) -> Arrays:
    shapes = (("columns", "whole_rows"), ("across", "down")) if problem["turned"] else (ROWS, ("down", "across"))
    return (
        Array("x", "dtype", ROWS),
        Array("y", E4M3, shapes[0], "output"),
        Array("scale", "float32", shapes[1], "output", aligned=False),
    )


def _reference(x: Any, turned: bool) -> dict[str, Any]:
    x = padded(x.t(), x.shape[1], whole(x.shape[0])) if turned else x
    y, scale = block_squares(x)
    return {"y": y.double(), "scale": scale.double()}


def _default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", occupancy=2, num_worker_warps=8, tma=True)


SPEC = blocks_spec(
    "fp8_weight_blocks",
    "y = x / scale in e4m3, or its transpose, with a power of two as scale of each 128 x 128 numbers",
    ("turned",),
    _arrays,
    _reference,
    function=fp8_weight_blocks,
    constants=lambda problem, config: {"whole": problem["columns"] % UNIT == 0},
    space=Space(axes_of_squares, (HAS_FP8, TMA_LOOPS)),
    default=_default,
    generic=lambda problem: Config(schedule="persistent", occupancy=1, num_worker_warps=8, tma=False),
)
