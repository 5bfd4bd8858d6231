"""Kernels over rows of logits: a block computes a row, or a tile of a row; resident blocks loop over more.

A kernel is the step of a row or of a tile, called by :func:`each_step` or :func:`each_tile`. A step reads a whole row
by :func:`each_part`. :func:`spec` makes the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import tables
from tilekern.kernels.families.arrays import Arrays, bytes_of, tensors
from tilekern.kernels.tiles import each_step, grid_of, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, KernelSpec, Problem, Space, Value, cdiv, name_of
from tilekern.spec.targets import Target

# Shapes of logits, of a number for each row, and of a number for each column.
LOGITS, ROWS, COLUMNS = ("rows", "vocabulary"), ("rows",), ("1", "vocabulary")


def place_of(item, columns, tile_n):
    """Return the row of a tile, and the tile's number in the row."""
    across = ct.static_eval(-(-columns // tile_n))
    return item // across, item % across


def in_tile(step, row, c, columns, tile_n, arguments):
    """Call ``step(row, c, bounded, *arguments)``; only the last tile of a row has its bounds checked."""
    if c < columns // tile_n:
        step(row, c, False, *arguments)
    elif columns % tile_n != 0:
        step(row, c, True, *arguments)


def _in_item(item, step, columns, tile_n, arguments):
    row, c = place_of(item, columns, tile_n)
    in_tile(step, row, c, columns, tile_n, arguments)


def each_tile(step, rows, columns, tile_n, persistent, arguments):
    """Call :func:`in_tile` for all tiles of some rows."""
    each_step(_in_item, rows * ct.cdiv(columns, tile_n), persistent, (step, columns, tile_n, arguments))


def each_part(step, sums, steps, columns, tile_n, unroll, arguments):
    """Return sums over a row: ``step(sums, first, count, partial, *arguments)`` adds ``count`` tiles to them.

    ``steps`` of ``unroll`` whole tiles need no check of bounds; the rest is one step, whose last tile may be
    ``partial``.
    """
    whole = ct.static_eval(columns // (tile_n * unroll))
    for n in range(steps):
        sums = step(sums, n * unroll, unroll, False, *arguments)
    rest = ct.static_eval(-(-columns // tile_n) - whole * unroll)
    if rest > 0:
        sums = step(sums, whole * unroll, rest, columns % tile_n != 0, *arguments)
    return sums


def load_number(array, row):
    """Load the number of a row, (1, 1)."""
    return ct.reshape(ct.load(array, (row,), (1,)), (1, 1))


def of_rows(*names: str, role: Any = "input") -> Arrays:
    """Return arrays of a float32 number for each row, by their names."""
    return tuple(Array(name, "float32", ROWS, role) for name in names)


def step_shapes(vocabulary: int, warps: int) -> list[tuple[int, int]]:
    """Return pairs of tile_n and unroll for a pass over a row: 8 or 16 neighbours a thread, 32 or 64 a step."""
    threads = 32 * (warps or 4)
    pairs = ((8, 4), (8, 8), (16, 2), (16, 4))
    found = [(n * threads, unroll) for n, unroll in pairs if n * threads * unroll <= vocabulary]
    return found or [(min(8 * threads, power_of_two(vocabulary)), 1)]


def step_axes(vocabulary: int) -> dict[str, list[Value]]:
    """Return the axes of a pass over a row; :data:`STEPS_MATCH` picks the pairs of them that make sense."""
    shapes = [shape for warps in (0, 8) for shape in step_shapes(vocabulary, warps)]
    return {
        "tile_n": sorted({tile_n for tile_n, _ in shapes}),
        "unroll": sorted({unroll for _, unroll in shapes}),
        "num_worker_warps": [0, 8],
    }


STEPS_MATCH = Constraint(
    "a step over a row gives each thread 32 or 64 elements in 2 to 8 tiles; rows that are shorter take one tile",
    lambda problem, config, target: (
        (config["tile_n"], config["unroll"]) in step_shapes(problem["vocabulary"], config["num_worker_warps"])
    ),
)


def step_config(
    schedule: str, tile_n: int, unroll: int, *, occupancy: int = 4, warps: int = 0, tma: bool = False
) -> Config:
    """Return a config of a pass over a row."""
    return Config(schedule=schedule, tile_n=tile_n, unroll=unroll, num_worker_warps=warps, occupancy=occupancy, tma=tma)


def generic_steps(problem: Problem) -> Config:
    """Return the generic config of a pass over a row."""
    return step_config("persistent", min(512, power_of_two(problem["vocabulary"])), 1)


def tile_axes(problem: Problem, *widths: int) -> dict[str, list[Value]]:
    """Return the axes of a gradient whose tiles each need one tile of logits; see :func:`tiles_full`."""
    width = power_of_two(problem["vocabulary"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in widths}),
        "num_worker_warps": [0, 8],
        "occupancy": [4, 8],
    }


def tiles_full(least: int, most: int, widest: int) -> Constraint:
    """Keep out tiles, of up to ``widest`` columns, with fewer or more elements for each thread."""
    return Constraint(
        f"a tile gives each thread {least} to {most} elements, fewer only where a row is shorter than that",
        lambda problem, config, target: (
            least <= config["tile_n"] // (32 * (config["num_worker_warps"] or 4)) <= most
            or config["tile_n"] == power_of_two(problem["vocabulary"]) < widest
        ),
    )


def tile_config(problem: Problem, schedule: str, widest: int, occupancy: int) -> Config:
    """Return a config of such a gradient."""
    tile_n = min(widest, power_of_two(problem["vocabulary"]))
    return Config(schedule=schedule, tile_n=tile_n, num_worker_warps=0, occupancy=occupancy)


def generic_tiles(problem: Problem) -> Config:
    """Return the generic config of such a gradient."""
    return tile_config(problem, "persistent", 512, 4)


SPACE_OF_TILES = Space(lambda problem: tile_axes(problem, 1024, 2048, 4096), (tiles_full(8, 32, 4096),))


def by_parts(function: Callable[..., dict[str, Any]], *rows: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return float32 results of a function of rows, called for some rows at a time: all rows may not fit in float64."""
    import torch

    parts = [function(*part) for part in zip(*(x.split(1024) for x in rows), strict=True)]
    return {name: torch.cat([part[name] for part in parts]).float() for name in names}


def _grid(sizes: Problem, config: Config, sm_count: int) -> int:
    # A pass over a row has steps of several tiles; else each tile is a step.
    across = 1 if "unroll" in config else cdiv(sizes["vocabulary"], config["tile_n"])
    return grid_of(sizes["rows"] * across, config, sm_count)


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *, flags: tuple[str, ...],
    flops: int, space: Space, default: Callable[[Problem, Target], Config], generic: Callable[[Problem], Config],
    inputs: Callable[[Problem, Any, str], dict[str, Any]], exact_as: str = "dtype", **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel over rows of logits, with the kernel's name.

    Args:
        function: the kernel; its parameters are the arrays, then ``columns``, ``persistent``, the flags, and the axes
            of the space that it takes, in any order.
        arrays: in the order of the kernel, with its scalars.
        flags: names of dimensions that are True or False, on which the kernel depends.
        flops: floating-point operations for each logit.
        exact_as: the dtype that sets the tolerance, or the dimension that has it.
        more: further arguments of :func:`tilekern.kernels.families.tables.spec`.
    """
    sizes = (Dimension("rows", "bucketed"), Dimension("vocabulary", "exact"), Dimension("dtype", "dtype"))
    return tables.spec(
        name_of(function),
        summary,
        (*sizes, *tables.flags_of(flags)),
        arrays,
        reference,
        function=function,
        constants=lambda problem, config: {"columns": problem["vocabulary"]},
        grid=_grid,
        space=space,
        default=default,
        generic=generic,
        given=inputs,
        bytes_moved=lambda problem: bytes_of(tensors(arrays), problem),
        flops=lambda problem: flops * problem["rows"] * problem["vocabulary"],
        result_dtype=lambda problem: str(problem.get(exact_as, exact_as)),
        **more,
    )
