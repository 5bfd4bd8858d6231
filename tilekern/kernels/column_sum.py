"""Sums down the columns of a float32 matrix, in a fixed order: the last step of a weight's gradient.

CuTe DSL compiles it too (:mod:`tilekern.kernels.cute.sums`), for columns that are whole vectors of 16 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import cuda.tile as ct

from tilekern.kernels.families import cute_sums
from tilekern.kernels.families.arrays import COLUMNS, ROWS, Arrays
from tilekern.kernels.families.tables import MATRIX, spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target


def sum_columns(x, y, columns, tile_m, tile_n, latency, tma):
    """Sum all columns: a block's ``tile_n`` columns, then the columns that are a grid further on."""
    for c in range(ct.bid(0), ct.cdiv(columns, tile_n), ct.num_blocks(0)):
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for r in range(ct.cdiv(x.shape[0], tile_m)):
            total = total + load(x, (r, c), (tile_m, tile_n), True, latency, tma)
        ct.store(y, (c,), ct.sum(total, axis=0).astype(y.dtype))


@ct.kernel
def column_sum(x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, latency: ConstInt, tma: ConstBool):
    """Each block adds up ``tile_n`` columns, ``tile_m`` rows at a time; x [rows, columns], y [columns]."""
    # Its launch overlaps the end of the kernel that writes x.
    ct.grid_dependency_control_wait()
    sum_columns(x, y, columns, tile_m, tile_n, latency, tma)


def _arrays(problem: Problem) -> Arrays:
    # A store of 16 bytes would reach beyond a shorter result.
    return Array("x", "float32", ROWS), Array("y", "dtype", COLUMNS, "output", problem["columns"] >= 8)


def config_of_sums(tile_m: int, tile_n: int, **more: Value) -> Config:
    """Return a config of a kernel that adds up columns."""
    tiles = {"schedule": "block", "tile_m": tile_m, "tile_n": tile_n}
    return Config({**tiles, "occupancy": 1, "num_worker_warps": 0, "tma": False, **more})


def default_of_sums(problem: Problem, target: Target, **more: Value) -> Config:
    """Return the default of such a kernel."""
    return config_of_sums(min(64, max(16, power_of_two(problem["rows"]))), 32, **more)


def space_of_sums(tile_m: list[Value], tile_n: list[Value], **more: list[Value]) -> Space:
    """Return the space of such a kernel."""
    axes: dict[str, list[Value]] = {"schedule": ["block"], "tile_m": tile_m, "tile_n": tile_n}
    axes |= {"occupancy": [1], "num_worker_warps": [0], "tma": [True, False], **more}
    sized = Constraint(
        "a tile of fewer than 512 or more than 4096 elements starves or spills",
        lambda problem, config, target: 512 <= config["tile_m"] * config["tile_n"] <= 4096,
    )
    return Space(lambda problem: axes, (TMA_NEEDS_HOPPER, sized))


SPEC = spec(
    "column_sum",
    "y = sum of x over its rows, float32 sums in a fixed order",
    MATRIX,
    _arrays,
    lambda x: {"y": x.double().sum(0)},
    function=column_sum,
    grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["columns"], config["tile_n"]), config, sm_count),
    space=replace(space_of_sums([32, 64, 128], [8, 16, 32], latency=[0]), beside=(cute_sums.SPACE,)),
    default=lambda problem, target: default_of_sums(problem, target, latency=0),
    generic=lambda problem: config_of_sums(32, 16, latency=0),
    cute=cute_sums.implement,
    flops=lambda problem: problem["rows"] * problem["columns"],
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
