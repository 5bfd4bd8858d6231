"""``x *= factor`` in place, with ``factor`` in device memory: if it is 1, nothing is read or written.

A loss computes its gradients in its forward; the backward's factor is almost always 1, but the host cannot know it
without waiting for the GPU.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import matrices
from tilekern.kernels.families.tables import MATRIX, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, bounds_of_tiles, grid_of_tiles, load, power_of_two
from tilekern.spec import Array, Config, Problem, Space, Value


@ct.kernel
def scale_persistent(x, factor, y, columns: ConstInt, tile_n: ConstInt, bounded: ConstBool):
    """Resident blocks that loop over tiles, unless the factor is 1; x and y [rows, columns], factor [1].

    ``y`` is the memory of ``x``.
    """
    by = ct.load(factor, (0,), ())
    if by != 1.0:
        across = ct.cdiv(columns, tile_n)
        for item in range(ct.bid(0), x.shape[0] * across, ct.num_blocks(0)):
            index = (item // across, item % across)
            tile = load(x, index, (1, tile_n), bounded, 0, False).astype(ct.float32) * by
            ct.store(y, index, tile.astype(y.dtype), check_bounds=bounded, allow_tma=False)


def _config(tile_n: int, occupancy: int) -> Config:
    return Config(schedule="persistent", tile_n=tile_n, occupancy=occupancy, num_worker_warps=0, tma=False)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["columns"])
    return {
        "schedule": ["persistent"],
        "tile_n": sorted({min(width, n) for n in (1024, 2048, 4096)}),
        "occupancy": [4, 8],
        "num_worker_warps": [0],
        "tma": [False],
    }


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    return {"factor": torch.full((1,), 0.37, device=device)}


SPEC = spec(
    "scale",
    "x *= factor in place, nothing if the factor is 1",
    MATRIX,
    (*matrices(("x",), ()), Array("factor", "float32", ("1",)), *matrices((), ("y",))),
    lambda x, factor: {"y": x.double() * factor.double()},
    function=scale_persistent,
    constants=bounds_of_tiles,
    grid=grid_of_tiles,
    space=Space(_axes),
    default=lambda problem, target: _config(min(1024, power_of_two(problem["columns"])), 8),
    generic=lambda problem: _config(min(256, power_of_two(problem["columns"])), 4),
    given=_given,
    flops=lambda problem: problem["rows"] * problem["columns"],
)

SPECS = (SPEC,)
