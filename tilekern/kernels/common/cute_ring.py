"""Sums over rows whose loads run far ahead, as CuTe DSL compiles them: their search space, and how a config is launched.

The device code is :mod:`tilekern.kernels.cute.ring`: a block of ``threads`` threads takes one row at a time out of a
ring of ``stages`` rows in shared memory, into which the GPU copies those that are next.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.common.cute_configs import vector_of
from tilekern.kernels.tiles import grid_of
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    CuteKernel,
    Problem,
    ScalarParameter,
)

_KERNEL = "tilekern.kernels.cute.ring:Ring"


def rows_read(parameters: tuple[ArrayParameter | ScalarParameter, ...]) -> list[ArrayParameter]:
    """The arrays of which a kernel over rows reads rows."""
    return [x for x in parameters if isinstance(x, ArrayParameter) and x.role == "input" and x.ndim == 2]


def implement(
    function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], flags: tuple[str, ...], dependent: bool,
    problem: Problem, config: Config,
) -> CuteKernel:  # fmt: skip
    """How a config of the space runs."""
    columns = problem["columns"]
    row_bytes = sum(ITEM_BYTES[x.dtype] * columns for x in rows_read(parameters))
    return CuteKernel(
        function=function,
        kernel=_KERNEL,
        parameters=parameters,
        constants=(
            ("columns", columns),
            ("vector", vector_of(problem)),
            ("stages", config["stages"]),
            ("occupancy", config["occupancy"]),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        block=config["threads"],
        dependent=dependent,
        shared_bytes=config["stages"] * row_bytes,
    )
