"""Rotary position embedding of q and k by three positions, like Qwen2-VL (Wang et al. 2024, arXiv:2409.12191).

A token has a position in time, in height and in width, and each frequency uses the angle of one of them: the first
``time`` frequencies use time, the next ``height`` use height, all others use width. The halves of a head turn by these
angles, or back if ``inverse``, like in ``rope``; only one of the three angles of a frequency is read. Arrays, all with
any strides: q [batch, heads, tokens, 2h], k [batch, kv_heads, tokens, 2h]; cos and sin [3, 1 or batch, tokens, 2h];
only the first h are read. All batch entries share the angles of a single one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rotations import (
    GRADIENTS,
    HEADS_FIRST,
    angles_of,
    arrays_of,
    default_of,
    drawn_angles_twice,
    each_step,
    read_halves,
    rotated,
    space_of,
    spec,
    write_halves,
)
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Config, Problem, ScalarParameter
from tilekern.spec.targets import Target


def _of_positions(array, at, t, tile_t, form):
    """Load the tokens' cosines or sines in float32 by their frequency's position, shaped to broadcast over heads.

    Every index is inside: the last token repeats past the end, and the frequencies are stored twice.
    """
    (_, width, _, _, _, _), time, height, _ = form
    frequency = ct.reshape(ct.arange(width, dtype=ct.int32), (1, 1, 1, width))
    position = ct.where(frequency < time, 0, ct.where(frequency < time + height, 1, 2))
    token = ct.minimum(t * tile_t + ct.arange(tile_t, dtype=ct.int32), array.shape[2] - 1)
    place = (position, at, ct.reshape(token, (1, 1, tile_t, 1)), frequency)
    return ct.gather(array, place, check_bounds=False).astype(ct.float32)


def _angles(turns, at, t, tile_t, form):
    return _of_positions(turns[0], at, t, tile_t, form), _of_positions(turns[1], at, t, tile_t, form)


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    c, s = angles
    (_, _, _, _, tma, _), _, _, inverse = form
    x1, x2 = tiles[0][0].astype(ct.float32), tiles[0][1].astype(ct.float32)
    if ct.static_eval(inverse):
        s = -s
    write_halves(y, x1 * c - x2 * s, x2 * c + x1 * s, place, form, tma)
    return sums


@ct.kernel
def qwen2vl_mrope(
    q, k, cos, sin, time, height, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt, tile_t: ConstInt,
    tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool, unrolled: ConstBool, bounded: ConstBool,
    tma: ConstBool, inverse: ConstBool, few: ConstBool,
):  # fmt: skip
    """q and q_out [batch, heads, tokens, 2 half], k and k_out [batch, kv_heads, tokens, 2 half].

    cos and sin [3, 1 or batch, tokens, 2 half].
    """
    launch_next(few)
    form = ((half, width, whole, bounded, tma, 0), time, height, inverse)
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, True)
    of_q, of_k = ((q,), q_out, ()), ((k,), k_out, ())
    each_step(read_halves, _angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


def _default(problem: Problem, target: Target) -> Config:
    # Each angle of a thread has its own address in registers: some of 8 angles spill, or some of 4 with four blocks.
    return default_of(problem, "block", 512, 2, tma=False)


def _of_three(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw angles of three positions, and the sections of models."""
    angles = drawn_angles_twice(problem.but(batch=3 * problem["batch"]), generator, device)
    half = problem["head_dim"] // 2
    sections = {"time": half - 2 * (3 * half // 8), "height": 3 * half // 8}
    return {name: x.unflatten(0, (3, -1)) for name, x in angles.items()} | sections


def reference(q: Any, k: Any, cos: Any, sin: Any, time: int, height: int, inverse: bool) -> dict[str, Any]:
    """Return the rotation, or its transpose, in float64."""
    import torch

    half = q.shape[-1] // 2

    def chosen(angles: Any) -> Any:
        parts = angles[..., :half].double().split((time, height, half - time - height), -1)
        return torch.cat([part[position] for position, part in enumerate(parts)], -1)

    c, s = chosen(cos), chosen(sin)
    turned = (rotated(x.double().transpose(1, 2), c, -s if inverse else s).transpose(1, 2) for x in (q, k))
    return dict(zip(("q_out", "k_out"), turned, strict=True))


_PRODUCT = "dtype*angle_dtype"
_GIVEN = (
    *angles_of("positions", "batch", "tokens", "2*angles/2"),
    ScalarParameter("time", "int32"),
    ScalarParameter("height", "int32"),
)


SPEC = spec(
    qwen2vl_mrope,
    "rotary embedding of q and k by three positions, or its inverse",
    arrays_of(HEADS_FIRST, _GIVEN, "dtype", _PRODUCT),
    reference,
    inverse=arrays_of(HEADS_FIRST, _GIVEN, _PRODUCT, "dtype"),
    flags=("inverse",),
    space=space_of(tma=[False]),
    default=_default,
    angles=_of_three,
    flops=3,
)
# The backward calls this: the rotation's transpose turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=arrays_of(HEADS_FIRST, _GIVEN, _PRODUCT, "dtype", GRADIENTS))

SPECS = (SPEC,)
