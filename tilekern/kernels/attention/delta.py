"""The first step of attention's backward: delta, the sum of out * dout over each head's channels."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention import problem as shared
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, load
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
)


@ct.kernel
def attention_delta(
    out, dout, delta, depth: ConstInt, tile_m: ConstInt, tile_h: ConstInt, bounded: ConstBool, tma: ConstBool
):
    """Blocks that loop over tiles of tokens and heads in steps of the grid.

    out and dout [batch, queries, heads, head_dim], delta [batch, heads, queries].
    """
    across = ct.cdiv(out.shape[2], tile_h)
    rows = ct.cdiv(out.shape[1], tile_m)
    for item in range(ct.bid(0), out.shape[0] * rows * across, ct.num_blocks(0)):
        batch, row, head = item // (rows * across), item // across % rows, item % across
        index, shape = (batch, row, head, 0), (1, tile_m, tile_h, depth)
        left = load(out, index, shape, bounded, 0, tma).astype(ct.float32)
        right = load(dout, index, shape, bounded, 0, tma).astype(ct.float32)
        sums = ct.reshape(ct.sum(left * right, axis=3), (tile_m, tile_h))
        values = ct.reshape(ct.transpose(sums), (1, tile_h, tile_m))
        ct.store(delta, (batch, head, row), values, check_bounds=bounded, allow_tma=False)


def _implement(problem: Problem, config: Config) -> Implementation:
    head_dim, heads, depth = problem["head_dim"], problem["heads"], shared.depth_of(problem)
    tile_m, tile_h = config["tile_m"], config["tile_h"]
    across = cdiv(heads, tile_h)
    return Implementation(
        function=attention_delta,
        parameters=(
            ArrayParameter("out", problem["dtype"], 4, head_dim),
            ArrayParameter("dout", problem["dtype"], 4, head_dim),
            ArrayParameter("delta", "float32", 3, None, "output", aligned=False),
        ),
        constants=(
            ("depth", depth),
            ("tile_m", tile_m),
            ("tile_h", tile_h),
            ("bounded", tile_m > 1 or heads % tile_h != 0 or head_dim != depth),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(
            sizes["batch"] * cdiv(sizes["queries"], tile_m) * across, config, sm_count
        ),
        hints=hints(config),
    )


def _config(tile_m: int, tile_h: int, schedule: str = "block", occupancy: int = 4) -> Config:
    return Config(
        schedule=schedule, tile_m=tile_m, tile_h=tile_h, occupancy=occupancy, num_worker_warps=0, tma=False
    )  # fmt: skip


_SIZED = Constraint(
    "a tile of fewer than 1024 or more than 8192 elements starves or spills",
    lambda problem, config, target: 1024 <= config["tile_m"] * config["tile_h"] * shared.depth_of(problem) <= 8192,
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block"],
        "tile_m": [2, 4, 8, 16, 32, 64],
        "tile_h": sorted({1, 4 if problem["heads"] % 4 == 0 else 1}),
        "occupancy": [4],
        "num_worker_warps": [0],
        "tma": [False, True],
    }


def _rows(problem: Problem) -> int:
    return max(2, min(64, 2048 // shared.depth_of(problem)))


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    shape = (problem["batch"], problem["queries"], problem["heads"], problem["head_dim"])
    dtype = getattr(torch, problem["dtype"])
    return {name: torch.randn(shape, generator=generator, device=device).to(dtype) for name in ("out", "dout")}


SPEC = KernelSpec(
    name="attention_delta",
    summary="delta = sum of out * dout over each head's channels, in float32",
    module=__name__,
    dimensions=(
        Dimension("batch", "bucketed"),
        Dimension("queries", "bucketed"),
        Dimension("heads", "exact"),
        Dimension("head_dim", "exact"),
        Dimension("dtype", "dtype"),
    ),
    space=Space(_axes, (TMA_NEEDS_HOPPER, _SIZED)),
    implement=_implement,
    default=lambda problem, target: _config(_rows(problem), 1),
    generic=lambda problem: _config(_rows(problem), 1, "persistent"),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"delta": ((problem["batch"], problem["heads"], problem["queries"]), "float32")},
    reference=lambda out, dout: {"delta": (out.double() * dout.double()).sum(-1).transpose(1, 2)},
    bytes_moved=lambda problem: (
        problem["batch"] * problem["queries"] * problem["heads"]
        * (2 * problem["head_dim"] * ITEM_BYTES[problem["dtype"]] + 4)
    ),
    flops=lambda problem: 2 * problem["batch"] * problem["queries"] * problem["heads"] * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
)  # fmt: skip

SPECS = (SPEC,)
