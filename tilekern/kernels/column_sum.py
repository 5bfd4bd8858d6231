"""Sums down the columns of a float32 matrix, in a fixed order: the last step of a weight's gradient."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, load, power_of_two
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
    cdiv,
)
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


def _implement(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=column_sum,
        parameters=(
            ArrayParameter("x", "float32", 2, problem["columns"]),
            # A store by 16 bytes would reach beyond a result that is shorter.
            ArrayParameter("y", problem["dtype"], 1, problem["columns"], "output", problem["columns"] >= 8),
        ),
        constants=(
            ("columns", problem["columns"]),
            ("tile_m", config["tile_m"]),
            ("tile_n", config["tile_n"]),
            ("latency", config["latency"]),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["columns"], config["tile_n"]), config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _default(problem: Problem, target: Target) -> Config:
    tile_m = min(64, max(16, power_of_two(problem["rows"])))
    return Config(schedule="block", tile_m=tile_m, tile_n=32, occupancy=1, num_worker_warps=0, tma=False, latency=0)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    return {"x": torch.randn((problem["rows"], problem["columns"]), generator=generator, device=device)}


SPEC = KernelSpec(
    name="column_sum",
    summary="y = sum of x over its rows, float32 sums in a fixed order",
    module=__name__,
    dimensions=(Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype")),
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
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(
        schedule="block", tile_m=32, tile_n=16, occupancy=1, num_worker_warps=0, tma=False, latency=0
    ),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["columns"],), problem["dtype"])},
    reference=lambda x: {"y": x.double().sum(0)},
    bytes_moved=lambda problem: problem["columns"] * (problem["rows"] * 4 + ITEM_BYTES[problem["dtype"]]),
    flops=lambda problem: problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    inputs_in_l2=True,
)

SPECS = (SPEC,)
