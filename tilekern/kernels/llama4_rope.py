"""Rotary position embedding of adjacent pairs of q and k, like Llama 4 (Su et al. 2021, arXiv:2104.09864).

The pair (x_2i, x_2i+1) of a head is a complex number. It is multiplied by the complex number c + is of its token and
index: ``y_2i = x_2i * c - x_2i+1 * s`` and ``y_2i+1 = x_2i+1 * c + x_2i * s``, in float32, rounded once. The backward
multiplies by the conjugate. One launch turns q and k: a block takes some tokens, loads their angles once, and goes
through the heads.
Arrays, all with any strides: q [batch, tokens, heads, head_dim] and k [batch, tokens, kv_heads, head_dim]; angles
[1 or batch, tokens, head_dim], which are c and s in turn. All batch entries share the angles of a single one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rotations import (
    GRADIENTS,
    TOKENS_FIRST,
    arrays_of,
    default_of,
    drawn_angles,
    each_step,
    is_second,
    parts_of_pairs,
    rotated,
    space_of,
    spec,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Problem
from tilekern.spec.targets import Target


def _read(x, place, shape, form):
    width, bounded = form[:2]
    return load(x, place + (0,), shape + (width,), bounded, 0, False)


def _angles(turns, at, t, tile_t, form):
    """Load the tokens' cosines and sines in float32, shaped to broadcast over heads."""
    width, bounded, inverse = form
    tile = load(turns[0], (at, t, 0), (1, tile_t, width), bounded, 0, False).astype(ct.float32)
    c, s = parts_of_pairs(ct.reshape(tile, (1, tile_t, 1, width // 2, 2)))
    if ct.static_eval(inverse):
        s = -s
    return c, s


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    width, bounded = form[:2]
    c, s = angles
    one, other = parts_of_pairs(ct.reshape(tiles[0].astype(ct.float32), shape + (width // 2, 2)))
    turned = ct.where(is_second(), other * c + one * s, one * c - other * s)
    tile = ct.reshape(turned, shape + (width,)).astype(y.dtype)
    ct.store(y, place + (0,), tile, check_bounds=bounded, allow_tma=False)
    return sums


@ct.kernel
def llama4_rope(
    q, k, angles, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, tile_t: ConstInt, tile_h: ConstInt,
    tile_hk: ConstInt, width: ConstInt, inverse: ConstBool, unrolled: ConstBool, bounded: ConstBool, few: ConstBool,
):  # fmt: skip
    """q and q_out [batch, tokens, heads, head_dim], k and k_out [batch, tokens, kv_heads, head_dim].

    angles [1 or batch, tokens, head_dim].
    """
    launch_next(few)
    form, sizes = (width, bounded, inverse), (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    of_q, of_k = ((q,), q_out, ()), ((k,), k_out, ())
    each_step(_read, _angles, _turn, of_q, of_k, (angles,), ((), ()), sizes, form)


def _cut(problem: Problem) -> dict[str, int | bool]:
    width = power_of_two(problem["head_dim"])
    return {"width": width, "bounded": width != problem["head_dim"]}


def _default(problem: Problem, target: Target) -> Config:
    # Wide numbers spill. If heads are not whole vectors, elements are loaded one by one, which makes the code long.
    wide = ITEM_BYTES[problem["dtype"]] > 2 or problem["head_dim"] % 16
    return default_of(problem, "block", 512 if wide else 1024, 4)


def _generic(problem: Problem) -> Config:
    # The compiler unrolls a loop over smaller steps, which takes 6 s to compile for one head of 192 a step.
    tile_h = min(power_of_two(problem["heads"]), max(1, 1024 // power_of_two(problem["head_dim"])))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=8)


def _in_turn(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    angles = drawn_angles(problem, generator, device)
    return {"angles": torch.stack((angles["cos"], angles["sin"]), -1).flatten(-2)}


def reference(q: Any, k: Any, angles: Any, inverse: bool) -> dict[str, Any]:
    """Return the rotation, or its transpose, in float64."""
    c, s = angles.double()[..., ::2], angles.double()[..., 1::2]
    turned = (rotated(x.double(), c, -s if inverse else s, interleaved=True) for x in (q, k))
    return dict(zip(("q_out", "k_out"), turned, strict=True))


_ANGLES = (Array("angles", "angle_dtype", ("batch", "tokens", "2*head_dim/2")),)
SPEC = spec(
    llama4_rope,
    "rotary embedding of adjacent pairs of q and k, or its inverse",
    arrays_of(TOKENS_FIRST, _ANGLES, "dtype", "dtype"),
    reference,
    cut=_cut,
    flags=("inverse",),
    space=space_of(),
    default=_default,
    generic=_generic,
    angles=_in_turn,
    flops=3,
)  # fmt: skip
# The backward calls this: the conjugate turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=arrays_of(TOKENS_FIRST, _ANGLES, "dtype", "dtype", GRADIENTS))

SPECS = (SPEC,)
