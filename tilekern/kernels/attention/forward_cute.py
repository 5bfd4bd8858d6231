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
# A descriptor of keys, and one of values, fit a row of the result, or two rows of heads of 64. A row of heads of 256
# has room for one of queries.
DESCRIPTOR_BYTES = 128
# Queries and keys of a tile, and whether scores are started ahead, by the width of heads and whether there are windows
# or packed sequences: sums, scores and weights fit a thread's registers. Edges of windows cut less of small tiles.
_TILES = {
    (64, False): ((192, 96, True), (192, 128, True)),
    (64, True): ((192, 64, True), (192, 128, True)),
    (128, False): ((128, 128, True), (128, 176, True), (192, 128, False), (192, 80, True)),
    (128, True): ((192, 80, True), (192, 128, False)),
    (256, False): ((128, 64, True), (128, 80, True)),
    (256, True): ((128, 64, True), (128, 80, True)),
}
# The most keys of a tile whose scores have a soft cap.
_MOST_CAPPED = 128
# With fewer queries, blocks would be few, and their tiles mostly empty.
_FEWEST_QUERIES = 512
# Numbers of stages, from the one that is preferred; with five, the kernel needs slots to be freed in their order.
_STAGES = (8, 6, 5, 4)
# The most shared memory of a block on Hopper.
_MOST_BYTES = 227 << 10


def descriptors(head_dim: int) -> int:
    """Return how many descriptors a block has: of keys and values, and of queries if a row of the result has room."""
    return 3 if 2 * head_dim >= 3 * DESCRIPTOR_BYTES else 2


def shared_bytes(problem: Problem, config: Config, stages: int) -> int:
    """Count the bytes of a block's queries, of its ring of keys and values, of descriptors, and of barriers."""
    rows, barriers = config["tile_m"] + stages * config["tile_n"], 2 * (config["tile_m"] // ROWS + stages)
    held = descriptors(problem["head_dim"]) * DESCRIPTOR_BYTES + barriers * _BARRIER_BYTES
    return rows * problem["head_dim"] * 2 + held


def stages_of(problem: Problem, config: Config) -> int:
    """Return how many tiles of keys or values the ring holds."""
    able = (n for n in _STAGES if n != 5 or not config["ahead"])
    return next(n for n in able if shared_bytes(problem, config, n) <= _MOST_BYTES)


def _tiles(problem: Problem) -> list[tuple[int, int, bool]]:
    """Return the tiles that serve a problem: half numbers, whole groups of heads, heads of 64, 128 or 256."""
    is_half, is_whole = problem["dtype"] != "float32", problem["heads"] % problem["kv_heads"] == 0
    if not is_half or not is_whole or problem["queries"] < _FEWEST_QUERIES:
        return []
    tiles = _TILES.get((problem["head_dim"], problem["windowed"] or problem["packed"]), ())
    # A soft cap's tanh takes registers, too.
    return [x for x in tiles if not problem["capped"] or x[1] <= _MOST_CAPPED]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    tiles = _tiles(problem)
    return {
        "implementation": ["cute"],
        "schedule": ["block", "persistent"] if problem["packed"] else ["persistent"],
        "tile_m": sorted({rows for rows, _, _ in tiles}),
        "tile_n": sorted({columns for _, columns, _ in tiles}),
        "ahead": [False, True],
    }


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint("the matrix units of Hopper are needed", lambda problem, config, target: target.has_wgmma),
        Constraint(
            "the other tiles spill registers, or were never the fastest",
            lambda problem, config, target: (config["tile_m"], config["tile_n"], config["ahead"]) in _tiles(problem),
        ),
    ),
)


def _blocks(sizes: Problem, config: Config, sm_count: int) -> int:
    """Return one block for each multiprocessor: each writes descriptors, which takes a while.

    Items of packed sequences have lengths that no order makes even: blocks of one item end when they end.
    """
    items = sizes["batch"] * sizes["heads"] * cdiv(sizes["queries"], config["tile_m"])
    return max(1, items if config["schedule"] == "block" else min(items, sm_count))


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    constants = {
        name: problem[name] for name in ("heads", "kv_heads", "causal", "windowed", "capped", "sinks", "packed")
    }
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
