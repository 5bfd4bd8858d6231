"""qk_norm_rope as other families than Qwen3's have it: norms of other weights, parts of heads, pairs, the norm last.

As in ``qk_norm_rope`` each head of q and k is normalised and rotated in float32, in one launch, out of place, and
rounded once. Here

- the norm multiplies by ``weight + offset``, as Gemma's does with an offset of 1;
- the first ``2 * pairs`` numbers of a head are rotated, and the others are not: the pair i is (x_i, x_i+pairs), or
  (x_2i, x_2i+1) where ``interleaved``;
- the rotation comes before the norm where ``norm_last``, as HunYuan, NanoChat and Llama 4 have it.

Arrays, all with any strides: q [batch, tokens, heads, head_dim], k [batch, tokens, kv_heads, head_dim]; q_weight and
k_weight [head_dim]; cos and sin [1 or batch, tokens, pairs]. The angles of a single batch entry are shared by all.
The form of both kernels: (cut, rest, interleaved, eps, norm_last), where ``rest`` numbers of a head do not turn.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.normed_rotations import EPS, SPACE, default, given, normed, read_weight
from tilekern.kernels.families.rotations import (
    TOKENS_FIRST,
    angles_of,
    arrays_of,
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
    """The first and the count of a head's numbers that do not turn, in pieces that tiles are of.

    A piece that a power of two of its size lies before is a tile of the array itself, whose rows need no mask. Odd
    sizes are one piece.
    """
    start, end, found = 2 * pairs, 2 * pairs + rest, []
    while start < end:
        size = min(start & -start, 1 << ((end - start).bit_length() - 1))
        found.append((start, size))
        start += size
    small = len(found) > 3 or any(size < 16 for _, size in found)
    return ((2 * pairs, rest),) if small and rest else tuple(found)


def is_tile(start: int, size: int) -> bool:
    """Whether a piece of a head is a tile of the array itself."""
    return size == power_of_two(size) and start % size == 0


def piece_of(x, axis, start, size):
    """The view of an array that has a piece of heads as a tile, and the tile's index along the axis."""
    if ct.static_eval(is_tile(start, size)):
        return x, ct.static_eval(start // size)
    return x.slice(axis, start, start + size), 0


def shaped(shape, width, interleaved):
    """The shape of a tile of numbers: what pairs are taken apart to has a last axis of 1."""
    return shape + (width, 1) if ct.static_eval(interleaved) else shape + (width,)


def read_parts(x, place, shape, form):
    """One step of tokens and heads, in the array's dtype: two halves or a tile of pairs, and what does not turn."""
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
    """A step in float32: the first numbers of the pairs, the second ones, and what does not turn."""
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
    """A norm's factors, as numbers that broadcast over tokens and heads."""
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
        factors = factors + (numbers[i] + offset,)
    return factors


def angles(turns, at, t, tile_t, form):
    """The tokens' cosines and sines, as numbers that broadcast over heads."""
    shape = shaped((1, tile_t, 1), form[0][1], form[2])
    c = ct.reshape(read_angles(turns[0], at, t, tile_t, form), shape)
    return c, ct.reshape(read_angles(turns[1], at, t, tile_t, form), shape)


def joined(one, other, shape, width):
    """The tile of pairs of which ``one`` and ``other`` are the first and the second numbers."""
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
    """Numbers of which the pairs are rotated; by ``-s`` they are rotated back."""
    return (numbers[0] * c - numbers[1] * s, numbers[1] * c + numbers[0] * s) + numbers[2:]


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    """Normalise and rotate one step of tokens and heads, and store it."""
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
def qk_norm_rope_general_forward(
    q, k, q_weight, k_weight, cos, sin, eps, offset, q_out, k_out, heads: ConstInt, kv_heads: ConstInt,
    pairs: ConstInt, rest: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt,
    whole: ConstBool, norm_last: ConstBool, interleaved: ConstBool, unrolled: ConstBool, bounded: ConstBool,
    tma: ConstBool,
):  # fmt: skip
    """q and q_out [batch, tokens, heads, head_dim], k and k_out [batch, tokens, kv_heads, head_dim].

    weights [head_dim], cos and sin [1 or batch, tokens, pairs].
    """
    ct.grid_dependency_control_wait()
    form = ((pairs, width, whole, bounded, tma, 0), rest, interleaved, eps, norm_last)
    of_q = ((q,), q_out, read_weights(q_weight, offset, form))
    of_k = ((k,), k_out, read_weights(k_weight, offset, form))
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, False)
    each_step(read_parts, angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


def cut(problem: Problem) -> dict[str, int | bool]:
    """The constants that say how heads are cut into tiles.

    Raises:
        ValueError: more numbers would turn than a head has.
    """
    pairs, rest = problem["pairs"], problem["head_dim"] - 2 * problem["pairs"]
    if rest < 0:
        raise ValueError(f"qk_norm_rope: {pairs} pairs are more than heads of {problem['head_dim']} numbers have")
    width = power_of_two(pairs)
    fits = width == pairs and all(is_tile(*piece) for piece in pieces_of(pairs, rest))
    return {"rest": rest, "width": width, "whole": width == pairs, "bounded": not fits}


def reference(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float, offset: float, norm_last: bool,
    interleaved: bool,
) -> dict[str, Any]:  # fmt: skip
    """The formula in float64."""

    def turned(x: Any) -> Any:
        return rotated(x, cos.double(), sin.double(), interleaved=interleaved)

    def made(x: Any, weight: Any) -> Any:
        z = normed(turned(x.double()) if norm_last else x.double(), weight.double() + offset, eps)
        return z if norm_last else turned(z)

    return {"q_out": made(q, q_weight), "k_out": made(k, k_weight)}


PRODUCT = "dtype*weight_dtype"
GIVEN = given(angles_of("batch", "tokens", "pairs"), EPS, ScalarParameter("offset", "float32", 0.75))
SIZES, FLAGS = ("pairs",), ("norm_last", "interleaved")
CONSTANTS = (
    "heads", "kv_heads", "pairs", "rest", "tile_t", "tile_h", "tile_hk", "width", "whole", "norm_last", "interleaved",
    "unrolled", "bounded", "tma",
)  # fmt: skip
SPEC = spec(
    qk_norm_rope_general_forward,
    "RMSNorm of each head of q and k and a rotation of pairs in it, in either order, weights with an offset",
    arrays_of(TOKENS_FIRST, GIVEN, "dtype", PRODUCT),
    reference,
    constants=CONSTANTS,
    cut=cut,
    sizes=SIZES,
    flags=FLAGS,
    space=SPACE,
    default=default,
    flops=7,
    dependent=True,
)

SPECS = (SPEC,)
