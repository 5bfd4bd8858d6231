"""Attention's forward in CuTe DSL for Hopper: search space and launches.

The device code is :mod:`tilekern.kernels.cute.attention_queries`: a block owns ``tile_m`` queries of a head, and
streams keys and values through a ring of ``stages`` tiles of ``tile_n`` keys in shared memory.
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
from tilekern.spec.targets import Target

_KERNEL = "tilekern.kernels.cute.attention_queries:AttentionQueries"
# Queries of a warpgroup.
ROWS = 64
# The system's share of the shared memory of each block.
_RESERVED_BYTES = 1 << 10
_BARRIER_BYTES = 8
# A descriptor of keys, and one of values, fit a row of the result.
DESCRIPTOR_BYTES = 128
# Registers of a thread for sums, scores and weights, by the number of warpgroups: all but 32.
_MOST_HELD = {2: 208, 3: 128}


def shared_bytes(problem: Problem, config: Config) -> int:
    """Count the bytes of a block's queries, of its ring of keys and values, and of two barriers for each."""
    parts, stages = config["tile_m"] // ROWS, config["stages"]
    rows = config["tile_m"] + stages * config["tile_n"]
    return rows * problem["head_dim"] * 2 + 2 * DESCRIPTOR_BYTES + 2 * (parts + stages) * _BARRIER_BYTES


def _is_served(problem: Problem) -> bool:
    """Return whether the device code serves a problem: whole groups of heads, half numbers, no windows or caps."""
    plain = not any(problem[flag] for flag in ("capped", "windowed", "packed")) and problem["dtype"] != "float32"
    return bool(plain and problem["head_dim"] == 128 and problem["heads"] % problem["kv_heads"] == 0)


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether a thread holds a row's share of the sums, the scores and, if need be, of the weights before."""
    held = (problem["head_dim"] + config["tile_n"] * (1.5 if config["ahead"] else 1)) * ROWS / 128
    return bool(held <= _MOST_HELD[config["tile_m"] // ROWS])


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["block", "persistent"],
        "tile_m": [128, 192],
        "tile_n": [80, 96, 112, 128, 144, 160, 176, 192],
        "ahead": [False, True],
        "turns": [False, True],
        "stages": [4, 5, 6, 8] if _is_served(problem) else [],
    }


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint("the matrix units of Hopper are needed", lambda problem, config, target: target.has_wgmma),
        Constraint("the sums, scores and weights of a thread exceed its registers", _fits),
        Constraint(
            "two warpgroups whose next scores are started early take turns",
            lambda problem, config, target: not config["turns"] or (config["ahead"] and config["tile_m"] == 128),
        ),
        Constraint(
            "with five stages a slot is loaded by two warps, which need slots to be freed in their order",
            lambda problem, config, target: config["stages"] != 5 or not config["ahead"],
        ),
        Constraint(
            "the stages exceed the shared memory",
            lambda problem, config, target: shared_bytes(problem, config) + _RESERVED_BYTES <= target.shared_bytes,
        ),
    ),
)


def _blocks(sizes: Problem, config: Config, sm_count: int) -> int:
    items = sizes["batch"] * sizes["heads"] * cdiv(sizes["queries"], config["tile_m"])
    return max(1, min(items, sm_count) if config["schedule"] == "persistent" else items)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    constants = {name: problem[name] for name in ("heads", "kv_heads", "causal", "sinks")}
    constants |= {name: config[name] for name in ("tile_n", "ahead", "turns", "stages")}
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(*constants.items(), ("depth", problem["head_dim"])),
        grid=lambda sizes, sm_count: _blocks(sizes, config, sm_count),
        block=(config["tile_m"] // ROWS + 1) * 128,
        shared_bytes=shared_bytes(problem, config),
    )
