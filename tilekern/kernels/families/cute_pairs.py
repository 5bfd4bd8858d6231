"""Losses over rows of two matrices in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.pairs`, which spreads a row over a ``cluster`` of blocks, each of
``threads`` threads, of which each loads ``unroll`` vectors of both matrices in a step.
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
)
from tilekern.spec.targets import Target

_KERNEL = "tilekern.kernels.cute.pairs:PairLoss"
# Registers that a thread needs for a formula and addresses, for those of all rows where it goes on with further ones,
# and for a vector of both matrices.
_OWN_REGISTERS, _OF_ALL_ROWS, _OF_A_PAIR = 32, 8, 8
# Threads of an SM: with fewer its arithmetic waits, more have no registers for a formula.
_RESIDENT = (512, 1024)
# Threads that share a row: with fewer too many rows are at work at once, and SMs idle while the last ones end.
_SHARING = (1024, 2048)
# Pairs of vectors that an SM's threads load at once: 64 KiB; fewer threads load twice as many, since they overlap less.
_LEAST_LOADS = {512: 4096, 1024: 2048}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["persistent", "block"],
        "threads": [128, 256, 512, 1024] if problem["columns"] % vector_of(problem) == 0 else [],
        "cluster": [1, 2, 4, 8],
        "unroll": [2, 4, 8],
        "occupancy": [1, 2, 4],
    }


def _fits_registers(config: Config, target: Target) -> bool:
    most = target.registers // (config["threads"] * config["occupancy"])
    own = _OWN_REGISTERS + (_OF_ALL_ROWS if config["schedule"] == "persistent" else 0)
    return bool(own + _OF_A_PAIR * config["unroll"] <= min(most, MOST_REGISTERS))


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        CLUSTERS_NEED_HOPPER,
        Constraint(
            "resident clusters would leave some SMs without a block",
            lambda problem, config, target: config["schedule"] == "block" or target.sm_count % config["cluster"] == 0,
        ),
        Constraint(
            f"{' or '.join(map(str, _SHARING))} threads share a row",
            lambda problem, config, target: config["threads"] * config["cluster"] in _SHARING,
        ),
        Constraint(
            "half of a row's threads and more would have nothing to load in its first step",
            lambda problem, config, target: (
                config["threads"] * config["cluster"] * config["unroll"] * vector_of(problem) < 2 * problem["columns"]
            ),
        ),
        Constraint(
            f"{' or '.join(map(str, _RESIDENT))} threads are at work on an SM",
            lambda problem, config, target: config["threads"] * config["occupancy"] in _RESIDENT,
        ),
        Constraint(
            "a step's loads exceed a thread's registers at this occupancy",
            lambda problem, config, target: _fits_registers(config, target),
        ),
        Constraint(
            "with so few loads on their way the memory waits",
            lambda problem, config, target: (
                config["threads"] * config["occupancy"] * config["unroll"]
                >= _LEAST_LOADS[config["threads"] * config["occupancy"]]
            ),
        ),
    ),
)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], flags: tuple[str, ...], problem: Problem,
    config: Config,
) -> CuteKernel:  # fmt: skip
    """Return the kernel of a config of the space."""
    cluster = config["cluster"]
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("columns", problem["columns"]),
            ("vector", vector_of(problem)),
            ("unroll", config["unroll"]),
            ("persistent", config["schedule"] == "persistent"),
            ("occupancy", config["occupancy"]),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: cluster * grid_of(sizes["rows"], config, sm_count // cluster),
        block=config["threads"],
        cluster=cluster,
    )
