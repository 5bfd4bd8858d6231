"""Gradients of the experts' biases: ``dbias[e]`` is the sum of dy over the rows of expert e, in float32.

Each block adds up some columns of one expert, a step of rows at a time in their order, so that every run gives the same
bits. An expert without rows gets zeros; rows beyond the last offset count for nobody.
"""

from __future__ import annotations

import itertools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.grouped.routing import VARIATIONS, balanced
from tilekern.kernels.grouped.tiles import rows_of
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, power_of_two
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
from tilekern.targets import Target


@ct.kernel
def grouped_bias_gradient(dy, offsets, dbias, experts: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tma: ConstBool):
    """dy [rows, columns], dbias [experts, columns]."""
    across = ct.cdiv(dy.shape[1], tile_n)
    view = dy.tiled_view((tile_m, tile_n), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_n))
    for item in range(ct.bid(0), experts * across, ct.num_blocks(0)):
        expert, j = item // across, item % across
        begin, end = rows_of(offsets, expert, experts, dy.shape[0])
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for first in range(begin, end, tile_m):
            inside = ct.reshape(first + ct.arange(tile_m, dtype=ct.int32), (tile_m, 1)) < end
            tile = view.load((first, j), allow_tma=tma).astype(ct.float32)
            # The next expert's rows may be NaN.
            total = total + ct.where(inside, tile, 0.0)
        ct.store(dbias, (expert, j), ct.sum(total, axis=0, keepdims=True).astype(dbias.dtype))


def _implement(problem: Problem, config: Config) -> Implementation:
    dtype, columns = problem["dtype"], problem["columns"]
    return Implementation(
        function=grouped_bias_gradient,
        parameters=(
            ArrayParameter("dy", dtype, 2, columns),
            ArrayParameter("offsets", "int32", 1, problem["experts"], aligned=False),
            ArrayParameter("dbias", dtype, 2, columns, "output"),
        ),
        constants=(("experts", problem["experts"]), *((name, config[name]) for name in ("tile_m", "tile_n", "tma"))),
        grid=lambda real, sm_count: grid_of(
            real["experts"] * cdiv(real["columns"], config["tile_n"]), config, sm_count
        ),
        hints=hints(config),
    )


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block"],
        "tile_m": [64, 128, 256],
        "tile_n": [side for side in (32, 64, 128) if side <= max(32, power_of_two(problem["columns"]))],
        "occupancy": [2, 4],
        "num_worker_warps": [0],
        "tma": [True, False],
    }


def _default(problem: Problem, target: Target) -> Config:
    tile_n = 64 if problem["columns"] > 32 else 32
    return Config(schedule="block", tile_m=128, tile_n=tile_n, occupancy=2, num_worker_warps=0, tma=False)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    dy = torch.randn((problem["rows"], problem["columns"]), generator=generator, device=device)
    return {"dy": dy.to(getattr(torch, problem["dtype"])), "offsets": balanced(problem, device)}


def reference(dy: Any, offsets: Any) -> dict[str, Any]:
    """The sums in float64."""
    import torch

    begins = [0, *offsets.tolist()]
    sums = [dy[begin:end].double().sum(0) for begin, end in itertools.pairwise(begins)]
    return {"dbias": torch.stack(sums)}


def _bytes(problem: Problem) -> int:
    elements = (problem["rows"] + problem["experts"]) * problem["columns"]
    return int(elements * ITEM_BYTES[problem["dtype"]] + problem["experts"] * ITEM_BYTES["int32"])


SPEC = KernelSpec(
    name="grouped_bias_gradient",
    summary="dbias = sum of dy over the rows of each expert, float32 sums in a fixed order",
    module=__name__,
    dimensions=(
        Dimension("rows", "bucketed"),
        Dimension("columns", "exact"),
        Dimension("experts", "exact"),
        Dimension("dtype", "dtype"),
    ),
    space=Space(
        _axes,
        (
            TMA_NEEDS_HOPPER,
            Constraint(
                "a tile of fewer than 4096 or more than 16384 elements starves or spills",
                lambda problem, config, target: 4096 <= config["tile_m"] * config["tile_n"] <= 16384,
            ),
        ),
    ),
    ops=("grouped_linear",),
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(schedule="block", tile_m=64, tile_n=32, occupancy=2, num_worker_warps=0, tma=False),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"dbias": ((problem["experts"], problem["columns"]), problem["dtype"])},
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    variations=VARIATIONS,
    timed=("zipf",),
)

SPECS = (SPEC,)
