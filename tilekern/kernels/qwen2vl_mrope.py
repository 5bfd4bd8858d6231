"""Rotary position embedding of q and k by three positions, as Qwen2-VL has it (Wang et al. 2024, arXiv:2409.12191).

A token has a position in time, in height and in width, and each frequency the angle of one of them: the first ``time``
frequencies that of the first, the next ``height`` that of the second, all others that of the third. The halves of a
head turn by these angles, or back by them where ``inverse``, as in ``rope``; the loop and the space are
``qk_norm_rope``'s, and the bytes ``rope``'s: of the three angles of a frequency one is read.
Arrays, all with any strides: q [batch, heads, tokens, 2h], k [batch, kv_heads, tokens, 2h]; cos and sin
[3, 1 or batch, tokens, 2h], of which the first h are read. The angles of a single batch entry are shared by all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn_angles
from tilekern.kernels.llama4_rope import DIMENSIONS
from tilekern.kernels.qk_norm_rope import (
    SIZED,
    constants,
    default_tiles,
    elements,
    generic,
    grid,
    read_heads,
    rotated,
    tile_axes,
    write_heads,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, hints, promoted
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    outputs_of,
    parameters_of,
)
from tilekern.targets import Target


def _angles(array, b, t, time, height, tile_t, width):
    """The tokens' cosines or sines in float32, each of its frequency's position, shaped to broadcast over heads.

    Every place is inside: behind the last token is the last, and behind the frequencies is their repetition.
    """
    frequency = ct.reshape(ct.arange(width, dtype=ct.int32), (1, 1, 1, width))
    position = ct.where(frequency < time, 0, ct.where(frequency < time + height, 1, 2))
    token = ct.minimum(t * tile_t + ct.arange(tile_t, dtype=ct.int32), array.shape[2] - 1)
    place = (position, b, ct.reshape(token, (1, 1, tile_t, 1)), frequency)
    return ct.gather(array, place, check_bounds=False).astype(ct.float32)


def _turn(y, tiles, c, s, b, h, t, half, whole, bounded):
    """Rotate one step of heads and tokens, and store it."""
    x1, x2 = tiles[0].astype(ct.float32), tiles[1].astype(ct.float32)
    write_heads(y, x1 * c - x2 * s, x2 * c + x1 * s, b, h, t, half, whole, bounded)


@ct.kernel
def qwen2vl_mrope(
    q, k, cos, sin, time, height, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt, tile_t: ConstInt,
    tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool, unrolled: ConstBool, bounded: ConstBool,
    tma: ConstBool, inverse: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry; unrolled, every load is issued before its first use.

    q and q_out [batch, heads, tokens, 2 half], k and k_out [batch, kv_heads, tokens, 2 half].
    cos and sin [3, 1 or batch, tokens, 2 half].
    """
    across = ct.cdiv(q.shape[2], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[1] - 1)
        # The functions of qk_norm_rope, whose arrays have tokens before heads.
        if ct.static_eval(unrolled):
            q_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (read_heads(q, b, h, t, half, tile_h, tile_t, width, whole, bounded, tma),)
            k_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (read_heads(k, b, h, t, half, tile_hk, tile_t, width, whole, bounded, tma),)
        c = _angles(cos, at, t, time, height, tile_t, width)
        s = _angles(sin, at, t, time, height, tile_t, width)
        if ct.static_eval(inverse):
            s = -s
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                _turn(q_out, q_tiles[h], c, s, b, h, t, half, whole, bounded)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                _turn(k_out, k_tiles[h], c, s, b, h, t, half, whole, bounded)
        else:
            for h in range(ct.cdiv(q.shape[1], tile_h)):
                tiles = read_heads(q, b, h, t, half, tile_h, tile_t, width, whole, bounded, tma)
                _turn(q_out, tiles, c, s, b, h, t, half, whole, bounded)
            for h in range(ct.cdiv(k.shape[1], tile_hk)):
                tiles = read_heads(k, b, h, t, half, tile_hk, tile_t, width, whole, bounded, tma)
                _turn(k_out, tiles, c, s, b, h, t, half, whole, bounded)


def _arrays(inverse: bool, q: str, k: str, q_out: str, k_out: str) -> tuple[Array | ScalarParameter, ...]:
    """The arrays of one direction; the inverse reads gradients of the other's results."""
    given, made = ("dtype*angle_dtype", "dtype") if inverse else ("dtype", "dtype*angle_dtype")
    of_q, of_k = (("batch", heads, "tokens", "head_dim") for heads in ("heads", "kv_heads"))
    of_angles = ("positions", "batch", "tokens", "2*angles/2")
    return (
        Array(q, given, of_q),
        Array(k, given, of_k),
        Array("cos", "angle_dtype", of_angles),
        Array("sin", "angle_dtype", of_angles),
        ScalarParameter("time", "int32"),
        ScalarParameter("height", "int32"),
        Array(q_out, made, of_q, "output"),
        Array(k_out, made, of_k, "output"),
    )


def _named(inverse: bool) -> tuple[Array | ScalarParameter, ...]:
    """The arrays of one direction under the device function's names."""
    return _arrays(inverse, "q", "k", "q_out", "k_out")


def _dtypes(problem: Problem) -> tuple[str, str]:
    """The dtype of what is read and that of what is written."""
    dtypes = problem["dtype"], promoted(problem["dtype"], problem["angle_dtype"])
    return dtypes[::-1] if problem["inverse"] else dtypes


def _implement(problem: Problem, config: Config) -> Implementation:
    item_bytes = ITEM_BYTES[_dtypes(problem)[0]]
    return Implementation(
        function=qwen2vl_mrope,
        parameters=parameters_of(_named(problem["inverse"]), DIMENSIONS, problem),
        constants=(*constants(problem, config, item_bytes), ("inverse", problem["inverse"])),
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
    )


def _default(problem: Problem, target: Target) -> Config:
    # Each angle of a thread has an address of its own, in registers: of 8 angles, or of 4 where four blocks must fit on
    # an SM, some spill.
    tile_t, tile_h = default_tiles(problem, 512)
    return Config(schedule="block", tile_t=tile_t, tile_h=tile_h, occupancy=2, num_worker_warps=0, tma=False)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """q and k as projections leave them, tokens before heads in memory; the sections of models."""
    import torch

    def random(heads: str) -> Any:
        shape = (problem["batch"], problem["tokens"], problem[heads], problem["head_dim"])
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(getattr(torch, _dtypes(problem)[0])).transpose(1, 2)

    half = problem["head_dim"] // 2
    angles = drawn_angles(problem.but(batch=3 * problem["batch"]), half, generator, device)
    twice = {name: torch.cat((x, x), -1).unflatten(0, (3, -1)) for name, x in angles.items()}
    sections = {"time": half - 2 * (3 * half // 8), "height": 3 * half // 8}
    return {"q": random("heads"), "k": random("kv_heads"), **twice, **sections}


def reference(q: Any, k: Any, cos: Any, sin: Any, time: int, height: int, inverse: bool) -> dict[str, Any]:
    """The rotation, or its transpose, in float64."""
    import torch

    half = q.shape[-1] // 2

    def chosen(angles: Any) -> Any:
        parts = angles[..., :half].double().split((time, height, half - time - height), -1)
        return torch.cat([part[position] for position, part in enumerate(parts)], -1)

    c, s = chosen(cos), chosen(sin)
    turned = (rotated(x.double().transpose(1, 2), c, -s if inverse else s).transpose(1, 2) for x in (q, k))
    return dict(zip(("q_out", "k_out"), turned, strict=True))


def _bytes(problem: Problem) -> int:
    turned = elements(problem) * sum(ITEM_BYTES[dtype] for dtype in _dtypes(problem))
    return int(turned + problem["tokens"] * problem["head_dim"] * ITEM_BYTES[problem["angle_dtype"]])


SPEC = KernelSpec(
    name="qwen2vl_mrope",
    summary="rotary embedding of q and k by three positions, or its inverse",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(
        lambda problem: {
            "schedule": ["block", "persistent"],
            **tile_axes(problem),
            "occupancy": [2, 4, 8],
            "num_worker_warps": [0, 8],
            "tma": [False],
        },
        (SIZED,),
    ),
    implement=_implement,
    default=_default,
    generic=generic,
    inputs=_inputs,
    outputs=lambda problem, blocks: outputs_of(_named(problem["inverse"]))(problem, blocks),
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: 3 * elements(problem),
    result_dtype=lambda problem: _dtypes(problem)[1],
    arrays=_named(inverse=False),
)
# As the backward calls it: the rotation's transpose turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=_arrays(True, "dq_out", "dk_out", "dq", "dk"))

SPECS = (SPEC,)
