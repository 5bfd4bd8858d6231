"""Device code of the grouped products: the rows of a tile, and the order of tiles.

``offsets`` [experts] (int32) are the ends of the experts' rows; an expert's rows begin at the end of the one before.
Rows beyond the last offset are the group number ``experts``, which has no expert. Only the device knows the number of a
group's tiles, so each group gets as many places as it may need. It has at most ``end // tile_m - begin // tile_m + 1``
tiles; with the first at place ``begin // tile_m + group`` no two groups overlap, and ``rows // tile_m + groups`` places
are enough. A place after a group's last tile stays empty.
"""

from __future__ import annotations

import cuda.tile as ct

from tilekern.kernels.tiles import load


def group_at(offsets, place, tile_m, groups, turns):
    """Return the group of a place, by ``turns`` halvings: the last one whose first place is not after it."""
    low = 0
    high = groups - 1
    for _ in range(turns):
        middle = (low + high + 1) // 2
        begin = ct.load(offsets, (max(middle - 1, 0),), ())
        if begin // tile_m + middle <= place:
            low = middle
        else:
            high = middle - 1
    return low


def rows_of(offsets, group, experts, rows):
    """Return (first row, end) of a group, of ``rows`` in all."""
    begin = 0
    if group > 0:
        begin = ct.load(offsets, (group - 1,), ())
    end = rows
    if group < experts:
        end = ct.load(offsets, (group,), ())
    return begin, end


def sources(order, row, slots, tile):
    """Return the rows [tile] of a gathered array from ``row`` on: each slot in ``order`` belongs to one token."""
    view = order.tiled_view((tile,), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1,))
    return view.load((row,)) // slots


def gathered(array, tokens, step, tile_k, latency):
    """Load columns [step * tile_k, ...) of some rows of an array."""
    hint = ct.static_eval(latency if latency > 0 else None)
    columns = ct.Slice(step * tile_k, tile_k)
    return ct.load_advanced_indexing(array, (tokens, columns), padding_mode=ct.PaddingMode.ZERO, latency=hint)


def weight_tile(weight, expert, outer, step, tile_outer, tile_k, depth_first, latency):
    """Load a tile [tile_outer, tile_k] of an expert's weight, stored in that order or (``depth_first``) transposed."""
    if ct.static_eval(depth_first):
        found = load(weight, (expert, step, outer), (1, tile_k, tile_outer), True, latency, True)
        return ct.reshape(found, (tile_k, tile_outer)).transpose()
    found = load(weight, (expert, outer, step), (1, tile_outer, tile_k), True, latency, True)
    return ct.reshape(found, (tile_outer, tile_k))
