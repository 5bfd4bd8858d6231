"""Kernels over rows: statistics of each row, then something of each element; with sums over all rows, or without.

Such a kernel is a few functions of float32 tiles, and :func:`forward` or :func:`backward` around them:

- ``statistics(rows, columns, *scalars)`` gives a tuple of columns [tile_m, 1]; :func:`add_up` makes sums over rows,
  :func:`largest` their maxima.
- ``formula(tiles, weights, known)`` gives a tile for each output.
- ``share(tiles, weights, known)`` gives what each element adds to the sums over all rows, one for each weight. Of
  zeros it makes 0: rows beyond the last read as 0, and their statistics are taken as 0.

Without a formula (None) the statistics are the results: each is stored as an output [rows], and nothing else is.

``tiles`` has one [tile_m, tile_n] of each input, ``weights`` one [tile_n] of each weight, ``known`` the statistics and
behind them the scalars, of which a dtype may be one. Rows stay in registers, in the dtype of their array; those that
registers cannot hold (``long``) are read again for each sum, out of the L2 cache.
Each block stores its sums over rows as one row of ``partial``, one weight behind the other, which the spec
``column_sum`` adds up in a fixed order. Its spec is made by :func:`spec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import cute_ring, cute_rows
from tilekern.kernels.families.arrays import Arrays, bytes_of, drawn, followed_by_sum, tensors
from tilekern.kernels.families.cute_configs import is_cute
from tilekern.kernels.tiles import (
    FEW_CHUNKS,
    HELD_BY_DEFAULT,
    LONGEST_HELD,
    PASSES_MATCH,
    TMA_NEEDS_HOPPER,
    fits_registers,
    grid_of,
    hints,
    is_bounded,
    load,
    passes,
    power_of_two,
    row_tiles,
)
from tilekern.spec import (
    Config,
    Constraint,
    CuteKernel,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
    module_of,
    name_of,
    outputs_of,
    parameters_of,
)
from tilekern.spec.targets import Target

_LOWEST = float("-inf")


def forward(
    statistics, formula, inputs, weights, outputs, scalars, columns, tile_m, tile_n, chunks, persistent, long, bounded,
    tma, made=None, kept=(),
):  # fmt: skip
    """Outputs for all rows: one step of ``tile_m`` rows a block, or resident blocks that loop.

    The results of ``made(tiles)`` are stored first, in the arrays ``kept``, and stand as rounded there in the place
    of the inputs.
    """
    shape = (columns, tile_m, tile_n, chunks, long, bounded, tma)
    vectors = _held_weights(weights, shape)
    if ct.static_eval(persistent):
        for step in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m), ct.num_blocks(0)):
            _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, step, shape, made, kept)
    else:
        _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, ct.bid(0), shape, made, kept)


def _forward_step(statistics, formula, inputs, weights, vectors, outputs, scalars, step, shape, made, kept):
    columns, _, tile_n, chunks, long, _, _ = shape
    held = _all_made(made, kept, _held_rows(inputs, step, shape), step, shape)
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
    """Outputs for all rows by resident blocks, and ``sums`` sums over each block's rows as its row of ``partial``."""
    shape = (columns, tile_m, tile_n, chunks, long, bounded, tma)
    run = _backward_long if ct.static_eval(long) else _backward_held
    run(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, shape)


def _backward_held(statistics, formula, share, inputs, weights, outputs, partial, sums, scalars, shape):
    columns, tile_m, tile_n, chunks, _, _, _ = shape
    vectors = _held_weights(weights, shape)
    totals = ()
    for _ in ct.static_iter(range(sums * chunks)):
        totals = totals + (ct.zeros((tile_m, tile_n), ct.float32),)
    for step in range(ct.bid(0), ct.cdiv(inputs[0].shape[0], tile_m), ct.num_blocks(0)):
        rows = (inputs, weights, _held_rows(inputs, step, shape), vectors, step, shape, None, ())
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
    """Sums over each row of the ``count`` tiles, one or two, that ``terms(tiles, weights, known)`` gives.

    Beyond the end of a row all reads as 0. Terms that make something else of that are ``masked``.
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
    return ct.reduce(sums, 1, _add_pairs, (0.0, 0.0), keepdims=True)


def _add_pairs(a, b, c, d):
    return a + c, b + d


def largest(term, rows, known):
    """The maximum of each row, [tile_m, 1], of the tile that ``term(tiles, weights, known)`` gives, but for NaN."""
    return ct.max(maxima(term, rows, known), axis=1, keepdims=True)


def maxima(term, rows, known):
    """The maximum over a row's chunks for each column of a chunk, [tile_m, tile_n]; else as :func:`largest`."""
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
    """The statistics, but 0 for rows beyond the last, of whose zeros they may make what is infinite."""
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
    """Chunk ``c`` of a step's rows and of the weights, in float32."""
    inputs, weights, held, vectors, step, (_, tile_m, tile_n, _, long, bounded, tma), made, kept = rows
    if ct.static_eval(long):
        tiles = _made(made, kept, _read(inputs, (step, c), (tile_m, tile_n), bounded, tma))
        parts = _read(weights, (c,), (tile_n,), bounded, tma)
        return _wide(tiles), _wide(parts)
    return _wide(held[c]), _wide(vectors[c])


def _held_rows(inputs, step, shape):
    """All chunks of a step's rows as they are stored; none where they are read again each time."""
    _, tile_m, tile_n, chunks, long, bounded, tma = shape
    held = ()
    for c in ct.static_iter(range(0 if long else chunks)):
        held = held + (_read(inputs, (step, c), (tile_m, tile_n), bounded, tma),)
    return held


def _all_made(made, kept, held, step, shape):
    """The tiles that are made of the rows, and stored; the rows themselves where none are."""
    rows = ()
    for c in ct.static_iter(range(len(held))):
        tiles = _made(made, kept, held[c])
        _write(tiles, kept, (step, c), shape)
        rows = rows + (tiles,)
    return rows


def _made(made, kept, tiles):
    if ct.static_eval(len(kept) == 0):
        return tiles
    results = made(_wide(tiles))
    rounded = ()
    for n in ct.static_iter(range(len(kept))):
        rounded = rounded + (results[n].astype(kept[n].dtype),)
    return rounded


def _held_weights(weights, shape):
    _, _, tile_n, chunks, long, bounded, tma = shape
    held = ()
    for c in ct.static_iter(range(0 if long else chunks)):
        held = held + (_read(weights, (c,), (tile_n,), bounded, tma),)
    return held


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
    """The columns of ``partial`` that belong to one sum."""
    if ct.static_eval(sums == 1):
        return partial
    return partial.slice(1, n * columns, (n + 1) * columns)


_WEIGHTED = Dimension("weight_dtype", "dtype")


def dimensions_of(arrays: Arrays, flags: tuple[str, ...] = ()) -> tuple[Dimension, ...]:
    """Rows, columns, their dtype, the weights' where there are weights, and flags."""
    sizes = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))
    weighted = (_WEIGHTED,) if _dtype_of_weights(arrays) == _WEIGHTED.name else ()
    return (*sizes, *weighted, *(Dimension(flag, "flag") for flag in flags))


def _dtype_of_weights(arrays: Arrays) -> str:
    """The dimension that says the dtype of the weights, that of the rows where they have none of their own."""
    return _WEIGHTED.name if any(array.dtype == _WEIGHTED.name for array in tensors(arrays)) else "dtype"


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


def space_of_narrow_chunks(live: int) -> Space:
    """The space of a forward for which it matters that a row is cut into many chunks."""
    return Space(_narrow_axes, (fits_registers(live), TMA_NEEDS_HOPPER, _TMA_PAYS, PASSES_MATCH, FEW_CHUNKS))


def space_of_short_steps(live: int, most: int) -> Space:
    """The space of a forward whose steps hold at most ``most`` elements."""
    return Space(
        lambda problem: _short_axes(problem, most),
        (fits_registers(live), TMA_NEEDS_HOPPER, _TMA_PAYS, PASSES_MATCH, FEW_CHUNKS),
    )


def _short_axes(problem: Problem, most: int) -> dict[str, list[Value]]:
    held = problem["columns"] <= LONGEST_HELD["forward"]
    return {**_axes(problem, "forward"), "tile_m": row_tiles(problem["columns"], 2048, most) if held else [1]}


def _narrow_axes(problem: Problem) -> dict[str, list[Value]]:
    axes = _axes(problem, "forward")
    narrow: list[Value] = [512] if 1024 < problem["columns"] <= LONGEST_HELD["forward"] else []
    return {**axes, "tile_n": [*narrow, *axes["tile_n"]]}


def _implement(
    function: Any, arrays: Arrays, flags: tuple[str, ...], direction: str, dependent: bool, problem: Problem,
    config: Config,
) -> Implementation | CuteKernel:  # fmt: skip
    parameters = parameters_of(arrays, dimensions_of(arrays, flags), problem)
    if is_cute(config):
        cute = cute_ring if "stages" in config else cute_rows
        return cute.implement(function, parameters, flags, dependent, problem, config)
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    schedule = () if direction == "backward" else (("persistent", config["schedule"] == "persistent"),)
    return Implementation(
        function=function,
        parameters=parameters,
        constants=(
            ("columns", columns),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("chunks", cdiv(columns, tile_n)),
            *schedule,
            ("long", config["passes"] == 2),
            ("bounded", is_bounded(tile_m, columns, tile_n)),
            ("tma", config["tma"]),
            *((flag, problem[flag]) for flag in flags),
        ),
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["rows"], tile_m), config, sm_count),
        hints=hints(config),
        dependent=dependent,
    )


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


def in_blocks(problem: Problem, occupancy: int, tile_n: int = 4096, num_worker_warps: int = 0) -> Config | None:
    """A default of one block a row for kernels without sums over rows; None for rows that are shorter or longer.

    Loads of so many blocks at once hide each other. Shorter rows leave blocks too little to do.

    Args:
        occupancy: of rows of 4096 columns and 16 bits; longer and wider ones have less.
    """
    columns, wide = problem["columns"], problem["dtype"] == "float32"
    if not 2048 < columns <= HELD_BY_DEFAULT:
        return None
    times = power_of_two(columns) // 4096 * (2 if wide else 1)
    return Config(
        schedule="block", passes=1, tile_m=1, tile_n=tile_n if columns <= 4096 else 1024,
        occupancy=max(2, occupancy // times), num_worker_warps=8 if times > 1 else num_worker_warps, tma=False,
    )  # fmt: skip


def default_in_blocks(
    live: int, occupancy: int, problem: Problem, target: Target, tile_n: int = 4096, num_worker_warps: int = 0
) -> Config:
    """The default of :func:`in_blocks`, or else that of other kernels of the family."""
    in_block = in_blocks(problem, occupancy, tile_n, num_worker_warps)
    return in_block or _default(live, "forward", problem, target)


def default_of_two_sums(live: int, problem: Problem, target: Target) -> Config:
    """Of a backward with two sums for each column, which rows of 16 bits leave room for in two blocks of four warps."""
    default = _default(live, "backward", problem, target)
    if problem["columns"] > 4096 or problem["dtype"] == "float32":
        return default
    return default.but(occupancy=2, num_worker_warps=0)


def _generic(problem: Problem) -> Config:
    # Loads of single elements are long code, so tiles are small; two rows of 256 compile faster than one of 512.
    width = min(256, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", passes=2 if problem["columns"] > 2 * width else 1, tile_m=512 // width, tile_n=width,
        occupancy=1, num_worker_warps=0, tma=False,
    )  # fmt: skip


def _results(outputs: dict[str, Any], sums: tuple[str, ...]) -> dict[str, Any]:
    """The outputs, the partial sums added up and taken apart."""
    if not sums:
        return outputs
    totals = outputs["partial"].double().sum(0).chunk(len(sums))
    return {name: x for name, x in outputs.items() if name != "partial"} | dict(zip(sums, totals, strict=True))


def spec(
    function: Any, summary: str, arrays: Arrays, reference: Callable[..., dict[str, Any]], *, live: int, flops: int,
    sums: tuple[str, ...] = (), flags: tuple[str, ...] = (), dependent: bool = False,
    default: Callable[[Problem, Target], Config] | None = None, cute: bool = True,
) -> KernelSpec:  # fmt: skip
    """The spec of a kernel over rows, which has the kernel's name.

    Args:
        function: the kernel; its parameters are the arrays, then the constants of :func:`forward` or :func:`backward`,
            then the flags.
        arrays: in the order of the kernel; matrices [rows, columns], weights [columns], statistics [rows] as outputs
            of a kernel without a formula, ``arrays.partial_sums`` for sums over rows, and scalars with their samples.
            The first output's dtype sets the tolerance.
        live: float32 values for each element of a step that stay in registers: rows, weights, and sums over rows.
        flops: floating-point operations for each element.
        sums: names of the sums over all rows, in the order of ``partial``; a kernel that has some calls
            :func:`backward`, any other one :func:`forward`.
        flags: names of dimensions that are True or False, of which the kernel depends.
        dependent: as :attr:`Implementation.dependent`.
        default: the heuristic config, where measurements say that it is another than the family's.
        cute: whether CuTe DSL compiles the kernel too, as it can where its function calls nothing of this module but
            :func:`forward` or :func:`backward`, :func:`add_up` and :func:`largest`.
    """
    direction = "backward" if sums else "forward"
    beside = (cute_rows.space(live, direction), *((cute_ring.space(live, arrays),) if sums else ()))
    return KernelSpec(
        name=name_of(function),
        summary=summary,
        module=module_of(function),
        dimensions=dimensions_of(arrays, flags),
        space=Space(
            lambda problem: _axes(problem, direction),
            (fits_registers(live), TMA_NEEDS_HOPPER, _TMA_PAYS, PASSES_MATCH, FEW_CHUNKS),
            beside if cute else (),
        ),
        implement=lambda problem, config: _implement(function, arrays, flags, direction, dependent, problem, config),
        default=default or (lambda problem, target: _default(live, direction, problem, target)),
        generic=_generic,
        inputs=lambda problem, generator, device: drawn(arrays, problem, generator, device),
        outputs=outputs_of(arrays),
        reference=reference,
        results=lambda outputs: _results(outputs, sums),
        bytes_moved=lambda problem: bytes_of(tensors(arrays), problem),
        flops=lambda problem: flops * problem["rows"] * problem["columns"],
        result_dtype=tensors(arrays, "output")[0].dtype_in,
        follower=followed_by_sum(tensors(arrays, "scratch")[0], _dtype_of_weights(arrays)) if sums else None,
        arrays=arrays,
    )
