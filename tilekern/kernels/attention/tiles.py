"""Device code of attention's forward and backward: tiles of heads, which tiles see each other, masks.

Query q of a sequence of ``queries`` queries and ``keys`` keys has the position q + keys - queries (the last query
at the last key, as in FlashAttention 2). ``causal``: it sees the keys up to its position. ``windowed``: it sees the
keys whose distance from its position is less than ``window``, on both sides unless ``causal`` takes one away.

A loop of the backward first takes tiles without a mask, then tiles that an edge crosses (:func:`edge_tile`). The
forward takes key tiles in their order, so that a query's sums do not depend on the other queries of its tile. Tiles in
which nothing is seen are skipped.
"""

from __future__ import annotations

import cuda.tile as ct

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Below any score: a running maximum starts here, so that no row computes inf - inf.
LOWEST = -1e30
# What the matrix units take at least: rows on Hopper, and columns.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 8


def kv_head_of(head, heads, kv_heads):
    """Return the key head that a query head reads: groups of heads are equal, or nearly equal if they do not divide."""
    return head * kv_heads // heads


def first_head_of(kv_head, heads, kv_heads):
    """Return the first query head that reads a key head; the last one precedes the next key head's first."""
    return ct.cdiv(kv_head * heads, kv_heads)


def sequence(starts, number, length, packed):
    """Return (first row, length) of a sequence: its part of the packed tokens, or a batch entry of ``length`` rows."""
    if ct.static_eval(packed):
        first = ct.load(starts, (number,), ())
        return first, ct.load(starts, (number + 1,), ()) - first
    return 0, length


def load_rows(array, number, first, tile, head, rows, depth, packed, latency):
    """Load tile ``tile`` of a sequence's rows for one head of array [batch, tokens, heads, head_dim], as (rows, depth).

    Beyond the array are zeros; beyond the end of a packed sequence are the next sequence's rows.
    """
    hint = ct.static_eval(latency if latency > 0 else None)
    zero = ct.PaddingMode.ZERO
    if ct.static_eval(packed):
        view = array.tiled_view((1, rows, 1, depth), padding_mode=zero, traversal_steps=(1, 1, 1, depth))
        return ct.reshape(view.load((0, first + tile * rows, head, 0), latency=hint), (rows, depth))
    found = ct.load(array, (number, tile, head, 0), (1, rows, 1, depth), padding_mode=zero, latency=hint)
    return ct.reshape(found, (rows, depth))


def store_rows(array, number, first, length, tile, head, values, packed):
    """Store a tile of :func:`load_rows`, but nothing beyond the end of the sequence."""
    values = ct.reshape(values, (1, values.shape[0], 1, values.shape[1]))
    if ct.static_eval(packed):
        ct.store(array.slice(1, first, first + length), (0, tile, head, 0), values)
    else:
        ct.store(array, (number, tile, head, 0), values)


def cut(rows, index, length, packed):
    """Zero rows from ``length`` on: after a packed sequence comes the next; a weight of 0 does not stop its NaN.

    ``index`` (int32, of one axis that is not 1) says which row of the sequence each is.
    """
    if ct.static_eval(packed):
        return ct.where(ct.reshape(index, (rows.shape[0], 1)) < length, rows, 0.0)
    return rows


def load_row_values(array, number, first, tile, head, rows, packed):
    """Load one float32 for each row of array [batch, heads, tokens] (log-sum-exp, delta), as (rows,)."""
    zero = ct.PaddingMode.ZERO
    if ct.static_eval(packed):
        view = array.tiled_view((1, 1, rows), padding_mode=zero, traversal_steps=(1, 1, 1))
        return ct.reshape(view.load((0, head, first + tile * rows)), (rows,))
    return ct.reshape(ct.load(array, (number, head, tile), (1, 1, rows), padding_mode=zero), (rows,))


def store_row_values(array, number, first, length, tile, head, values, packed):
    """Store values of :func:`load_row_values`, but nothing beyond the end of the sequence."""
    values = ct.reshape(values, (1, 1, values.shape[0]))
    if ct.static_eval(packed):
        ct.store(array.slice(2, first, first + length), (0, head, tile), values)
    else:
        ct.store(array, (number, head, tile), values)


def _split(lower, upper, full_lower, full_upper, tile):
    """Return (first, full, edge, stop) in tiles: some row sees tiles [first, stop), every row all of [full, edge)."""
    first = ct.maximum(lower, 0) // tile
    stop = ct.maximum(first, ct.cdiv(ct.maximum(upper, 0), tile))
    full = ct.minimum(ct.maximum(first, ct.cdiv(ct.maximum(full_lower, 0), tile)), stop)
    edge = ct.maximum(full, ct.minimum(stop, ct.maximum(full_upper, 0) // tile))
    return first, full, edge, stop


def key_tiles(first_query, rows, queries, keys, window, tile, causal, windowed):
    """Return the key tiles that queries [first_query, first_query + rows) see, in the form of :func:`_split`."""
    low = first_query + keys - queries
    high = ct.minimum(first_query + rows, queries) - 1 + keys - queries
    lower, upper, full_lower, full_upper = 0, keys, 0, keys
    if ct.static_eval(windowed):
        lower, full_lower = low - window + 1, high - window + 1
        upper, full_upper = ct.minimum(upper, high + window), ct.minimum(full_upper, low + window)
    if ct.static_eval(causal):
        upper, full_upper = ct.minimum(upper, high + 1), ct.minimum(full_upper, low + 1)
    return _split(lower, upper, full_lower, full_upper, tile)


def query_tiles(first_key, rows, queries, keys, window, tile, causal, windowed):
    """Return the query tiles that see keys [first_key, first_key + rows), in the form of :func:`_split`."""
    low = first_key + queries - keys
    high = ct.minimum(first_key + rows, keys) - 1 + queries - keys
    lower, upper, full_lower, full_upper = 0, queries, 0, queries
    if ct.static_eval(windowed):
        lower, full_lower = low - window + 1, high - window + 1
        upper, full_upper = ct.minimum(upper, high + window), ct.minimum(full_upper, low + window)
    if ct.static_eval(causal):
        lower, full_lower = low, high
    return _split(lower, upper, full_lower, full_upper, tile)


def edge_tile(number, first, full, edge):
    """Return the tile of step ``number`` of a loop over tiles that need a mask: [first, full), then [edge, stop)."""
    return ct.where(first + number < full, first + number, edge + number - (full - first))


def seen(query, key, queries, keys, window, causal, windowed):
    """Return whether each query sees each key, if both exist; int32 indices that broadcast, in either orientation."""
    position = query + (keys - queries)
    stop = ct.where(query < queries, keys, 0)
    if ct.static_eval(windowed):
        stop = ct.minimum(stop, position + window)
    if ct.static_eval(causal):
        stop = ct.minimum(stop, position + 1)
    found = key < stop
    if ct.static_eval(windowed):
        found = found & (key > position - window)
    return found


def product(left, right, total):
    """Return ``left @ right + total`` by the matrix units: exact products of half types; of float32 to 2^-21 or so.

    A float32 is split into two tfloat32 parts; the three larger products of parts are used (Ootomo and Yokota 2022,
    arXiv:2203.03341): without the split the product would run on the plain units, at a fraction of the speed. Tiles of
    fewer than 32 rows use the plain units, whose code is a third as long.
    """
    if ct.static_eval(left.dtype == ct.float32 and left.shape[0] >= 32):
        left_high, right_high = left.astype(ct.tfloat32), right.astype(ct.tfloat32)
        left_low = (left - left_high.astype(ct.float32)).astype(ct.tfloat32)
        right_low = (right - right_high.astype(ct.float32)).astype(ct.tfloat32)
        total = ct.mma(left_high, right_low, ct.mma(left_low, right_high, total))
        return ct.mma(left_high, right_high, total)
    return ct.mma(left, right, total)


def tile_sums(products, v_tile, factor, keys_first):
    """Return what a tile of keys adds by itself: (exponent, denominator, weighted sum), on which no other tile bears.

    The exponent is a whole number. The matrix units add up the weights as they were rounded for the second product: in
    the order of the keys, whether these are rows of ``products`` or, without ``keys_first``, columns.
    """
    axis = ct.static_eval(0 if keys_first else 1)
    most = ct.maximum(ct.ceil(ct.max(products, axis=axis, keepdims=True) * factor), LOWEST)
    weights = ct.exp2(products * factor - most, flush_to_zero=True).astype(v_tile.dtype)
    # All rows, or columns, of the product with ones are the same, and as many as these units take at least. Their sum
    # would be rounded on the way.
    if ct.static_eval(keys_first):
        rows = weights.shape[1]
        ones = ct.full((_LEAST_ROWS, weights.shape[0]), 1.0, weights.dtype)
        total = product(ones, weights, ct.zeros((_LEAST_ROWS, rows), ct.float32))
        summed = product(ct.transpose(v_tile), weights, ct.zeros((v_tile.shape[1], rows), ct.float32))
        return most, ct.max(total, axis=0, keepdims=True), summed
    rows = weights.shape[0]
    total = product(
        weights,
        ct.full((weights.shape[1], _LEAST_COLUMNS), 1.0, weights.dtype),
        ct.zeros((rows, _LEAST_COLUMNS), ct.float32),
    )
    summed = product(weights, v_tile, ct.zeros((rows, v_tile.shape[1]), ct.float32))
    return most, ct.max(total, axis=1, keepdims=True), summed


def add_sums(state, found):
    """Add what a tile or a part of the keys adds up to, to the sums before it; both (exponent, denominator, sum).

    If exponents are whole numbers, nothing is rounded but the two sums, whoever multiplies and adds at once.
    """
    biggest, total, summed = state
    most, more, part = found
    top = ct.maximum(biggest, most)
    shrink, grow = ct.exp2(biggest - top, flush_to_zero=True), ct.exp2(most - top, flush_to_zero=True)
    return top, total * shrink + more * grow, summed * shrink + part * grow


def soft_tanh(x, precise):
    """Return tanh of float32 for soft caps; unless ``precise``, by the hardware's exponential, to 2e-7 absolute."""
    if ct.static_eval(precise):
        return ct.tanh(x)
    grown = 1.0 + ct.exp2(x * (2.0 * LOG2_E), flush_to_zero=True)
    return 1.0 - ct.truediv(2.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def factors_of(scale, softcap, capped):
    """Return (slope, factor): base-2 exponents are factor * tanh(slope * product) if capped, else factor * product."""
    if ct.static_eval(capped):
        return scale / softcap, softcap * LOG2_E
    return scale, scale * LOG2_E


def head_and_tile(item, tiles, heads, abreast, longest_last):
    """Return (head, tile) of a work item: ``abreast`` heads at a time, whose keys fit the L2 cache; longest rows first.

    ``heads`` counts the heads of all sequences; ``longest_last`` means that a later tile has more work.
    """
    wave = item // (abreast * tiles)
    inside = item % (abreast * tiles)
    width = ct.minimum(abreast, heads - wave * abreast)
    tile = inside // width
    if ct.static_eval(longest_last):
        tile = tiles - 1 - tile
    return wave * abreast + inside % width, tile


def heads_abreast(keys, depth, group, budget):
    """Count the query heads that share ``budget`` elements of keys and values: one or more groups of ``group``."""
    return group * ct.maximum(1, budget // (2 * depth * ct.maximum(1, keys)))
