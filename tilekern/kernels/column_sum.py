"""Sums down the columns of a float32 matrix, in a fixed order: the last step of a weight's gradient."""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.common.arrays import COLUMNS, ROWS, Arrays
from tilekern.kernels.common.tables import MATRIX, spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Problem, Space, cdiv
from tilekern.targets import Target


@ct.kernel
def column_sum(x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, latency: ConstInt, tma: ConstBool):
    """Each block adds up ``tile_n`` columns, ``tile_m`` rows at a time; x [rows, columns], y [columns]."""
    # Its launch overlaps the end of the kernel that writes x.
    ct.grid_dependency_control_wait()
    for c in range(ct.bid(0), ct.cdiv(columns, tile_n), ct.num_blocks(0)):
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for r in range(ct.cdiv(x.shape[0], tile_m)):
            total = total + load(x, (r, c), (tile_m, tile_n), True, latency, tma)
        ct.store(y, (c,), ct.sum(total, axis=0).astype(y.dtype))


def _arrays(problem: Problem) -> Arrays:
    # A store by 16 bytes would reach beyond a result that is shorter.
    return Array("x", "float32", ROWS), Array("y", "dtype", COLUMNS, "output", problem["columns"] >= 8)


def _default(problem: Problem, target: Target) -> Config:
    tile_m = min(64, max(16, power_of_two(problem["rows"])))
    return Config(schedule="block", tile_m=tile_m, tile_n=32, occupancy=1, num_worker_warps=0, tma=False, latency=0)


SPEC = spec(
    "column_sum",
    "y = sum of x over its rows, float32 sums in a fixed order",
    MATRIX,
    _arrays,
    lambda x: {"y": x.double().sum(0)},
    function=lambda problem, config: column_sum,
    grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["columns"], config["tile_n"]), config, sm_count),
    space=Space(
        lambda problem: {
            "schedule": ["block"],
            "tile_m": [32, 64, 128],
            "tile_n": [8, 16, 32],
            "occupancy": [1],
            "num_worker_warps": [0],
            "tma": [True, False],
            "latency": [0],
        },
        (
            TMA_NEEDS_HOPPER,
            Constraint(
                "a tile of fewer than 512 or more than 4096 elements starves or spills",
                lambda problem, config, target: 512 <= config["tile_m"] * config["tile_n"] <= 4096,
            ),
        ),
    ),
    default=_default,
    generic=lambda problem: Config(
        schedule="block", tile_m=32, tile_n=16, occupancy=1, num_worker_warps=0, tma=False, latency=0
    ),
    flops=lambda problem: problem["rows"] * problem["columns"],
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
