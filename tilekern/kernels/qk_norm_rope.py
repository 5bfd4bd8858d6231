"""RMSNorm of every head of q and k and a rotary embedding, in one launch, out of place.

For a head x of size n, with its weight w: ``rstd = 1 / sqrt(mean(x^2) + eps)`` and ``z = w * x * rstd`` (RMSNorm:
Zhang and Sennrich 2019, arXiv:1910.07467), then with the halves (z1, z2) and the cosines c and sines s of the token's
angles ``y1 = z1 * c - z2 * s``, ``y2 = z2 * c + z1 * s`` (Su et al. 2021, arXiv:2104.09864). Everything is computed in
float32 and rounded once; Hugging Face's Qwen3 rounds the norm, its product with w and each term of the rotation. A
block loads the angles of some tokens once, and goes through the heads of q and k.

``qk_norm_rope_general`` serves other models than Qwen3:

- the norm multiplies by ``weight + offset``, as in Gemma with an offset of 1;
- only the first ``2 * pairs`` numbers of a head are rotated: the pair i is (x_i, x_i+pairs), or (x_2i, x_2i+1) if
  ``interleaved``;
- with ``norm_last`` the rotation comes before the norm, as in HunYuan, NanoChat and Llama 4.

Arrays, all with any strides: q [batch, tokens, heads, n] and k [batch, tokens, kv_heads, n], the projections' layout;
q_weight and k_weight [n]; cos and sin [1 or batch, tokens, n/2 or n]: only the first n/2 are read, since Hugging Face
stores each angle twice; in the general kernel they are [1 or batch, tokens, pairs]. All batch entries share the angles
of a single one. The form of both kernels: (cut, rest, interleaved, eps, norm_last), where ``rest`` numbers of a head
are not rotated.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.normed_rotations import EPS, SPACE, default, given, normed, read_weight
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rotations import (
    TOKENS_FIRST,
    angles_of,
    arrays_of,
    drawn_angles_twice,
    each_step,
    is_second,
    parts_of_pairs,
    read_angles,
    read_halves,
    rotated,
    spec,
    write_halves,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, load, power_of_two
from tilekern.spec import Problem, ScalarParameter


def pieces_of(pairs: int, rest: int) -> tuple[tuple[int, int], ...]:
    """Return the start and the size of each piece of a head's unrotated numbers; a tile has a piece.

    A piece whose size is a power of two that divides its start is a tile of the array itself, without a mask. Odd sizes
    are one piece.
    """
    start, end, found = 2 * pairs, 2 * pairs + rest, []
    while start < end:
        size = min(start & -start, 1 << ((end - start).bit_length() - 1))
        found.append((start, size))
        start += size
    small = len(found) > 3 or any(size < 16 for _, size in found)
    return ((2 * pairs, rest),) if small and rest else tuple(found)


def is_tile(start: int, size: int) -> bool:
    """Return whether a piece of a head is a tile of the array itself."""
    return size == power_of_two(size) and start % size == 0


def piece_of(x, axis, start, size):
    """Return the view of an array that has a piece of heads as a tile, and the tile's index along the axis."""
    if ct.static_eval(is_tile(start, size)):
        return x, ct.static_eval(start // size)
    return x.slice(axis, start, start + size), 0


def shaped(shape, width, interleaved):
    """Return the shape of a tile of numbers; the parts of pairs have a last axis of 1."""
    return shape + (width, 1) if ct.static_eval(interleaved) else shape + (width,)


def read_parts(x, place, shape, form):
    """Load a step of tokens and heads in its stored dtype: two halves or a tile of pairs, then the unrotated pieces."""
    (pairs, width, whole, bounded, tma, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        turning = x if ct.static_eval(whole) else x.slice(3, 0, 2 * pairs)
        tiles = (load(turning, place + (0,), shape + (2 * width,), bounded, 0, tma),)
    else:
        tiles = read_halves(x, place, shape, form)
    for start, size in ct.static_iter(pieces_of(pairs, rest)):
        view, at = piece_of(x, 3, start, size)
        length = ct.static_eval(power_of_two(size))
        tiles = tiles + (load(view, place + (at,), shape + (length,), bounded, 0, tma),)
    return tiles


def numbers_of(tiles, shape, form):
    """Return a step in float32: the first numbers of the pairs, the second ones, and the unrotated pieces."""
    (pairs, width, _, _, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        numbers = parts_of_pairs(ct.reshape(tiles[0].astype(ct.float32), shape + (width, 2)))
        others = tiles[1:]
    else:
        numbers = (tiles[0].astype(ct.float32), tiles[1].astype(ct.float32))
        others = tiles[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        other = others[i].astype(ct.float32)
        numbers = numbers + (ct.reshape(other, shaped(shape, other.shape[3], interleaved)),)
    return numbers


def read_weights(weight, offset, form):
    """Load a norm's factors, as numbers that broadcast over tokens and heads; without an offset (None) the weight."""
    (pairs, width, whole, bounded, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        turning = weight if ct.static_eval(whole) else weight.slice(0, 0, 2 * pairs)
        tiles = (ct.reshape(load(turning, (0,), (2 * width,), bounded, 0, False), (1, 1, 1, 2 * width)),)
    else:
        tiles = read_weight(weight, form)
    for start, size in ct.static_iter(pieces_of(pairs, rest)):
        view, place = piece_of(weight, 0, start, size)
        length = ct.static_eval(power_of_two(size))
        tiles = tiles + (ct.reshape(load(view, (place,), (length,), bounded, 0, False), (1, 1, 1, length)),)
    numbers, factors = numbers_of(tiles, (1, 1, 1), form), ()
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        factors = factors + (numbers[i] if ct.static_eval(offset is None) else numbers[i] + offset,)
    return factors


def angles(turns, at, t, tile_t, form):
    """Load the tokens' cosines and sines in float32, shaped to broadcast over heads."""
    return read_angles(turns[0], at, t, tile_t, form), read_angles(turns[1], at, t, tile_t, form)


def general_angles(turns, at, t, tile_t, form):
    """Load the tokens' cosines and sines, shaped to broadcast over heads."""
    shape = shaped((1, tile_t, 1), form[0][1], form[2])
    c = ct.reshape(read_angles(turns[0], at, t, tile_t, form), shape)
    return c, ct.reshape(read_angles(turns[1], at, t, tile_t, form), shape)


def joined(one, other, shape, width):
    """Return the tile of pairs with ``one`` as their first and ``other`` as their second numbers."""
    return ct.reshape(ct.where(is_second(), other, one), shape + (2 * width,))


def write_parts(y, numbers, place, shape, form):
    """Store one step of tokens and heads."""
    (pairs, width, whole, bounded, _, _), rest, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        turning = y if ct.static_eval(whole) else y.slice(3, 0, 2 * pairs)
        tile = joined(numbers[0], numbers[1], shape, width).astype(y.dtype)
        ct.store(turning, place + (0,), tile, check_bounds=bounded, allow_tma=False)
    else:
        write_halves(y, numbers[0], numbers[1], place, form)
    others = numbers[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        start, size = ct.static_eval(pieces_of(pairs, rest)[i])
        view, at = piece_of(y, 3, start, size)
        length = ct.static_eval(power_of_two(size))
        tile = ct.reshape(others[i], shape + (length,)).astype(y.dtype)
        ct.store(view, place + (at,), tile, check_bounds=bounded, allow_tma=False)


def turned(numbers, c, s):
    """Rotate pairs; ``-s`` rotates them back."""
    return (numbers[0] * c - numbers[1] * s, numbers[1] * c + numbers[0] * s) + numbers[2:]


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    (pairs, _, _, _, _, _), rest, _, eps, norm_last = form
    c, s = angles
    x, z = numbers_of(tiles[0], shape, form), ()
    if ct.static_eval(norm_last):
        x = turned(x, c, s)
    square = ct.sum(x[0] * x[0] + x[1] * x[1], axis=3, keepdims=True)
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        square = square + ct.sum(x[2 + i] * x[2 + i], axis=3, keepdims=True)
    rstd = ct.rsqrt(square / (2 * pairs + rest) + eps)
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        z = z + (x[i] * rstd * weights[i],)
    if ct.static_eval(not norm_last):
        z = turned(z, c, s)
    write_parts(y, z, place, shape, form)
    return sums


@ct.kernel
def qk_norm_rope_forward(
    q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt,
    tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool, unrolled: ConstBool,
    bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """q and q_out [batch, tokens, heads, 2 half], k and k_out [batch, tokens, kv_heads, 2 half], weights [2 half].

    cos and sin [1 or batch, tokens, half or 2 half].
    """
    # Its launch overlaps the end of the kernel that writes k, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    form = ((half, width, whole, bounded, tma, 0), 0, False, eps, False)
    of_q, of_k = ((q,), q_out, read_weights(q_weight, None, form)), ((k,), k_out, read_weights(k_weight, None, form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    each_step(read_parts, angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


@ct.kernel
def qk_norm_rope_general_forward(
    q, k, q_weight, k_weight, cos, sin, eps, offset, q_out, k_out, heads: ConstInt, kv_heads: ConstInt,
    pairs: ConstInt, rest: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt,
    whole: ConstBool, norm_last: ConstBool, interleaved: ConstBool, unrolled: ConstBool, bounded: ConstBool,
    tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """q and q_out [batch, tokens, heads, head_dim], k and k_out [batch, tokens, kv_heads, head_dim].

    weights [head_dim], cos and sin [1 or batch, tokens, pairs].
    """
    ct.grid_dependency_control_wait()
    launch_next(few)
    form = ((pairs, width, whole, bounded, tma, 0), rest, interleaved, eps, norm_last)
    of_q = ((q,), q_out, read_weights(q_weight, offset, form))
    of_k = ((k,), k_out, read_weights(k_weight, offset, form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    each_step(read_parts, general_angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


def cut(problem: Problem) -> dict[str, int | bool]:
    """Return the constants that cut heads into tiles.

    Raises:
        ValueError: more numbers would be rotated than a head has.
    """
    pairs, rest = problem["pairs"], problem["head_dim"] - 2 * problem["pairs"]
    if rest < 0:
        raise ValueError(f"qk_norm_rope: {pairs} pairs are more than heads of {problem['head_dim']} numbers have")
    width = power_of_two(pairs)
    fits = width == pairs and all(is_tile(*piece) for piece in pieces_of(pairs, rest))
    return {"rest": rest, "width": width, "whole": width == pairs, "bounded": not fits}


def reference_general(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float, offset: float, norm_last: bool,
    interleaved: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the formula in float64."""

    def turned(x: Any) -> Any:
        return rotated(x, cos.double(), sin.double(), interleaved=interleaved)

    def made(x: Any, weight: Any) -> Any:
        z = normed(turned(x.double()) if norm_last else x.double(), weight.double() + offset, eps)
        return z if norm_last else turned(z)

    return {"q_out": made(q, q_weight), "k_out": made(k, k_weight)}


def reference(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float) -> dict[str, Any]:
    """Return the formula in float64."""
    c, s = (angles[..., : q.shape[-1] // 2] for angles in (cos, sin))
    return reference_general(q, k, q_weight, k_weight, c, s, eps, 0.0, False, False)


PRODUCT, GIVEN = "dtype*weight_dtype*angle_dtype", given(angles_of("batch", "tokens", "head_dim/2"), EPS)
SPEC = spec(
    qk_norm_rope_forward,
    "RMSNorm of each head of q and k, then their rotary embedding",
    arrays_of(TOKENS_FIRST, GIVEN, "dtype", PRODUCT),
    reference,
    space=SPACE,
    default=default,
    angles=drawn_angles_twice,
    flops=7,
    dependent=True,
)
GENERAL_PRODUCT = "dtype*weight_dtype"
GENERAL_GIVEN = given(angles_of("batch", "tokens", "pairs"), EPS, ScalarParameter("offset", "float32", 0.75))
SIZES, FLAGS = ("pairs",), ("norm_last", "interleaved")
GENERAL = spec(
    qk_norm_rope_general_forward,
    "RMSNorm of each head of q and k and a rotation of pairs in it, in either order, weights with an offset",
    arrays_of(TOKENS_FIRST, GENERAL_GIVEN, "dtype", GENERAL_PRODUCT),
    reference_general,
    cut=cut,
    sizes=SIZES,
    flags=FLAGS,
    space=SPACE,
    default=default,
    flops=7,
    dependent=True,
)

SPECS = (SPEC, GENERAL)
