"""Code that kernels share: loads with hints, tile shapes, and the axes of most search spaces."""

from __future__ import annotations

import cuda.tile as ct

from tilekern.spec import Config, Constraint, Problem, Value, cdiv
from tilekern.spec.targets import Target

ConstBool = ct.Constant[bool]
ConstInt = ct.Constant[int]


def load(array, index, shape, bounded, latency, tma):
    """Load a tile of ``array``: zeros beyond its edge, or, if ``bounded`` is false, a tile that lies inside.

    ``latency`` 0 leaves the estimate of memory latency to the compiler.
    """
    padding = ct.static_eval(ct.PaddingMode.ZERO if bounded else ct.PaddingMode.UNDETERMINED)
    hint = ct.static_eval(latency if latency > 0 else None)
    return ct.load(array, index, shape, padding_mode=padding, check_bounds=bounded, latency=hint, allow_tma=tma)


def each_step(step, steps, persistent, arguments):
    """Call ``step(n, *arguments)`` for all n below ``steps``: one a block, or resident blocks that loop."""
    if ct.static_eval(persistent):
        for n in range(ct.bid(0), steps, ct.num_blocks(0)):
            step(n, *arguments)
    else:
        step(ct.bid(0), *arguments)


def add_pairs(a, b, c, d):
    """Add up two tiles at once, in ``ct.reduce``."""
    return a + c, b + d


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below ``size``."""
    return 1 << max(0, size - 1).bit_length()


def row_tiles(columns: int, least: int, most: int) -> list[Value]:
    """Return rows per step: a step holds ``least`` to ``most`` elements of rows padded to a power of two."""
    width = power_of_two(columns)
    tiles = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128) if least <= rows * width <= most]
    return list(tiles or [1])


# A default config holds rows of up to this many columns in registers: the compiler takes 6 s and more for the chunks of
# 16384, which spill, and 1 s for a loop that reads them twice.
HELD_BY_DEFAULT = 8192
# For rows of a norm with up to this many columns, some config holds them in registers; longer ones are read twice.
LONGEST_HELD = {"forward": 16384, "backward": 8192}


def passes(columns: int, direction: str) -> list[Value]:
    """Return how often a norm, ``forward`` or ``backward``, may read its rows: once if they stay in registers."""
    return [1] if columns <= HELD_BY_DEFAULT else [1, 2] if columns <= LONGEST_HELD[direction] else [2]


def is_bounded(rows_per_step: int, columns: int, tile_n: int) -> bool:
    """Return whether a tile can reach over an edge of the array, so that its bounds must be checked."""
    return rows_per_step > 1 or columns % tile_n != 0


def hints(config: Config) -> dict[str, int | None]:
    """Return the compiler hints of a config; 0 leaves a hint to the compiler."""
    return {name: config.get(name) or None for name in ("occupancy", "num_worker_warps")}


def grid_of(steps: int, config: Config, sm_count: int) -> int:
    """Return the blocks to launch: one a step, or as many as stay resident if the schedule is persistent."""
    if config["schedule"] == "persistent":
        return max(1, min(steps, sm_count * (config["occupancy"] or 1)))
    return max(1, steps)


def _rows_of_tile(config: Config) -> int:
    return int(config.get("tile_m") or 1)


def grid_of_tiles(sizes: Problem, config: Config, sm_count: int) -> int:
    """Return the blocks to launch when each tile [tile_m or 1, tile_n] of a matrix is a step."""
    down, across = cdiv(sizes["rows"], _rows_of_tile(config)), cdiv(sizes["columns"], config["tile_n"])
    return grid_of(down * across, config, sm_count)


def bounds_of_tiles(problem: Problem, config: Config) -> dict[str, bool]:
    """Return the constant ``bounded`` of a kernel over such tiles."""
    return {"bounded": is_bounded(_rows_of_tile(config), problem["columns"], config["tile_n"])}


def fits_registers(live: int) -> Constraint:
    """Keep out configs whose resident blocks cannot hold ``live`` float32 values for each element of their rows."""

    def fits(problem: Problem, config: Config, target: Target) -> bool:
        chunks = 1 if config["passes"] == 2 else cdiv(problem["columns"], config["tile_n"])
        elements = config["tile_m"] * config["tile_n"] * chunks
        return bool(elements * live * max(1, config["occupancy"]) <= 1.25 * target.registers)

    return Constraint(
        f"{live} live values for each element of a step exceed the SM's registers at this occupancy", fits
    )


PASSES_MATCH = Constraint(
    "the two-pass implementation is persistent and takes chunks of at most 2048 columns",
    lambda problem, config, target: (
        config["passes"] == 1 or (config["schedule"] == "persistent" and config["tile_n"] <= 2048)
    ),
)
FEW_CHUNKS = Constraint(
    "more than 16 unrolled chunks take minutes to compile",
    lambda problem, config, target: config["passes"] == 2 or cdiv(problem["columns"], config["tile_n"]) <= 16,
)
TMA_NEEDS_HOPPER = Constraint(
    "TMA exists on sm_90 and newer", lambda problem, config, target: not config["tma"] or target.has_tma
)
