"""The gradients of qk_norm_rope: dq, dk, and the two weights' as one float32 row for each block.

With the forward's names (see ``qk_norm_rope``): the rotation is undone, ``dz1 = dy1 * c + dy2 * s`` and ``dz2 = dy2 *
c - dy1 * s``; then, with g = dz * w, ``dx = rstd * (g - x * rstd^2 * mean(g * x))``, and dw is the sum of ``dz * x *
rstd`` over all tokens and heads.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.normed_rotations import (
    SPACE_OF_GRADIENTS,
    arrays_of_gradients,
    default_of_gradients,
    each_step_with_sums,
    gradients_of,
    over_heads,
    read_weight,
    results,
)
from tilekern.kernels.families.rotations import drawn_angles_twice, read_halves, spec, write_halves
from tilekern.kernels.qk_norm_rope import CONSTANTS, GIVEN, PRODUCT, angles
from tilekern.kernels.qk_norm_rope import reference as reference_forward
from tilekern.kernels.tiles import ConstBool, ConstInt


def _pull(dx, tiles, weights, angles, sums, place, shape, form):
    """The gradients of one step of tokens and heads: dx is stored, the shares of dw are added to ``sums``."""
    (half, _, _, _, _, _), eps = form
    c, s = angles
    x1, x2 = tiles[0][0].astype(ct.float32), tiles[0][1].astype(ct.float32)
    dy1, dy2 = tiles[1][0].astype(ct.float32), tiles[1][1].astype(ct.float32)
    dz1, dz2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
    g1, g2 = dz1 * weights[0], dz2 * weights[1]
    square, product = over_heads(x1 * x1 + x2 * x2, g1 * x1 + g2 * x2)
    rstd = ct.rsqrt(square / (2 * half) + eps)
    pull = product * rstd * rstd / (2 * half)
    write_halves(dx, (g1 - x1 * pull) * rstd, (g2 - x2 * pull) * rstd, place, form)
    return sums[0] + dz1 * x1 * rstd, sums[1] + dz2 * x2 * rstd


@ct.kernel
def qk_norm_rope_backward(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, dq, dk, partial, heads: ConstInt, kv_heads: ConstInt,
    half: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool,
    unrolled: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """dq_out, q and dq [batch, tokens, heads, 2 half], dk_out, k and dk [batch, tokens, kv_heads, 2 half].

    weights [2 half], cos and sin [1 or batch, tokens, half or 2 half], partial [blocks, 4 half].
    """
    ct.grid_dependency_control_wait()
    form = ((half, width, whole, bounded, tma, 0), eps)
    of_q, of_k = ((q, dq_out), dq, read_weight(q_weight, form)), ((k, dk_out), dk, read_weight(k_weight, form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    each_step_with_sums(read_halves, angles, _pull, of_q, of_k, (cos, sin), partial, sizes, form)


def reference(dq_out: Any, dk_out: Any, **given: Any) -> dict[str, Any]:
    """The gradients of the forward's reference in float64; ``given`` are its inputs."""
    return gradients_of(reference_forward, dq_out, dk_out, **given)


_ARRAYS = arrays_of_gradients(GIVEN, PRODUCT)
SPEC = spec(
    qk_norm_rope_backward,
    "gradients of qk_norm_rope: dq, dk, and the weights' as one float32 row for each block",
    _ARRAYS,
    reference,
    constants=CONSTANTS,
    space=SPACE_OF_GRADIENTS,
    default=lambda problem, target: default_of_gradients(_ARRAYS, problem),
    angles=drawn_angles_twice,
    results=results,
    flops=16,
    dependent=True,
    cute=True,
)

SPECS = (SPEC,)
