"""The gradients of qk_norm_rope: dq, dk, and the two weights' gradients as one float32 row for each block.

With the forward's names (see ``qk_norm_rope``): the norm is of u, which is x, or x rotated if ``norm_last``. Its
gradient dz is dy, rotated back unless ``norm_last``: ``dz1 = dy1 * c + dy2 * s`` and ``dz2 = dy2 * c - dy1 * s``. Then,
with g = dz * (weight + offset), ``du = rstd * (g - u * rstd^2 * mean(g * u))``, which is dx, rotated back if
``norm_last``; dw is the sum of ``dz * u * rstd`` over all tokens and heads.

The kernel for Qwen3's form has its own body, which CuTe DSL compiles too: for 8192 tokens of 32 and 8 heads of 128 CuTe
DSL takes 73.5 us on an H200, and the best config of cuTile 77.4 us.
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
from tilekern.kernels.families.rotations import (
    drawn_angles_twice,
    each_step,
    read_halves,
    spec,
    write_halves,
)
from tilekern.kernels.qk_norm_rope import (
    FLAGS,
    GENERAL_GIVEN,
    GENERAL_PRODUCT,
    GIVEN,
    PRODUCT,
    SIZES,
    angles,
    cut,
    general_angles,
    joined,
    numbers_of,
    pieces_of,
    read_parts,
    read_weights,
    turned,
    write_parts,
)
from tilekern.kernels.qk_norm_rope import reference as reference_forward
from tilekern.kernels.qk_norm_rope import reference_general as reference_general_forward
from tilekern.kernels.tiles import ConstBool, ConstInt, power_of_two


def _pull(dx, tiles, weights, angles, sums, place, shape, form):
    """Store dx of a step of tokens and heads, and add the shares of dw to ``sums``."""
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


def _pull_general(dx, tiles, weights, angles, sums, place, shape, form):
    """Store dx of a step of tokens and heads, and add the shares of dw to ``sums``."""
    (pairs, _, _, _, _, _), rest, _, eps, norm_last = form
    c, s = angles
    u, dz = numbers_of(tiles[0], shape, form), numbers_of(tiles[1], shape, form)
    if ct.static_eval(norm_last):
        u = turned(u, c, s)
    else:
        dz = turned(dz, c, -s)
    g, du, shares = (dz[0] * weights[0], dz[1] * weights[1]), (), ()
    square, product = over_heads(u[0] * u[0] + u[1] * u[1], g[0] * u[0] + g[1] * u[1])
    for i in ct.static_iter(range(2, 2 + len(pieces_of(pairs, rest)))):
        g = g + (dz[i] * weights[i],)
        more = over_heads(u[i] * u[i], g[i] * u[i])
        square, product = square + more[0], product + more[1]
    rstd = ct.rsqrt(square / (2 * pairs + rest) + eps)
    pull = product * rstd * rstd / (2 * pairs + rest)
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        du = du + ((g[i] - u[i] * pull) * rstd,)
        shares = shares + (dz[i] * u[i] * rstd,)
    if ct.static_eval(norm_last):
        du = turned(du, c, -s)
    write_parts(dx, du, place, shape, form)
    return _plus(sums, shares, shape, form)


def _plus(sums, shares, shape, form):
    """Add a step's shares to the sums; pairs stay in one tile, as loaded."""
    (pairs, width, _, _, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        found, others = (sums[0] + joined(shares[0], shares[1], shape, width),), shares[2:]
    else:
        found, others = (sums[0] + shares[0], sums[1] + shares[1]), shares[2:]
    so_far = sums[1:] if ct.static_eval(interleaved) else sums[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        found = found + (so_far[i] + ct.reshape(others[i], so_far[i].shape),)
    return found


def _zeros(shape, form):
    (pairs, width, _, _, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        sums = (ct.zeros(shape + (2 * width,), ct.float32),)
    else:
        zeros = ct.zeros(shape + (width,), ct.float32)
        sums = (zeros, zeros)
    for _, size in ct.static_iter(pieces_of(pairs, rest)):
        length = ct.static_eval(power_of_two(size))
        sums = sums + (ct.zeros(shape + (length,), ct.float32),)
    return sums


def _store_piece(partial, sums, start, size):
    """Store the sum over tokens and heads as a piece of this block's row."""
    row = ct.reshape(ct.sum(ct.sum(sums, axis=2), axis=1), (1, sums.shape[3]))
    ct.store(partial.slice(1, start, start + size), (ct.bid(0), 0), row)


def _store_sums(partial, sums, first, form):
    """Store one weight's gradient as a part of this block's row."""
    (pairs, _, _, _, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        _store_piece(partial, sums[0], first, 2 * pairs)
        others = sums[1:]
    else:
        _store_piece(partial, sums[0], first, pairs)
        _store_piece(partial, sums[1], first + pairs, pairs)
        others = sums[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        start, size = ct.static_eval(pieces_of(pairs, rest)[i])
        _store_piece(partial, others[i], first + start, size)


@ct.kernel
def qk_norm_rope_general_backward(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, offset, dq, dk, partial, heads: ConstInt,
    kv_heads: ConstInt, pairs: ConstInt, rest: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt,
    width: ConstInt, whole: ConstBool, norm_last: ConstBool, interleaved: ConstBool, unrolled: ConstBool,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """dq_out, q and dq [batch, tokens, heads, head_dim], dk_out, k and dk [batch, tokens, kv_heads, head_dim].

    weights [head_dim], cos and sin [1 or batch, tokens, pairs], partial [blocks, 2 * head_dim].
    """
    ct.grid_dependency_control_wait()
    form = ((pairs, width, whole, bounded, tma, 0), rest, interleaved, eps, norm_last)
    of_q = ((q, dq_out), dq, read_weights(q_weight, offset, form))
    of_k = ((k, dk_out), dk, read_weights(k_weight, offset, form))
    sums = (_zeros((1, tile_t, tile_h), form), _zeros((1, tile_t, tile_hk), form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    q_sums, k_sums = each_step(read_parts, general_angles, _pull_general, of_q, of_k, (cos, sin), sums, sizes, form)
    _store_sums(partial, q_sums, 0, form)
    _store_sums(partial, k_sums, 2 * pairs + rest, form)


def reference(dq_out: Any, dk_out: Any, **given: Any) -> dict[str, Any]:
    """Return the gradients of the forward's reference in float64; ``given`` are its inputs."""
    return gradients_of(reference_forward, dq_out, dk_out, **given)


def reference_general(dq_out: Any, dk_out: Any, norm_last: bool, interleaved: bool, **given: Any) -> dict[str, Any]:
    """Return the gradients of the general forward's reference in float64; ``given`` are its inputs."""
    return gradients_of(
        reference_general_forward, dq_out, dk_out, norm_last=norm_last, interleaved=interleaved, **given
    )


_ARRAYS, _GENERAL_ARRAYS = arrays_of_gradients(GIVEN, PRODUCT), arrays_of_gradients(GENERAL_GIVEN, GENERAL_PRODUCT)
SPEC = spec(
    qk_norm_rope_backward,
    "gradients of qk_norm_rope: dq, dk, and the weights' as one float32 row for each block",
    _ARRAYS,
    reference,
    space=SPACE_OF_GRADIENTS,
    default=lambda problem, target: default_of_gradients(_ARRAYS, problem),
    angles=drawn_angles_twice,
    results=results,
    flops=16,
    dependent=True,
    cute=True,
)
GENERAL = spec(
    qk_norm_rope_general_backward,
    "gradients of qk_norm_rope_general: dq, dk, and the weights' as one float32 row for each block",
    _GENERAL_ARRAYS,
    reference_general,
    cut=cut,
    sizes=SIZES,
    flags=FLAGS,
    space=SPACE_OF_GRADIENTS,
    default=lambda problem, target: default_of_gradients(_GENERAL_ARRAYS, problem),
    results=results,
    flops=16,
    dependent=True,
)

SPECS = (SPEC, GENERAL)
