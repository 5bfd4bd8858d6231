"""Sums down the columns of a float32 matrix, in a fixed order: the last step of a weight's gradient.

CuTe DSL compiles it too (:mod:`tilekern.kernels.cute.sums`), for columns that are whole vectors of 16 bytes.
"""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.families import cute_sums
from tilekern.kernels.families.arrays import COLUMNS, ROWS, Arrays, bytes_of, drawn, tensors
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.kernels.families.tables import MATRIX
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, load, power_of_two
from tilekern.spec import (
    Array,
    Config,
    Constraint,
    CuteKernel,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    cdiv,
    outputs_of,
    parameters_of,
)
from tilekern.spec.targets import Target


def sum_columns(x, y, columns, tile_m, tile_n, latency, tma):
    """The sums of all columns: those of a block's ``tile_n``, then of those that are a grid further on."""
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
    # A store by 16 bytes would reach beyond a result that is shorter.
    return Array("x", "float32", ROWS), Array("y", "dtype", COLUMNS, "output", problem["columns"] >= 8)


def _implement(problem: Problem, config: Config) -> Implementation | CuteKernel:
    parameters = parameters_of(_arrays(problem), MATRIX, problem)
    if is_cute(config):
        return cute_sums.implement(column_sum, parameters, problem, config)
    constants = ("tile_m", "tile_n", "latency", "tma")
    return Implementation(
        function=column_sum,
        parameters=parameters,
        constants=(("columns", problem["columns"]), *((name, config[name]) for name in constants)),
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["columns"], config["tile_n"]), config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _default(problem: Problem, target: Target) -> Config:
    tile_m = min(64, max(16, power_of_two(problem["rows"])))
    return Config(schedule="block", tile_m=tile_m, tile_n=32, occupancy=1, num_worker_warps=0, tma=False, latency=0)


SPEC = KernelSpec(
    name="column_sum",
    summary="y = sum of x over its rows, float32 sums in a fixed order",
    module=__name__,
    dimensions=MATRIX,
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
        (cute_sums.SPACE,),
    ),
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(
        schedule="block", tile_m=32, tile_n=16, occupancy=1, num_worker_warps=0, tma=False, latency=0
    ),
    inputs=lambda problem, generator, device: drawn(_arrays(problem), problem, generator, device),
    outputs=lambda problem, blocks: outputs_of(_arrays(problem))(problem, blocks),
    reference=lambda x: {"y": x.double().sum(0)},
    bytes_moved=lambda problem: bytes_of(tensors(_arrays(problem)), problem),
    flops=lambda problem: problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    inputs_in_l2=True,
)

SPECS = (SPEC,)
