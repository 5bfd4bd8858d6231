"""Attention's backward without atomics, so that two runs agree to the bit.

With P = exp(S - lse), S the scaled (and capped) scores, and delta = rowsum(out * dout), the gradients are
(Dao et al. 2022, arXiv:2205.14135, appendix B.2)

    dv = P^T dout,   dS = P * (dout v^T - delta),   dq = scale dS k,   dk = scale dS^T q,

with dS times 1 - tanh^2 if the scores are capped. P is computed again from q, k and lse: once for dk and dv, by blocks
that own a tile of keys (:data:`DKDV`), and once for dq, by blocks that own a tile of queries (:data:`DQ`); delta is
computed before, by :data:`DELTA`. A gradient of lse itself is subtracted from delta.
:mod:`tilekern.kernels.attention.problem` describes the layout.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention import backward_problem as shared
from tilekern.kernels.attention.problem import SCALARS, depth_of, is_one_loop, pairs, sizes
from tilekern.kernels.attention.tiles import (
    LOG2_E,
    cut,
    edge_tile,
    factors_of,
    first_head_of,
    head_and_tile,
    heads_abreast,
    key_tiles,
    kv_head_of,
    load_row_values,
    load_rows,
    query_tiles,
    seen,
    sequence,
    soft_tanh,
    store_rows,
)
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, load
from tilekern.spec import (
    Array,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)

__all__ = ["DELTA", "DKDV", "DQ", "SPECS"]


def _score_gradients(products, pulled, lse, delta, shown, factors, capped, precise, masked):
    """Compute P and dS, without the scale, from the products q k^T and dout v^T, in either orientation."""
    slope, factor = factors
    if ct.static_eval(capped):
        products = soft_tanh(products * slope, precise)
    weights = ct.exp2(products * factor - lse * LOG2_E, flush_to_zero=True)
    if ct.static_eval(masked):
        weights = ct.where(shown, weights, 0.0)
    gradients = weights * (pulled - delta)
    if ct.static_eval(capped):
        gradients = gradients * (1.0 - products * products)
    return weights, gradients


def _add_queries(
    arrays, place, owned, sums, span, factors, tile_m, depth, latency, causal, windowed, capped, packed, precise, masked
):
    """Add a tile of queries to dk and dv of a tile of keys; return these sums, and dS^T as its product reads it."""
    (q, dout, lse, delta), (number, first, tile, head), (k_tile, v_tile, key) = arrays, place, owned
    queries, keys, window = span
    q_tile = load_rows(q, number, first, tile, head, tile_m, depth, packed, latency)
    dout_tile = load_rows(dout, number, first, tile, head, tile_m, depth, packed, latency)
    lse_row = load_row_values(lse, number, first, tile, head, tile_m, packed)[None, :]
    delta_row = load_row_values(delta, number, first, tile, head, tile_m, packed)[None, :]
    query = tile * tile_m + ct.arange(tile_m, dtype=ct.int32)[None, :]
    if ct.static_eval(masked):
        q_tile, dout_tile = cut(q_tile, query, queries, packed), cut(dout_tile, query, queries, packed)
        if ct.static_eval(packed):
            delta_row = ct.where(query < queries, delta_row, 0.0)
    # Keys are the rows: P^T and dS^T are left operands of the next products without a change of layout in registers.
    nothing = ct.zeros((k_tile.shape[0], tile_m), ct.float32)
    products = ct.mma(k_tile, ct.transpose(q_tile), nothing)
    pulled = ct.mma(v_tile, ct.transpose(dout_tile), nothing)
    shown = None
    if ct.static_eval(masked):
        shown = seen(query, key, queries, keys, window, causal, windowed)
    weights, gradients = _score_gradients(products, pulled, lse_row, delta_row, shown, factors, capped, precise, masked)
    dk_sum, dv_sum = sums
    gradients = gradients.astype(q.dtype)
    dv_sum = ct.mma(weights.astype(dout.dtype), dout_tile, dv_sum)
    dk_sum = ct.mma(gradients, q_tile, dk_sum)
    return (dk_sum, dv_sum), gradients


def keys_gradients(
    item, q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, window, dk, dv, keep, kept,
    heads, kv_heads, depth, tile_m, tile_n, budget, latency, one_loop, apart, causal, windowed, capped, packed,
    precise,
):  # fmt: skip
    """Compute dk and dv of a tile of keys of one key head of a sequence, with the queries of all heads that read it.

    If ``apart``, with those of one head: dk and dv have a part for each. ``keep(kept, ...)`` takes each dS^T.
    """
    batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
    owners = ct.static_eval(heads if apart else kv_heads)
    group = ct.static_eval(max(1, heads // owners))
    abreast = heads_abreast(q.shape[1], depth * group, 1, budget)
    row, tile = head_and_tile(item, ct.cdiv(most_keys, tile_n), batch * owners, abreast, False)
    number, owner = row // owners, row % owners
    kv_head = kv_head_of(owner, heads, kv_heads) if ct.static_eval(apart) else owner
    first_query, queries = sequence(query_starts, number, q.shape[1], packed)
    first_key, keys = sequence(key_starts, number, k.shape[1], packed)
    # One iteration, or none beyond the end of a packed sequence: tileiras 13.4 rejects a branch in dq's kernel for
    # sm_100.
    for _ in range(ct.where(tile * tile_n < keys, 1, 0) if ct.static_eval(packed) else 1):
        arrays, span, factors = (q, dout, lse, delta), (queries, keys, window), factors_of(scale, softcap, capped)
        key = tile * tile_n + ct.arange(tile_n, dtype=ct.int32)[:, None]
        k_tile = load_rows(k, number, first_key, tile, kv_head, tile_n, depth, packed, 0)
        v_tile = load_rows(v, number, first_key, tile, kv_head, tile_n, depth, packed, 0)
        owned = (k_tile, v_tile, key)
        first, full, edge, stop = query_tiles(tile * tile_n, tile_n, queries, keys, window, tile_m, causal, windowed)
        if ct.static_eval(one_loop):
            full, edge = stop, stop
        head = first_head_of(owner, heads, owners)
        readers = first_head_of(owner + 1, heads, owners) - head
        sums = ct.zeros((tile_n, depth), ct.float32), ct.zeros((tile_n, depth), ct.float32)
        # One loop over the tiles of all heads keeps loads in flight from one head to the next.
        count = ct.maximum(1, full - first + stop - edge)
        for n in range(readers * (full - first + stop - edge)):
            place = (number, first_query, edge_tile(n % count, first, full, edge), head + n // count)
            sums, gradients = _add_queries(
                arrays, place, owned, sums, span, factors, tile_m, depth, latency, causal, windowed, capped, packed,
                precise, True,
            )  # fmt: skip
            keep(kept, gradients, place, tile, queries, heads, batch, causal, packed)
        if ct.static_eval(not one_loop):
            count = ct.maximum(1, edge - full)
            for n in range(readers * (edge - full)):
                place = (number, first_query, full + n % count, head + n // count)
                sums, gradients = _add_queries(
                    arrays, place, owned, sums, span, factors, tile_m, depth, latency, causal, windowed, capped, packed,
                    precise, False,
                )  # fmt: skip
                keep(kept, gradients, place, tile, queries, heads, batch, causal, packed)
        dk_sum, dv_sum = sums
        store_rows(dk, number, first_key, keys, tile, owner, (dk_sum * scale).astype(dk.dtype), packed)
        store_rows(dv, number, first_key, keys, tile, owner, dv_sum.astype(dv.dtype), packed)


def keep_nothing(kept, gradients, place, tile, queries, heads, batch, causal, packed):
    """Take dS^T of two tiles, as :func:`keys_gradients` wants, and do nothing."""


@ct.kernel
def attention_dkdv(
    q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, window, dk, dv, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, causal: ConstBool, windowed: ConstBool, capped: ConstBool,
    packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One tile of keys a block, or resident blocks that loop; k, v, dk and dv [batch, keys, kv_heads, head_dim].

    q and dout [batch, queries, heads, head_dim], lse and delta [batch, heads, queries], query_starts and key_starts
    [batch + 1]; if ``packed``, the sequences follow one another in a batch of one.
    """
    arguments = (
        q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, window, dk, dv, keep_nothing,
        None, heads, kv_heads, depth, tile_m, tile_n, budget, latency, one_loop, False, causal, windowed, capped,
        packed, precise,
    )  # fmt: skip
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
        for item in range(ct.bid(0), batch * kv_heads * ct.cdiv(most_keys, tile_n), ct.num_blocks(0)):
            keys_gradients(item, *arguments)
    else:
        keys_gradients(ct.bid(0), *arguments)


def _add_keys(
    arrays, place, owned, dq_sum, span, factors, tile_n, depth, latency, causal, windowed, capped, packed, precise,
    masked,
):  # fmt: skip
    """Add a tile of keys to dq of a tile of queries."""
    (k, v), (number, first, tile, kv_head), (q_tile, dout_tile, lse, delta, query) = arrays, place, owned
    queries, keys, window = span
    k_tile = load_rows(k, number, first, tile, kv_head, tile_n, depth, packed, latency)
    v_tile = load_rows(v, number, first, tile, kv_head, tile_n, depth, packed, latency)
    key = tile * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :]
    if ct.static_eval(masked):
        k_tile, v_tile = cut(k_tile, key, keys, packed), cut(v_tile, key, keys, packed)
    nothing = ct.zeros((q_tile.shape[0], tile_n), ct.float32)
    products = ct.mma(q_tile, ct.transpose(k_tile), nothing)
    pulled = ct.mma(dout_tile, ct.transpose(v_tile), nothing)
    shown = None
    if ct.static_eval(masked):
        shown = seen(query, key, queries, keys, window, causal, windowed)
    _, gradients = _score_gradients(products, pulled, lse, delta, shown, factors, capped, precise, masked)
    return ct.mma(gradients.astype(k.dtype), k_tile, dq_sum)


def _queries_gradients(
    item, q, k, v, dout, lse, delta, query_starts, key_starts, most_queries, scale, softcap, window, dq, heads,
    kv_heads, depth, tile_m, tile_n, budget, latency, one_loop, causal, windowed, capped, packed, precise,
):  # fmt: skip
    """Compute dq of one tile of queries of one head of one sequence."""
    batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
    abreast = heads_abreast(k.shape[1], depth, ct.static_eval(max(1, heads // kv_heads)), budget)
    row, tile = head_and_tile(item, ct.cdiv(most_queries, tile_m), batch * heads, abreast, causal)
    number, head = row // heads, row % heads
    kv_head = kv_head_of(head, heads, kv_heads)
    first_query, queries = sequence(query_starts, number, q.shape[1], packed)
    first_key, keys = sequence(key_starts, number, k.shape[1], packed)
    for _ in range(ct.where(tile * tile_m < queries, 1, 0) if ct.static_eval(packed) else 1):
        arrays, span, factors = (k, v), (queries, keys, window), factors_of(scale, softcap, capped)
        query = tile * tile_m + ct.arange(tile_m, dtype=ct.int32)[:, None]
        q_tile = load_rows(q, number, first_query, tile, head, tile_m, depth, packed, 0)
        dout_tile = load_rows(dout, number, first_query, tile, head, tile_m, depth, packed, 0)
        lse_column = load_row_values(lse, number, first_query, tile, head, tile_m, packed)[:, None]
        delta_column = load_row_values(delta, number, first_query, tile, head, tile_m, packed)[:, None]
        owned = (q_tile, dout_tile, lse_column, delta_column, query)
        first, full, edge, stop = key_tiles(tile * tile_m, tile_m, queries, keys, window, tile_n, causal, windowed)
        dq_sum = ct.zeros((tile_m, depth), ct.float32)
        if ct.static_eval(one_loop):
            full, edge = stop, stop
        else:
            for j in range(full, edge):
                dq_sum = _add_keys(
                    arrays, (number, first_key, j, kv_head), owned, dq_sum, span, factors, tile_n, depth, latency,
                    causal, windowed, capped, packed, precise, False,
                )  # fmt: skip
        for n in range(full - first + stop - edge):
            j = edge_tile(n, first, full, edge)
            dq_sum = _add_keys(
                arrays, (number, first_key, j, kv_head), owned, dq_sum, span, factors, tile_n, depth, latency, causal,
                windowed, capped, packed, precise, True,
            )  # fmt: skip
        store_rows(dq, number, first_query, queries, tile, head, (dq_sum * scale).astype(dq.dtype), packed)


@ct.kernel
def attention_dq(
    q, k, v, dout, lse, delta, query_starts, key_starts, most_queries, scale, softcap, window, dq, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, causal: ConstBool, windowed: ConstBool, capped: ConstBool,
    packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One tile of queries a block, or resident blocks that loop; dq [batch, queries, heads, head_dim].

    Other arrays: see :func:`attention_dkdv`.
    """
    arguments = (
        q, k, v, dout, lse, delta, query_starts, key_starts, most_queries, scale, softcap, window, dq, heads, kv_heads,
        depth, tile_m, tile_n, budget, latency, one_loop, causal, windowed, capped, packed, precise,
    )  # fmt: skip
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
        for item in range(ct.bid(0), batch * heads * ct.cdiv(most_queries, tile_m), ct.num_blocks(0)):
            _queries_gradients(item, *arguments)
    else:
        _queries_gradients(ct.bid(0), *arguments)


# The first step: delta.


@ct.kernel
def attention_delta(
    out, dout, delta, depth: ConstInt, tile_m: ConstInt, tile_h: ConstInt, bounded: ConstBool, tma: ConstBool
):
    """Blocks that loop over tiles of tokens and heads in steps of the grid.

    out and dout [batch, queries, heads, head_dim], delta [batch, heads, queries].
    """
    across = ct.cdiv(out.shape[2], tile_h)
    rows = ct.cdiv(out.shape[1], tile_m)
    for item in range(ct.bid(0), out.shape[0] * rows * across, ct.num_blocks(0)):
        batch, row, head = item // (rows * across), item // across % rows, item % across
        index, shape = (batch, row, head, 0), (1, tile_m, tile_h, depth)
        left = load(out, index, shape, bounded, 0, tma).astype(ct.float32)
        right = load(dout, index, shape, bounded, 0, tma).astype(ct.float32)
        sums = ct.reshape(ct.sum(left * right, axis=3), (tile_m, tile_h))
        values = ct.reshape(ct.transpose(sums), (1, tile_h, tile_m))
        ct.store(delta, (batch, head, row), values, check_bounds=bounded, allow_tma=False)


def _delta_config(problem: Problem, schedule: str) -> Config:
    tile_m = max(2, min(64, 2048 // depth_of(problem)))
    return Config(schedule=schedule, tile_m=tile_m, tile_h=1, occupancy=4, num_worker_warps=0, tma=False)


def _delta_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block"],
        "tile_m": [2, 4, 8, 16, 32, 64],
        "tile_h": [1, 4] if problem["heads"] % 4 == 0 else [1],
        "occupancy": [4],
        "num_worker_warps": [0],
        "tma": [False, True],
    }


_DELTA_SIZED = Constraint(
    "a tile of fewer than 1024 or more than 8192 elements starves or spills",
    lambda problem, config, target: 1024 <= config["tile_m"] * config["tile_h"] * depth_of(problem) <= 8192,
)
_DELTA_ARRAYS = (
    *(Array(name, "dtype", ("batch", "queries", "heads", "head_dim")) for name in ("out", "dout")),
    Array("delta", "float32", ("batch", "heads", "queries"), "output", aligned=False),
)

DELTA = spec(
    "attention_delta",
    "delta = sum of out * dout over each head's channels, in float32",
    (
        *(Dimension(name, "bucketed") for name in ("batch", "queries")),
        *(Dimension(name, "exact") for name in ("heads", "head_dim")),
        Dimension("dtype", "dtype"),
    ),
    lambda problem: _DELTA_ARRAYS,
    lambda out, dout: {"delta": (out.double() * dout.double()).sum(-1).transpose(1, 2)},
    function=lambda problem, config: attention_delta,
    sizes=lambda problem: {"depth": depth_of(problem)},
    constants=lambda problem, config: {
        "bounded": config["tile_m"] > 1
        or problem["heads"] % config["tile_h"] != 0
        or problem["head_dim"] != problem["depth"]
    },
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"] * cdiv(sizes["queries"], config["tile_m"]) * cdiv(sizes["heads"], config["tile_h"]),
        config,
        sm_count,
    ),
    space=Space(_delta_axes, (TMA_NEEDS_HOPPER, _DELTA_SIZED)),
    default=lambda problem, target: _delta_config(problem, "block"),
    generic=lambda problem: _delta_config(problem, "persistent"),
    flops=lambda problem: 2 * problem["batch"] * problem["queries"] * problem["heads"] * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
)


# The specs of the gradients.


def _spec(
    name: str, summary: str, side: str, outputs: tuple[Array, ...], function: Any, products: int
) -> KernelSpec:  # fmt: skip
    """Make the spec of a kernel whose blocks own tiles of ``side``, queries or keys, and run ``products`` products."""
    space = shared.space_of(side)
    arrays: Arrays = (*shared.READ, ScalarParameter(f"most_{side}", "int32"), *SCALARS, *outputs)
    heads, rows = ("heads", "tile_m") if side == "queries" else ("kv_heads", "tile_n")
    return spec(
        name,
        summary,
        shared.DIMENSIONS,
        lambda problem: arrays,
        shared.REFERENCES[side],
        function=lambda problem, config: function,
        sizes=sizes,
        # Loads of packed rows are long code, which a second loop would double.
        constants=lambda problem, config: {"one_loop": problem["packed"] or is_one_loop(config)},
        grid=lambda sizes, config, sm_count: grid_of(
            sizes["batch"] * sizes[heads] * cdiv(sizes[side], config[rows]), config, sm_count
        ),
        space=space,
        default=lambda problem, target: shared.default(problem, target, space, side),
        generic=shared.generic,
        given=shared.inputs,
        flops=lambda problem: 2 * products * pairs(problem) * problem["head_dim"],
        roundings=2,
    )


DKDV = _spec(
    "attention_dkdv", "dk and dv of attention, by tiles of keys", "keys", (shared.DK, shared.DV), attention_dkdv, 4
)
DQ = _spec("attention_dq", "dq of attention, by tiles of queries", "queries", (shared.DQ,), attention_dq, 3)

SPECS = (DKDV, DQ, DELTA)
