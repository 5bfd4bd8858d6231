"""Device code of kernels that take one row of a layer of experts at a time: the row's expert, and tiles."""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.tiles import power_of_two
from tilekern.spec import ArrayParameter, Config, Problem, Space, Value, cdiv

# Experts of the inputs that kernels are checked and timed with.
EXPERTS = 5


def expert_of(experts, row, weights):
    """The expert of a row; the last one for a row of none, of which no number counts."""
    return ct.minimum(ct.load(experts, (row,), ()), weights.shape[0] - 1)


def bias_of(dtype: str, columns: int, is_there: bool) -> ArrayParameter:
    """The bias of each expert; one element in its place, which is not aligned, where there is none."""
    return ArrayParameter("bias", dtype, 2, columns if is_there else None, aligned=is_there)


def widths(columns: int) -> list[int]:
    """Widths of tiles, wide ones first, of which at most a third lies beyond the row's end."""
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
    """One block a row, with the widest tile that is not wider than ``widest``."""
    tile_n = next((n for n in widths(problem["columns"]) if n <= widest), widths(problem["columns"])[-1])
    return Config(schedule="block", tile_n=tile_n, occupancy=8 if tile_n < 2048 else 4, num_worker_warps=0)


def generic(problem: Problem) -> Config:
    """Narrow tiles: loads of single elements are long code."""
    tile_n = min(256, power_of_two(problem["columns"]))
    return Config(schedule="persistent", tile_n=tile_n, occupancy=1, num_worker_warps=0)


def constants(problem: Problem, config: Config) -> tuple[tuple[str, int], ...]:
    """The width of a tile, and whether one reaches over the end of a row."""
    return ("tile_n", config["tile_n"]), ("bounded", problem["columns"] % config["tile_n"] != 0)
