"""Attention's backward by five products: dS, which dk needs anyway, is kept in memory, and dq is computed from it.

The kernels of :mod:`tilekern.kernels.attention.backward` compute the scores twice, in seven products. Here the kernel
that owns tiles of keys also stores dS^T, rounded as its own product reads it (:data:`DKDV`), and dq = scale dS k is a
product whose left operand comes from memory (:data:`DQ`). All sums have a fixed order.

Layout of ``kept`` [lines, columns, 128, 128]: units of dS^T, 128 keys by 128 queries. A line holds the units of 128
queries of a head from the first key on. Without ``packed``, a causal mask leaves lines half empty, so the first 128
queries share a line with the last ones: theirs begin at its end (:func:`_unit`). What no query sees is not written.

A key head that many query heads read has few tiles with much work each, which leave most of the GPU idle. ``apart``,
each query head adds up parts of dk and dv of its own, in float32, and :data:`SUMS` adds up the parts of a group.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention import backward_problem as shared
from tilekern.kernels.attention import kept_cute
from tilekern.kernels.attention.apart import PARTS_FIT, by_readers
from tilekern.kernels.attention.backward import keys_gradients
from tilekern.kernels.attention.problem import SCALARS, STARTS, K, depth_of, is_one_loop, mask, pairs, sizes
from tilekern.kernels.attention.problem import inputs as attention_inputs
from tilekern.kernels.attention.tiles import (
    cut,
    edge_tile,
    head_and_tile,
    heads_abreast,
    key_tiles,
    kv_head_of,
    load_rows,
    seen,
    sequence,
    store_rows,
)
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of
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
    cdiv,
)
from tilekern.spec.targets import Target

# Queries and keys of a unit. Tiles of the kernels divide it.
_UNIT = 128
# A budget that holds the keys of all heads: tiles with most work begin first, and the last ones end together. On an
# H200 the kernel takes 0.76 of the time at 4096 tokens that it takes with the heads whose queries fit the L2 cache.
_ALL_HEADS = (1 << 31) - 1


def _unit(kept, number, first, head, row, column, queries, heads, batch, causal, packed):
    """Return (line, column) of unit ``row`` of a sequence's queries and ``column`` of its keys, for a query head.

    ``first`` is the sequence's first query among packed ones.
    """
    if ct.static_eval(packed):
        # As many lines as a sequence needs begin here before the next one's.
        return head * (kept.shape[0] // heads) + first // _UNIT + number + row, column
    line = (number * heads + head) * (kept.shape[0] // (heads * batch))
    if ct.static_eval(causal):
        last = ct.cdiv(queries, _UNIT) - 1 - row
        return line + ct.minimum(row, last), ct.where(row < last, kept.shape[1] - 1 - column, column)
    return line + row, column


def _keep(kept, gradients, place, tile, queries, heads, batch, causal, packed):
    """Store dS^T of a tile of keys and a tile of queries."""
    number, first, query_tile, head = place
    tile_n, tile_m = gradients.shape
    down, across = ct.static_eval(_UNIT // tile_n), ct.static_eval(_UNIT // tile_m)
    line, column = _unit(
        kept, number, first, head, query_tile // across, tile // down, queries, heads, batch, causal, packed
    )
    values = ct.reshape(gradients, (1, 1, tile_n, tile_m))
    ct.store(kept, (line, column, tile % down, query_tile % across), values, check_bounds=False)


@ct.kernel
def attention_dkdv_kept(
    q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, dk, dv, kept, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, apart: ConstBool, causal: ConstBool, capped: ConstBool,
    packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One tile of keys a block, or resident blocks that loop; kept as in the module.

    If ``apart``, dk and dv are float32 [batch, keys, heads, head_dim]. Other arrays: see
    :func:`tilekern.kernels.attention.backward.attention_dkdv`.
    """
    arguments = (
        q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, 0, dk, dv, _keep, kept, heads,
        kv_heads, depth, tile_m, tile_n, budget, latency, one_loop, apart, causal, False, capped, packed, precise,
    )  # fmt: skip
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
        owners = ct.static_eval(heads if apart else kv_heads)
        for item in range(ct.bid(0), batch * owners * ct.cdiv(most_keys, tile_n), ct.num_blocks(0)):
            keys_gradients(item, *arguments)
    else:
        keys_gradients(ct.bid(0), *arguments)


def _add_keys(sums, kept, k, place, tiles, shape, span, latency, causal, packed, masked):
    """Add a tile of keys to dq of a tile of queries of each head."""
    (number, first_query, first_key, head, kv_head, heads, batch), (tile, j) = place, tiles
    (tile_m, tile_n, tile_h, depth), (queries, keys) = shape, span
    hint = ct.static_eval(latency if latency > 0 else None)
    k_tile = load_rows(k, number, first_key, j, kv_head, tile_n, depth, packed, latency)
    key = j * tile_n + ct.arange(tile_n, dtype=ct.int32)[:, None]
    query = tile * tile_m + ct.arange(tile_m, dtype=ct.int32)[None, :]
    if ct.static_eval(masked):
        k_tile = cut(k_tile, key, keys, packed)
    down, across, added = ct.static_eval(_UNIT // tile_n), ct.static_eval(_UNIT // tile_m), ()
    for h in ct.static_iter(range(tile_h)):
        line, column = _unit(
            kept, number, first_query, head + h, tile // across, j // down, queries, heads, batch, causal, packed
        )
        index, size = (line, column, j % down, tile % across), (1, 1, tile_n, tile_m)
        gradients = ct.reshape(ct.load(kept, index, size, check_bounds=False, latency=hint), (tile_n, tile_m))
        if ct.static_eval(masked):
            gradients = ct.where(seen(query, key, queries, keys, 0, causal, False), gradients, 0.0)
        added = added + (ct.mma(ct.transpose(gradients), k_tile, sums[h]),)
    return added


def _queries_gradients(
    item, kept, k, query_starts, key_starts, most_queries, scale, dq, heads, kv_heads, depth, tile_m, tile_n, tile_h,
    budget, latency, causal, packed,
):  # fmt: skip
    """Compute dq of a tile of queries of ``tile_h`` heads that read the same keys."""
    batch = ct.static_eval(query_starts.shape[0] - 1 if packed else dq.shape[0])
    across = ct.static_eval(heads // tile_h)
    abreast = heads_abreast(k.shape[1], depth, ct.static_eval(max(1, heads // kv_heads // tile_h)), budget)
    row, tile = head_and_tile(item, ct.cdiv(most_queries, tile_m), batch * across, abreast, causal)
    number, head = row // across, row % across * tile_h
    kv_head = kv_head_of(head, heads, kv_heads)
    first_query, queries = sequence(query_starts, number, dq.shape[1], packed)
    first_key, keys = sequence(key_starts, number, k.shape[1], packed)
    for _ in range(ct.where(tile * tile_m < queries, 1, 0) if ct.static_eval(packed) else 1):
        place = (number, first_query, first_key, head, kv_head, heads, batch)
        shape, span = (tile_m, tile_n, tile_h, depth), (queries, keys)
        first, full, edge, stop = key_tiles(tile * tile_m, tile_m, queries, keys, 0, tile_n, causal, False)
        sums = ()
        for _ in ct.static_iter(range(tile_h)):
            sums = sums + (ct.zeros((tile_m, depth), ct.float32),)
        for j in range(full, edge):
            sums = _add_keys(sums, kept, k, place, (tile, j), shape, span, latency, causal, packed, False)
        for n in range(full - first + stop - edge):
            j = edge_tile(n, first, full, edge)
            sums = _add_keys(sums, kept, k, place, (tile, j), shape, span, latency, causal, packed, True)
        for h in ct.static_iter(range(tile_h)):
            values = (sums[h] * scale).astype(dq.dtype)
            store_rows(dq, number, first_query, queries, tile, head + h, values, packed)


@ct.kernel
def attention_dq_kept(
    kept, k, query_starts, key_starts, most_queries, scale, dq, heads: ConstInt, kv_heads: ConstInt, depth: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, tile_h: ConstInt, budget: ConstInt, latency: ConstInt, persistent: ConstBool,
    causal: ConstBool, packed: ConstBool,
):  # fmt: skip
    """One tile of queries of some heads a block, or resident blocks that loop; dq [batch, queries, heads, head_dim].

    Other arrays: see :func:`attention_dkdv_kept`.
    """
    arguments = (
        kept, k, query_starts, key_starts, most_queries, scale, dq, heads, kv_heads, depth, tile_m, tile_n, tile_h,
        budget, latency, causal, packed,
    )  # fmt: skip
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else dq.shape[0])
        items = batch * ct.static_eval(heads // tile_h) * ct.cdiv(most_queries, tile_m)
        for item in range(ct.bid(0), items, ct.num_blocks(0)):
            _queries_gradients(item, *arguments)
    else:
        _queries_gradients(ct.bid(0), *arguments)


@ct.kernel
def attention_sums(dk_parts, dv_parts, dk, dv, group: ConstInt, depth: ConstInt, tile_m: ConstInt):
    """A tile of tokens of a key head a block; parts [tokens, kv_heads, group, head_dim], dk and dv without group."""
    token, head = ct.bid(0) // dk.shape[1], ct.bid(0) % dk.shape[1]
    for parts, sums in ct.static_iter(((dk_parts, dk), (dv_parts, dv))):
        total = ct.zeros((tile_m, depth), ct.float32)
        for reader in range(group):
            part = ct.load(parts, (token, head, reader, 0), (tile_m, 1, 1, depth), padding_mode=ct.PaddingMode.ZERO)
            total = total + ct.reshape(part, (tile_m, depth))
        ct.store(sums, (token, head, 0), ct.reshape(total.astype(sums.dtype), (tile_m, 1, depth)))


# Without a kernel: sizes, inputs, references.


def room(
    batch: int, tokens: int, queries: int, keys: int, heads: int, causal: bool, packed: bool
) -> tuple[int, int, int, int]:
    """Return the shape of ``kept``; ``tokens`` counts the queries of all packed sequences."""
    rows, columns = cdiv(queries, _UNIT), cdiv(keys, _UNIT)
    if packed:
        return heads * (tokens // _UNIT + batch), columns, _UNIT, _UNIT
    if not causal:
        return batch * heads * rows, columns, _UNIT, _UNIT
    beyond = cdiv(max(0, keys - queries), _UNIT)
    return batch * heads * cdiv(rows, 2), min(2 * columns, rows + 1 + 2 * beyond), _UNIT, _UNIT


def _sizes(problem: Problem) -> dict[str, int]:
    known = sizes(problem)
    given = (problem[name] for name in ("queries", "keys", "heads", "causal", "packed"))
    lines, columns, _, _ = room(problem["batch"], known["query_tokens"], *given)
    return {**known, "lines": lines, "columns": columns, "unit": _UNIT}


def _dense(kept: Any, number: int, first: int, queries: int, keys: int, lines: int, heads: int, causal: bool) -> Any:
    """Return dS of one sequence in float64, [heads, queries, keys]; what was not written is anything.

    ``first`` is its first line in the ``lines`` of each head, ``number`` counts the entries before it.
    """
    import torch

    rows, columns = cdiv(queries, _UNIT), cdiv(keys, _UNIT)
    made = torch.zeros((heads, rows, _UNIT, columns, _UNIT), dtype=torch.float64, device=kept.device)
    starts = (number * heads + torch.arange(heads, device=kept.device)) * lines + first
    for row in range(rows):
        for column in range(columns):
            line, place = row, column
            if causal and row < rows - 1 - row:
                place = kept.shape[1] - 1 - column
            if causal:
                line = min(row, rows - 1 - row)
            if 0 <= place < kept.shape[1]:
                made[:, row, :, column] = kept[starts + line, place].double().transpose(1, 2)
    return made.reshape(heads, rows * _UNIT, columns * _UNIT)[:, :queries, :keys]


def reference(
    kept: Any, k: Any, query_starts: Any, key_starts: Any, most_queries: int, scale: float, causal: bool, packed: bool
) -> dict[str, Any]:
    """Compute dq = scale dS k in float64 from dS in the layout of the module."""
    import torch

    if packed:
        spans = [starts.tolist() for starts in (query_starts, key_starts)]
        entries = [
            (0, a // _UNIT + number, b - a, k[0, c:d])
            for number, (a, b, c, d) in enumerate(zip(spans[0], spans[0][1:], spans[1], spans[1][1:], strict=False))
        ]
        lines = spans[0][-1] // _UNIT + len(entries)
        heads = kept.shape[0] // lines
    else:
        lines = cdiv(cdiv(most_queries, _UNIT), 1 + causal)
        heads = kept.shape[0] // (lines * k.shape[0])
        entries = [(number, 0, most_queries, k[number]) for number in range(k.shape[0])]
    of_head, parts = torch.arange(heads, device=k.device), []
    for number, first, queries, own in entries:
        dense = _dense(kept, number, first, queries, len(own), lines, heads, causal and not packed)
        visible = mask(queries, len(own), 0, causal, False, k.device)
        read = own.double()[:, of_head * own.shape[1] // heads]
        parts.append(torch.einsum("hqk,khd->qhd", dense.masked_fill(~visible, 0), read) * scale)
    return {"dq": torch.cat(parts)[None] if packed else torch.stack(parts)}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Take the starts and scalars of attention's inputs; the others are normal."""
    found = attention_inputs(problem.but(windowed=False, capped=False, sinks=False), generator, device)
    return {name: found[name] for name in ("query_starts", "key_starts", "most_queries", "scale")}


# Search spaces.


def _dq_config(tile_m: int, tile_n: int, warps: int, schedule: str = "block") -> Config:
    return Config(
        implementation="tile", schedule=schedule, tile_m=tile_m, tile_n=tile_n, tile_h=1, occupancy=1,
        num_worker_warps=warps, latency=0,
    )  # fmt: skip


def _dq_axes(problem: Problem) -> dict[str, list[Value]]:
    small = problem["dtype"] == "float32" or depth_of(problem) > 256
    group = max(1, problem["heads"] // problem["kv_heads"]) if problem["heads"] % problem["kv_heads"] == 0 else 1
    return {
        "implementation": ["tile"],
        "schedule": ["block"],
        "tile_m": [16, 32] if small else [64, 128],
        "tile_n": [16, 32] if small else [64, 128],
        "tile_h": [1] if small else [h for h in (1, 2, 4) if group % h == 0],
        "occupancy": [1, 2],
        "num_worker_warps": [4, 8],
        "latency": [0],
    }


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    values = config["tile_m"] * config["tile_h"] * depth_of(problem)
    if target.has_tensor_memory:
        return bool(values * config["occupancy"] <= 128 * 512)
    most = 160 if config["occupancy"] * config["num_worker_warps"] <= 8 else 64
    return bool(values <= most * 32 * config["num_worker_warps"])


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    row = config["tile_m"] * config["tile_h"] + depth_of(problem)
    bytes_of_stages = 2 * config["tile_n"] * row * ITEM_BYTES[problem["dtype"]]
    return bool(bytes_of_stages * config["occupancy"] <= target.shared_bytes)


_DQ_SPACE = Space(
    _dq_axes,
    (
        Constraint("the sums of all heads exceed the registers of a thread", _fits_registers),
        Constraint("two stages of dS and of keys exceed a block's share of the shared memory", _fits_shared),
    ),
)


def _dq_default(problem: Problem, target: Target) -> Config:
    if problem["dtype"] == "float32" or depth_of(problem) > 256:
        return _dq_config(16, 16, 8)
    return _dq_config(64 if depth_of(problem) > 128 else 128, 64, 8)


def _sums_config(problem: Problem) -> Config:
    tile_m = min(64, 4096 // depth_of(problem))
    return Config(schedule="block", tile_m=tile_m, occupancy=4, num_worker_warps=4)


# The specs.

_PLAIN = tuple(dimension for dimension in shared.DIMENSIONS if dimension.name not in ("windowed", "capped"))
_KEPT = ("lines", "columns", "unit", "unit")


def _keys_reference(
    q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, query_starts: Any, key_starts: Any,
    most_queries: int, most_keys: int, scale: float, softcap: float, apart: bool, causal: bool, capped: bool,
    packed: bool,
) -> dict[str, Any]:  # fmt: skip
    if apart:
        k, v = by_readers(q, k, v)
    return shared.REFERENCES["keys"](
        q=q, k=k, v=v, dout=dout, lse=lse, delta=delta, query_starts=query_starts, key_starts=key_starts,
        most_queries=most_queries, most_keys=most_keys, scale=scale, softcap=softcap, window=0, causal=causal,
        windowed=False, capped=capped, packed=packed,
    )  # fmt: skip


def _keys_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    found = shared.inputs(problem.but(windowed=False), generator, device)
    del found["window"]
    return found


_KEYS = shared.space_of("keys")
_DKDV_SPACE = Space(
    _KEYS.axes,
    (
        *_KEYS.constraints,
        Constraint(
            PARTS_FIT.reason,
            lambda problem, config, target: not problem["apart"] or PARTS_FIT.holds(problem, config, target),
        ),
    ),
    beside=(kept_cute.SPACE,),
)


def _dkdv_arrays(problem: Problem) -> Arrays:
    owner, dtype = ("heads", "float32") if problem["apart"] else ("kv_heads", "dtype")
    sums = (Array(name, dtype, ("entries", "key_tokens", owner, "head_dim"), "output") for name in ("dk", "dv"))
    scalars = (scalar for scalar in SCALARS if scalar.name != "window")
    kept = Array("kept", "dtype", _KEPT, "scratch")
    return (*shared.READ, ScalarParameter("most_keys", "int32"), *scalars, *sums, kept)


DKDV = spec(
    "attention_dkdv_kept",
    "dk and dv of attention by tiles of keys, and dS for dq",
    (*_PLAIN, *(Dimension(name, "flag") for name in ("apart", "capped"))),
    _dkdv_arrays,
    _keys_reference,
    function=lambda problem, config: attention_dkdv_kept,
    sizes=_sizes,
    constants=lambda problem, config: {
        "one_loop": problem["packed"] or is_one_loop(config),
        "budget": _ALL_HEADS,
    },
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"] * sizes["heads" if sizes["apart"] else "kv_heads"] * cdiv(sizes["keys"], config["tile_n"]),
        config,
        sm_count,
    ),
    space=_DKDV_SPACE,
    cute=kept_cute.implement,
    default=lambda problem, target: shared.default(problem, target, _DKDV_SPACE, "keys"),
    generic=shared.generic,
    given=_keys_inputs,
    flops=lambda problem: 8 * pairs(problem.but(windowed=False)) * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
    roundings=2,
)

_DQ_ARRAYS: Arrays = (
    Array("kept", "dtype", _KEPT),
    K,
    *STARTS,
    ScalarParameter("most_queries", "int32"),
    ScalarParameter("scale", "float32"),
    shared.DQ,
)
DQ = spec(
    "attention_dq_kept",
    "dq of attention from dS, by tiles of queries",
    _PLAIN,
    lambda problem: _DQ_ARRAYS,
    reference,
    function=lambda problem, config: attention_dq_kept,
    sizes=_sizes,
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"] * (sizes["heads"] // config["tile_h"]) * cdiv(sizes["queries"], config["tile_m"]),
        config,
        sm_count,
    ),
    space=_DQ_SPACE,
    default=_dq_default,
    generic=lambda problem: _dq_config(*((16, 16) if depth_of(problem) > 256 else (32, 32)), 8, "persistent"),
    given=_inputs,
    flops=lambda problem: 2 * pairs(problem.but(windowed=False)) * problem["head_dim"],
    roundings=1,
)

_PARTS = ("tokens", "kv_heads", "group", "head_dim")
_SUMS_ARRAYS: Arrays = (
    *(Array(name, "float32", _PARTS) for name in ("dk_parts", "dv_parts")),
    *(Array(name, "dtype", ("tokens", "kv_heads", "head_dim"), "output") for name in ("dk", "dv")),
)
SUMS = spec(
    "attention_sums",
    "dk and dv of key heads, from the parts of the query heads that read them",
    (
        Dimension("tokens", "bucketed"),
        *(Dimension(name, "exact") for name in ("kv_heads", "group", "head_dim")),
        Dimension("dtype", "dtype"),
    ),
    lambda problem: _SUMS_ARRAYS,
    lambda dk_parts, dv_parts: {"dk": dk_parts.double().sum(2), "dv": dv_parts.double().sum(2)},
    function=lambda problem, config: attention_sums,
    sizes=lambda problem: {"depth": depth_of(problem)},
    grid=lambda sizes, config, sm_count: max(1, cdiv(sizes["tokens"], config["tile_m"]) * sizes["kv_heads"]),
    space=Space(
        lambda problem: {
            "schedule": ["block"],
            "tile_m": [8, 16, 32, 64],
            "occupancy": [2, 4, 8],
            "num_worker_warps": [4],
        },
        (
            Constraint(
                "a tile of less than 1024 or more than 8192 elements starves or spills",
                lambda problem, config, target: 1024 <= config["tile_m"] * depth_of(problem) <= 8192,
            ),
        ),
    ),
    default=lambda problem, target: _sums_config(problem),
    generic=_sums_config,
    flops=lambda problem: 2 * problem["tokens"] * problem["kv_heads"] * problem["group"] * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (DKDV, DQ, SUMS)
