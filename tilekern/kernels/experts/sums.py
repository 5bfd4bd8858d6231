"""The rows of each expert added up, weighted or not: the gradients of the biases of both products.

``partial[s, e] = sum of weights[order[r]] * x[r]`` over share s of the rows r of expert e, in float32 and in a fixed
order; an expert without rows gets zeros. Tiles of rows are dealt out to ``SHARES`` blocks in turn, so that an expert
that has most of the rows keeps as many blocks busy; ``column_sum`` adds the shares up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.route import routed
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, hints, load, power_of_two
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


@ct.kernel
def experts_sum(
    x, offsets, order, weights, partial, columns: ConstInt, shares: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    weighted: ConstBool,
):  # fmt: skip
    """x [rows, columns], offsets [experts], order [rows], weights [rows] by slot, partial [shares, experts * columns].

    Tiles begin at multiples of ``tile_m``: rows of other experts in them, and of none, count as zeros.
    """
    across = ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), offsets.shape[0] * shares * across, ct.num_blocks(0)):
        c, of = item % across, item // across
        expert, share = of // shares, of % shares
        first = ct.where(expert == 0, 0, ct.load(offsets, (ct.maximum(expert, 1) - 1,), ()))
        end = ct.load(offsets, (expert,), ())
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for step in range(first // tile_m + share, ct.cdiv(end, tile_m), shares):
            row = step * tile_m + ct.arange(tile_m, dtype=ct.int32)
            tile = load(x, (step, c), (tile_m, tile_n), True, 0, False).astype(ct.float32)
            if ct.static_eval(weighted):
                slot = load(order, (step,), (tile_m,), True, 0, False)
                tile = tile * ct.expand_dims(ct.gather(weights, slot).astype(ct.float32), 1)
            total = total + ct.where(ct.expand_dims((row >= first) & (row < end), 1), tile, 0.0)
        piece = partial.slice(1, expert * columns, (expert + 1) * columns)
        ct.store(piece, (share, c), ct.sum(total, axis=0, keepdims=True), allow_tma=False)


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
    columns = problem["columns"]
    return Implementation(
        function=experts_sum,
        parameters=(
            ArrayParameter("x", problem["dtype"], 2, columns),
            ArrayParameter("offsets", "int32", 1),
            ArrayParameter("order", "int32", 1),
            ArrayParameter("weights", problem["weight_dtype"], 1),
            ArrayParameter("partial", "float32", 2, role="output"),
        ),
        constants=(
            ("columns", columns),
            ("shares", SHARES),
            ("tile_m", config["tile_m"]),
            ("tile_n", config["tile_n"]),
            ("weighted", problem["weighted"]),
        ),
        grid=lambda sizes, sm_count: grid_of(
            sizes["experts"] * SHARES * cdiv(columns, config["tile_n"]), config, sm_count
        ),
        hints=hints(config),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, experts = problem["rows"], problem["experts"]
    ids = torch.randint(experts + 1, (rows,), generator=generator, device=device)
    ids[::2] = experts // 2
    offsets, order, _, _ = routed(ids, experts)
    weights = (rows,) if problem["weighted"] else (1,)
    x, weights = (
        torch.randn(size, generator=generator, device=device).to(getattr(torch, problem[dtype]))
        for size, dtype in (((rows, problem["columns"]), "dtype"), (weights, "weight_dtype"))
    )
    return {"x": x, "offsets": offsets, "order": order, "weights": weights}


def reference(x: Any, offsets: Any, order: Any, weights: Any, weighted: bool) -> dict[str, Any]:
    """The sums of all shares, [experts * columns]."""
    import torch

    rows = x.double()
    if weighted:
        rows = rows * weights.double()[order.long()][:, None]
    expert = torch.searchsorted(offsets.long(), torch.arange(len(x), device=x.device), right=True)
    # Rows of no expert go to one that is left out.
    sums = rows.new_zeros(len(offsets) + 1, x.shape[1]).index_add_(0, expert, rows)
    return {"partial": sums[:-1].reshape(-1)}


def _bytes(problem: Problem) -> int:
    each = problem["columns"] * ITEM_BYTES[problem["dtype"]]
    numbers = 4 + ITEM_BYTES[problem["weight_dtype"]] if problem["weighted"] else 0
    return problem["rows"] * (each + numbers) + 4 * problem["experts"] * problem["columns"]


SPEC = KernelSpec(
    name="experts_sum",
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
    ops=("experts",),
    implement=_implement,
    default=lambda problem, target: _config(problem, "block", 32, 128, 4),
    generic=lambda problem: _config(problem, "persistent", 16, 64, 1),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"partial": ((SHARES, problem["experts"] * problem["columns"]), "float32")},
    reference=reference,
    results=lambda found: {"partial": found["partial"].double().sum(0)},
    bytes_moved=_bytes,
    flops=lambda problem: 2 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: "float32",
)

SPECS = (SPEC,)
