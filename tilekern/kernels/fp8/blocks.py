"""Round a matrix to e4m3 by blocks of 1 x 128 numbers, along rows and, if asked, along columns in the same read.

A linear layer reads its input and its result's gradient along rows for one product and along columns for the weight's
gradient. The scales of both are their own (:mod:`tilekern.kernels.fp8.block_scales`), so the numbers are rounded from
``x`` for each: one launch reads ``x`` from memory once and writes both, 4 bytes a number of bfloat16. Turning e4m3
numbers in a launch of its own would round twice where scales differ, and move 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import MATRIX, Table, flags_of, spec
from tilekern.kernels.fp8.block_scales import SIDE, UNIT, block_rows, block_sizes, padded, whole
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of
from tilekern.kernels.fp8.space import HAS_FP8, check_target, threads
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import Array, Config, Constraint, KernelSpec, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# The most numbers that a thread holds of a tile.
_HELD = 64


def _tile(item, x, y, scale, turned, turned_scale, tile_m, tma, whole):
    across = ct.cdiv(x.shape[1], SIDE)
    i, j = item // across, item % across
    tile = load(x, (i, j), (tile_m, SIDE), True, 0, tma).astype(ct.float32)
    step, inverse = scale_of(ct.max(bits_of(tile), 1, keepdims=True))
    ct.store(y, (i, j), (tile * inverse).astype(y.dtype), allow_tma=whole)
    ct.store(scale, (j, i), ct.reshape(step, (1, tile_m)), allow_tma=False)
    if ct.static_eval(turned is not None):
        # Once more, out of L2: registers for both copies at once would spill.
        tile = load(x, (i, j), (tile_m, SIDE), True, 0, tma).astype(ct.float32)
        step, inverse = scale_of(ct.max(bits_of(tile), 0, keepdims=True))
        ct.store(turned, (j, i), ct.transpose((tile * inverse).astype(y.dtype)))
        ct.store(turned_scale, (i, j), step, allow_tma=False)


@ct.kernel
def fp8_blocks_along(
    x, y, scale, tile_m: ConstInt, tma: ConstBool, whole: ConstBool, persistent: ConstBool
):  # fmt: skip
    """A tile a block, or resident blocks that loop; x and y [rows, columns], scale [columns / 128, rows].

    ``whole`` means that the rows of y are whole 16 bytes, which TMA writes at once.
    """
    steps = ct.cdiv(x.shape[0], tile_m) * ct.cdiv(x.shape[1], SIDE)
    each_step(_tile, steps, persistent, (x, y, scale, None, None, tile_m, tma, whole))


@ct.kernel
def fp8_blocks_both(
    x, y, scale, turned, turned_scale, tile_m: ConstInt, tma: ConstBool, whole: ConstBool, persistent: ConstBool
):  # fmt: skip
    """Also the turned matrix [columns, rows] with its scales [rows / 128, columns]; ``tile_m`` is 128."""
    steps = ct.cdiv(x.shape[0], tile_m) * ct.cdiv(x.shape[1], SIDE)
    each_step(_tile, steps, persistent, (x, y, scale, turned, turned_scale, tile_m, tma, whole))


def _arrays(problem: Problem) -> Arrays:
    along = (
        Array("x", "dtype", ROWS),
        Array("y", E4M3, ROWS, "output"),
        Array("scale", "float32", ("across", "whole_rows"), "output"),
    )
    both = (
        Array("turned", E4M3, ("columns", "whole_rows"), "output"),
        Array("turned_scale", "float32", ("down", "whole_columns"), "output"),
    )
    return along + both if problem["both"] else along


def _reference(x: Any, both: bool) -> dict[str, Any]:
    y, scale = block_rows(x)
    along = {"y": y.double(), "scale": scale.double()}
    if not both:
        return along
    turned, turned_scale = block_rows(padded(x.t(), x.shape[1], whole(x.shape[0])))
    return along | {"turned": turned.double(), "turned_scale": turned_scale.double()}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        "tile_m": [SIDE] if problem["both"] else [32, 64, SIDE],
        "occupancy": [1, 2, 3, 4],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


def axes_of_squares(problem: Problem) -> dict[str, list[Value]]:
    """Return the axes of kernels whose tiles are all 128 x 128."""
    return {
        "schedule": ["persistent", "block"], "occupancy": [1, 2], "num_worker_warps": [0, 8], "tma": [True, False],
    }  # fmt: skip


def grid_of_blocks(sizes: Problem, config: Config, sm_count: int) -> int:
    """Return the blocks to launch when each tile [tile_m or 128, 128] of a matrix is a step."""
    steps = cdiv(sizes["rows"], int(config.get("tile_m") or SIDE)) * cdiv(sizes["columns"], SIDE)
    return grid_of(steps, config, sm_count)


TMA_LOOPS = Constraint(
    "blocks that loop are for tiles that TMA brings, whose loads run ahead",
    lambda problem, config, target: config["tma"] == (config["schedule"] == "persistent"),
)


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    numbers = config["tile_m"] * SIDE
    return bool(numbers <= _HELD * threads(config) and numbers * max(1, config["occupancy"]) <= 2 * SIDE * SIDE)


def _default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", tile_m=SIDE, occupancy=2, num_worker_warps=8, tma=True)


def blocks_spec(
    name: str, summary: str, flags: tuple[str, ...], arrays: Table, reference: Callable[..., dict[str, Any]],
    **more: Any,
) -> KernelSpec:  # fmt: skip
    """Make the spec of a kernel that rounds a matrix by blocks.

    ``more`` is the rest, as in :func:`tilekern.kernels.families.tables.spec`.
    """
    rows, columns, dtype = MATRIX
    return spec(
        name, summary, (rows, columns, *flags_of(flags), dtype), arrays, reference,
        sizes=block_sizes,
        grid=grid_of_blocks,
        result_dtype=lambda problem: "float32",
        flops=lambda problem: 3 * problem["rows"] * problem["columns"],
        **more,
    )  # fmt: skip


SPEC = blocks_spec(
    "fp8_blocks",
    "y = x / scale in e4m3, with a power of two as scale of each 128 numbers of a row; also turned",
    ("both",),
    _arrays,
    _reference,
    function=lambda problem, config: fp8_blocks_both if problem["both"] else fp8_blocks_along,
    constants=lambda problem, config: {"whole": problem["columns"] % UNIT == 0},
    space=Space(
        _axes,
        (
            HAS_FP8,
            Constraint(f"a thread holds at most {_HELD} numbers, and an SM those of two whole tiles", _fits),
            TMA_LOOPS,
        ),
    ),
    default=_default,
    generic=lambda problem: Config(schedule="persistent", tile_m=SIDE, occupancy=1, num_worker_warps=8, tma=False),
)
