"""The first step of attention's backward: delta, the sum of out * dout over each head's channels."""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.attention import problem as shared
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, load
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value, cdiv


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


def _is_bounded(problem: Problem, config: Config) -> bool:
    whole = problem["heads"] % config["tile_h"] == 0 and problem["head_dim"] == problem["depth"]
    return bool(config["tile_m"] > 1 or not whole)


def _grid(sizes: Problem, config: Config, sm_count: int) -> int:
    tiles = cdiv(sizes["queries"], config["tile_m"]) * cdiv(sizes["heads"], config["tile_h"])
    return grid_of(sizes["batch"] * tiles, config, sm_count)


_SHAPE = ("batch", "queries", "heads", "head_dim")
_ARRAYS = (
    *(Array(name, "dtype", _SHAPE) for name in ("out", "dout")),
    Array("delta", "float32", ("batch", "heads", "queries"), "output", aligned=False),
)

SPEC = spec(
    "attention_delta",
    "delta = sum of out * dout over each head's channels, in float32",
    (
        *(Dimension(name, "bucketed") for name in ("batch", "queries")),
        *(Dimension(name, "exact") for name in ("heads", "head_dim")),
        Dimension("dtype", "dtype"),
    ),
    lambda problem: _ARRAYS,
    lambda out, dout: {"delta": (out.double() * dout.double()).sum(-1).transpose(1, 2)},
    function=lambda problem, config: attention_delta,
    sizes=lambda problem: {"depth": shared.depth_of(problem)},
    constants=lambda problem, config: {"bounded": _is_bounded(problem, config)},
    grid=_grid,
    space=Space(_axes, (TMA_NEEDS_HOPPER, _SIZED)),
    default=lambda problem, target: _config(_rows(problem), 1),
    generic=lambda problem: _config(_rows(problem), 1, "persistent"),
    flops=lambda problem: 2 * problem["batch"] * problem["queries"] * problem["heads"] * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (SPEC,)
