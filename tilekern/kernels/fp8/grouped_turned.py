"""Transpose e4m3 matrices of experts, by blocks of 128 rows: ``x[128 rows]^T ~ scale * y[block]``.

A tensor core reads e4m3 operands along the sums alone. The gradient of an expert's weight sums over its rows, and one
of both products with a weight sums over the weight's rows, so rows that are sorted by expert, and weights, have to be
turned. Experts have any number of rows: each begins a block of its own here, whose last rows may be zeros, so that
products read whole tiles at addresses that TMA takes.

    rows      An expert whose rows begin at ``begin`` has its first block at ``begin // 128 + expert``, so nobody counts
              blocks (:mod:`tilekern.kernels.grouped.tiles`), and some stay unwritten. A block has the largest of its
              rows' scales. They may be gathered through ``order``, as in :mod:`tilekern.kernels.grouped.product`.
    weights   are given in their own dtype, and each 128 x 128 numbers have a scale, the least one.

All scales are powers of two, so the numbers are those of :mod:`tilekern.kernels.fp8.rows`, unless they are below 2^-14
of their block's largest, where fewer bits are left of them, and at last none.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.fp8.scales import E4M3, INFINITY, MAGNITUDE, bits_of, reciprocal, scale_of, scaled_rows
from tilekern.kernels.fp8.space import HAS_FP8, check_target
from tilekern.kernels.grouped.routing import OF_SUMS, SLOTS, balanced, shuffled
from tilekern.kernels.grouped.space import OFFSETS, ORDER
from tilekern.kernels.grouped.tiles import gathered, group_at, rows_of, sources
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# Rows of a block.
SIDE = 128


def _store(y, block, j, tile, tile_n):
    """Store a tile [128, tile_n] of float32 numbers turned, in e4m3."""
    ct.store(y, (block, j, 0), ct.reshape(ct.transpose(tile.astype(y.dtype)), (1, tile_n, SIDE)))


def _rows(item, x, scale, offsets, order, slots, y, common, experts, turns, rows, tile_n):
    across = ct.cdiv(x.shape[1], tile_n)
    block, j = item // across, item % across
    expert = group_at(offsets, block, SIDE, experts, turns)
    begin, end = rows_of(offsets, expert, experts, rows)
    first = begin + (block - (begin // SIDE + expert)) * SIDE
    if first < end:
        if ct.static_eval(order is not None):
            tokens = sources(order, first, slots, SIDE)
            tile, step = gathered(x, tokens, j, tile_n, 0), ct.gather(scale, tokens)
        else:
            view = x.tiled_view((SIDE, tile_n), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_n))
            steps = scale.tiled_view((SIDE,), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1,))
            tile, step = view.load((first, j)), steps.load((first,))
        inside = first + ct.arange(SIDE, dtype=ct.int32) < end
        # Those of the next expert may be NaN.
        wide, step = ct.where(ct.reshape(inside, (SIDE, 1)), tile.astype(ct.float32), 0.0), ct.where(inside, step, 0.0)
        largest = ct.max(ct.bitcast(step, ct.int32) & MAGNITUDE, 0, keepdims=True)
        shrinking = ct.where(largest < INFINITY, reciprocal(largest), math.nan)
        _store(y, block, j, wide * ct.reshape(step * shrinking, (SIDE, 1)), tile_n)
        if j == 0:
            ct.store(common, (block,), ct.bitcast(largest, ct.float32), allow_tma=False)


@ct.kernel
def fp8_grouped_turned(
    x, scale, offsets, y, common, experts: ConstInt, turns: ConstInt, tile_n: ConstInt, persistent: ConstBool
):  # fmt: skip
    """A tile a block, or resident blocks that loop; x [rows, columns], scale [rows], offsets [experts].

    y [blocks, columns, 128], common [blocks].
    """
    steps = (x.shape[0] // SIDE + experts) * ct.cdiv(x.shape[1], tile_n)
    each_step(
        _rows, steps, persistent,
        (x, scale, offsets, None, None, y, common, experts, turns, x.shape[0], tile_n),
    )  # fmt: skip


@ct.kernel
def fp8_grouped_turned_gathered(
    x, scale, offsets, order, slots, y, common, experts: ConstInt, turns: ConstInt, tile_n: ConstInt,
    persistent: ConstBool,
):  # fmt: skip
    """With x [tokens, columns] and scale [tokens] gathered by order [rows]."""
    steps = (order.shape[0] // SIDE + experts) * ct.cdiv(x.shape[1], tile_n)
    each_step(
        _rows, steps, persistent,
        (x, scale, offsets, order, slots, y, common, experts, turns, order.shape[0], tile_n),
    )  # fmt: skip


def _weight(item, x, y, scale):
    down, across = ct.cdiv(x.shape[1], SIDE), ct.cdiv(x.shape[2], SIDE)
    block, j = item // across, item % across
    tile = ct.reshape(load(x, (block // down, block % down, j), (1, SIDE, SIDE), True, 0, True), (SIDE, SIDE))
    tile = tile.astype(ct.float32)
    step, inverse = scale_of(ct.max(ct.max(bits_of(tile), 1, keepdims=True), 0, keepdims=True))
    _store(y, block, j, tile * inverse, SIDE)
    ct.store(scale, (block, j), step, allow_tma=False)


@ct.kernel
def fp8_expert_weights_turned(x, y, scale, persistent: ConstBool):
    """A tile a block, or resident blocks that loop; x [experts, rows, columns].

    y [blocks, columns, 128] and scale [blocks, columns / 128], with ``rows / 128`` blocks for each expert, and one more
    for its last rows.
    """
    steps = x.shape[0] * ct.cdiv(x.shape[1], SIDE) * ct.cdiv(x.shape[2], SIDE)
    each_step(_weight, steps, persistent, (x, y, scale))


def blocks_of(rows: int, experts: int) -> int:
    """Return the blocks of rows that are sorted by expert, some of which stay unwritten."""
    return rows // SIDE + experts


def turned_groups(x: Any, scale: Any, offsets: Any, order: Any = None, slots: int = 1) -> tuple[Any, Any]:
    """Compute the blocks of rows that are sorted by expert, by torch's operations.

    Args:
        x: [rows, columns] of e4m3, or, with ``order``, [tokens, columns].
        scale: [rows] or [tokens].
        offsets: [experts], int32: the end of each expert's rows.
        order: [rows], int32: the slot of each row, or None.
        slots: the slots of a token.

    Returns:
        e4m3 numbers [blocks, columns, 128] and scales [blocks]; of blocks without rows both are NaN.
    """
    import torch

    tokens = None if order is None else order.long() // slots
    numbers, steps = (x.float(), scale) if tokens is None else (x.float()[tokens], scale[tokens])
    places = torch.arange(len(numbers), dtype=torch.int32, device=x.device)
    expert = torch.searchsorted(offsets, places, right=True)
    begins = torch.cat([offsets.new_zeros(1), offsets])[expert]
    count = blocks_of(len(numbers), len(offsets)) * SIDE
    # Rows of nobody go behind all blocks.
    to = torch.where(expert < len(offsets), (begins // SIDE + expert) * SIDE + places - begins, count).long()
    rows = numbers.new_zeros(count + 1, x.shape[1]).index_copy_(0, to, numbers)[:-1]
    scales = steps.new_zeros(count + 1).index_copy_(0, to, steps)[:-1]
    common = scales.view(-1, SIDE).amax(1)
    common = common.where(common != 0, math.nan)
    moved = (rows * (scales / common.repeat_interleave(SIDE))[:, None]).to(torch.float8_e4m3fn)
    return moved.view(-1, SIDE, x.shape[1]).transpose(1, 2).contiguous(), common


def turned_weights(x: Any) -> tuple[Any, Any]:
    """Compute the blocks of weights [experts, rows, columns], by torch's operations.

    Returns:
        e4m3 numbers [blocks, columns, 128] and their scales [blocks, columns / 128], all blocks of one expert first.
    """
    experts, rows, columns = x.shape
    down, across = cdiv(rows, SIDE), cdiv(columns, SIDE)
    padded = x.new_zeros(experts, down * SIDE, across * SIDE)
    padded[:, :rows, :columns] = x
    squares = padded.view(experts * down, SIDE, across, SIDE).permute(0, 2, 3, 1).reshape(-1, SIDE * SIDE)
    numbers, scale = scaled_rows(squares)
    return numbers.view(experts * down, across * SIDE, SIDE)[:, :columns].contiguous(), scale.view(-1, across)


def _row_arrays(problem: Problem) -> Arrays:
    known = ("tokens", "columns") if problem["gathered"] else ROWS
    return (
        Array("x", E4M3, known),
        Array("scale", "float32", known[:1]),
        OFFSETS,
        *(ORDER if problem["gathered"] else ()),
        Array("y", E4M3, ("row_blocks", "columns", str(SIDE)), "output"),
        Array("common", "float32", ("row_blocks",), "output"),
    )


def _row_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows = problem["tokens" if problem["gathered"] else "rows"]
    x, scale = scaled_rows(torch.randn((rows, problem["columns"]), generator=generator, device=device))
    order = {"order": shuffled(problem["rows"], generator, device)} if problem["gathered"] else {}
    return {"x": x, "scale": scale, "offsets": balanced(problem, device), **order}


def _row_reference(x: Any, scale: Any, offsets: Any, order: Any = None, slots: int = 1) -> dict[str, Any]:
    y, common = turned_groups(x, scale, offsets, order, slots)
    return {"y": y.double(), "common": common.double()}


def _weight_reference(x: Any) -> dict[str, Any]:
    y, scale = turned_weights(x)
    return {"y": y.double(), "scale": scale.double()}


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    return bool(SIDE * config["tile_n"] * config["occupancy"] <= 32768)


def _row_default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", tile_n=64, occupancy=4, num_worker_warps=0)


def _row_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        "tile_n": [32, 64, 128],
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
    }


def _weight_default(problem: Problem, target: Target) -> Config:
    check_target(target)
    return Config(schedule="persistent", occupancy=2, num_worker_warps=8)


def _weight_axes(problem: Problem) -> dict[str, list[Value]]:
    return {"schedule": ["persistent", "block"], "occupancy": [1, 2], "num_worker_warps": [0, 8]}


def _row_bytes(problem: Problem) -> int:
    """Return the bytes of the rows, each read and written once: not of what fills their blocks."""
    rows, columns, gathers = problem["rows"], problem["columns"], problem["gathered"]
    read = (cdiv(rows, SLOTS) if gathers else rows) * (columns + 4) + 4 * problem["experts"] + 4 * rows * gathers
    return int(read + rows * columns + 4 * cdiv(rows, SIDE))


ROWS_SPEC = spec(
    "fp8_grouped_turned",
    "rows sorted by expert, transposed by blocks of 128, in e4m3 at the largest of their scales",
    (
        Dimension("rows", "bucketed"),
        Dimension("columns", "exact"),
        Dimension("experts", "exact"),
        Dimension("gathered", "flag"),
    ),
    _row_arrays,
    _row_reference,
    # Views: blocks of nobody are not written.
    results=lambda found: {name: values[:] for name, values in found.items()},
    function=lambda problem, config: fp8_grouped_turned_gathered if problem["gathered"] else fp8_grouped_turned,
    sizes=lambda problem: {
        "tokens": cdiv(problem["rows"], SLOTS),
        "row_blocks": blocks_of(problem["rows"], problem["experts"]),
    },
    constants=lambda problem, config: {"turns": (problem["experts"] - 1).bit_length()},
    grid=lambda sizes, config, sm_count: grid_of(
        blocks_of(sizes["rows"], sizes["experts"]) * cdiv(sizes["columns"], config["tile_n"]), config, sm_count
    ),
    space=Space(
        _row_axes,
        (
            HAS_FP8,
            Constraint("the tiles on an SM have up to 32768 numbers", _fits),
            Constraint(
                "a thread of eight warps has 32 numbers of a tile or more",
                lambda problem, config, target: config["num_worker_warps"] == 0 or config["tile_n"] >= 64,
            ),
        ),
    ),
    default=_row_default,
    generic=lambda problem: Config(schedule="persistent", tile_n=32, occupancy=1, num_worker_warps=8),
    given=_row_inputs,
    result_dtype=lambda problem: "float32",
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
    bytes_moved=_row_bytes,
    variations=OF_SUMS,
)
WEIGHTS_SPEC = spec(
    "fp8_expert_weights_turned",
    "weights of experts, transposed by blocks of 128 rows, in e4m3 with a scale of each 128 x 128 numbers",
    (*(Dimension(name, "exact") for name in ("experts", "rows", "columns")), Dimension("dtype", "dtype")),
    (
        Array("x", "dtype", ("experts", *ROWS)),
        Array("y", E4M3, ("weight_blocks", "columns", str(SIDE)), "output"),
        Array("scale", "float32", ("weight_blocks", "across"), "output", aligned=False),
    ),
    _weight_reference,
    function=fp8_expert_weights_turned,
    sizes=lambda problem: {
        "weight_blocks": problem["experts"] * cdiv(problem["rows"], SIDE), "across": cdiv(problem["columns"], SIDE),
    },
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["experts"] * cdiv(sizes["rows"], SIDE) * cdiv(sizes["columns"], SIDE), config, sm_count
    ),
    space=Space(_weight_axes, (HAS_FP8,)),
    default=_weight_default,
    generic=lambda problem: Config(schedule="persistent", occupancy=1, num_worker_warps=8),
    result_dtype=lambda problem: "float32",
    flops=lambda problem: 3 * problem["experts"] * problem["rows"] * problem["columns"],
)  # fmt: skip
