"""Attention's forward in CuTe DSL for Hopper: search space and launches.

The device code is :mod:`tilekern.kernels.cute.attention_queries`: a block owns ``tile_m`` queries of a head, and
streams keys and values through a ring of tiles of ``tile_n`` keys in shared memory.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import NOT_INTERPRETED
from tilekern.spec import (
    ArrayParameter,
    Config,
    Constraint,
    CuteKernel,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)

_KERNEL = "tilekern.kernels.cute.attention_queries:AttentionQueries"
# Queries of a warpgroup.
ROWS = 64
_BARRIER_BYTES = 8
# A descriptor of keys, and one of values, fit a row of the result.
DESCRIPTOR_BYTES = 128
# Queries and keys of a tile, and whether scores are started ahead: sums, scores and weights fit a thread's registers.
_TILES = ((128, 128, True), (128, 176, True), (192, 128, False), (192, 80, True))
# Numbers of stages, from the one that is preferred; with five, the kernel needs slots to be freed in their order.
_STAGES = (8, 6, 5, 4)
# The most shared memory of a block on Hopper.
_MOST_BYTES = 227 << 10


def shared_bytes(problem: Problem, config: Config, stages: int) -> int:
    """Count the bytes of a block's queries, of its ring of keys and values, of descriptors, and of barriers."""
    parts = config["tile_m"] // ROWS
    rows = config["tile_m"] + stages * config["tile_n"]
    return rows * problem["head_dim"] * 2 + 2 * DESCRIPTOR_BYTES + 2 * (parts + stages) * _BARRIER_BYTES


def stages_of(problem: Problem, config: Config) -> int:
    """Return how many tiles of keys or values the ring holds."""
    able = (n for n in _STAGES if n != 5 or not config["ahead"])
    return next(n for n in able if shared_bytes(problem, config, n) <= _MOST_BYTES)


def _is_served(problem: Problem) -> bool:
    """Return whether the device code serves a problem: whole groups of heads, half numbers, no windows or caps."""
    plain = not any(problem[flag] for flag in ("capped", "windowed", "packed")) and problem["dtype"] != "float32"
    return bool(plain and problem["head_dim"] == 128 and problem["heads"] % problem["kv_heads"] == 0)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["persistent"],
        "tile_m": sorted({rows for rows, _, _ in _TILES}),
        "tile_n": sorted({columns for _, columns, _ in _TILES}),
        "ahead": [False, True] if _is_served(problem) else [],
    }


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint("the matrix units of Hopper are needed", lambda problem, config, target: target.has_wgmma),
        Constraint(
            "the other tiles spill registers, or were never the fastest",
            lambda problem, config, target: (config["tile_m"], config["tile_n"], config["ahead"]) in _TILES,
        ),
    ),
)


def _blocks(sizes: Problem, config: Config, sm_count: int) -> int:
    """Return one block for each multiprocessor: each writes descriptors, which takes a while."""
    items = sizes["batch"] * sizes["heads"] * cdiv(sizes["queries"], config["tile_m"])
    return max(1, min(items, sm_count))


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    constants = {name: problem[name] for name in ("heads", "kv_heads", "causal", "sinks")}
    stages = stages_of(problem, config)
    constants |= {"tile_n": config["tile_n"], "ahead": config["ahead"], "stages": stages}
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(*constants.items(), ("depth", problem["head_dim"])),
        grid=lambda sizes, sm_count: _blocks(sizes, config, sm_count),
        block=(config["tile_m"] // ROWS + 1) * 128,
        shared_bytes=shared_bytes(problem, config, stages),
    )
