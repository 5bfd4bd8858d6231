"""Kernels over elements with sums down the columns, whose blocks go down stripes of columns.

Elements do not depend on other columns, so rows are cut into stripes, the same for all configs. A block goes down one
stripe of its share of the rows, and stores one row of sums for that stripe. The partial sums of all blocks are some
hundred rows of a stripe's width, not of the full width. Another kernel adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.kernels.families import tables
from tilekern.kernels.families.arrays import Arrays, bytes_of, tensors
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, power_of_two
from tilekern.spec import Config, Constraint, KernelSpec, Problem, Space, Value, cdiv, name_of, outputs_of
from tilekern.spec.targets import Target


def stripe_of(columns: int) -> int:
    """Return the width of the widest stripe whose last one in a row wastes little."""
    widths = [width for width in (1024, 512, 256) if cdiv(columns, width) * width <= 1.125 * columns]
    return widths[0] if widths else min(256, power_of_two(columns))


def stripes_of(columns: int) -> int:
    """Return the number of stripes of a row."""
    return cdiv(columns, stripe_of(columns))


def groups_of(blocks: int, columns: int) -> int:
    """Return the number of rows of partial sums for a number of blocks."""
    return cdiv(blocks, stripes_of(columns))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    stripe = stripe_of(problem["columns"])
    widths = sorted({min(stripe, width) for width in (256, 512, 1024)})
    return {
        "schedule": ["persistent"],
        "tile_m": sorted({max(1, size // width) for size in (1024, 2048, 4096) for width in widths}),
        "tile_n": list(widths),
        "occupancy": [1, 2, 3, 4],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


_SIZED = Constraint(
    "a tile of fewer than 1024 elements starves the memory system, and of more than 4096 spills",
    lambda problem, config, target: (
        min(1024, 16 * stripe_of(problem["columns"])) <= config["tile_m"] * config["tile_n"] <= 4096
    ),
)
_FITS = Constraint(
    "6 live values for each element of a tile exceed the SM's registers at this occupancy",
    lambda problem, config, target: (
        6 * config["tile_m"] * config["tile_n"] * max(1, config["occupancy"]) <= 1.25 * target.registers
    ),
)


def _grid(sizes: Problem, config: Config, sm_count: int) -> int:
    """Return as many groups of rows as keep all blocks resident, times the stripes of each."""
    stripes = stripes_of(sizes["columns"])
    groups = max(1, sm_count * max(1, config["occupancy"]) // stripes)
    return min(cdiv(sizes["rows"], config["tile_m"]), groups) * stripes


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    stripe = stripe_of(problem["columns"])
    return {"stripe": stripe, "bounded": config["tile_m"] > 1 or problem["columns"] % stripe != 0}


def _default(problem: Problem, target: Target) -> Config:
    # The exact tanh leaves fewer registers for loads that run ahead.
    width = min(stripe_of(problem["columns"]), 512 if problem["dtype"] == "float32" else 1024)
    return Config(
        schedule="persistent", tile_m=max(1, 2048 // width), tile_n=width, occupancy=2, num_worker_warps=0,
        tma=target.has_tma,
    )  # fmt: skip


def _generic(problem: Problem) -> Config:
    width = min(256, stripe_of(problem["columns"]))
    return Config(
        schedule="persistent", tile_m=max(1, 256 // width), tile_n=width, occupancy=1, num_worker_warps=0, tma=False
    )


def spec(
    function: Any, summary: str, arrays: Callable[[Problem], Arrays], reference: Callable[..., dict[str, Any]], *,
    results: Callable[[dict[str, Any]], dict[str, Any]], flags: tuple[str, ...], flops: int,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel with sums down the columns, with the kernel's name.

    Args:
        function: the kernel; its constants are ``columns``, ``stripe``, ``tile_m``, ``tile_n``, ``bounded``, ``tma``
            and the flags.
        arrays: problem -> arrays and scalars in the order of the kernel; an array of [blocks, ...] has a row for each
            group of rows, one of [slopes] an element for each stripe of each group.
        results: outputs by name -> results by name, with the partial sums added up.
        flags: names of dimensions that are True or False.
        flops: floating-point operations for each element.
    """

    def outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = groups_of(blocks, problem["columns"])
        known = problem.but(slopes=groups * stripes_of(problem["columns"]))
        return outputs_of(arrays(known))(known, groups)

    def sizes(problem: Problem) -> dict[str, Any]:
        return {"slopes": stripes_of(problem["columns"])}

    return tables.spec(
        name_of(function),
        summary,
        tables.dimensions_of(arrays(Problem(dict.fromkeys(flags, False))), flags),
        arrays,
        reference,
        function=function,
        sizes=sizes,
        constants=_constants,
        grid=_grid,
        space=Space(_axes, (_SIZED, _FITS, TMA_NEEDS_HOPPER)),
        default=_default,
        generic=_generic,
        outputs=outputs,
        results=results,
        bytes_moved=lambda problem: bytes_of(tensors(arrays(problem)), problem.but(**sizes(problem))),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        result_dtype=lambda problem: str(problem["dtype"]),
    )
