"""RMSNorm of every head of q and k and the rotary embedding after it, in one launch, out of place.

For a head x of size n = 2h, with its weight w: ``rstd = 1 / sqrt(mean(x^2) + eps)`` and ``z = w * x * rstd`` (RMSNorm:
Zhang and Sennrich 2019, arXiv:1910.07467), then with the halves (z1, z2) and the cosines c and sines s of the token's
angles ``y1 = z1 * c - z2 * s``, ``y2 = z2 * c + z1 * s`` (Su et al. 2021, arXiv:2104.09864). All of it is computed in
float32 and rounded once, where Hugging Face's Qwen3 rounds the norm, its product with w and each term of the rotation.
A block takes some tokens, loads their angles once, and goes through the heads of q and k.
Arrays, all with any strides: q [batch, tokens, heads, 2h] and k [batch, tokens, kv_heads, 2h], as the projections
leave them; q_weight and k_weight [2h]; cos and sin [1 or batch, tokens, h or 2h], of which the first h are read:
Hugging Face stores each angle twice. The angles of a single batch entry are shared by all.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.normed_rotations import EPS, SPACE, default, given, normed, read_weight
from tilekern.kernels.families.rotations import (
    TOKENS_FIRST,
    angles_of,
    arrays_of,
    drawn_angles_twice,
    each_step,
    read_angles,
    read_halves,
    rotated,
    spec,
    write_halves,
)
from tilekern.kernels.tiles import ConstBool, ConstInt


def angles(turns, at, t, tile_t, form):
    """The tokens' cosines and sines in float32, shaped to broadcast over heads."""
    return read_angles(turns[0], at, t, tile_t, form), read_angles(turns[1], at, t, tile_t, form)


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    """Normalise and rotate one step of tokens and heads, and store it."""
    (half, _, _, _, _, _), eps = form
    c, s = angles
    x1, x2 = tiles[0][0].astype(ct.float32), tiles[0][1].astype(ct.float32)
    rstd = ct.rsqrt(ct.sum(x1 * x1 + x2 * x2, axis=3, keepdims=True) / (2 * half) + eps)
    z1, z2 = x1 * rstd * weights[0], x2 * rstd * weights[1]
    write_halves(y, z1 * c - z2 * s, z2 * c + z1 * s, place, form)
    return sums


@ct.kernel
def qk_norm_rope_forward(
    q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt,
    tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool, unrolled: ConstBool,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """q and q_out [batch, tokens, heads, 2 half], k and k_out [batch, tokens, kv_heads, 2 half], weights [2 half].

    cos and sin [1 or batch, tokens, half or 2 half].
    """
    # Its launch overlaps the end of the kernel that writes k.
    ct.grid_dependency_control_wait()
    form = ((half, width, whole, bounded, tma, 0), eps)
    of_q, of_k = ((q,), q_out, read_weight(q_weight, form)), ((k,), k_out, read_weight(k_weight, form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    each_step(read_halves, angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


def reference(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float) -> dict[str, Any]:
    """The formula in float64."""
    c, s = (angles[..., : q.shape[-1] // 2].double() for angles in (cos, sin))
    return {
        "q_out": rotated(normed(q.double(), q_weight.double(), eps), c, s),
        "k_out": rotated(normed(k.double(), k_weight.double(), eps), c, s),
    }


PRODUCT, GIVEN = "dtype*weight_dtype*angle_dtype", given(angles_of("batch", "tokens", "head_dim/2"), EPS)
CONSTANTS = (
    "heads", "kv_heads", "half", "tile_t", "tile_h", "tile_hk", "width", "whole", "unrolled", "bounded", "tma",
)  # fmt: skip
SPEC = spec(
    qk_norm_rope_forward,
    "RMSNorm of each head of q and k, then their rotary embedding",
    arrays_of(TOKENS_FIRST, GIVEN, "dtype", PRODUCT),
    reference,
    constants=CONSTANTS,
    space=SPACE,
    default=default,
    angles=drawn_angles_twice,
    flops=7,
    dependent=True,
)

SPECS = (SPEC,)
