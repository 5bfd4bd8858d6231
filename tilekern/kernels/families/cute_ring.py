"""Sums over rows with loads far ahead, in CuTe DSL: search space and launches.

The device code is :mod:`tilekern.kernels.cute.ring`: a block of ``threads`` threads takes one row at a time out of a
ring of ``stages`` rows in shared memory, into which the GPU copies the next rows; with ``early`` it does so before the
outputs of a row are computed, which is faster if they take long.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.families.arrays import ROWS, Arrays, tensors
from tilekern.kernels.families.cute_configs import MOST_REGISTERS, NOT_INTERPRETED, vector_of
from tilekern.kernels.tiles import grid_of
from tilekern.spec import (
    ITEM_BYTES,
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

_KERNEL = "tilekern.kernels.cute.ring:Ring"
# Vectors of a row that a thread has, of each array.
_MOST_CHUNKS = 2
# Registers of a thread for addresses and the like.
_OWN_REGISTERS = 24
# Bytes of an SM's rings: on an H200 fewer leave the memory idle, and more gain nothing.
_LEAST_BYTES, _MOST_BYTES = 80 << 10, 112 << 10
# Shared memory of a block besides its ring, for its sums and barriers, and the system's share for each block.
_OTHER_BYTES = 3 << 10


def row_bytes(parameters: tuple[ArrayParameter | ScalarParameter, ...], columns: int) -> int:
    """Count the bytes of a stage: a row of each array whose rows a kernel reads."""
    read = (x for x in parameters if isinstance(x, ArrayParameter) and x.role == "input" and x.ndim == len(ROWS))
    return columns * sum(ITEM_BYTES[x.dtype] for x in read)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    whole = problem["columns"] % vector_of(problem) == 0
    return {
        "implementation": ["cute"],
        "schedule": ["persistent"],
        "threads": [64, 128, 256, 512, 1024] if whole else [],
        "stages": [2, 3, 4, 6, 8, 12],
        "early": [False, True],
        "occupancy": [1, 2, 4],
    }


def _chunks(problem: Problem, config: Config) -> int:
    return cdiv(problem["columns"], config["threads"] * vector_of(problem))


def _fits_registers(problem: Problem, config: Config, target: Target, live: int) -> bool:
    most = target.registers // (config["threads"] * config["occupancy"])
    needed = _OWN_REGISTERS + live * _chunks(problem, config) * vector_of(problem)
    return bool(needed <= min(most, MOST_REGISTERS))


_CONSTRAINTS = (
    NOT_INTERPRETED,
    Constraint("bulk copies need sm_90 or newer", lambda problem, config, target: target.has_tma),
    Constraint(
        f"a thread has at most {_MOST_CHUNKS} vectors of a row",
        lambda problem, config, target: _chunks(problem, config) <= _MOST_CHUNKS,
    ),
    Constraint(
        "more than half of the threads would have nothing to do",
        lambda problem, config, target: config["threads"] * vector_of(problem) < 2 * problem["columns"],
    ),
    Constraint(
        "resident blocks fill an eighth of an SM's threads, and no more than half",
        lambda problem, config, target: 256 <= config["threads"] * config["occupancy"] <= target.threads // 2,
    ),
)


def space(live: int, arrays: Arrays) -> Space:
    """Return the space of a kernel with sums over rows.

    Args:
        live: see :func:`tilekern.kernels.families.rows.spec`.
        arrays: the kernel's arrays.
    """
    read = [array for array in tensors(arrays, "input") if array.shape == ROWS]

    def ring_bytes(problem: Problem, config: Config) -> int:
        row = problem["columns"] * sum(ITEM_BYTES[array.dtype_in(problem)] for array in read)
        return int(config["stages"] * row)

    return Space(
        _axes,
        (
            *_CONSTRAINTS,
            Constraint(
                f"{live} live values for each element that a thread holds exceed its registers at this occupancy",
                lambda problem, config, target: _fits_registers(problem, config, target, live),
            ),
            Constraint(
                f"the rings of an SM have {_LEAST_BYTES >> 10} to {_MOST_BYTES >> 10} KiB",
                lambda problem, config, target: (
                    _LEAST_BYTES <= config["occupancy"] * ring_bytes(problem, config) <= _MOST_BYTES
                ),
            ),
            Constraint(
                "the rings exceed the shared memory",
                lambda problem, config, target: (
                    config["occupancy"] * (ring_bytes(problem, config) + _OTHER_BYTES) <= target.shared_bytes
                ),
            ),
        ),
    )


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], flags: tuple[str, ...], dependent: bool,
    problem: Problem, config: Config,
) -> CuteKernel:  # fmt: skip
    """Return the kernel of a config of the space."""
    columns = problem["columns"]
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("columns", columns),
            ("vector", vector_of(problem)),
            ("stages", config["stages"]),
            ("early", config["early"]),
            ("occupancy", config["occupancy"]),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        block=config["threads"],
        dependent=dependent,
        shared_bytes=config["stages"] * row_bytes(parameters, columns),
    )
