"""Attention of one new token per sequence to its keys and values in a cache, split over the keys.

``out = softmax(scale q k^T) v``, online over tiles of keys as in :mod:`tilekern.kernels.attention.forward`, with its
order of tiles and its arithmetic. The query heads that share a key head are one side of the matrix products.

Few key heads with many keys do not fill a GPU, so the tiles of a key head are dealt out to ``splits`` blocks: tile j
belongs to block ``j % splits``. This depends on the config and on j alone, so a row's bits depend neither on the rest
of the batch nor on the room of the cache, and the grid does not depend on the lengths, which only the GPU knows. Each
block leaves its part of the sums, and :func:`decode_join` adds up the parts in their order. With a single split there
is nothing to join, and the block stores the result itself.

With tiles that are summed ``apart`` (:func:`tilekern.kernels.attention.tiles.tile_sums`) the bits can be those of
attention's forward, however many blocks share the tiles: one, or a block for each tile of the cache's room (``splits``
0), whose parts are the tiles. The tuner finds whether they are. With the schedule ``tile`` such blocks run
:func:`decode_tile`, which is small enough that three of them load at a time on an SM.

Layout: q and out [batch, kv_heads, group, head_dim]. A cache is [batch, kv_heads, room, head_dim], or, if ``paged``,
[pages, page_size, kv_heads, head_dim] with ``table`` [batch, pages of a sequence] int32. Sequence b has the keys from
``starts[b]`` (only if ``padded``, else 0) to ``lengths[b]`` - 1, the new token's, from which a window counts back.
Tiles are counted from the first of these keys or, if ``paged``, from the beginning of the first page. Each row of
``parts`` [blocks, group, at least 2 * head_dim] float32 is a head's values, then the exponent and the denominator of
the part. In the first row of a key head four numbers follow: those of what comes before the parts (a sink), the first
part that is to be added, and the one behind the last. The rest is not written: of a width that is a multiple of the
head's, whole vectors can be read. Arrays that a flag turns off are placeholders, and so is ``parts`` with one split.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention.problem import depth_of, keys_apart
from tilekern.kernels.attention.tiles import LOG2_E, LOWEST, add_sums, factors_of, product, soft_tanh, tile_sums
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    Follower,
    Problem,
    ScalarParameter,
    Space,
    Value,
    bucket,
    cdiv,
)
from tilekern.spec.targets import Target

# The most query heads that may share a key head: the sums of more spill, and take the compiler too long.
MOST_HEADS = 32
MOST_SPLITS = 64
# As few query heads as these are columns of the products alone: as rows they are padded further.
_FEW = 16
# The matrix units take fewer rows or columns than these with spilled registers.
_LEAST_ROWS = 8
# The least room beside the values of a part.
_NUMBERS = 8
# Parts whose exponents are looked at together.
_LANES = 256
# Elements of a tile of parts: with twice as many the threads spill.
_MOST_OF_A_TILE = 8192
# Tiles of as many keys have a loop without a mask.
_MASKED_APART = 64


def _tile_of(key, page_size, across, tile_n, paged):
    """Return the tile that holds a key; a page has ``across`` tiles."""
    if ct.static_eval(paged):
        return key // page_size * across + key % page_size // tile_n
    return key // tile_n


def _key_of(tile, page_size, across, tile_n, paged):
    """Return the first key of a tile."""
    if ct.static_eval(paged):
        return tile // across * page_size + tile % across * tile_n
    return tile * tile_n


def _rows(cache, table, where, tile, tile_n, depth, padded, paged):
    """Load a tile of keys or values, (tile_n, depth), with zeros beyond the end of the cache or of the page."""
    b, h, origin, _, across = where
    zero = ct.PaddingMode.ZERO
    if ct.static_eval(paged):
        page = ct.load(table, (b, tile // across), ())
        found = ct.load(cache, (page, tile % across, h, 0), (1, tile_n, 1, depth), padding_mode=zero)
    elif ct.static_eval(padded):
        view = cache.tiled_view((1, 1, tile_n, depth), padding_mode=zero, traversal_steps=(1, 1, 1, depth))
        found = view.load((b, h, origin + tile * tile_n, 0))
    else:
        found = ct.load(cache, (b, h, tile, 0), (1, 1, tile_n, depth), padding_mode=zero)
    return ct.reshape(found, (tile_n, depth))


def _scores(q_side, keys, table, where, j, slope, sizes, flags):
    """Return the products of the queries with a tile of keys, soft-capped."""
    _, depth, rows, tile_n = sizes
    keys_first, _, capped, padded, paged, precise = flags
    k_tile = _rows(keys, table, where, j, tile_n, depth, padded, paged)
    if ct.static_eval(keys_first):
        products = product(k_tile, q_side, ct.zeros((tile_n, rows), ct.float32))
    else:
        products = product(q_side, ct.transpose(k_tile), ct.zeros((rows, tile_n), ct.float32))
    if ct.static_eval(capped):
        products = soft_tanh(products * slope, precise)
    return products


def _shown(products, v_tile, j, where, shown, tile_n, flags, is_edge):
    """Return products and values of a tile without what is not to be seen: beyond a page, or outside ``shown``.

    ``is_edge`` hides keys outside ``shown``; all keys of other tiles are in it.
    """
    _, _, _, page_size, across = where
    keys_first, _, _, _, paged, _ = flags
    if ct.static_eval(is_edge or paged):
        along = ct.arange(tile_n, dtype=ct.int32)
        # A page may end within a tile.
        there = along < page_size - j % across * tile_n if ct.static_eval(paged) else along < tile_n
        if ct.static_eval(is_edge):
            key = _key_of(j, page_size, across, tile_n, paged) + along
            there = there & (key >= shown[0]) & (key < shown[1])
            # A weight of 0 does not stop NaN of rows that were never written.
            v_tile = ct.where(ct.reshape(there, (tile_n, 1)), v_tile, 0.0)
        side = ct.static_eval((tile_n, 1) if keys_first else (1, tile_n))
        products = ct.where(ct.reshape(there, side), products, -float("inf"))
    return products, v_tile


def _add_tile(state, products, v_tile, factor, flags):
    """Add a tile of keys to the running maximum, denominator and weighted sum, in the steps of attention's forward."""
    biggest, total, summed = state
    keys_first, apart, _, _, _, _ = flags
    if ct.static_eval(apart):
        return add_sums((biggest, total, summed), tile_sums(products, v_tile, factor, keys_first))
    axis = ct.static_eval(0 if keys_first else 1)
    most = ct.maximum(biggest, ct.max(products, axis=axis, keepdims=True) * factor)
    shrink = ct.exp2(biggest - most, flush_to_zero=True)
    weights = ct.exp2(products * factor - most, flush_to_zero=True)
    total = total * shrink + ct.sum(weights, axis=axis, keepdims=True)
    if ct.static_eval(keys_first):
        summed = product(ct.transpose(v_tile), weights.astype(v_tile.dtype), summed * shrink)
    else:
        summed = product(weights.astype(v_tile.dtype), v_tile, summed * shrink)
    return most, total, summed


def _tile(cache, where, j, shown, slope, sizes, flags, is_edge):
    """Return the scores and the values of a tile of keys."""
    q_side, keys, values, table = cache
    _, depth, _, tile_n = sizes
    _, _, _, padded, paged, _ = flags
    products = _scores(q_side, keys, table, where, j, slope, sizes, flags)
    v_tile = _rows(values, table, where, j, tile_n, depth, padded, paged)
    return _shown(products, v_tile, j, where, shown, tile_n, flags, is_edge)


def _add_tiles(state, cache, where, steps, shown, factors, sizes, flags, is_edge):
    """Add the tiles of ``steps``, (begin, stop, step)."""
    biggest, total, summed = state
    slope, factor = factors
    begin, stop, step = steps
    for j in range(begin, stop, step):
        products, v_tile = _tile(cache, where, j, shown, slope, sizes, flags, is_edge)
        biggest, total, summed = _add_tile((biggest, total, summed), products, v_tile, factor, flags)
    return biggest, total, summed


def _start(sink_logits, h, rows, split, sinks, keys_first, apart):
    """Return the running maximum and denominator before the first key: the first split has the sink."""
    side = ct.static_eval((1, rows) if keys_first else (rows, 1))
    if ct.static_eval(sinks):
        logit = ct.load(sink_logits, (h, 0), (1, rows), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        logit = ct.where(split == 0, ct.reshape(logit, side) * LOG2_E, -float("inf"))
        most = ct.ceil(logit) if ct.static_eval(apart) else logit
        biggest = ct.maximum(most, LOWEST)
        return biggest, ct.exp2(logit - biggest, flush_to_zero=True)
    return ct.full(side, LOWEST, ct.float32), ct.zeros(side, ct.float32)


def _span(b, lengths, starts, window, room, windowed, padded, paged):
    """Return (origin, lower, length): keys are counted from ``origin``, and those in [lower, length) are seen."""
    length, origin, lower = ct.minimum(ct.load(lengths, (b,), ()), room), 0, 0
    if ct.static_eval(padded and paged):
        lower = ct.maximum(ct.load(starts, (b,), ()), 0)
    elif ct.static_eval(padded):
        origin = ct.maximum(ct.load(starts, (b,), ()), 0)
        length = length - origin
    if ct.static_eval(windowed):
        lower = ct.maximum(lower, length - window)
    return origin, lower, length


def _pages(keys, table, tile_n, paged):
    """Return (page_size, across, room): a page has ``across`` tiles, a sequence up to ``room`` keys."""
    page_size, across, room = 1, 1, keys.shape[2]
    if ct.static_eval(paged):
        page_size, across = keys.shape[1], ct.cdiv(keys.shape[1], tile_n)
        room = table.shape[1] * keys.shape[1]
    return page_size, across, room


def _tiles_of(shown, page_size, across, tile_n, paged):
    """Return the tiles [first, stop) with the keys that are seen."""
    lower, length = shown
    first = _tile_of(lower, page_size, across, tile_n, paged)
    stop = ct.where(lower < length, _tile_of(ct.maximum(length - 1, 0), page_size, across, tile_n, paged) + 1, first)
    return first, stop


def _queries(q, b, h, rows, depth, keys_first):
    """Load the query heads of a key head as their side of the products."""
    zero = ct.PaddingMode.ZERO
    q_side = ct.reshape(ct.load(q, (b, h, 0, 0), (1, 1, rows, depth), padding_mode=zero), (rows, depth))
    if ct.static_eval(keys_first):
        q_side = ct.transpose(q_side)
    return q_side


def _nothing(rows, depth, keys_first):
    """Return a weighted sum of no keys."""
    return ct.zeros(ct.static_eval((depth, rows) if keys_first else (rows, depth)), ct.float32)


def _store_part(parts, row, state, rows, depth, head_dim, keys_first):
    """Store the sums of a part: the weighted values, then the exponent and the denominator."""
    biggest, total, summed = state
    if ct.static_eval(keys_first):
        summed = ct.transpose(summed)
    ct.store(parts.slice(2, 0, head_dim), (row, 0, 0), ct.reshape(summed, (1, rows, depth)), allow_tma=False)
    _store_numbers(parts, row, head_dim, biggest, total, rows)


def _store_order(parts, row, first, stop, start, rows, head_dim):
    """Store beside the first part of a key head what comes before its parts, and that [first, stop) are to be added."""
    biggest, total = start
    _store_numbers(parts, row, head_dim + 2, biggest, total, rows)
    side = ct.static_eval((rows, 1))
    _store_numbers(parts, row, head_dim + 4, ct.full(side, first, ct.float32), ct.full(side, stop, ct.float32), rows)


def _store_numbers(parts, row, place, one, other, rows):
    """Store two numbers of each query head."""
    side = ct.static_eval((1, rows, 1))
    ct.store(parts, (row, 0, place), ct.reshape(one, side), allow_tma=False)
    ct.store(parts, (row, 0, place + 1), ct.reshape(other, side), allow_tma=False)


def _store_out(out, b, h, state, rows, depth, keys_first, allow_tma):
    """Store the result; by TMA it passes through shared memory."""
    _, total, summed = state
    found = summed * (1.0 / ct.where(total == 0.0, 1.0, total))
    if ct.static_eval(keys_first):
        found = ct.transpose(found)
    ct.store(out, (b, h, 0, 0), ct.reshape(found, (1, 1, rows, depth)).astype(out.dtype), allow_tma=allow_tma)


def _add_split(state, cache, where, tiles, split, splits, shown, factors, sizes, flags, one_loop, cut_in_front):
    """Add the tiles of one split to a state, from those of ``tiles``, [first, stop)."""
    first, stop = tiles
    mine = first + (split + splits - first % splits) % splits
    if ct.static_eval(one_loop):
        return _add_tiles(state, cache, where, (mine, stop, splits), shown, factors, sizes, flags, True)
    # The last tile, and a first one that begins before the first key, are edges; the keys come in their order.
    last = stop - 1
    if ct.static_eval(cut_in_front):
        _, _, _, page_size, across = where
        _, _, _, _, paged, _ = flags
        begins = _key_of(first, page_size, across, ct.static_eval(sizes[3]), paged)
        owns_first = (mine == first) & (first < last) & (shown[0] > begins)
        steps = (mine, mine + ct.where(owns_first, 1, 0), 1)
        state = _add_tiles(state, cache, where, steps, shown, factors, sizes, flags, True)
        mine = mine + ct.where(owns_first, splits, 0)
    state = _add_tiles(state, cache, where, (mine, last, splits), shown, factors, sizes, flags, False)
    owns_last = (first < stop) & (last % splits == split)
    steps = (last, last + ct.where(owns_last, 1, 0), 1)
    return _add_tiles(state, cache, where, steps, shown, factors, sizes, flags, True)


def _leave_tile(parts, item, split, tiles, start, cache, where, shown, factors, sizes, flags):
    """Leave the sums of the tile of a block's number, if it is one of ``tiles``, [first, stop)."""
    first, stop = tiles
    head_dim, depth, rows, _ = sizes
    keys_first, _, _, _, _, _ = flags
    if (first <= split) & (split < stop):
        products, v_tile = _tile(cache, where, split, shown, factors[0], sizes, flags, True)
        _store_part(parts, item, tile_sums(products, v_tile, factors[1], keys_first), rows, depth, head_dim, keys_first)
    if split == 0:
        _store_order(parts, item, first, stop, start, rows, head_dim)


def _attend(item, q, keys, values, lengths, starts, table, sink_logits, numbers, out, parts, splits, sizes, flags):
    """Compute one split's part for the query heads of one key head; the result itself if it is the only one."""
    scale, softcap, window = numbers
    head_dim, depth, rows, tile_n = sizes
    one_loop, one_tile, keys_first, apart, windowed, capped, sinks, padded, paged, precise = flags
    split, pair = item % splits, item // splits
    h, b = pair % q.shape[1], pair // q.shape[1]

    page_size, across, room = _pages(keys, table, tile_n, paged)
    origin, lower, length = _span(b, lengths, starts, window, room, windowed, padded, paged)
    first, stop = _tiles_of((lower, length), page_size, across, tile_n, paged)

    factors = factors_of(scale, softcap, capped)
    q_side = _queries(q, b, h, rows, depth, keys_first)
    start = _start(sink_logits, h, rows, split, sinks, keys_first, apart)
    state = start + (_nothing(rows, depth, keys_first),)
    cache, where, shown = (q_side, keys, values, table), (b, h, origin, page_size, across), (lower, length)
    tiles, kinds = (first, stop), (keys_first, apart, capped, padded, paged, precise)
    if ct.static_eval(one_tile):
        if splits > 1:
            _leave_tile(parts, item, split, tiles, start, cache, where, shown, factors, sizes, kinds)
        else:
            state = _add_tiles(state, cache, where, (first, stop, 1), shown, factors, sizes, kinds, True)
            _store_out(out, b, h, state, rows, depth, keys_first, None)
    else:
        edges = ct.static_eval(windowed or (padded and paged))
        state = _add_split(state, cache, where, tiles, split, splits, shown, factors, sizes, kinds, one_loop, edges)
        if splits == 1:
            _store_out(out, b, h, state, rows, depth, keys_first, None)
        else:
            _store_part(parts, item, state, rows, depth, head_dim, keys_first)
            if split == 0:
                nothing = (ct.full((rows, 1), LOWEST, ct.float32), ct.zeros((rows, 1), ct.float32))
                _store_order(parts, item, 0, splits, nothing, rows, head_dim)


@ct.kernel
def decode_attention(
    q, keys, values, lengths, starts, table, sink_logits, scale, softcap, window, out, parts, head_dim: ConstInt,
    depth: ConstInt, rows: ConstInt, tile_n: ConstInt, persistent: ConstBool, one_loop: ConstBool,
    one_tile: ConstBool, keys_first: ConstBool, apart: ConstBool, windowed: ConstBool, capped: ConstBool,
    sinks: ConstBool, padded: ConstBool, paged: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One split of one key head a block, or resident blocks that loop; the layout is that of the module."""
    # Its launch overlaps the end of the kernel that writes the last keys, and the join's its own.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    pairs = q.shape[0] * q.shape[1]
    # As many as the grid has blocks for.
    splits = ct.maximum(1, ct.num_blocks(0) // pairs)
    numbers, sizes = (scale, softcap, window), (head_dim, depth, rows, tile_n)
    flags = (one_loop, one_tile, keys_first, apart, windowed, capped, sinks, padded, paged, precise)
    arguments = (q, keys, values, lengths, starts, table, sink_logits, numbers, out, parts, splits, sizes, flags)
    if ct.static_eval(persistent):
        for item in range(ct.bid(0), pairs * splits, ct.num_blocks(0)):
            _attend(item, *arguments)
    else:
        _attend(ct.bid(0), *arguments)


@ct.kernel
def decode_tile(
    q, keys, values, lengths, starts, table, sink_logits, scale, softcap, window, out, parts, head_dim: ConstInt,
    depth: ConstInt, rows: ConstInt, tile_n: ConstInt, keys_first: ConstBool, windowed: ConstBool, capped: ConstBool,
    sinks: ConstBool, padded: ConstBool, paged: ConstBool, precise: ConstBool,
):  # fmt: skip
    """The part of one tile of a key head a block, summed apart; the result itself if the room is one tile.

    Both branches read one load of the tile: a load in each would take twice the shared memory, and a mask for all tiles
    would bring all values through registers.
    """
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    pairs = q.shape[0] * q.shape[1]
    tiles = ct.maximum(1, ct.num_blocks(0) // pairs)
    item = ct.bid(0)
    j, pair = item % tiles, item // tiles
    h, b = pair % q.shape[1], pair // q.shape[1]

    page_size, across, room = _pages(keys, table, tile_n, paged)
    origin, lower, length = _span(b, lengths, starts, window, room, windowed, padded, paged)
    first, stop = _tiles_of((lower, length), page_size, across, tile_n, paged)
    where, kinds = (b, h, origin, page_size, across), (keys_first, True, capped, padded, paged, precise)
    if (first <= j) & (j < stop):
        slope, factor = factors_of(scale, softcap, capped)
        q_side = _queries(q, b, h, rows, depth, keys_first)
        products = _scores(q_side, keys, table, where, j, slope, (head_dim, depth, rows, tile_n), kinds)
        v_tile = _rows(values, table, where, j, tile_n, depth, padded, paged)
        begins = _key_of(j, page_size, across, tile_n, paged)
        if (begins < lower) | (begins + tile_n > length) | (tiles == 1):
            products, v_tile = _shown(products, v_tile, j, where, (lower, length), tile_n, kinds, True)
            found = tile_sums(products, v_tile, factor, keys_first)
            if tiles > 1:
                _store_part(parts, item, found, rows, depth, head_dim, keys_first)
            else:
                state = _start(sink_logits, h, rows, j, sinks, keys_first, True) + (_nothing(rows, depth, keys_first),)
                _store_out(out, b, h, add_sums(state, found), rows, depth, keys_first, False)
        else:
            products, v_tile = _shown(products, v_tile, j, where, (lower, length), tile_n, kinds, False)
            found = tile_sums(products, v_tile, factor, keys_first)
            _store_part(parts, item, found, rows, depth, head_dim, keys_first)
    elif tiles == 1:
        ct.store(out, (b, h, 0, 0), ct.zeros((1, 1, rows, depth), out.dtype), allow_tma=False)
    if (j == 0) & (tiles > 1):
        start = _start(sink_logits, h, rows, j, sinks, keys_first, True)
        _store_order(parts, item, first, stop, start, rows, head_dim)


def _rows_from(begun, last, count):
    """Return the rows of ``count`` parts, (count, 1). The last one repeats, so that loads need no check."""
    return ct.minimum(begun + ct.arange(count, dtype=ct.int32), last)[:, None]


def _biggest(parts, biggest, first, stop, head, head_dim):
    """Return the largest exponent of the parts [first, stop), and of what comes before them."""
    most, begun = ct.full((_LANES, 1), LOWEST, ct.float32), first
    # Mostly there is one step. The compiler would pipeline a loop over ``range`` for up to 14.
    while True:
        if begun >= stop:
            break
        exponents = ct.gather(parts, (_rows_from(begun, stop - 1, _LANES), head, head_dim), check_bounds=False)
        most, begun = ct.maximum(most, exponents), begun + _LANES
    return ct.maximum(biggest, ct.max(most))


def _join(item, parts, splits, out, head_dim, depth, width, chunk):
    """Add up ``width`` columns of a query head's parts in their order, ``chunk`` parts a step.

    All threads load vectors of the next tile while this one is added up, a thread for each column. A thread for each
    column would have too few loads in flight.
    """
    across = ct.static_eval(depth // width)
    column, row = item % across, item // across
    pair, head = row // out.shape[1], row % out.shape[1]
    mine = parts.slice(0, pair * splits, (pair + 1) * splits)
    first = ct.load(mine, (0, head, head_dim + 4), ()).astype(ct.int32)
    stop = ct.load(mine, (0, head, head_dim + 5), ()).astype(ct.int32)
    before, total = ct.load(mine, (0, head, head_dim + 2), ()), ct.load(mine, (0, head, head_dim + 3), ())
    last = ct.maximum(stop - 1, 0)
    # Columns behind the head may hold anything, and are not stored. Only parts of heads below 8 end before them.
    columns = (column * width + ct.arange(width, dtype=ct.int32))[None, :]
    bounded = ct.static_eval(depth > 2 * head_dim)
    rows = _rows_from(first, last, chunk)
    values = ct.gather(mine, (rows, head, columns), check_bounds=bounded)
    biggest = _biggest(mine, before, first, stop, head, head_dim)
    total = ct.reshape(total * ct.exp2(before - biggest, flush_to_zero=True), (1, 1))
    summed = ct.zeros((1, width), ct.float32)
    # Over ``range`` a thread would load the numbers of all its vectors, and compiling takes up to 50 s.
    begun = first
    while begun < stop:
        next_rows = _rows_from(begun + chunk, last, chunk)
        coming = ct.gather(mine, (next_rows, head, columns), check_bounds=bounded)
        there = (begun + ct.arange(chunk, dtype=ct.int32) < stop)[:, None]
        weight = ct.exp2(ct.gather(mine, (rows, head, head_dim), check_bounds=False) - biggest, flush_to_zero=True)
        more = ct.gather(mine, (rows, head, head_dim + 1), check_bounds=False) * weight
        more, values = ct.where(there, more, 0.0), ct.where(there, values * weight, 0.0)
        for n in ct.static_iter(range(chunk)):
            total = total + ct.extract(more, (n, 0), (1, 1))
            summed = summed + ct.extract(values, (n, 0), (1, width))
        rows, values, begun = next_rows, coming, begun + chunk
    summed = summed * (1.0 / ct.where(total == 0.0, 1.0, total))
    ct.store(out, (pair, head, column), ct.reshape(summed, (1, 1, width)).astype(out.dtype), allow_tma=False)


@ct.kernel
def decode_join(
    parts, splits, out, head_dim: ConstInt, depth: ConstInt, width: ConstInt, chunk: ConstInt, persistent: ConstBool
):  # fmt: skip
    """``width`` columns of a query head a block; parts as in the module, out [kv_heads, group, head_dim]."""
    # Its launch overlaps the end of the kernel that writes the parts.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    steps = out.shape[0] * out.shape[1] * ct.static_eval(depth // width)
    each_step(_join, steps, persistent, (parts, splits, out, head_dim, depth, width, chunk))


# ``kv_heads`` counts the key heads of all sequences, ``keys`` is the room of a sequence's cache; ``page_size`` is 1
# unless ``paged``.
DIMENSIONS = (
    *(Dimension(name, "bucketed") for name in ("kv_heads", "keys", "page_size")),
    *(Dimension(name, "exact") for name in ("group", "head_dim")),
    *flags_of(("windowed", "capped", "sinks", "padded", "paged")),
    Dimension("dtype", "dtype"),
)


def _heads(problem: Problem) -> int:
    """Return the key heads of a sequence in inputs: at most 8, and several sequences if there can be."""
    count = problem["kv_heads"]
    return max(d for d in range(1, min(8, count) + 1) if count % d == 0 and (count // d > 1 or d == 1))


def sizes(problem: Problem) -> dict[str, Any]:
    """Return the sizes of arrays in inputs, and the kernel's constants, that follow from a problem."""
    heads, paged = _heads(problem), problem["paged"]
    batch = problem["kv_heads"] // heads
    most_pages = cdiv(problem["keys"], problem["page_size"]) if paged else 1
    cache = (batch * most_pages, problem["page_size"], heads) if paged else (batch, heads, problem["keys"])
    return {
        "batch": batch,
        "heads": heads,
        **dict(zip(("entries", "second", "third"), cache, strict=True)),
        "most_pages": most_pages,
        "depth": depth_of(problem),
        "part": part_of(problem["head_dim"]),
        "precise": problem["dtype"] == "float32",
    }


def part_of(head_dim: int) -> int:
    """Return the width of a part: the values of a head, and room for six numbers."""
    return head_dim + max(_NUMBERS, head_dim)


_QUERIES, _CACHE = ("batch", "heads", "group", "head_dim"), ("entries", "second", "third", "head_dim")
_ARRAYS: Arrays = (
    Array("q", "dtype", _QUERIES),
    Array("keys", "dtype", _CACHE),
    Array("values", "dtype", _CACHE),
    Array("lengths", "int32", ("batch",)),
    Array("starts", "int32", ("batch",), flag="padded"),
    Array("table", "int32", ("batch", "most_pages"), aligned=False, flag="paged"),
    Array("sink_logits", "float32", ("heads", "group"), aligned=False, flag="sinks"),
    *(ScalarParameter(name, "float32") for name in ("scale", "softcap")),
    ScalarParameter("window", "int32"),
    Array("out", "dtype", _QUERIES, "output"),
    Array("parts", "float32", ("blocks", "group", "part"), "output", aligned=False),
)


def window_of(problem: Problem) -> int:
    """Return the window with which a windowed problem is run and counted: a quarter of the keys."""
    return max(1, problem["keys"] // 4)


def _fewer(problem: Problem) -> list[int]:
    """Return how many keys each sequence has less than the first; the last has about half of them."""
    batch = problem["kv_heads"] // _heads(problem)
    return [number * problem["keys"] // (2 * batch) for number in range(batch)]


def spans(problem: Problem) -> list[tuple[int, int]]:
    """Return the first key and the length of each sequence in inputs.

    As in use: what shares a batch in a cache of one block has been padded to one length, or has it; what shares pages
    has lengths of its own.
    """
    keys = problem["keys"]
    if problem["padded"]:
        return [(start, keys) for start in _fewer(problem)]
    return [(0, keys - less) for less in (_fewer(problem) if problem["paged"] else [0] * len(_fewer(problem)))]


def _of_their_own(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Return lengths that differ where those of the inputs are equal."""
    import torch

    if problem["padded"] or problem["paged"]:
        return {}
    return {"lengths": problem["keys"] - torch.tensor(_fewer(problem), dtype=torch.int32, device=device)}


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Add lengths, starts, the table of pages and numbers to the drawn tensors."""
    import torch

    def whole(numbers: list[int]) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts, lengths = zip(*spans(problem), strict=True)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    if problem["paged"]:
        # The pages in the opposite order; those behind the end of a sequence are -1, as in transformers.
        shape = (problem["batch"], problem["most_pages"])
        table = torch.arange(problem["entries"], dtype=torch.int32, device=device).flip(0).view(shape)
        first = torch.arange(shape[1], device=device) * problem["page_size"]
        table = table.masked_fill(first >= whole(list(lengths))[:, None], -1)
    return {
        "lengths": whole(list(lengths)),
        "starts": whole(list(starts) if problem["padded"] else [0]),
        "table": table,
        "scale": float(problem["head_dim"] ** -0.5),
        "softcap": 5.0,
        "window": window_of(problem),
    }


def reference(
    q: Any, keys: Any, values: Any, lengths: Any, starts: Any, table: Any, sink_logits: Any, scale: float,
    softcap: float, window: int, windowed: bool, capped: bool, sinks: bool, padded: bool, paged: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute out in float64; it is 0 where a sequence has no key."""
    import torch

    found = []
    for b, length in enumerate(lengths.tolist()):
        k, v = keys, values
        if paged:
            k, v = (x[table[b].clamp(min=0).long()].flatten(0, 1).transpose(0, 1) for x in (keys, values))
        else:
            k, v = k[b], v[b]
        first = max(int(starts[b]) if padded else 0, length - window if windowed else 0)
        k, v = (x[:, first:length].double() for x in (k, v))
        scores = torch.einsum("hgd,hkd->hgk", q[b].double() * scale, k)
        scores = softcap * torch.tanh(scores / softcap) if capped else scores
        sink = sink_logits.double()[..., None] if sinks else scores.new_full((*scores.shape[:2], 1), -torch.inf)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1] if sinks or k.shape[1] else scores
        found.append(torch.einsum("hgk,hkd->hgd", weights, v))
    return {"out": torch.stack(found)}


def joined(parts: Any, splits: int) -> Any:
    """Add up parts in torch and in their order, as [kv_heads, group, head_dim]."""
    import torch

    width, of_pairs = parts.shape[2], parts.unflatten(0, (-1, splits))
    head_dim = min(width // 2, width - _NUMBERS)
    values, most, more, _ = of_pairs.split((head_dim, 1, 1, width - head_dim - 2), -1)
    biggest, total, first, stop = of_pairs[:, 0, :, head_dim + 2 : head_dim + 6].split(1, -1)
    summed = torch.zeros_like(values[:, 0])
    for n in range(splits):
        there = (first <= n) & (n < stop)
        top = torch.where(there, torch.maximum(biggest, most[:, n]), biggest)
        shrink, grow = torch.exp2(biggest - top), torch.exp2(most[:, n] - top)
        total = torch.where(there, total * shrink + more[:, n] * grow, total)
        summed = torch.where(there, summed * shrink + values[:, n] * grow, summed)
        biggest = top
    return summed * (1 / torch.where(total == 0, 1, total))


def results(found: dict[str, Any]) -> dict[str, Any]:
    """Return out alone: with several splits it is the sum of their parts."""
    out, parts = found["out"], found["parts"]
    pairs = out.shape[0] * out.shape[1]
    splits = parts.shape[0] // pairs
    return {"out": joined(parts[: pairs * splits], splits).view_as(out).to(out.dtype) if splits > 1 else out}


def _visible(problem: Problem) -> int:
    """Count the keys that are read, of all key heads."""
    window = window_of(problem) if problem["windowed"] else problem["keys"]
    return _heads(problem) * sum(min(window, length - start) for start, length in spans(problem))


def _bytes(problem: Problem) -> int:
    elements = 2 * problem["kv_heads"] * problem["group"] + 2 * _visible(problem)
    return int(elements) * problem["head_dim"] * ITEM_BYTES[problem["dtype"]]


def _is_narrow(problem: Problem) -> bool:
    """Return whether tiles are of 16-bit numbers and heads of up to 128."""
    return problem["dtype"] != "float32" and depth_of(problem) <= 128


def _axes(problem: Problem) -> dict[str, list[Value]]:
    tiles: list[Value] = [64, 128, 256] if _is_narrow(problem) else [32, 64, 128]
    return {
        "schedule": ["block"],
        "tile_n": [16, 32] if problem["dtype"] == "float32" else tiles,
        "splits": [n for n in (1, 2, 4, 8, 16, 32, MOST_SPLITS) if n <= bucket(problem["keys"])],
        "occupancy": [1, 2, 4] if _is_narrow(problem) else [1, 2],
        "num_worker_warps": [4, 8],
        "keys_first": [True, False],
    }


def _axes_apart(problem: Problem) -> dict[str, list[Value]]:
    """Return axes of tiles that hold as many keys as in training, for one block or for one each."""
    return _axes(problem) | {"tile_n": [keys_apart(problem)], "splits": [0, 1], "apart": [True]}


def _rows_of(problem: Problem) -> int:
    """Return the rows of a tile for the query heads."""
    return max(_LEAST_ROWS, power_of_two(problem["group"]))


def _tiles(problem: Problem, tile_n: int) -> int:
    """Count the tiles of a sequence's room."""
    if problem["paged"]:
        return cdiv(problem["keys"], problem["page_size"]) * cdiv(problem["page_size"], tile_n)
    return cdiv(problem["keys"], tile_n)


def _axes_of_tiles(problem: Problem) -> dict[str, list[Value]]:
    """Return axes of :func:`decode_tile`, whose sums of float32 spill.

    Shared memory of an SM holds the keys and values of three tiles, if the query heads and their sums are small.
    """
    return _axes_apart(problem) | {
        "schedule": [] if problem["dtype"] == "float32" else ["tile"],
        "splits": [0],
        "occupancy": [2, 3] if _is_narrow(problem) and problem["group"] <= _LEAST_ROWS else [2],
        "num_worker_warps": [4],
        "keys_first": [True],
    }


_CONSTRAINTS = (
    Constraint(
        "few query heads are columns of the products",
        lambda problem, config, target: config["keys_first"] or problem["group"] >= _FEW,
    ),
    Constraint(
        "a block for each tile is for key heads that do not fill the GPU by themselves, with more tiles than one",
        lambda problem, config, target: (
            config["splits"] > 0
            or (problem["kv_heads"] <= 4 * target.sm_count and _tiles(problem, config["tile_n"]) > 1)
        ),
    ),
    Constraint(
        "a block for each key head loads ahead in a loop and leaves no parts, if two for each SM fill the GPU",
        lambda problem, config, target: config["schedule"] != "tile" or problem["kv_heads"] <= 2 * target.sm_count,
    ),
    Constraint(
        "a split without a tile of its own has nothing to do",
        lambda problem, config, target: (
            config["splits"] <= 1 or (config["splits"] - 1) * config["tile_n"] < problem["keys"]
        ),
    ),
    Constraint(
        "more than 16 blocks for each SM only add parts to join",
        lambda problem, config, target: (
            config["splits"] <= 1 or problem["kv_heads"] * config["splits"] <= 16 * target.sm_count
        ),
    ),
    Constraint(
        "four blocks on an SM leave a thread 64 registers, too few for larger tiles or more query heads",
        lambda problem, config, target: (
            config["occupancy"] < 4
            or (config["tile_n"] == 64 and config["num_worker_warps"] == 4 and problem["group"] <= _FEW)
        ),
    ),
    Constraint(
        "tiles of 256 keys spill unless eight warps share them on an SM of their own",
        lambda problem, config, target: (
            config["tile_n"] < 256 or (config["num_worker_warps"] == 8 and config["occupancy"] == 1)
        ),
    ),
    Constraint(
        "eight warps share large tiles, or sums of float32",
        lambda problem, config, target: (
            (config["num_worker_warps"] == 8) == (problem["dtype"] == "float32")
            or (problem["dtype"] != "float32" and config["tile_n"] >= 128)
        ),
    ),
)


def _config(
    problem: Problem, tile_n: int, splits: int, occupancy: int, warps: int, keys_first: bool, schedule: str = "block"
) -> Config:
    return Config(
        schedule=schedule, tile_n=tile_n, splits=splits, occupancy=occupancy, num_worker_warps=warps,
        keys_first=keys_first,
    )  # fmt: skip


def _default(problem: Problem, target: Target) -> Config:
    """Return a config with two blocks for each SM, unless a block then has fewer than two tiles."""
    wide = problem["dtype"] == "float32"
    tile_n = 16 if wide else 128 if _is_narrow(problem) else 64
    most = min(2 * target.sm_count // problem["kv_heads"], problem["keys"] // (2 * tile_n), MOST_SPLITS)
    splits = bucket(most + 1) // 2 if most > 1 else 1
    return _config(problem, tile_n, splits, 1 if wide else 2, 8 if wide else 4, True)


def _generic(problem: Problem) -> Config:
    """Return small tiles of eight warps, which compile in the least time."""
    wide = problem["dtype"] == "float32"
    return _config(problem, 32 if _is_narrow(problem) else 16, 1, 1, 8, wide, "persistent")


def _joined_by(problem: Problem, blocks: int) -> dict[str, Value] | None:
    splits = blocks // problem["kv_heads"]
    same = {name: problem[name] for name in ("kv_heads", "group", "head_dim", "dtype")}
    return same | {"splits": splits} if splits > 1 else None


SPEC = spec(
    "decode_attention",
    "out = softmax(scale q k^T) v for one token a sequence, over a cache, by splits of its keys",
    DIMENSIONS,
    lambda problem: _ARRAYS,
    reference,
    function=lambda problem, config: decode_tile if config["schedule"] == "tile" else decode_attention,
    sizes=sizes,
    constants=lambda problem, config: {
        "rows": _rows_of(problem),
        "one_tile": config["splits"] == 0,
        "apart": config.get("apart", False),
        # The mask of a smaller tile costs little, and the second loop takes as long to compile as the first.
        "one_loop": config["tile_n"] < _MASKED_APART,
    },
    grid=lambda sizes, config, sm_count: sizes["kv_heads"] * (config["splits"] or _tiles(sizes, config["tile_n"])),
    space=Space(_axes, _CONSTRAINTS, beside=(Space(_axes_apart, _CONSTRAINTS), Space(_axes_of_tiles, _CONSTRAINTS))),
    default=_default,
    generic=_generic,
    given=_given,
    results=results,
    flops=lambda problem: 4 * problem["group"] * problem["head_dim"] * _visible(problem),
    roundings=2,
    bytes_moved=_bytes,
    dependent=True,
    streamed=True,
    variations={"lengths of their own": _of_their_own},
    follower=Follower(
        kernel="decode_join",
        array="parts",
        dimensions=_joined_by,
    ),
)

JOIN_DIMENSIONS = (
    *(Dimension(name, "bucketed") for name in ("kv_heads", "splits")),
    *(Dimension(name, "exact") for name in ("group", "head_dim")),
    Dimension("dtype", "dtype"),
)


def _join_sizes(problem: Problem) -> dict[str, Any]:
    return {
        "before": problem["kv_heads"] * problem["splits"],
        "part": part_of(problem["head_dim"]),
        "depth": depth_of(problem),
    }


def _given_parts(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw parts of which all are to be added, behind a sink."""
    import torch

    parts = torch.randn((problem["before"], problem["group"], problem["part"]), generator=generator, device=device)
    numbers = parts[..., problem["head_dim"] :]
    numbers[..., 0:4:2] = (4 * numbers[..., 0:4:2]).round()
    numbers[..., 1:4:2] = numbers[..., 1:4:2].abs()
    numbers[..., 4], numbers[..., 5] = 0, problem["splits"]
    return {"parts": parts, "splits": problem["splits"]}


def _chunks(problem: Problem) -> list[int]:
    """Return how many parts a step may add: the three largest powers of two up to all of them."""
    return [n for n in (4, 8, 16, 32, 64, 128) if n <= max(4, bucket(problem["splits"]))][-3:]


def _is_small(width: Value, chunk: Value) -> bool:
    """Return whether two tiles of parts fit a thread's registers."""
    return int(width or 0) * int(chunk or 0) <= _MOST_OF_A_TILE


def _join_axes(problem: Problem) -> dict[str, list[Value]]:
    widths: list[Value] = [n for n in (32, 64, 128) if n <= depth_of(problem)]
    return {
        "schedule": ["block"],
        "width": widths or [depth_of(problem)],
        "chunk": [*_chunks(problem)],
        "num_worker_warps": [0, 8],
    }


def _join_default(problem: Problem, target: Target) -> Config:
    """Return blocks of 128 columns if the heads fill the GPU, else of 32."""
    fills = problem["kv_heads"] * problem["group"] >= target.sm_count
    width = min(128 if fills else 32, depth_of(problem))
    chunk = max(n for n in _chunks(problem) if _is_small(width, n))
    return Config(schedule="block", width=width, chunk=chunk, num_worker_warps=0)


JOIN = spec(
    "decode_join",
    "out = the parts of decode_attention's splits, scaled to one exponent and added up in their order",
    JOIN_DIMENSIONS,
    (
        Array("parts", "float32", ("before", "group", "part")),
        ScalarParameter("splits", "int32"),
        Array("out", "dtype", ("kv_heads", "group", "head_dim"), "output"),
    ),
    lambda parts, splits: {"out": joined(parts.double(), splits)},
    function=decode_join,
    sizes=_join_sizes,
    grid=lambda sizes, config, sm_count: sizes["kv_heads"] * sizes["group"] * (depth_of(sizes) // config["width"]),
    space=Space(
        _join_axes,
        (
            Constraint(
                "a larger tile of parts spills",
                lambda problem, config, target: _is_small(config["width"], config["chunk"]),
            ),
        ),
    ),
    default=_join_default,
    # Smaller steps spill in the loop of resident blocks.
    generic=lambda problem: Config(
        schedule="persistent", width=min(32, depth_of(problem)), chunk=64, num_worker_warps=0
    ),
    given=_given_parts,
    flops=lambda problem: 2 * problem["kv_heads"] * problem["splits"] * problem["group"] * problem["head_dim"],
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC, JOIN)
