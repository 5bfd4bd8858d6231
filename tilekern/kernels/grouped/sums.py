"""The rows of each expert added up, weighted or not: the gradients of the experts' biases.

``partial[s, e] = sum of weights[order[r]] * x[r]`` over share s of the rows r of expert e, in float32 and in a fixed
order; an expert without rows gets zeros, and rows beyond the last offset count for nobody. Tiles of rows are dealt out
to ``SHARES`` blocks in turn, so that an expert that has most of the rows keeps as many blocks busy; ``column_sum`` adds
the shares up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.grouped.routing import OF_SUMS, balanced, expert_rows, shuffled
from tilekern.kernels.grouped.tiles import rows_of
from tilekern.kernels.tiles import ConstInt, grid_of, hints, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
)

SHARES = 8


def _sums(x, offsets, order, weights, partial, columns, shares, tile_m, tile_n):
    """Tiles begin at multiples of ``tile_m``: rows of other experts in them, and of none, count as zeros."""
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
            # Rows of others may be NaN.
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
    """With order [rows], and weights [rows] by slot."""
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


def _implement(problem: Problem, config: Config) -> Implementation:
    dtype, columns, experts = problem["dtype"], problem["columns"], problem["experts"]
    weighting = (ArrayParameter("order", "int32", 1), ArrayParameter("weights", problem["weight_dtype"], 1))
    return Implementation(
        function=grouped_sum_weighted if problem["weighted"] else grouped_sum,
        parameters=(
            ArrayParameter("x", dtype, 2, columns),
            ArrayParameter("offsets", "int32", 1, experts, aligned=False),
            *(weighting if problem["weighted"] else ()),
            ArrayParameter("partial", "float32", 3, columns, "output"),
        ),
        constants=(
            ("columns", columns),
            ("shares", SHARES),
            ("tile_m", config["tile_m"]),
            ("tile_n", config["tile_n"]),
        ),
        grid=lambda sizes, sm_count: grid_of(
            sizes["experts"] * SHARES * cdiv(columns, config["tile_n"]), config, sm_count
        ),
        hints=hints(config),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    def normal(dtype: str, *shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))

    rows = problem["rows"]
    found = {"x": normal(problem["dtype"], rows, problem["columns"]), "offsets": balanced(problem, device)}
    if problem["weighted"]:
        weights = normal(problem["weight_dtype"], rows)
        found |= {"order": shuffled(rows, generator, device), "weights": weights}
    return found


def reference(x: Any, offsets: Any, order: Any = None, weights: Any = None, *, weighted: bool) -> dict[str, Any]:
    """The sums of all shares in float64, [experts, columns]."""
    rows = x.double()
    if weighted:
        rows = rows * weights.double()[order.long()][:, None]
    # Rows of no expert go to one that is left out.
    sums = rows.new_zeros(len(offsets) + 1, x.shape[1]).index_add_(0, expert_rows(offsets, len(x)), rows)
    return {"partial": sums[:-1]}


def _bytes(problem: Problem) -> int:
    each = problem["columns"] * ITEM_BYTES[problem["dtype"]]
    numbers = 4 + ITEM_BYTES[problem["weight_dtype"]] if problem["weighted"] else 0
    return problem["rows"] * (each + numbers) + 4 * problem["experts"] * problem["columns"]


SPEC = KernelSpec(
    name="grouped_sum",
    summary="the rows of each expert added up in shares, float32 in a fixed order",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("experts", "exact"),
        Dimension("columns", "exact"),
        Dimension("dtype", "dtype"),
        Dimension("weight_dtype", "dtype"),
        Dimension("weighted", "flag"),
    ),
    space=Space(_axes),
    implement=_implement,
    default=lambda problem, target: _config(problem, "block", 32, 128, 4),
    generic=lambda problem: _config(problem, "persistent", 16, 64, 1),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"partial": ((SHARES, problem["experts"], problem["columns"]), "float32")},
    reference=reference,
    results=lambda found: {"partial": found["partial"].double().sum(0)},
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: "float32",
    variations=OF_SUMS,
    timed=("zipf",),
)

SPECS = (SPEC,)
