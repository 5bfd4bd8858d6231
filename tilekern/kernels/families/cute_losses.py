"""Cross entropy with its gradient in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.losses`, which holds a row in the registers of a ``cluster`` of blocks,
each of ``threads`` threads.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import CLUSTERS_NEED_HOPPER, MOST_REGISTERS, NOT_INTERPRETED, vector_of
from tilekern.kernels.tiles import grid_of
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

_KERNEL = "tilekern.kernels.cute.losses:FusedLoss"
# Registers of a thread for addresses, a vector in float32 and the like, and for each vector that it holds.
_OWN_REGISTERS, _OF_A_VECTOR = 24, 4
# Vectors that a thread may hold: a row's code is written out for each of them.
_MOST_CHUNKS = 20
# Vectors that the threads of an SM hold: 64 KiB; some are in flight while others are processed.
_LEAST_HELD = 4096


def _chunks(problem: Problem, config: Config) -> int:
    return cdiv(problem["vocabulary"], config["threads"] * config["cluster"] * vector_of(problem))


def _axes(problem: Problem, flags: tuple[str, ...]) -> dict[str, list[Value]]:
    fits = problem["vocabulary"] % vector_of(problem) == 0 and not any(problem[flag] for flag in flags)
    return {
        "implementation": ["cute"],
        "schedule": ["persistent", "block"],
        "threads": [256, 512, 1024] if fits else [],
        "cluster": [1, 2, 4, 8],
        "occupancy": [1, 2, 3, 4],
    }


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    most = target.registers // (config["threads"] * config["occupancy"])
    return _OWN_REGISTERS + _OF_A_VECTOR * _chunks(problem, config) <= min(most, MOST_REGISTERS)


_CONSTRAINTS = (
    NOT_INTERPRETED,
    CLUSTERS_NEED_HOPPER,
    Constraint(
        "more than half of the threads of a row would have nothing to do",
        lambda problem, config, target: (
            config["threads"] * config["cluster"] * vector_of(problem) < 2 * problem["vocabulary"]
        ),
    ),
    Constraint(
        "an SM has no room for so many threads",
        lambda problem, config, target: config["threads"] * config["occupancy"] <= target.threads,
    ),
    Constraint(
        f"a thread holds at most {_MOST_CHUNKS} vectors of a row",
        lambda problem, config, target: _chunks(problem, config) <= _MOST_CHUNKS,
    ),
    Constraint("a thread's share of a row exceeds its registers at this occupancy", _fits_registers),
    Constraint(
        f"an SM's blocks hold {_LEAST_HELD} vectors of their rows: with fewer on their way the memory waits",
        lambda problem, config, target: (
            _chunks(problem, config) * config["threads"] * config["occupancy"] >= _LEAST_HELD
        ),
    ),
)


def space(flags: tuple[str, ...]) -> Space:
    """Return the space; problems with one of the flags set have no config."""
    return Space(lambda problem: _axes(problem, flags), _CONSTRAINTS)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    cluster = config["cluster"]
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("columns", problem["vocabulary"]),
            ("vector", vector_of(problem)),
            ("persistent", config["schedule"] == "persistent"),
            ("occupancy", config["occupancy"]),
        ),
        grid=lambda sizes, sm_count: cluster * grid_of(sizes["rows"], config, sm_count // cluster),
        block=config["threads"],
        cluster=cluster,
    )
