"""Kernels over rows: statistics of each row, then a formula of each element; with sums over all rows, or without.

A kernel is a few functions of float32 tiles, and :func:`forward` or :func:`backward` around them:

- ``statistics(rows, columns, *scalars)`` returns a tuple of columns [tile_m, 1]; :func:`add_up` computes sums over
  rows, :func:`largest` their maxima.
- ``formula(tiles, weights, known)`` returns a tile for each output.
- ``share(tiles, weights, known)`` returns the terms of the sums over all rows, one tile for each weight. It must map
  zeros to 0: rows beyond the last read as 0, and their statistics are 0.

Without a formula (None) the statistics are the results: each is stored as an output [rows].

``tiles`` has one [tile_m, tile_n] of each input, ``weights`` one [tile_n] of each weight, ``known`` the statistics,
then the scalars (a dtype may be one). Rows stay in registers, in the dtype of their array; rows that registers cannot
hold (``long``) are read again for each sum, out of the L2 cache.
Each block stores its sums over rows as one row of ``partial``, one weight after the other; the spec ``column_sum``
adds the rows up in a fixed order. :func:`spec` makes the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import cute_ring, cute_rows, tables
from tilekern.kernels.families.arrays import Arrays, bytes_of, followed_by_sum, tensors
from tilekern.kernels.families.overlap import is_few
from tilekern.kernels.tiles import (
    FEW_CHUNKS,
    HELD_BY_DEFAULT,
    LONGEST_HELD,
    PASSES_MATCH,
    TMA_NEEDS_HOPPER,
    add_pairs,
    fits_registers,
    grid_of,
    is_bounded,
    load,
    passes,
    power_of_two,
    row_tiles,
)
from tilekern.spec import Config, Constraint, CuteKernel, KernelSpec, Problem, Space, Value, cdiv, name_of, python_of
from tilekern.spec.targets import Target

_LOWEST = float("-inf")


def forward(
    statistics, formula, inputs, weights, outputs, scalars, columns, tile_m, tile_n, chunks, persistent, long, bounded,
    tma, made=None, kept=(),
):  # fmt: skip
    """Compute the outputs of all rows: one step of ``tile_m`` rows a block, or resident blocks that loop.

    The results of ``made(tiles)`` are stored in the arrays ``kept`` first, and replace the inputs, as rounded there.
    """
    shape = (columns, tile_m, tile_n, chunks, long, bounded, tma)
    vectors = _held(weights, (), (tile_n,), shape)
    if ct.static_eval(persistent):
        for step in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m), ct.num_blocks(0)):
            _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, step, shape, made, kept)
    else:
        _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, ct.bid(0), shape, made, kept)


def _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, step, shape, made, kept):
    columns, tile_m, tile_n, chunks, long, _, _ = shape
    stored, held = _held(inputs, (step,), (tile_m, tile_n), shape), ()
    for c in ct.static_iter(range(len(stored))):
        tiles = _made(made, kept, stored[c])
        _write(tiles, kept, (step, c), shape)
        held = held + (tiles,)
    rows = (inputs, weights, held, vectors, step, shape, made, kept)
    known = statistics(rows, columns, *scalars) + scalars
    if ct.static_eval(formula is None):
        _write_statistics(rows, outputs, known)
    elif ct.static_eval(long):
        for c in range(ct.cdiv(inputs[0].shape[1], tile_n)):
            tiles, parts = _at(rows, c)
            _write(tiles, kept, (step, c), shape)
            _write(formula(tiles, parts, known), outputs, (step, c), shape)
    else:
        for c in ct.static_iter(range(chunks)):
            _write(formula(*_at(rows, c), known), outputs, (step, c), shape)


def backward(
    statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, columns, tile_m, tile_n, chunks, long,
    bounded, tma,
):  # fmt: skip
    """Compute the outputs of all rows by resident blocks, and ``sums`` sums over each block's rows in ``partial``."""
    shape = (columns, tile_m, tile_n, chunks, long, bounded, tma)
    run = _backward_long if ct.static_eval(long) else _backward_held
    run(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, shape)


def _backward_held(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, shape):
    columns, tile_m, tile_n, chunks, _, _, _ = shape
    vectors = _held(weights, (), (tile_n,), shape)
    totals = ()
    for _ in ct.static_iter(range(sums * chunks)):
        totals = totals + (ct.zeros((tile_m, tile_n), ct.float32),)
    for step in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m), ct.num_blocks(0)):
        rows = (inputs, weights, _held(inputs, (step,), (tile_m, tile_n), shape), vectors, step, shape, None, ())
        known = _inside(statistics(rows, columns, *scalars), inputs, step, tile_m) + scalars
        added = ()
        for c in ct.static_iter(range(chunks)):
            tiles, parts = _at(rows, c)
            _write(formula(tiles, parts, known), outputs, (step, c), shape)
            shares = share(tiles, parts, known)
            for n in ct.static_iter(range(sums)):
                added = added + (totals[c * sums + n] + shares[n],)
        totals = added
    for c in ct.static_iter(range(chunks)):
        for n in ct.static_iter(range(sums)):
            total = ct.sum(totals[c * sums + n], axis=0, keepdims=True)
            ct.store(_piece(partial, n, sums, columns), (ct.bid(0), c), total)


def _backward_long(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, shape):
    columns, tile_m, tile_n, _, _, _, _ = shape
    for n in ct.static_iter(range(sums)):
        for c in range(ct.cdiv(inputs[0].shape[1], tile_n)):
            ct.store(_piece(partial, n, sums, columns), (ct.bid(0), c), ct.zeros((1, tile_n), ct.float32))
    for step in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m), ct.num_blocks(0)):
        rows = (inputs, weights, (), (), step, shape, None, ())
        known = _inside(statistics(rows, columns, *scalars), inputs, step, tile_m) + scalars
        for c in range(ct.cdiv(inputs[0].shape[1], tile_n)):
            tiles, parts = _at(rows, c)
            _write(formula(tiles, parts, known), outputs, (step, c), shape)
            shares = share(tiles, parts, known)
            for n in ct.static_iter(range(sums)):
                piece = _piece(partial, n, sums, columns)
                # The block reads what it alone has stored, so this load must not go through TMA's other memory proxy.
                before = load(piece, (ct.bid(0), c), (1, tile_n), True, 0, False)
                ct.store(piece, (ct.bid(0), c), before + ct.sum(shares[n], axis=0, keepdims=True), allow_tma=False)


def add_up(terms, count, rows, known, masked):
    """Return sums over each row of the ``count`` tiles, one or two, that ``terms(tiles, weights, known)`` returns.

    Elements beyond the end of a row read as 0. Terms that do not map these to 0 are ``masked``.
    """
    _, tile_m, tile_n, chunks, long, _, _ = rows[5]
    sums = ()
    for _ in ct.static_iter(range(count)):
        sums = sums + (ct.zeros((tile_m, tile_n), ct.float32),)
    if ct.static_eval(long):
        for c in range(ct.cdiv(rows[0][0].shape[1], tile_n)):
            sums = _added(terms, sums, rows, c, known, masked)
    else:
        for c in ct.static_iter(range(chunks)):
            sums = _added(terms, sums, rows, c, known, masked)
    if ct.static_eval(count == 1):
        return (ct.sum(sums[0], axis=1, keepdims=True),)
    # One reduction: one barrier among a block's warps in place of two.
    return ct.reduce(sums, 1, add_pairs, (0.0, 0.0), keepdims=True)


def largest(term, rows, known):
    """Return each row's maximum [tile_m, 1] of the tile that ``term(tiles, weights, known)`` returns, ignoring NaN."""
    return ct.max(maxima(term, rows, known), axis=1, keepdims=True)


def maxima(term, rows, known):
    """Return the maximum over a row's chunks for each column of a chunk, [tile_m, tile_n]; see :func:`largest`."""
    _, tile_m, tile_n, chunks, long, _, _ = rows[5]
    top = ct.full((tile_m, tile_n), _LOWEST, ct.float32)
    if ct.static_eval(long):
        for c in range(ct.cdiv(rows[0][0].shape[1], tile_n)):
            top = _larger(term, top, rows, c, known)
    else:
        for c in ct.static_iter(range(chunks)):
            top = _larger(term, top, rows, c, known)
    return top


def _larger(term, top, rows, c, known):
    tiles, weights = _at(rows, c)
    columns, _, tile_n, _, _, _, _ = rows[5]
    value = term(tiles, weights, known)
    if ct.static_eval(columns % tile_n != 0):
        place = c * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :]
        value = ct.where(place < columns, value, _LOWEST)
    return ct.maximum(top, value)


def _added(terms, sums, rows, c, known, masked):
    tiles, weights = _at(rows, c)
    columns, _, tile_n, _, _, _, _ = rows[5]
    shares = terms(tiles, weights, known)
    added = ()
    for n in ct.static_iter(range(len(sums))):
        share = shares[n]
        if ct.static_eval(masked and columns % tile_n != 0):
            place = c * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :]
            share = ct.where(place < columns, share, 0.0)
        added = added + (sums[n] + share,)
    return added


def _inside(statistics, inputs, step, tile_m):
    """Zero the statistics of rows beyond the last, which may be infinite."""
    if ct.static_eval(tile_m == 1):
        return statistics
    row = step * tile_m + ct.arange(tile_m, dtype=ct.int32)[:, None]
    inside = ()
    for n in ct.static_iter(range(len(statistics))):
        inside = inside + (ct.where(row < inputs[0].shape[0], statistics[n], 0.0),)
    return inside


def _write(results, outputs, index, shape):
    _, _, _, _, _, bounded, tma = shape
    for n in ct.static_iter(range(len(outputs))):
        ct.store(outputs[n], index, results[n].astype(outputs[n].dtype), check_bounds=bounded, allow_tma=tma)


def _write_statistics(rows, outputs, known):
    step, (_, tile_m, _, _, _, bounded, _) = rows[4], rows[5]
    for n in ct.static_iter(range(len(outputs))):
        result = ct.reshape(known[n], (tile_m,)).astype(outputs[n].dtype)
        ct.store(outputs[n], (step,), result, check_bounds=bounded, allow_tma=False)


def _at(rows, c):
    """Return chunk ``c`` of a step's rows and of the weights, in float32."""
    inputs, weights, held, vectors, step, (_, tile_m, tile_n, _, long, bounded, tma), made, kept = rows
    if ct.static_eval(long):
        tiles = _made(made, kept, _read(inputs, (step, c), (tile_m, tile_n), bounded, tma))
        parts = _read(weights, (c,), (tile_n,), bounded, tma)
        return _wide(tiles), _wide(parts)
    return _wide(held[c]), _wide(vectors[c])


def _held(arrays, place, tile, shape):
    """Load all chunks of a step's rows, or of the weights, in their stored dtype; none if they are read again."""
    _, _, _, chunks, long, bounded, tma = shape
    held = ()
    for c in ct.static_iter(range(0 if long else chunks)):
        held = held + (_read(arrays, place + (c,), tile, bounded, tma),)
    return held


def _made(made, kept, tiles):
    if ct.static_eval(len(kept) == 0):
        return tiles
    results = made(_wide(tiles))
    rounded = ()
    for n in ct.static_iter(range(len(kept))):
        rounded = rounded + (results[n].astype(kept[n].dtype),)
    return rounded


def _read(arrays, index, shape, bounded, tma):
    tiles = ()
    for n in ct.static_iter(range(len(arrays))):
        tiles = tiles + (load(arrays[n], index, shape, bounded, 0, tma),)
    return tiles


def _wide(tiles):
    wide = ()
    for n in ct.static_iter(range(len(tiles))):
        wide = wide + (tiles[n].astype(ct.float32),)
    return wide


def _piece(partial, n, sums, columns):
    """Return the columns of ``partial`` that belong to one sum."""
    if ct.static_eval(sums == 1):
        return partial
    return partial.slice(1, n * columns, (n + 1) * columns)


_TMA_PAYS = Constraint(
    "one block a step has no loop in which its own TMA loads could run ahead, which pays for short rows alone",
    lambda problem, config, target: (
        config["schedule"] == "persistent" or not config["tma"] or problem["columns"] <= 1024
    ),
)


def _axes(problem: Problem, direction: str) -> dict[str, list[Value]]:
    columns, backward = problem["columns"], direction == "backward"
    width, resident = power_of_two(columns), columns <= LONGEST_HELD[direction]
    return {
        "schedule": ["persistent"] if backward or not resident else ["persistent", "block"],
        "passes": passes(columns, direction),
        "tile_m": row_tiles(columns, 2048, 8192 if backward else 16384) if resident else [1],
        "tile_n": sorted({width, min(width, 1024)}) if resident else [1024, 2048],
        "occupancy": [1, 2, 3, 4] if backward else [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


def space_of(live: int, direction: str = "forward", **other: Callable[[Problem, list[Value]], list[Value]]) -> Space:
    """Return the space of a kernel; functions in ``other`` replace axes: (problem, usual values) -> values."""

    def axes(problem: Problem) -> dict[str, list[Value]]:
        usual = _axes(problem, direction)
        return usual | {axis: values(problem, usual[axis]) for axis, values in other.items()}

    return Space(axes, (fits_registers(live), TMA_NEEDS_HOPPER, _TMA_PAYS, PASSES_MATCH, FEW_CHUNKS))


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    columns, tile_n = problem["columns"], config["tile_n"]
    bounded = is_bounded(config["tile_m"], columns, tile_n)
    few = is_few(problem["rows"])
    return {"chunks": cdiv(columns, tile_n), "long": config["passes"] == 2, "bounded": bounded, "few": few}


def _default(live: int, direction: str, problem: Problem, target: Target) -> Config:
    columns, backward = problem["columns"], direction == "backward"
    resident, width = columns <= HELD_BY_DEFAULT, power_of_two(columns)
    hopper, wide, most = target.has_tma, problem["dtype"] == "float32", 2 if backward else 4
    return Config(
        schedule="persistent",
        passes=1 if resident else 2,
        tile_m=max(1, min(64, (2048 if backward else 4096) // width)) if resident else 1,
        tile_n=width if resident and width <= 4096 else 1024,
        occupancy=most if width <= 4096 and live <= (4 if backward else 2) else most // 2,
        # Four warps would spill what long rows of float32 hold.
        num_worker_warps=8 if (backward and hopper) or (resident and width > 4096 and wide) else 0,
        tma=hopper,
    )


def default_in_blocks(
    live: int, occupancy: int, problem: Problem, target: Target, tile_n: int = 4096, num_worker_warps: int = 0
) -> Config:
    """Return a default of one block a row, for kernels without sums over rows; the family's for short or long rows.

    Many blocks at once hide each other's loads. Shorter rows leave blocks too little to do.

    Args:
        occupancy: for rows of 4096 columns and 16 bits; longer and wider ones get less.
    """
    columns, wide = problem["columns"], problem["dtype"] == "float32"
    if not 2048 < columns <= HELD_BY_DEFAULT:
        return _default(live, "forward", problem, target)
    times = power_of_two(columns) // 4096 * (2 if wide else 1)
    return Config(
        schedule="block", passes=1, tile_m=1, tile_n=tile_n if columns <= 4096 else 1024,
        occupancy=max(2, occupancy // times), num_worker_warps=8 if times > 1 else num_worker_warps, tma=False,
    )  # fmt: skip


def default_of_two_sums(live: int, problem: Problem, target: Target) -> Config:
    """Return the default of a backward with two sums for each column: rows of 16 bits leave room for two blocks."""
    default = _default(live, "backward", problem, target)
    if problem["columns"] > 4096 or problem["dtype"] == "float32":
        return default
    return default.but(occupancy=2, num_worker_warps=0)


def generic(problem: Problem, elements: int = 512) -> Config:
    """Return a config of steps of ``elements`` elements: loads of single elements are long code."""
    # Two rows of 256 compile faster than one of 512.
    width = min(256, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", passes=2 if problem["columns"] > elements // 256 * width else 1,
        tile_m=elements // width, tile_n=width, occupancy=1, num_worker_warps=0, tma=False,
    )  # fmt: skip


def _results(outputs: dict[str, Any], sums: tuple[str, ...]) -> dict[str, Any]:
    """Return the outputs, with the partial sums added up and taken apart."""
    if not sums:
        return outputs
    totals = outputs["partial"].double().sum(0).chunk(len(sums))
    return {name: x for name, x in outputs.items() if name != "partial"} | dict(zip(sums, totals, strict=True))


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *, live: int, flops: int,
    sums: tuple[str, ...] = (), flags: tuple[str, ...] = (), cute: bool = True, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a kernel over rows, with the kernel's name.

    Args:
        function: the kernel; its parameters are the arrays, then the constants of :func:`forward` or :func:`backward`,
            ``few`` if it calls :func:`~tilekern.kernels.families.overlap.launch_next`, and the flags.
        arrays: in the order of the kernel; matrices [rows, columns], weights [columns], statistics [rows] as outputs
            of a kernel without a formula, ``arrays.partial_sums`` for sums over rows, and scalars with their samples.
            The first output's dtype sets the tolerance.
        live: float32 values for each element of a step that stay in registers: rows, weights, and sums over rows.
        flops: floating-point operations for each element.
        sums: names of the sums over all rows, in the order of ``partial``; a kernel with sums calls :func:`backward`,
            one without calls :func:`forward`.
        flags: names of dimensions that are True or False, on which the kernel depends.
        cute: whether CuTe DSL compiles the kernel too, as it can if its function calls nothing of this module but
            :func:`forward` or :func:`backward`, :func:`add_up` and :func:`largest`.
        more: further arguments of :func:`tilekern.kernels.families.tables.spec`, such as a ``default`` that
            measurements prefer to the family's.
    """
    direction = "backward" if sums else "forward"
    dimensions, space = tables.dimensions_of(arrays, flags), space_of(live, direction)
    if cute:
        beside = (cute_rows.space(live, direction), *((cute_ring.space(live, arrays),) if sums else ()))
        space = replace(space, beside=beside)
    of_cute = (*flags, "few") if "few" in python_of(function).__code__.co_varnames else flags

    def by_cute(function: Any, parameters: Any, problem: Problem, config: Config) -> CuteKernel:
        module, known = cute_ring if "stages" in config else cute_rows, problem.but(few=is_few(problem["rows"]))
        return module.implement(function, parameters, of_cute, more.get("dependent", False), known, config)

    follower = None
    if sums:
        # The last dtype is the weights'.
        dtype = [dimension.name for dimension in dimensions if dimension.kind == "dtype"][-1]
        follower = followed_by_sum(tensors(arrays, "scratch")[0], dtype)
    fields: dict[str, Any] = {
        "space": space,
        "default": lambda problem, target: _default(live, direction, problem, target),
        "generic": generic,
        "results": lambda outputs: _results(outputs, sums),
        "result_dtype": tensors(arrays, "output")[0].dtype_in,
        "arrays": arrays,
    }
    return tables.spec(
        name_of(function),
        summary,
        dimensions,
        arrays,
        reference,
        function=function,
        constants=_constants,
        grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["rows"], config["tile_m"]), config, sm_count),
        cute=by_cute,
        follower=follower,
        bytes_moved=lambda problem: bytes_of(tensors(arrays), problem),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        **fields | more,
    )
