"""Attention's forward: softmax(scale q k^T) v with its log-sum-exp, online over tiles of keys.

The online softmax is Milakov and Gimelshein's (2018, arXiv:1805.02867), its use tile by tile is FlashAttention's (Dao
et al. 2022, arXiv:2205.14135). Scores are kept in base 2, so that one exponential instruction serves; probabilities are
rounded to the dtype for the second product, like in every implementation on matrix units. The mask is described in
:mod:`tilekern.kernels.attention.tiles`, the layout in :mod:`tilekern.kernels.attention.problem`.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention import cudnn as attention_cudnn
from tilekern.kernels.attention import forward_cute
from tilekern.kernels.attention import problem as shared
from tilekern.kernels.attention.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    add_sums,
    cut,
    edge_tile,
    factors_of,
    head_and_tile,
    heads_abreast,
    key_tiles,
    kv_head_of,
    load_rows,
    product,
    seen,
    sequence,
    soft_tanh,
    store_row_values,
    store_rows,
    tile_sums,
)
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.matmul.space import of_tiles, one_for_library
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of
from tilekern.spec import Array, Config, Constraint, Problem, ScalarParameter, Space, Value, cdiv
from tilekern.spec.targets import Target


def _scores(q_tile, k_tile, slope, capped, precise):
    """Compute a tile's scores in base 2, without the factor of :func:`~tilekern.kernels.attention.tiles.factors_of`."""
    products = product(q_tile, ct.transpose(k_tile), ct.zeros((q_tile.shape[0], k_tile.shape[0]), ct.float32))
    if ct.static_eval(capped):
        products = soft_tanh(products * slope, precise)
    return products


def _add_keys(biggest, total, summed, products, v_tile, factor, apart):
    """Add a tile of keys to the running maximum, denominator and weighted sum; ``apart`` sums it by itself before."""
    if ct.static_eval(apart):
        return add_sums((biggest, total, summed), tile_sums(products, v_tile, factor, False))
    most = ct.maximum(biggest, ct.max(products, axis=1, keepdims=True) * factor)
    shrink = ct.exp2(biggest - most, flush_to_zero=True)
    weights = ct.exp2(products * factor - most, flush_to_zero=True)
    total = total * shrink + ct.sum(weights, axis=1, keepdims=True)
    summed = product(weights.astype(v_tile.dtype), v_tile, summed * shrink)
    return most, total, summed


def _start(sink_logits, head, rows, sinks, apart):
    """Return the running maximum and denominator before the first key: a sink is a key whose value is zero."""
    if ct.static_eval(sinks):
        logit = ct.load(sink_logits, (head,), ()) * LOG2_E
        most = ct.ceil(logit) if ct.static_eval(apart) else logit
        biggest = ct.full((rows, 1), ct.maximum(most, LOWEST), ct.float32)
        return biggest, ct.exp2(logit - biggest, flush_to_zero=True)
    return ct.full((rows, 1), LOWEST, ct.float32), ct.zeros((rows, 1), ct.float32)


def _rows(array, where, j):
    """Load key tile ``j`` of k or v."""
    number, first_key, kv_head, tile_n, depth, packed, latency = where
    return load_rows(array, number, first_key, j, kv_head, tile_n, depth, packed, latency)


def _whole_tiles(state, q_tile, k, v, where, full, edge, slope, factor, capped, precise, ahead, apart):
    """Return the state after the key tiles [full, edge), in which every query sees all keys.

    ``ahead`` issues the product of queries and the next keys before the softmax of this tile.
    """
    biggest, total, summed = state
    if ct.static_eval(ahead):
        if full < edge:
            products = _scores(q_tile, _rows(k, where, full), slope, capped, precise)
            for j in range(full, edge - 1):
                coming = _scores(q_tile, _rows(k, where, j + 1), slope, capped, precise)
                v_tile = _rows(v, where, j)
                biggest, total, summed = _add_keys(biggest, total, summed, products, v_tile, factor, apart)
                products = coming
            v_tile = _rows(v, where, edge - 1)
            biggest, total, summed = _add_keys(biggest, total, summed, products, v_tile, factor, apart)
    else:
        for j in range(full, edge):
            products = _scores(q_tile, _rows(k, where, j), slope, capped, precise)
            biggest, total, summed = _add_keys(biggest, total, summed, products, _rows(v, where, j), factor, apart)
    return biggest, total, summed


def _edge_tiles(state, q_tile, k, v, where, tiles, sizes, slope, factor, flags):
    """Return the state after key tiles in which some queries do not see all keys (:func:`edge_tile`)."""
    biggest, total, summed = state
    first, full, edge, stop = tiles
    tile, tile_m, tile_n, queries, keys, window = sizes
    causal, windowed, capped, packed, precise, apart = flags
    query = tile * tile_m + ct.arange(tile_m, dtype=ct.int32)[:, None]
    for n in range(full - first + stop - edge):
        j = edge_tile(n, first, full, edge)
        products = _scores(q_tile, _rows(k, where, j), slope, capped, precise)
        key = j * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :]
        products = ct.where(seen(query, key, queries, keys, window, causal, windowed), products, -float("inf"))
        v_tile = cut(_rows(v, where, j), key, keys, packed)
        biggest, total, summed = _add_keys(biggest, total, summed, products, v_tile, factor, apart)
    return biggest, total, summed


def _attend(item, q, k, v, sink_logits, query_starts, key_starts, numbers, out, lse, sizes, flags):
    """Compute one tile of queries of one head of one sequence."""
    most_queries, scale, softcap, window = numbers
    heads, kv_heads, depth, tile_m, tile_n, budget, latency = sizes
    one_loop, ahead, apart, causal, windowed, capped, sinks, packed, precise = flags
    batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
    abreast = heads_abreast(k.shape[1], depth, ct.static_eval(max(1, heads // kv_heads)), budget)
    row, tile = head_and_tile(item, ct.cdiv(most_queries, tile_m), batch * heads, abreast, causal)
    number, head = row // heads, row % heads
    first_query, queries = sequence(query_starts, number, q.shape[1], packed)
    first_key, keys = sequence(key_starts, number, k.shape[1], packed)
    if tile * tile_m < queries:
        slope, factor = factors_of(scale, softcap, capped)
        q_tile = load_rows(q, number, first_query, tile, head, tile_m, depth, packed, 0)
        where = (number, first_key, kv_head_of(head, heads, kv_heads), tile_n, depth, packed, latency)
        first, full, edge, stop = key_tiles(tile * tile_m, tile_m, queries, keys, window, tile_n, causal, windowed)
        state = _start(sink_logits, head, tile_m, sinks, apart) + (ct.zeros((tile_m, depth), ct.float32),)
        sides, kinds = (tile, tile_m, tile_n, queries, keys, window), (causal, windowed, capped, packed, precise, apart)
        if ct.static_eval(one_loop):
            full, edge = stop, stop
        else:
            if ct.static_eval(windowed):
                # Which tiles a window cuts depends on the other queries of the tile.
                tiles, first = (first, full, full, full), full
                state = _edge_tiles(state, q_tile, k, v, where, tiles, sides, slope, factor, kinds)
            state = _whole_tiles(state, q_tile, k, v, where, full, edge, slope, factor, capped, precise, ahead, apart)
        tiles = (first, full, edge, stop)
        biggest, total, summed = _edge_tiles(state, q_tile, k, v, where, tiles, sides, slope, factor, kinds)
        # A query that sees nothing has total 0: out 0, and lse -inf by itself.
        values = summed * (1.0 / ct.where(total == 0.0, 1.0, total))
        store_rows(out, number, first_query, queries, tile, head, values.astype(out.dtype), packed)
        logs = ct.reshape((biggest + ct.log2(total)) * LN_2, (tile_m,))
        store_row_values(lse, number, first_query, queries, tile, head, logs, packed)


@ct.kernel
def attention_forward(
    q, k, v, sink_logits, query_starts, key_starts, most_queries, scale, softcap, window, out, lse, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, ahead: ConstBool, apart: ConstBool, causal: ConstBool,
    windowed: ConstBool, capped: ConstBool, sinks: ConstBool, packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One tile of queries a block, or resident blocks that loop; q and out [batch, queries, heads, head_dim].

    k and v [batch, keys, kv_heads, head_dim], lse [batch, heads, queries], sink_logits [heads], query_starts and
    key_starts [batch + 1]; if ``packed``, the sequences follow one another in a batch of one.
    """
    numbers = (most_queries, scale, softcap, window)
    sizes = (heads, kv_heads, depth, tile_m, tile_n, budget, latency)
    flags = (one_loop, ahead, apart, causal, windowed, capped, sinks, packed, precise)
    arguments = (q, k, v, sink_logits, query_starts, key_starts, numbers, out, lse, sizes, flags)
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
        for item in range(ct.bid(0), batch * heads * ct.cdiv(most_queries, tile_m), ct.num_blocks(0)):
            _attend(item, *arguments)
    else:
        _attend(ct.bid(0), *arguments)


def _config(tile_m: int, tile_n: int, occupancy: int, warps: int, schedule: str = "block") -> Config:
    return Config(
        implementation="tile", schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=occupancy,
        num_worker_warps=warps, ahead=False, latency=0,
    )  # fmt: skip


def _is_roomy(problem: Problem) -> bool:
    """Return whether tiles may be large: float32 takes three products each, and heads of 512 fill the registers."""
    return problem["dtype"] != "float32" and shared.depth_of(problem) <= 256


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether the accumulators (scores, the next tile's with ``ahead``, output) fit a worker's registers."""
    if target.has_tensor_memory or not _is_roomy(problem):
        return True
    columns = config["tile_n"] * (1 + config["ahead"]) + shared.depth_of(problem)
    held = config["tile_m"] * columns // (32 * config["num_worker_warps"])
    return bool(held <= (192 if config["occupancy"] == 1 else 160))


def _fits_tensor_memory(problem: Problem, config: Config, target: Target) -> bool:
    if not target.has_tensor_memory or not _is_roomy(problem):
        return True
    columns = config["tile_m"] // 128 * (config["tile_n"] + shared.depth_of(problem))
    return config["tile_m"] >= 128 and not config["ahead"] and columns * config["occupancy"] <= 512


def _takes_stages(problem: Problem, config: Config, target: Target) -> bool:
    square = config["tile_m"] == config["tile_n"] == 128
    return target.has_wgmma and square and 64 < shared.depth_of(problem) <= 128


def _axes(problem: Problem) -> dict[str, list[Value]]:
    wide = _is_roomy(problem)
    small: list[Value] = [16, 32] if shared.depth_of(problem) > 256 else [32, 64]
    return {
        "implementation": ["tile", "cudnn"],
        "schedule": ["block", "persistent"],
        "tile_m": [64, 128, 256] if wide else small,
        "tile_n": [64, 128] if wide else small,
        "occupancy": [1, 2],
        "num_worker_warps": [4, 8],
        "ahead": [False, True] if wide else [False],
        "latency": [0, 1],
    }


def _is_busy(problem: Problem, config: Config, target: Target) -> bool:
    depth = shared.depth_of(problem)
    few = 64 <= depth <= 256 and _is_roomy(problem) and config["occupancy"] == 1
    return not few or bool(config["tile_m"] * config["tile_n"] * depth >= 1 << 20)


_CONSTRAINTS = (
    attention_cudnn.SERVES,
    one_for_library(_axes),
    of_tiles("the accumulators do not fit a thread's registers", _fits),
    of_tiles(
        "tensor memory holds 512 columns of 128 rows, and its products run ahead by themselves", _fits_tensor_memory
    ),
    Constraint(
        "on sm_90 a low latency gives tiles of 128 x 128 more stages; it changes nothing good elsewhere",
        lambda problem, config, target: config["latency"] == 0 or _takes_stages(problem, config, target),
    ),
    Constraint(
        "tiles of 256 rows need tensor memory",
        lambda problem, config, target: config["tile_m"] <= 128 or target.has_tensor_memory,
    ),
    Constraint(
        "eight worker warps share 128 rows or more, or sums of float32, and leave no registers for another block",
        lambda problem, config, target: (
            config["num_worker_warps"] < 8
            or (config["occupancy"] == 1 and (config["tile_m"] >= 128 or not _is_roomy(problem)))
        ),
    ),
    of_tiles("a single block of a few small products leaves the matrix units idle", _is_busy),
)


def _axes_apart(problem: Problem) -> dict[str, list[Value]]:
    """Return axes of tiles of keys that are summed apart, and hold the same keys in all: one class with decoding."""
    if not problem["causal"]:
        return {"apart": []}
    some: dict[str, list[Value]] = {"implementation": ["tile"], "schedule": ["block"], "ahead": [False]}
    return _axes(problem) | some | {"tile_n": [shared.keys_apart(problem)], "apart": [True]}


def _default(problem: Problem, target: Target) -> Config:
    depth = shared.depth_of(problem)
    if depth > 256:
        return _config(16, 16, 1, 8) if problem["dtype"] == "float32" else _config(32, 32, 1, 8)
    if not _is_roomy(problem):
        return _config(64 if 64 < depth <= 128 else 32, 64 if depth <= 64 else 32, 1, 8)
    if target.has_tensor_memory or target.has_wgmma:
        return _config(128, 64 if depth > 128 else 128, 1, 8)
    return _config(64, 64, 2, 4)


def _generic(problem: Problem) -> Config:
    """Return small tiles of eight warps: four would write out twice as many loads of single elements."""
    side = 16 if problem["dtype"] == "float32" or shared.depth_of(problem) > 256 else 32
    return _config(side, side, 1, 8, "persistent")


@functools.wraps(shared.formula)
def reference(**given: Any) -> dict[str, Any]:
    """Compute the formula with comparable log-sum-exps."""
    return shared.results(shared.formula(**given))


_ARRAYS: Arrays = (
    shared.Q,
    shared.K,
    shared.V,
    Array("sink_logits", "float32", ("sink_logits",)),
    *shared.STARTS,
    ScalarParameter("most_queries", "int32"),
    *shared.SCALARS,
    Array("out", "dtype", shared.TOKENS["queries"], "output"),
    Array("lse", "float32", shared.OF_QUERIES, "output", aligned=False),
)

SPEC = spec(
    "attention_forward",
    "out = softmax(scale q k^T) v and its log-sum-exp, masked, by tiles of queries and keys",
    shared.DIMENSIONS,
    lambda problem: _ARRAYS,
    reference,
    function=lambda problem, config: attention_forward,
    library=lambda problem, config: attention_cudnn.forward(problem) if config["implementation"] == "cudnn" else None,
    sizes=shared.sizes,
    constants=lambda problem, config: {
        "one_loop": shared.is_one_loop(config),
        "apart": config.get("apart", False),
    },
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"] * sizes["heads"] * cdiv(sizes["queries"], config["tile_m"]), config, sm_count
    ),
    space=Space(_axes, _CONSTRAINTS, beside=(Space(_axes_apart, _CONSTRAINTS), forward_cute.SPACE)),
    cute=forward_cute.implement,
    default=_default,
    generic=_generic,
    given=shared.inputs,
    results=shared.results,
    flops=lambda problem: 4 * shared.pairs(problem) * problem["head_dim"],
    roundings=2,
)

SPECS = (SPEC,)
