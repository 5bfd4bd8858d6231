"""Kernels over rows in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.rows`, which holds a row in registers: ``threads`` threads share a row in
a block, a block processes ``rows`` rows at a time, and a ``cluster`` of blocks shares a long row.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import CLUSTERS_NEED_HOPPER, MOST_REGISTERS, NOT_INTERPRETED, vector_of
from tilekern.kernels.tiles import grid_of, power_of_two
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

_KERNEL = "tilekern.kernels.cute.rows:Rows"
_LARGEST_BLOCK = 1024
# Vectors of each array that a thread may hold.
_MOST_CHUNKS = 8
# Registers of a thread for addresses and the like.
_OWN_REGISTERS = 24
# Several blocks may share a row with at least this many columns.
_LONG = 16384


def _chunks(problem: Problem, config: Config) -> int:
    return cdiv(problem["columns"], config["threads"] * config["cluster"] * vector_of(problem))


def _axes(problem: Problem, direction: str) -> dict[str, list[Value]]:
    columns, vector = problem["columns"], vector_of(problem)
    vectors = columns // vector
    most = min(_LARGEST_BLOCK, power_of_two(vectors))
    threads = [n for n in (8, 16, 32, 64, 128, 256, 512, 1024) if cdiv(vectors, 8 * _MOST_CHUNKS) <= n <= most]
    backward = direction == "backward"
    return {
        "implementation": ["cute"],
        "schedule": ["persistent"] if backward else ["persistent", "block"],
        "threads": threads if columns % vector == 0 else [],
        "rows": [1] if backward else [1, 2, 4, 8, 16],
        "cluster": [1, 2, 4, 8] if columns >= _LONG and not backward else [1],
        "ahead": [True, False] if backward else [False, True],
        "occupancy": [1, 2, 3, 4] if backward else [1, 2, 4, 8],
    }


def _registers(problem: Problem, config: Config, live: int) -> int:
    # Values loaded ahead have their stored dtype, mostly 16 bits.
    return _OWN_REGISTERS + (live + config["ahead"]) * _chunks(problem, config) * vector_of(problem)


def _fits_registers(problem: Problem, config: Config, target: Target, live: int) -> bool:
    most = target.registers // (config["threads"] * config["rows"] * config["occupancy"])
    return _registers(problem, config, live) <= min(most, MOST_REGISTERS)


_CONSTRAINTS = (
    NOT_INTERPRETED,
    CLUSTERS_NEED_HOPPER,
    Constraint(
        f"a thread holds at most {_MOST_CHUNKS} vectors of a row",
        lambda problem, config, target: _chunks(problem, config) <= _MOST_CHUNKS,
    ),
    Constraint(
        "more than half of the threads of a row would have nothing to do",
        lambda problem, config, target: (
            (config["threads"] * config["cluster"]) * vector_of(problem) < 2 * problem["columns"]
        ),
    ),
    Constraint(
        "blocks have 64 to 512 threads, or as many more as a row takes",
        lambda problem, config, target: (
            64 <= config["threads"] * config["rows"] <= 512 or (config["rows"] == 1 and config["threads"] > 512)
        ),
    ),
    Constraint(
        "blocks of a cluster are wide, and have one row",
        lambda problem, config, target: (
            config["cluster"] == 1 or (config["rows"] == 1 and 128 <= config["threads"] <= 512)
        ),
    ),
    Constraint(
        "a block that ends with its rows loads none ahead, and needs no other occupancy than the most",
        lambda problem, config, target: (
            config["schedule"] == "persistent" or (config["occupancy"] == 1 and not config["ahead"])
        ),
    ),
    Constraint(
        "resident blocks fill an eighth of an SM's threads, and no more than it has",
        lambda problem, config, target: (
            config["schedule"] == "block"
            or 256 <= config["threads"] * config["rows"] * config["occupancy"] <= target.threads
        ),
    ),
)


def space(live: int, direction: str) -> Space:
    """Return the space of a kernel over rows.

    Args:
        live: see :func:`tilekern.kernels.families.rows.spec`.
        direction: ``backward`` for a kernel with sums over rows, else ``forward``.
    """
    fits = Constraint(
        f"{live} live values for each element that a thread holds exceed its registers at this occupancy",
        lambda problem, config, target: _fits_registers(problem, config, target, live),
    )
    return Space(lambda problem: _axes(problem, direction), (*_CONSTRAINTS, fits))


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], flags: tuple[str, ...], dependent: bool,
    problem: Problem, config: Config,
) -> CuteKernel:  # fmt: skip
    """Return the kernel of a config of the space."""
    persistent, cluster, rows = config["schedule"] == "persistent", config["cluster"], config["rows"]
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("columns", problem["columns"]),
            ("threads", config["threads"]),
            ("rows", rows),
            ("vector", vector_of(problem)),
            ("persistent", persistent),
            ("ahead", config["ahead"]),
            ("occupancy", config["occupancy"] if persistent else 0),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: cluster * grid_of(cdiv(sizes["rows"], rows), config, sm_count // cluster),
        block=config["threads"] * rows,
        cluster=cluster,
        dependent=dependent,
    )
