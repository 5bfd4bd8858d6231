"""Attention of one new token per sequence in one launch: norms and rotation of its heads, its rows in the cache, joins.

It computes what :mod:`tilekern.kernels.append_to_cache` and :mod:`tilekern.kernels.decode_attention` do together. q and
k are divided by their heads' root mean square, if ``normed``, rotated by halves, if ``turned``, and rounded to the
dtype; then ``out = softmax(scale q k^T) v`` over the keys before the token and its own.

The tiles of old keys of a key head are dealt out to ``splits`` blocks: tile j belongs to block ``j % splits``. Each
block makes its query heads by itself. The block to whose tile the new key belongs takes it last, from registers, and
writes it and its value to the cache. No other block reads that tile, so none waits for another.

The products are those of ``decode_attention``. A single query head fills an eighth of what the matrix units take, so
the scalar units may multiply it (``scalar``), by vectors of keys and values that do not pass through shared memory.

Each block of several leaves its part of the sums, then counts itself in the ``counters`` of the key head. That orders
memory: who sees the count of another block sees its part. So the last block to come adds up all parts, always in the
same order, and sets the counter back to 0 for the next launch.

Layout: q and out [batch, kv_heads, group, head_dim], k and v [batch, kv_heads, 1, head_dim], cos and sin [1 or batch,
1, head_dim / 2], positions [batch, 1] int32, each token's place in the cache of its sequence, which is the number of
keys before it. A cache and its ``table`` lie as in :mod:`tilekern.kernels.decode_attention`. ``new_keys`` and
``new_values`` are where the new rows go: in use they are ``keys`` and ``values`` themselves. A token whose position is
negative or behind the end of the room is not written, and its result is 0. counters [batch * kv_heads] int32 are 0
before and after each launch. ``parts`` are those of ``decode_attention``, of which an order is not written; with one
split they are a placeholder.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import decode_attention as decoding
from tilekern.kernels.append_to_cache import _place, written
from tilekern.kernels.attention.problem import depth_of
from tilekern.kernels.attention.tiles import LOG2_E, LOWEST, add_sums, product
from tilekern.kernels.decode_attention import MOST_SPLITS, _add_tile, _nothing, _store_part
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.normed_rotations import EPS, read_weight
from tilekern.kernels.families.normed_rotations import normed as norm
from tilekern.kernels.families.rotations import drawn_angles, read_angles, read_halves, rotated, write_halves
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.qk_norm_rope import turned as turn
from tilekern.kernels.tiles import ConstBool, ConstInt, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    Problem,
    ScalarParameter,
    Space,
    Value,
    bucket,
)
from tilekern.spec.targets import Target

# As few query heads as these are columns of the products alone: as rows they are padded further.
_FEW = 16
# The matrix units take fewer rows or columns than these with spilled registers.
_LEAST_ROWS = 8
# Numbers of parts that the last block adds up at once: with twice as many its threads spill.
_MOST_AT_ONCE = 8192


def _made(halves, factors, turns, eps, flags, form):
    """Return both halves of heads in float32, normalised and rotated."""
    normed, turned = flags
    numbers = (halves[0].astype(ct.float32), halves[1].astype(ct.float32))
    if ct.static_eval(normed):
        square = ct.sum(numbers[0] * numbers[0] + numbers[1] * numbers[1], axis=3, keepdims=True)
        rstd = ct.rsqrt(square / ct.static_eval(2 * form[0][0]) + eps)
        numbers = (numbers[0] * rstd * factors[0], numbers[1] * rstd * factors[1])
    if ct.static_eval(turned):
        numbers = turn(numbers, turns[0], turns[1])
    return numbers


def _joined(halves, rows, width):
    """Return heads as one tile [rows, 2 * width], whose halves stand side by side."""
    one, other = ct.reshape(halves[0], (rows, 1, width)), ct.reshape(halves[1], (rows, 1, width))
    is_other = ct.reshape(ct.arange(2, dtype=ct.int32), (1, 2, 1)) == 1
    return ct.reshape(ct.where(is_other, other, one), ct.static_eval((rows, 2 * width)))


def _repeated(x, rows):
    """Repeat the rows of a tile until there are as many as the matrix units take."""
    group, columns = x.shape
    several = ct.broadcast_to(ct.reshape(x, (1, group, columns)), ct.static_eval((rows // group, group, columns)))
    return ct.reshape(several, (rows, columns))


def _constants_of(norms, angles, b, flags, form):
    """Load the factors of both norms and the angles of a sequence's token, which the kernel before does not write."""
    normed, turned = flags
    factors, turns = (None, None), None
    if ct.static_eval(normed):
        factors = (read_weight(norms[0], form), read_weight(norms[1], form))
    if ct.static_eval(turned):
        at = ct.minimum(b, angles[0].shape[0] - 1)
        turns = (read_angles(angles[0], at, 0, 1, form), read_angles(angles[1], at, 0, 1, form))
    return factors, turns


def _tile_of(table, where, j, tile_n, paged):
    """Return where tile ``j`` of a cache is, in all axes except the last, and the shape of its tiles there."""
    b, h, _, across = where
    if ct.static_eval(paged):
        return (ct.load(table, (b, j // across), ()), j % across, h), ct.static_eval((1, tile_n, 1))
    return (b, h, j), ct.static_eval((1, 1, tile_n))


def _rows_of(cache, place, shape, tile_n, depth, bounded, tma):
    """Load a tile of a cache, (tile_n, depth), with zeros beyond its end or the page's if ``bounded``."""
    return ct.reshape(load(cache, place + (0,), shape + (depth,), bounded, 0, tma), (tile_n, depth))


def _keys_of(keys, place, shape, tile_n, bounded, tma, form):
    """Load a tile of keys, (tile_n, twice the width of halves), in the layout of :func:`_joined`."""
    _, width, whole, _, _, _ = form[0]
    if ct.static_eval(whole):
        return _rows_of(keys, place, shape, tile_n, ct.static_eval(2 * width), bounded, tma)
    return _joined(read_halves(keys, place, shape, form), tile_n, width)


def _add_tile_of_one(state, products, v_tile, factor):
    """Add a tile of keys (tile_n, 1) to the state of a single query head, by the scalar units."""
    biggest, total, summed = state
    most = ct.maximum(biggest, ct.max(products, axis=0, keepdims=True) * factor)
    shrink = ct.exp2(biggest - most, flush_to_zero=True)
    weights = ct.exp2(products * factor - most, flush_to_zero=True)
    total = total * shrink + ct.sum(weights, axis=0, keepdims=True)
    return most, total, summed * shrink + ct.sum(v_tile.astype(ct.float32) * weights, axis=0, keepdims=True)


def _add_old(state, q_side, caches, table, where, steps, shown, factor, sizes, flags, form):
    """Add the tiles of old keys of ``steps``, (begin, stop, step); of an edge, of which ``shown`` keys are old ones."""
    biggest, total, summed = state
    depth, rows, tile_n = sizes
    keys_first, scalar, paged, is_edge = flags
    begin, stop, step = steps
    _, _, page_size, across = where
    along, kinds = ct.arange(tile_n, dtype=ct.int32), (keys_first, False, False, False, False, False)
    for j in range(begin, stop, step):
        place, shape = _tile_of(table, where, j, tile_n, paged)
        # Without bounds the scalar units load vectors; through shared memory these would be copied again.
        bounded, tma = ct.static_eval(is_edge or paged or not scalar or not form[0][2]), ct.static_eval(not scalar)
        k_tile = _keys_of(caches[0], place, shape, tile_n, bounded, tma, form)
        v_tile = _rows_of(caches[1], place, shape, tile_n, depth, bounded, tma)
        if ct.static_eval(scalar):
            products = ct.sum(k_tile.astype(ct.float32) * q_side.astype(ct.float32), axis=1, keepdims=True)
        elif ct.static_eval(keys_first):
            products = product(k_tile, q_side, ct.zeros((tile_n, rows), ct.float32))
        else:
            products = product(q_side, ct.transpose(k_tile), ct.zeros((rows, tile_n), ct.float32))
        if ct.static_eval(is_edge or paged):
            # A page may end within a tile.
            count = shown if ct.static_eval(is_edge) else page_size - j % across * tile_n
            side = ct.static_eval((tile_n, 1) if keys_first or scalar else (1, tile_n))
            products = ct.where(ct.reshape(along < count, side), products, -float("inf"))
        if ct.static_eval(is_edge):
            # A weight of 0 does not stop NaN of rows that were never written.
            v_tile = ct.where(ct.reshape(along < shown, (tile_n, 1)), v_tile, 0.0)
        if ct.static_eval(scalar):
            biggest, total, summed = _add_tile_of_one((biggest, total, summed), products, v_tile, factor)
        else:
            biggest, total, summed = _add_tile((biggest, total, summed), products, v_tile, factor, kinds)
    return biggest, total, summed


def _of_new(q_heads, k_head, v_row, factor, sizes, keys_first):
    """Return what the new key adds by itself: (exponent, denominator, weighted sum)."""
    depth, rows, _ = sizes
    side = ct.static_eval((1, rows) if keys_first else (rows, 1))
    scores = ct.sum(q_heads.astype(ct.float32) * k_head.astype(ct.float32), axis=1, keepdims=True)
    scores = ct.reshape(_repeated(scores, rows), side) * factor
    biggest = ct.maximum(scores, LOWEST)
    # 1, but of scores that are not finite.
    weight = ct.exp2(scores - biggest, flush_to_zero=True)
    value = ct.reshape(v_row.astype(ct.float32), ct.static_eval((depth, 1) if keys_first else (1, depth)))
    return biggest, weight, _nothing(rows, depth, keys_first) + value * weight


def _store_quotient(out, b, h, total, summed, is_there):
    """Store the result of rows (1, rows, depth); NaN if all scores are -inf, and 0 for a token without a place."""
    found = summed * (1.0 / ct.where(is_there, total, 1.0))
    # By TMA it would pass through shared memory.
    ct.store(out, (b, h, 0, 0), ct.reshape(found, (1,) + found.shape).astype(out.dtype), allow_tma=False)


def _join(parts, pair, splits, out, b, h, is_there, sizes):
    """Add up the parts of a key head, ``chunk`` at a time, and store the result."""
    head_dim, depth, group, chunk = sizes
    mine, zero = parts.slice(0, pair * splits, (pair + 1) * splits), ct.PaddingMode.ZERO
    biggest, total = ct.full((1, group, 1), LOWEST, ct.float32), ct.zeros((1, group, 1), ct.float32)
    summed = ct.zeros((1, group, depth), ct.float32)
    number = ct.reshape(ct.arange(chunk, dtype=ct.int32), (chunk, 1, 1))
    for n in range(ct.cdiv(splits, chunk)):
        values = ct.load(mine, (n, 0, 0), (chunk, group, depth), padding_mode=zero, allow_tma=False)
        exponents = ct.load(mine, (n, 0, head_dim), (chunk, group, 1), padding_mode=zero, allow_tma=False)
        totals = ct.load(mine, (n, 0, head_dim + 1), (chunk, group, 1), padding_mode=zero, allow_tma=False)
        exponents = ct.where(n * chunk + number < splits, exponents, LOWEST)
        most = ct.maximum(biggest, ct.max(exponents, axis=0, keepdims=True))
        shrink, weights = ct.exp2(biggest - most, flush_to_zero=True), ct.exp2(exponents - most, flush_to_zero=True)
        total = total * shrink + ct.sum(totals * weights, axis=0, keepdims=True)
        summed = summed * shrink + ct.sum(values * weights, axis=0, keepdims=True)
        biggest = most
    _store_quotient(out, b, h, total, summed, is_there)


def _is_last(counters, pair, splits):
    """Count this block among those of a key head; return whether it is the last, to which all parts are visible.

    The order of memory is the default one: what this block has stored is visible to those that count themselves later.
    """
    return ct.atomic_add(counters, (pair,), 1) == splits - 1


def _wait():
    # The launch overlaps the end of the product that writes q, k and v, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()


def _attend(
    item, heads, norms, angles, positions, table, caches, new, numbers, counters, out, parts, splits, sizes, flags,
    forms,
):  # fmt: skip
    """Attend to one split of the keys of one key head, and join the parts if they are all there."""
    (q, k, v), (new_keys, new_values), (eps, scale) = heads, new, numbers
    head_dim, depth, rows, group, tile_n, chunk = sizes
    persistent, keys_first, scalar, normed, turned, paged = flags
    q_form, k_form = forms
    width = ct.static_eval(k_form[0][1])
    split, pair = item % splits, item // splits
    h, b = pair % q.shape[1], pair // q.shape[1]

    row, is_there = _place(positions, table, new_keys, b, 0, paged)
    position = ct.load(positions, (ct.minimum(b, positions.shape[0] - 1), 0), ())
    kinds = (normed, turned)
    factors, turns = _constants_of(norms, angles, b, kinds, k_form)
    if ct.static_eval(not persistent):
        _wait()

    # The tile in which the new key belongs, and how many old ones are there.
    before, page_size, across = ct.where(is_there, position, 0), 1, 1
    edge, shown = before // tile_n, before % tile_n
    if ct.static_eval(paged):
        page_size, across = caches[0].shape[1], ct.cdiv(caches[0].shape[1], tile_n)
        edge, shown = before // page_size * across + before % page_size // tile_n, before % page_size % tile_n
    is_mine = is_there & (split == edge % splits)

    of_q, of_k = read_halves(q, (b, h, 0), (1, 1, group), q_form), read_halves(k, (b, h, 0), (1, 1, 1), k_form)
    v_row = ct.load(v, (b, h, 0, 0), (1, 1, 1, depth), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    q_heads = _joined(_made(of_q, factors[0], turns, eps, kinds, q_form), group, width).astype(q.dtype)
    q_side = ct.transpose(_repeated(q_heads, rows)) if ct.static_eval(keys_first) else _repeated(q_heads, rows)

    factor, of_tiles, ways = scale * LOG2_E, (depth, rows, tile_n), (keys_first, scalar, paged)
    side, where = ct.static_eval((1, rows) if keys_first else (rows, 1)), (b, h, page_size, across)
    state = (ct.full(side, LOWEST, ct.float32), ct.zeros(side, ct.float32), _nothing(rows, depth, keys_first))
    steps = (split, edge, splits)
    state = _add_old(state, q_side, caches, table, where, steps, 0, factor, of_tiles, ways + (False,), k_form)
    steps = (edge, edge + ct.where(is_mine & (shown > 0), 1, 0), 1)
    state = _add_old(state, q_side, caches, table, where, steps, shown, factor, of_tiles, ways + (True,), k_form)
    biggest, total, summed = state
    if is_mine:
        k_halves = _made(of_k, factors[1], turns, eps, kinds, k_form)
        place = (row[0], row[1], h) if ct.static_eval(paged) else (row[0], h, row[1])
        write_halves(new_keys, k_halves[0], k_halves[1], place, k_form)
        ct.store(new_values, place + (0,), v_row, allow_tma=False)
        k_head = _joined(k_halves, 1, width).astype(k.dtype)
        found = _of_new(q_heads, k_head, v_row, factor, of_tiles, keys_first)
        biggest, total, summed = add_sums((biggest, total, summed), found)
    if splits == 1:
        if ct.static_eval(keys_first):
            summed = ct.transpose(summed)
        total, summed = ct.reshape(total, (1, rows, 1)), ct.reshape(summed, (1, rows, depth))
        _store_quotient(out, b, h, total, summed, is_there)
    else:
        _store_part(parts, item, (biggest, total, summed), rows, depth, head_dim, keys_first)
        if _is_last(counters, pair, splits):
            ct.store(counters, (pair,), 0)
            _join(parts, pair, splits, out, b, h, is_there, (head_dim, depth, group, chunk))


@ct.kernel
def token_attention(
    q, k, v, q_weight, k_weight, cos, sin, positions, table, keys, values, counters, eps, scale, new_keys, new_values,
    out, parts, head_dim: ConstInt, depth: ConstInt, width: ConstInt, rows: ConstInt, group: ConstInt, tile_n: ConstInt,
    chunk: ConstInt, persistent: ConstBool, keys_first: ConstBool, scalar: ConstBool, whole: ConstBool,
    bounded: ConstBool, normed: ConstBool, turned: ConstBool, paged: ConstBool,
):  # fmt: skip
    """One split of one key head a block, or resident blocks that loop; the layout is that of the module."""
    pairs = q.shape[0] * q.shape[1]
    # As many as the grid has blocks for.
    splits = ct.maximum(1, ct.num_blocks(0) // pairs)
    half = ct.static_eval(head_dim // 2)
    forms = (((half, width, whole, bounded, False, 0),), ((half, width, whole, not whole, False, 0),))
    sizes = (head_dim, depth, rows, group, tile_n, chunk)
    flags = (persistent, keys_first, scalar, normed, turned, paged)
    arguments = (
        (q, k, v), (q_weight, k_weight), (cos, sin), positions, table, (keys, values), (new_keys, new_values),
        (eps, scale), counters, out, parts, splits, sizes, flags, forms,
    )  # fmt: skip
    if ct.static_eval(persistent):
        _wait()
        for item in range(ct.bid(0), pairs * splits, ct.num_blocks(0)):
            _attend(item, *arguments)
    else:
        _attend(ct.bid(0), *arguments)


FLAGS = ("normed", "turned", "paged")
# As those of ``decode_attention``.
DIMENSIONS = (
    *(Dimension(name, "bucketed") for name in ("kv_heads", "keys", "page_size")),
    *(Dimension(name, "exact") for name in ("group", "head_dim")),
    *flags_of(FLAGS),
    Dimension("dtype", "dtype"),
)


def _of_decoding(problem: Problem) -> Problem:
    """Return the sizes that the inputs for checks of ``decode_attention`` depend on."""
    return problem.but(padded=False, windowed=False)


def _sizes(problem: Problem) -> dict[str, Any]:
    """Return the sizes of arrays in inputs, and constants.

    Raises:
        ValueError: a head has no halves.
    """
    half = problem["head_dim"] // 2
    if problem["head_dim"] % 2:
        raise ValueError(f"token_attention: heads of {problem['head_dim']} numbers have no halves")
    width = max(_LEAST_ROWS, power_of_two(half))
    return {**decoding.sizes(_of_decoding(problem)), "half": half, "width": width, "whole": width == half}


_QUERIES, _NEW = ("batch", "heads", "group", "head_dim"), ("batch", "heads", "1", "head_dim")
_CACHE = ("entries", "second", "third", "head_dim")
_ARRAYS: Arrays = (
    Array("q", "dtype", _QUERIES),
    Array("k", "dtype", _NEW),
    Array("v", "dtype", _NEW),
    *(Array(name, "dtype", ("head_dim",), flag="normed", constant=True) for name in ("q_weight", "k_weight")),
    *(Array(name, "dtype", ("batch", "1", "half"), flag="turned", constant=True) for name in ("cos", "sin")),
    Array("positions", "int32", ("batch", "1"), aligned=False, constant=True),
    Array("table", "int32", ("batch", "most_pages"), aligned=False, flag="paged", constant=True),
    Array("keys", "dtype", _CACHE),
    Array("values", "dtype", _CACHE),
    Array("counters", "int32", ("kv_heads",), aligned=False),
    EPS,
    ScalarParameter("scale", "float32"),
    Array("new_keys", "dtype", _CACHE, "output"),
    Array("new_values", "dtype", _CACHE, "output"),
    Array("out", "dtype", _QUERIES, "output"),
    Array("parts", "float32", ("blocks", "group", "part"), "output", aligned=False),
)


def _spans(problem: Problem) -> list[int]:
    """Return how many keys each sequence has in inputs, the new one's included."""
    return [length for _, length in decoding.spans(_of_decoding(problem))]


def _positions(lengths: list[int], device: str) -> Any:
    import torch

    return torch.tensor(lengths, dtype=torch.int32, device=device)[:, None] - 1


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Add angles, positions, the table of pages and numbers to the drawn tensors."""
    import torch

    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    if problem["paged"]:
        # The pages in the opposite order; those behind the last of a sequence are -1.
        shape = (problem["batch"], problem["most_pages"])
        table = torch.arange(problem["entries"], dtype=torch.int32, device=device).flip(0).view(shape)
        first = torch.arange(shape[1], device=device) * problem["page_size"]
        table = table.masked_fill(first > _positions(_spans(problem), device), -1)
    angles = {}
    if problem["turned"]:
        of_a_token = problem.but(tokens=1, pairs=problem["half"], angle_dtype=problem["dtype"])
        angles = drawn_angles(of_a_token, generator, device)
    return {
        "positions": _positions(_spans(problem), device),
        "table": table,
        "counters": torch.zeros(problem["kv_heads"], dtype=torch.int32, device=device),
        "scale": float(problem["head_dim"] ** -0.5),
        **angles,
    }


def _of_their_own(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Return positions that differ where those of the inputs are equal."""
    if problem["paged"]:
        return {}
    batch = decoding.sizes(_of_decoding(problem))["batch"]
    lengths = [problem["keys"] - number * problem["keys"] // (2 * batch) for number in range(batch)]
    return {"positions": _positions(lengths, device)}


def reference(
    q: Any, k: Any, v: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, table: Any, keys: Any,
    values: Any, counters: Any, eps: float, scale: float, normed: bool, turned: bool, paged: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute out in float64, of heads that are rounded to the dtype, and caches that are NaN but in the new rows."""
    import torch

    def made(x: Any, weight: Any) -> Any:
        """Return heads as tokens first, [batch, 1, heads, head_dim]."""
        tokens = x.double().flatten(1, 2)[:, None]
        tokens = norm(tokens, weight.double(), eps) if normed else tokens
        return rotated(tokens, cos.double(), sin.double()) if turned else tokens

    new_q, new_k, new_v = made(q, q_weight), made(k, k_weight), v.double().transpose(1, 2)
    pages, place = (table if paged else None), positions.long().expand(len(q), 1)
    rows = {
        name: written(torch.full_like(cache, torch.nan, dtype=torch.float64), x, positions, pages)
        for name, cache, x in (("new_keys", keys, new_k), ("new_values", values, new_v))
    }
    room = keys.shape[1] * table.shape[1] if paged else keys.shape[2]
    is_there = ((place >= 0) & (place < room)).flatten()
    if paged:
        page = table.long().gather(1, (place // keys.shape[1]).clamp(0, table.shape[1] - 1)).flatten()
        is_there &= (page >= 0) & (page < len(keys))
    heads, token = new_q.to(q.dtype).double().view(q.shape) * scale, new_k.to(k.dtype).double().transpose(1, 2)
    found = []
    for b, seen in enumerate(is_there.tolist()):
        before = int(place[b]) if seen else 0
        if paged:
            old = [x[table[b].clamp(min=0).long()].flatten(0, 1).transpose(0, 1) for x in (keys, values)]
        else:
            old = [keys[b], values[b]]
        k_all, v_all = (
            torch.cat((x[:, :before].double(), own[b]), 1)
            for x, own in zip(old, (token, v.double()), strict=True)
        )  # fmt: skip
        weights = torch.einsum("hgd,hkd->hgk", heads[b], k_all).softmax(-1)
        out = torch.einsum("hgk,hkd->hgd", weights, v_all)
        found.append(out if seen else torch.zeros_like(out))
    return {"out": torch.stack(found), **rows}


def results(found: dict[str, Any]) -> dict[str, Any]:
    """Return out and views of the caches, of which only the new rows are written."""
    return {"out": found["out"], **{name: found[name][:] for name in ("new_keys", "new_values")}}


def _is_narrow(problem: Problem) -> bool:
    """Return whether tiles are of 16-bit numbers and heads of up to 128."""
    return problem["dtype"] != "float32" and depth_of(problem) <= 128


def _axes(problem: Problem) -> dict[str, list[Value]]:
    tiles: list[Value] = [64, 128, 256] if _is_narrow(problem) else [32, 64, 128]
    return {
        "schedule": ["block"],
        "tile_n": [16, 32] if problem["dtype"] == "float32" else tiles,
        "splits": [n for n in (1, 2, 4, 8, 16, 32, MOST_SPLITS) if n <= bucket(problem["keys"])],
        "occupancy": [1, 2],
        "num_worker_warps": [4, 8],
        "keys_first": [True, False] if problem["group"] >= _FEW or problem["group"] == 1 else [True],
        "scalar": [False, True] if problem["group"] == 1 else [False],
    }


_CONSTRAINTS = (
    Constraint(
        "a single query head is a row of scalar units, or a column of products",
        lambda problem, config, target: problem["group"] > 1 or config["scalar"] != config["keys_first"],
    ),
    Constraint(
        "a split without a tile of its own has nothing to do",
        lambda problem, config, target: (
            config["splits"] == 1 or (config["splits"] - 1) * config["tile_n"] < problem["keys"]
        ),
    ),
    Constraint(
        "more than 16 blocks for each SM only add parts to join",
        lambda problem, config, target: (
            config["splits"] == 1 or problem["kv_heads"] * config["splits"] <= 16 * target.sm_count
        ),
    ),
    Constraint(
        "eight warps spill unless their block has an SM to itself; scalar units have the same code beside another",
        lambda problem, config, target: (
            config["occupancy"] == 1
            if config["num_worker_warps"] == 8
            else config["occupancy"] == 2 or not config["scalar"]
        ),
    ),
    Constraint(
        "tiles of 256 keys spill unless eight warps share them",
        lambda problem, config, target: config["tile_n"] < 256 or config["num_worker_warps"] == 8,
    ),
    Constraint(
        "eight warps share large tiles, or sums of float32",
        lambda problem, config, target: (
            (config["num_worker_warps"] == 8) == (problem["dtype"] == "float32")
            or (problem["dtype"] != "float32" and config["tile_n"] >= 128)
        ),
    ),
)


def _config(problem: Problem, schedule: str, tile_n: int, splits: int, occupancy: int, warps: int) -> Config:
    return Config(
        schedule=schedule, tile_n=tile_n, splits=splits, occupancy=occupancy, num_worker_warps=warps, keys_first=True,
        scalar=False,
    )  # fmt: skip


def _default(problem: Problem, target: Target) -> Config:
    """Return a config with two blocks for each SM, unless a block then has fewer than two tiles."""
    wide = problem["dtype"] == "float32"
    tile_n = 16 if wide else 64
    most = min(2 * target.sm_count // problem["kv_heads"], problem["keys"] // (2 * tile_n), MOST_SPLITS)
    splits = bucket(most + 1) // 2 if most > 1 else 1
    return _config(problem, "block", tile_n, splits, 1 if wide else 2, 8 if wide else 4)


def _generic(problem: Problem) -> Config:
    """Return small tiles of eight warps, which compile in the least time."""
    return _config(problem, "persistent", 32 if _is_narrow(problem) else 16, 1, 1, 8)


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    group = power_of_two(problem["group"])
    rows = group if config["scalar"] else max(_LEAST_ROWS, group)
    at_once = max(1, _MOST_AT_ONCE // (group * problem["depth"]))
    return {
        "rows": rows,
        "group": group,
        "bounded": not problem["whole"] or group != problem["group"],
        # The generic variant may have the grid of any config.
        "chunk": min(at_once, power_of_two(config["splits"]) if config["splits"] > 1 else _LEAST_ROWS),
    }


def _bytes(problem: Problem) -> int:
    known = problem.but(**_sizes(problem))
    rows = 2 * problem["kv_heads"] * problem["group"] + 4 * problem["kv_heads"]
    old = 2 * known["heads"] * sum(length - 1 for length in _spans(known))
    return int(rows + old) * problem["head_dim"] * ITEM_BYTES[problem["dtype"]]


SPEC = spec(
    "token_attention",
    "q and k of one token, normalised and rotated, k and v in a cache, and out = softmax(scale q k^T) v, in one launch",
    DIMENSIONS,
    _ARRAYS,
    reference,
    function=token_attention,
    sizes=_sizes,
    constants=_constants,
    grid=lambda sizes, config, sm_count: sizes["kv_heads"] * config["splits"],
    space=Space(_axes, _CONSTRAINTS),
    default=_default,
    generic=_generic,
    given=_given,
    results=results,
    flops=lambda problem: 4 * problem["group"] * problem["head_dim"] * problem["kv_heads"] * problem["keys"],
    roundings=2,
    bytes_moved=_bytes,
    dependent=True,
    streamed=True,
    variations={"positions of their own": _of_their_own},
)
SPECS = (SPEC,)
