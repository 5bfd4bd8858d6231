"""Sums down columns in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.sums`: a block of ``threads`` threads has ``width`` columns, each thread
has ``loads`` rows in flight at the same time, and a ``cluster`` of blocks shares the rows of few columns.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.cute_configs import CLUSTERS_NEED_HOPPER, MOST_REGISTERS, NOT_INTERPRETED, WARP
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

_KERNEL = "tilekern.kernels.cute.sums:ColumnSum"
# Float32 values of a vector of 16 bytes.
_VECTOR = 4
# Columns of a block: 64 bytes of a row at least, and a vector for each lane of a warp at most.
_NARROWEST, _WIDEST = 16, 128
# Registers that a thread needs for addresses, its sums and the like.
_OWN_REGISTERS = 24
# Rows that a cluster has in flight at the same time; all matrices have the same candidates, whatever their rows, so
# that they share compiled artifacts.
_LEAST_ROWS, _MOST_ROWS = 256, 1024
# One thread adds up the sums of this many warps.
_MOST_WARPS = 32


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["cute"],
        "schedule": ["block"],
        "threads": [128, 256, 512, 1024] if problem["columns"] % _VECTOR == 0 else [],
        "width": [_NARROWEST, 32, 64, _WIDEST],
        "cluster": [1, 2, 4],
        "loads": [1, 2, 4, 8, 16],
    }


def _blocks(problem: Problem, config: Config) -> int:
    return int(config["cluster"] * cdiv(problem["columns"], config["width"]))


def _rows_at_once(config: Config) -> int:
    return int(config["threads"] * _VECTOR // config["width"] * config["cluster"] * config["loads"])


SPACE = Space(
    _axes,
    (
        NOT_INTERPRETED,
        Constraint(
            "a block would have more columns than there are",
            lambda problem, config, target: config["width"] <= problem["columns"],
        ),
        CLUSTERS_NEED_HOPPER,
        Constraint(
            "clusters are for so few columns that the narrowest blocks leave SMs without one",
            lambda problem, config, target: (
                config["cluster"] == 1 or _blocks(problem, config.but(width=_NARROWEST)) <= target.sm_count
            ),
        ),
        Constraint(
            "wide blocks leave more than three quarters of the SMs without one",
            lambda problem, config, target: (
                config["width"] == _NARROWEST or 4 * _blocks(problem, config) >= target.sm_count
            ),
        ),
        Constraint(
            "narrow blocks come to more than four for each SM",
            lambda problem, config, target: (
                config["width"] == _WIDEST or _blocks(problem, config) <= 4 * target.sm_count
            ),
        ),
        Constraint(
            f"a thread adds up the sums of at most {_MOST_WARPS} warps",
            lambda problem, config, target: config["threads"] * config["cluster"] <= WARP * _MOST_WARPS,
        ),
        Constraint(
            f"{_LEAST_ROWS} to {_MOST_ROWS} rows are on their way at once",
            lambda problem, config, target: _LEAST_ROWS <= _rows_at_once(config) <= _MOST_ROWS,
        ),
        Constraint(
            "the vectors that a thread has on their way exceed its registers",
            lambda problem, config, target: (
                _OWN_REGISTERS + _VECTOR * config["loads"] <= min(target.registers // config["threads"], MOST_REGISTERS)
            ),
        ),
    ),
)


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], problem: Problem, config: Config
) -> CuteKernel:
    """Return the kernel of a config of the space."""
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(("columns", problem["columns"]), ("width", config["width"]), ("loads", config["loads"])),
        grid=lambda sizes, sm_count: _blocks(sizes, config),
        block=config["threads"],
        cluster=config["cluster"],
        dependent=True,
    )
