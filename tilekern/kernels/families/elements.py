"""Kernels over elements: they read matrices of one shape and dtype, and write matrices of that shape.

An input may also be a vector [rows] of any dtype: each value belongs to all elements of its row.

A kernel is its formula, a function that maps float32 tiles to a tuple of them, and :func:`each_tile` around it:

    @ct.kernel
    def scaled(x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool, bounded: ConstBool):
        each_tile(_formula, (x,), (y,), columns, tile_m, tile_n, persistent, bounded)

Flags of the problem are further constants, in the order of the spec's ``flags``. The rest is :func:`spec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import tables
from tilekern.kernels.families.arrays import Arrays, bytes_of, tensors
from tilekern.kernels.tiles import bounds_of_tiles, grid_of_tiles, load, power_of_two
from tilekern.spec import Config, Constraint, KernelSpec, Problem, Space, Value, cdiv, name_of
from tilekern.spec.targets import Target


def each_tile(formula, inputs, outputs, columns, tile_m, tile_n, persistent, bounded):
    """Compute ``formula(*tiles)`` for all tiles [tile_m, tile_n]: one a block, or resident blocks that loop."""
    if ct.static_eval(persistent):
        for item in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m) * ct.cdiv(columns, tile_n), ct.num_blocks(0)):
            _tile(formula, inputs, outputs, item, columns, tile_m, tile_n, bounded)
    else:
        _tile(formula, inputs, outputs, ct.bid(0), columns, tile_m, tile_n, bounded)


def _tile(formula, inputs, outputs, item, columns, tile_m, tile_n, bounded):
    across = ct.cdiv(columns, tile_n)
    index = (item // across, item % across)
    tiles = ()
    for n in ct.static_iter(range(len(inputs))):
        if ct.static_eval(inputs[n].ndim == 1):
            tile = ct.expand_dims(load(inputs[n], (index[0],), (tile_m,), bounded, 0, False), 1)
        else:
            tile = load(inputs[n], index, (tile_m, tile_n), bounded, 0, False)
        tiles = tiles + (tile.astype(ct.float32),)
    results = formula(*tiles)
    for n in ct.static_iter(range(len(outputs))):
        ct.store(outputs[n], index, results[n].astype(outputs[n].dtype), check_bounds=bounded, allow_tma=False)


def _wastes_little(columns: int, tile_n: int) -> bool:
    """Return whether at most a third of the columns of a row's tiles lie beyond the row's end."""
    return cdiv(columns, tile_n) * tile_n <= 1.5 * columns


def _tile_widths(columns: int) -> list[int]:
    """Return wide tiles if they fit the row, else narrower ones, the widest last."""
    wide = [n for n in (1024, 2048, 4096) if n <= power_of_two(columns) and _wastes_little(columns, n)]
    narrow = [n for n in (256, 512) if n <= power_of_two(columns) and _wastes_little(columns, n)]
    return wide or narrow or [min(256, power_of_two(columns))]


def _axes(problem: Problem) -> dict[str, list[Value]]:
    widths = _tile_widths(problem["columns"])
    return {
        "schedule": ["persistent", "block"],
        "tile_m": sorted({max(1, elements // n) for elements in (1024, 2048) for n in widths}),
        "tile_n": list(widths),
        "occupancy": [2, 8],
        "num_worker_warps": [0, 8],
    }


def _sized(arrays: int) -> Constraint:
    return Constraint(
        f"a tile of fewer than 1024 elements starves the memory system; {arrays} of more than 24576 together spill",
        lambda problem, config, target: 1024 <= config["tile_m"] * config["tile_n"] <= 24576 // arrays,
    )


def _default(problem: Problem, target: Target) -> Config:
    width = _tile_widths(problem["columns"])[0]
    return Config(schedule="block", tile_m=max(1, 1024 // width), tile_n=width, occupancy=8, num_worker_warps=0)


def _generic(problem: Problem) -> Config:
    width = min(256, power_of_two(problem["columns"]))
    return Config(schedule="persistent", tile_m=max(1, 256 // width), tile_n=width, occupancy=1, num_worker_warps=0)


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *, flops: int,
    flags: tuple[str, ...] = (),
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel over elements, with the kernel's name.

    Args:
        function: the kernel; its parameters are the arrays, the constants of :func:`each_tile` and the flags.
        arrays: in the order of the kernel, ``arrays.matrices`` and scalars with their samples.
        flops: floating-point operations for each element.
        flags: names of dimensions that are True or False, on which the formula depends.
    """
    return tables.spec(
        name_of(function),
        summary,
        tables.dimensions_of(arrays, flags),
        arrays,
        reference,
        function=function,
        constants=bounds_of_tiles,
        grid=grid_of_tiles,
        space=Space(_axes, (_sized(len(arrays)),)),
        default=_default,
        generic=_generic,
        bytes_moved=lambda problem: bytes_of(tensors(arrays), problem),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        result_dtype=lambda problem: problem["dtype"],
        arrays=arrays,
    )
