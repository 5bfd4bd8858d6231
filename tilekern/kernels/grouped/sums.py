"""The sum of each expert's rows, weighted or not: the gradients of the experts' biases.

``partial[s, e] = sum of weights[order[r]] * x[r]`` over share s of the rows r of expert e, in float32 and in a fixed
order; an expert without rows gets zeros, and rows beyond the last offset are ignored. ``SHARES`` blocks take the
tiles of an expert's rows in turn, so that an expert with most of the rows keeps several blocks busy; ``column_sum``
adds the shares up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.grouped.routing import OF_SUMS, balanced, expert_rows, shuffled
from tilekern.kernels.grouped.tiles import rows_of
from tilekern.kernels.tiles import ConstInt, grid_of, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Dimension, Problem, Space, Value, cdiv

SHARES = 8


def _sums(x, offsets, order, weights, partial, columns, shares, tile_m, tile_n):
    """Store the sums; tiles begin at multiples of ``tile_m``: rows outside the expert's count as zeros."""
    experts, across = offsets.shape[0], ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), experts * shares * across, ct.num_blocks(0)):
        c, of = item % across, item // across
        expert, share = of // shares, of % shares
        begin, end = rows_of(offsets, expert, experts, x.shape[0])
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for step in range(begin // tile_m + share, ct.cdiv(end, tile_m), shares):
            row = step * tile_m + ct.arange(tile_m, dtype=ct.int32)
            tile = load(x, (step, c), (tile_m, tile_n), True, 0, False).astype(ct.float32)
            if ct.static_eval(weights is not None):
                slot = load(order, (step,), (tile_m,), True, 0, False)
                tile = tile * ct.expand_dims(ct.gather(weights, slot).astype(ct.float32), 1)
            # Other experts' rows may be NaN.
            total = total + ct.where(ct.expand_dims((row >= begin) & (row < end), 1), tile, 0.0)
        added = ct.reshape(ct.sum(total, axis=0), (1, 1, tile_n))
        ct.store(partial, (share, expert, c), added, allow_tma=False)


@ct.kernel
def grouped_sum(x, offsets, partial, columns: ConstInt, shares: ConstInt, tile_m: ConstInt, tile_n: ConstInt):
    """x [rows, columns], offsets [experts], partial [shares, experts, columns]."""
    _sums(x, offsets, None, None, partial, columns, shares, tile_m, tile_n)


@ct.kernel
def grouped_sum_weighted(
    x, offsets, order, weights, partial, columns: ConstInt, shares: ConstInt, tile_m: ConstInt, tile_n: ConstInt
):
    """The weighted sum; order [rows], weights [rows] by slot."""
    _sums(x, offsets, order, weights, partial, columns, shares, tile_m, tile_n)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["columns"])
    return {
        "schedule": ["block", "persistent"],
        "tile_m": [16, 32, 64],
        "tile_n": sorted({min(width, n) for n in (64, 128)}),
        "occupancy": [2, 4],
        "num_worker_warps": [0],
    }


def _config(problem: Problem, schedule: str, tile_m: int, width: int, occupancy: int) -> Config:
    tile_n = min(width, power_of_two(problem["columns"]))
    return Config(schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=occupancy, num_worker_warps=0)


def _arrays(problem: Problem) -> Arrays:
    weighting = (Array("order", "int32", ("rows",)), Array("weights", "weight_dtype", ("rows",)))
    return (
        Array("x", "dtype", ROWS),
        Array("offsets", "int32", ("experts",), aligned=False),
        *(weighting if problem["weighted"] else ()),
        Array("partial", "float32", ("shares", "experts", "columns"), "output"),
    )


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    order = {"order": shuffled(problem["rows"], generator, device)} if problem["weighted"] else {}
    return {"offsets": balanced(problem, device), **order}


def reference(x: Any, offsets: Any, order: Any = None, weights: Any = None, *, weighted: bool) -> dict[str, Any]:
    """Compute the sums of all shares in float64, [experts, columns]."""
    rows = x.double()
    if weighted:
        rows = rows * weights.double()[order.long()][:, None]
    # Rows without an expert go to an extra one that is dropped.
    sums = rows.new_zeros(len(offsets) + 1, x.shape[1]).index_add_(0, expert_rows(offsets, len(x)), rows)
    return {"partial": sums[:-1]}


def _bytes(problem: Problem) -> int:
    """Return the bytes of the rows and of one sum: all shares count as their sum."""
    each = problem["columns"] * ITEM_BYTES[problem["dtype"]]
    numbers = 4 + ITEM_BYTES[problem["weight_dtype"]] if problem["weighted"] else 0
    return problem["rows"] * (each + numbers) + 4 * problem["experts"] * problem["columns"]


SPEC = spec(
    "grouped_sum",
    "the rows of each expert added up in shares, float32 in a fixed order",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("experts", "columns")),
        *(Dimension(name, "dtype") for name in ("dtype", "weight_dtype")),
        Dimension("weighted", "flag"),
    ),
    _arrays,
    reference,
    function=lambda problem, config: grouped_sum_weighted if problem["weighted"] else grouped_sum,
    sizes=lambda problem: {"shares": SHARES},
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["experts"] * SHARES * cdiv(sizes["columns"], config["tile_n"]), config, sm_count
    ),
    space=Space(_axes),
    default=lambda problem, target: _config(problem, "block", 32, 128, 4),
    generic=lambda problem: _config(problem, "persistent", 16, 64, 1),
    given=_given,
    results=lambda found: {"partial": found["partial"].double().sum(0)},
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
    variations=OF_SUMS,
    timed=("zipf",),
)

SPECS = (SPEC,)
