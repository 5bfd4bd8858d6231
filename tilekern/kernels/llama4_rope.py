"""Rotary position embedding of adjacent pairs of q and k, as Llama 4 has it (Su et al. 2021, arXiv:2104.09864).

The pair (x_2i, x_2i+1) of a head is a complex number, which is multiplied by the complex number c + is of its token and
place: ``y_2i = x_2i * c - x_2i+1 * s`` and ``y_2i+1 = x_2i+1 * c + x_2i * s``, in float32, rounded once. The backward
multiplies by the conjugate. One launch turns q and k: a block takes some tokens, loads their angles once, and goes
through the heads.
Arrays, all with any strides: q [batch, tokens, heads, head_dim] and k [batch, tokens, kv_heads, head_dim]; angles
[1 or batch, tokens, head_dim], which are c and s in turn. The angles of a single batch entry are shared by all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn, drawn_angles
from tilekern.kernels.qk_norm_rope import (
    SIZED,
    K,
    Q,
    default_tiles,
    elements,
    grid,
    is_unrolled,
    rotated,
    tile_axes,
    tile_of_kv_heads,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, hints, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    outputs_of,
    parameters_of,
)
from tilekern.targets import Target


def is_second():
    """Which of a pair is its second number."""
    return ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 1, 1, 2)) == 1


def parts_of_pairs(pairs):
    """The first and the second numbers of pairs, with a last axis of 1.

    They are sums of which one term is 0: a thread that has loaded 16 bytes has whole pairs. Tiles that are extracted
    and concatenated would go through shared memory.
    """
    one = ct.sum(ct.where(is_second(), 0.0, pairs), axis=4, keepdims=True)
    return one, ct.sum(ct.where(is_second(), pairs, 0.0), axis=4, keepdims=True)


def _read(x, b, t, h, tile_t, tile_h, width, bounded):
    """One step of tokens and heads, in the array's dtype."""
    return load(x, (b, t, h, 0), (1, tile_t, tile_h, width), bounded, 0, False)


def _write(y, tile, c, s, b, t, h, tile_t, tile_h, width, bounded):
    """Rotate one step of tokens and heads, and store it."""
    one, other = parts_of_pairs(ct.reshape(tile.astype(ct.float32), (1, tile_t, tile_h, width // 2, 2)))
    turned = ct.where(is_second(), other * c + one * s, one * c - other * s)
    ct.store(
        y, (b, t, h, 0), ct.reshape(turned, (1, tile_t, tile_h, width)).astype(y.dtype), check_bounds=bounded,
        allow_tma=False,
    )  # fmt: skip


@ct.kernel
def llama4_rope(
    q, k, angles, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, tile_t: ConstInt, tile_h: ConstInt,
    tile_hk: ConstInt, width: ConstInt, inverse: ConstBool, unrolled: ConstBool, bounded: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry; unrolled, every load is issued before its first use.

    q and q_out [batch, tokens, heads, head_dim], k and k_out [batch, tokens, kv_heads, head_dim].
    angles [1 or batch, tokens, head_dim].
    """
    across = ct.cdiv(q.shape[1], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, angles.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (_read(q, b, t, h, tile_t, tile_h, width, bounded),)
            k_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (_read(k, b, t, h, tile_t, tile_hk, width, bounded),)
        turns = load(angles, (at, t, 0), (1, tile_t, width), bounded, 0, False).astype(ct.float32)
        c, s = parts_of_pairs(ct.reshape(turns, (1, tile_t, 1, width // 2, 2)))
        if ct.static_eval(inverse):
            s = -s
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                _write(q_out, q_tiles[h], c, s, b, t, h, tile_t, tile_h, width, bounded)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                _write(k_out, k_tiles[h], c, s, b, t, h, tile_t, tile_hk, width, bounded)
        else:
            for h in range(ct.cdiv(q.shape[2], tile_h)):
                tile = _read(q, b, t, h, tile_t, tile_h, width, bounded)
                _write(q_out, tile, c, s, b, t, h, tile_t, tile_h, width, bounded)
            for h in range(ct.cdiv(k.shape[2], tile_hk)):
                tile = _read(k, b, t, h, tile_t, tile_hk, width, bounded)
                _write(k_out, tile, c, s, b, t, h, tile_t, tile_hk, width, bounded)


DIMENSIONS = (
    Dimension("tokens", "bucketed"),
    Dimension("batch", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("inverse", "flag"),
    Dimension("dtype", "dtype"),
    Dimension("angle_dtype", "dtype"),
)


def _arrays(q: str, k: str, q_out: str, k_out: str) -> tuple[Array, ...]:
    """The arrays of one direction."""
    return (
        Array(q, "dtype", Q),
        Array(k, "dtype", K),
        Array("angles", "angle_dtype", ("batch", "tokens", "2*head_dim/2")),
        Array(q_out, "dtype", Q, "output"),
        Array(k_out, "dtype", K, "output"),
    )


_ARRAYS = _arrays("q", "k", "q_out", "k_out")


def _implement(problem: Problem, config: Config) -> Implementation:
    size, tile_t, tile_h = problem["head_dim"], config["tile_t"], config["tile_h"]
    tile_hk, width = tile_of_kv_heads(problem, config), power_of_two(size)
    bounded = bool(tile_t > 1 or width != size or problem["heads"] % tile_h or problem["kv_heads"] % tile_hk)
    constants = (
        ("heads", problem["heads"]),
        ("kv_heads", problem["kv_heads"]),
        ("tile_t", tile_t),
        ("tile_h", tile_h),
        ("tile_hk", tile_hk),
        ("width", width),
        ("inverse", problem["inverse"]),
        ("unrolled", is_unrolled(problem, config, ITEM_BYTES[problem["dtype"]])),
        ("bounded", bounded),
    )
    return Implementation(
        function=llama4_rope,
        parameters=parameters_of(_ARRAYS, DIMENSIONS, problem),
        constants=constants,
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
    )


def _default(problem: Problem, target: Target) -> Config:
    # Wide numbers spill, and where no vector ends with a head each load of a single element makes the code longer.
    wide = ITEM_BYTES[problem["dtype"]] > 2 or problem["head_dim"] % 16
    tile_t, tile_h = default_tiles(problem, 512 if wide else 1024)
    return Config(schedule="block", tile_t=tile_t, tile_h=tile_h, occupancy=4, num_worker_warps=0)


def _generic(problem: Problem) -> Config:
    # The compiler unrolls a loop over smaller steps, into code that takes it 6 s for one head of 192 a step.
    tile_h = min(power_of_two(problem["heads"]), max(1, 1024 // power_of_two(problem["head_dim"])))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=8)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Random q and k, and angles of any size."""
    import torch

    angles = drawn_angles(problem, problem["head_dim"] // 2, generator, device)
    in_turn = torch.stack((angles["cos"], angles["sin"]), -1).flatten(-2)
    return drawn(_ARRAYS[:2], problem, generator, device) | {"angles": in_turn}


def reference(q: Any, k: Any, angles: Any, inverse: bool) -> dict[str, Any]:
    """The rotation, or its transpose, in float64."""
    c, s = angles.double()[..., ::2], angles.double()[..., 1::2]
    turned = (rotated(x.double(), c, -s if inverse else s, interleaved=True) for x in (q, k))
    return dict(zip(("q_out", "k_out"), turned, strict=True))


def _bytes(problem: Problem) -> int:
    turned = 2 * elements(problem) * ITEM_BYTES[problem["dtype"]]
    return int(turned + problem["tokens"] * problem["head_dim"] * ITEM_BYTES[problem["angle_dtype"]])


SPEC = KernelSpec(
    name="llama4_rope",
    summary="rotary embedding of adjacent pairs of q and k, or its inverse",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(
        lambda problem: {
            "schedule": ["block", "persistent"],
            **tile_axes(problem),
            "occupancy": [2, 4, 8],
            "num_worker_warps": [0, 8],
        },
        (SIZED,),
    ),
    implement=_implement,
    default=_default,
    generic=_generic,
    inputs=_inputs,
    outputs=outputs_of(_ARRAYS),
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: 3 * elements(problem),
    result_dtype=lambda problem: str(problem["dtype"]),
    arrays=_ARRAYS,
)
# As the backward calls it: the conjugate turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=_arrays("dq_out", "dk_out", "dq", "dk"))

SPECS = (SPEC,)
