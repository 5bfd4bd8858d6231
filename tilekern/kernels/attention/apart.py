"""Attention's backward through a window where key heads have several readers: each query head has parts of dk and dv.

A key head that many query heads read has few tiles with much work each, which leave most of the GPU idle. Here each
query head adds up parts of its own, in float32, and :data:`tilekern.kernels.attention.kept.SUMS` adds up the parts of a
group. dS is not kept: a window leaves few scores to compute again.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.attention import backward_problem as shared
from tilekern.kernels.attention.backward import keep_nothing, keys_gradients
from tilekern.kernels.attention.problem import SCALARS, is_one_loop, pairs, sizes
from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of
from tilekern.spec import Array, Constraint, ScalarParameter, Space, cdiv


@ct.kernel
def attention_dkdv_apart(
    q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, window, dk, dv, heads: ConstInt,
    kv_heads: ConstInt, depth: ConstInt, tile_m: ConstInt, tile_n: ConstInt, budget: ConstInt, latency: ConstInt,
    persistent: ConstBool, one_loop: ConstBool, causal: ConstBool, windowed: ConstBool, capped: ConstBool,
    packed: ConstBool, precise: ConstBool,
):  # fmt: skip
    """One tile of keys of a query head a block, or resident blocks that loop; dk and dv [batch, keys, heads, head_dim].

    Other arrays: see :func:`tilekern.kernels.attention.backward.attention_dkdv`.
    """
    arguments = (
        q, k, v, dout, lse, delta, query_starts, key_starts, most_keys, scale, softcap, window, dk, dv, keep_nothing,
        None, heads, kv_heads, depth, tile_m, tile_n, budget, latency, one_loop, True, causal, windowed, capped, packed,
        precise,
    )  # fmt: skip
    if ct.static_eval(persistent):
        batch = ct.static_eval(query_starts.shape[0] - 1 if packed else q.shape[0])
        for item in range(ct.bid(0), batch * heads * ct.cdiv(most_keys, tile_n), ct.num_blocks(0)):
            keys_gradients(item, *arguments)
    else:
        keys_gradients(ct.bid(0), *arguments)


def by_readers(q: Any, *of_keys: Any) -> Any:
    """Return arrays [batch, keys, kv_heads, head_dim] with the head that each query head of q reads."""
    import torch

    read = torch.arange(q.shape[2], device=q.device) * of_keys[0].shape[2] // q.shape[2]
    return [x[:, :, read] for x in of_keys]


@functools.wraps(shared.gradients)
def _reference(**given: Any) -> dict[str, Any]:
    """Compute the parts in float64: dk and dv where each query head has a key head of its own."""
    k, v = by_readers(*(given[name] for name in ("q", "k", "v")))
    return shared.REFERENCES["keys"](**given | {"k": k, "v": v})


PARTS_FIT = Constraint(
    "float32 parts of 128 keys, on their way to memory, do not fit the shared memory beside tiles of tcgen05",
    lambda problem, config, target: config["tile_n"] <= 64 or not target.has_tensor_memory,
)
_KEYS = shared.space_of("keys")
_SPACE = Space(_KEYS.axes, (*_KEYS.constraints, PARTS_FIT))
_ARRAYS: Arrays = (
    *shared.READ,
    ScalarParameter("most_keys", "int32"),
    *SCALARS,
    *(Array(name, "float32", ("entries", "key_tokens", "heads", "head_dim"), "output") for name in ("dk", "dv")),
)
DKDV = spec(
    "attention_dkdv_apart",
    "parts of dk and dv of attention for each query head, by tiles of keys",
    shared.DIMENSIONS,
    lambda problem: _ARRAYS,
    _reference,
    function=lambda problem, config: attention_dkdv_apart,
    sizes=sizes,
    constants=lambda problem, config: {"one_loop": problem["packed"] or is_one_loop(config)},
    grid=lambda sizes, config, sm_count: grid_of(
        sizes["batch"] * sizes["heads"] * cdiv(sizes["keys"], config["tile_n"]), config, sm_count
    ),
    space=_SPACE,
    default=lambda problem, target: shared.default(problem, target, _SPACE, "keys"),
    generic=shared.generic,
    given=shared.inputs,
    flops=lambda problem: 8 * pairs(problem) * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"],
    roundings=2,
)

SPECS = (DKDV,)
