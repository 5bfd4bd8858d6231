"""Code shared by kernels that take one row of a layer of experts at a time: its expert and bias, tiles, routing."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.route import routed
from tilekern.kernels.grouped.routing import drawn_experts
from tilekern.kernels.tiles import power_of_two
from tilekern.spec import Array, Config, Problem, Space, Value, cdiv

# The number of experts in inputs for checks and timings.
EXPERTS = 5


def expert_of(experts, row, weights):
    """Return the expert of a row; for a row without an expert, whose numbers are ignored, the last one."""
    return ct.minimum(ct.load(experts, (row,), ()), weights.shape[0] - 1)


def bias_of(columns: str = "columns") -> Array:
    """Return the array of the experts' biases, which the flag ``biased`` turns on."""
    return Array("bias", "dtype", ("experts", columns), flag="biased")


def sizes(problem: Problem) -> dict[str, int]:
    """Return the number of experts of the inputs; it is not part of a problem."""
    return {"experts": EXPERTS}


def widths(columns: int) -> list[int]:
    """Return widths of tiles, widest first; at most a third lies beyond the row's end."""
    fitting = [n for n in (4096, 2048, 1024, 512, 256) if n <= power_of_two(columns)]
    return [n for n in fitting if cdiv(columns, n) * n <= 1.5 * columns] or [min(256, power_of_two(columns))]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted(widths(problem["columns"])[:3]),
        "occupancy": [4, 8],
        "num_worker_warps": [0, 8],
    }


SPACE = Space(_axes)


def default(problem: Problem, widest: int) -> Config:
    """Return one block a row, with the widest tile up to ``widest``."""
    tile_n = next((n for n in widths(problem["columns"]) if n <= widest), widths(problem["columns"])[-1])
    return Config(schedule="block", tile_n=tile_n, occupancy=8 if tile_n < 2048 else 4, num_worker_warps=0)


def generic(problem: Problem) -> Config:
    """Return narrow tiles: loads of single elements are long code."""
    tile_n = min(256, power_of_two(problem["columns"]))
    return Config(schedule="persistent", tile_n=tile_n, occupancy=1, num_worker_warps=0)


def constants(problem: Problem, config: Config) -> dict[str, bool]:
    """Return whether a tile reaches over the end of a row, as ``bounded``."""
    return {"bounded": problem["columns"] % config["tile_n"] != 0}


def routing(slots: int, generator: Any, device: str) -> dict[str, Any]:
    """Draw an uneven routing of slots: ``order``, ``ranks`` and ``experts``."""
    _, order, ranks, experts = routed(drawn_experts(slots, EXPERTS, generator, device), EXPERTS)
    return {"order": order, "ranks": ranks, "experts": experts}
