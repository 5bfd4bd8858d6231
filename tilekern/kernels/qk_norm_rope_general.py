"""qk_norm_rope as other families than Qwen3's have it: norms of other weights, parts of heads, pairs, the norm last.

As in ``qk_norm_rope`` each head of q and k is normalised and rotated in float32, in one launch, out of place, and
rounded once. Here

- the norm multiplies by ``weight + offset``, as Gemma's does with an offset of 1;
- the first ``2 * pairs`` numbers of a head are rotated, and the others are not: the pair i is (x_i, x_i+pairs), or
  (x_2i, x_2i+1) where ``interleaved``;
- the rotation comes before the norm where ``norm_last``, as HunYuan, NanoChat and Llama 4 have it.

Arrays, all with any strides: q [batch, tokens, heads, head_dim], k [batch, tokens, kv_heads, head_dim]; q_weight and
k_weight [head_dim]; cos and sin [1 or batch, tokens, pairs]. The angles of a single batch entry are shared by all.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn, drawn_angles
from tilekern.kernels.llama4_rope import is_second, parts_of_pairs
from tilekern.kernels.qk_norm_rope import (
    SIZED,
    K,
    Q,
    default_tiles,
    elements,
    grid,
    is_unrolled,
    normed,
    read_angles,
    read_heads,
    read_weight,
    rotated,
    tile_axes,
    tile_of_kv_heads,
    write_heads,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, hints, load, power_of_two, promoted
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    outputs_of,
)
from tilekern.targets import Target


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


def shaped(tile_t, tile_h, width, interleaved):
    """The shape of a tile of numbers: what pairs are taken apart to has a last axis of 1."""
    return ct.static_eval((1, tile_t, tile_h, width, 1) if interleaved else (1, tile_t, tile_h, width))


def read_parts(x, b, t, h, tile_t, tile_h, form):
    """One step of tokens and heads, in the array's dtype: two halves or a tile of pairs, and what does not turn."""
    pairs, rest, width, whole, interleaved, bounded, tma = form
    if ct.static_eval(interleaved):
        turning = x if ct.static_eval(whole) else x.slice(3, 0, 2 * pairs)
        tiles = (load(turning, (b, t, h, 0), (1, tile_t, tile_h, 2 * width), bounded, 0, tma),)
    else:
        tiles = read_heads(x, b, t, h, pairs, tile_t, tile_h, width, whole, bounded, tma)
    for start, size in ct.static_iter(pieces_of(pairs, rest)):
        view, place = piece_of(x, 3, start, size)
        shape = ct.static_eval((1, tile_t, tile_h, power_of_two(size)))
        tiles = tiles + (load(view, (b, t, h, place), shape, bounded, 0, tma),)
    return tiles


def numbers_of(tiles, tile_t, tile_h, form):
    """A step in float32: the first numbers of the pairs, the second ones, and what does not turn."""
    pairs, rest, width, _, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        numbers = parts_of_pairs(ct.reshape(tiles[0].astype(ct.float32), (1, tile_t, tile_h, width, 2)))
        others = tiles[1:]
    else:
        numbers = (tiles[0].astype(ct.float32), tiles[1].astype(ct.float32))
        others = tiles[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        other = others[i].astype(ct.float32)
        numbers = numbers + (ct.reshape(other, shaped(tile_t, tile_h, other.shape[3], interleaved)),)
    return numbers


def read_weights(weight, offset, form):
    """A norm's factors, as numbers that broadcast over tokens and heads."""
    pairs, rest, width, whole, interleaved, bounded, _ = form
    if ct.static_eval(interleaved):
        turning = weight if ct.static_eval(whole) else weight.slice(0, 0, 2 * pairs)
        tiles = (ct.reshape(load(turning, (0,), (2 * width,), bounded, 0, False), (1, 1, 1, 2 * width)),)
    else:
        tiles = read_weight(weight, pairs, width, whole, bounded)
    for start, size in ct.static_iter(pieces_of(pairs, rest)):
        view, place = piece_of(weight, 0, start, size)
        length = ct.static_eval(power_of_two(size))
        tiles = tiles + (ct.reshape(load(view, (place,), (length,), bounded, 0, False), (1, 1, 1, length)),)
    numbers, found = numbers_of(tiles, 1, 1, form), ()
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        found = found + (numbers[i] + offset,)
    return found


def read_turns(array, at, t, tile_t, form):
    """The tokens' cosines or sines, as numbers that broadcast over heads."""
    pairs, _, width, whole, interleaved, bounded, _ = form
    tile = read_angles(array, at, t, pairs, tile_t, width, whole, bounded)
    return ct.reshape(tile, shaped(tile_t, 1, width, interleaved))


def joined(one, other, tile_t, tile_h, width):
    """The tile of pairs of which ``one`` and ``other`` are the first and the second numbers."""
    return ct.reshape(ct.where(is_second(), other, one), (1, tile_t, tile_h, 2 * width))


def write_parts(y, numbers, b, t, h, tile_t, tile_h, form):
    """Store one step of tokens and heads."""
    pairs, rest, width, whole, interleaved, bounded, _ = form
    if ct.static_eval(interleaved):
        turning = y if ct.static_eval(whole) else y.slice(3, 0, 2 * pairs)
        tile = joined(numbers[0], numbers[1], tile_t, tile_h, width).astype(y.dtype)
        ct.store(turning, (b, t, h, 0), tile, check_bounds=bounded, allow_tma=False)
    else:
        write_heads(y, numbers[0], numbers[1], b, t, h, pairs, whole, bounded)
    others = numbers[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        start, size = ct.static_eval(pieces_of(pairs, rest)[i])
        view, place = piece_of(y, 3, start, size)
        tile = ct.reshape(others[i], ct.static_eval((1, tile_t, tile_h, power_of_two(size)))).astype(y.dtype)
        ct.store(view, (b, t, h, place), tile, check_bounds=bounded, allow_tma=False)


def turned(numbers, c, s):
    """Numbers of which the pairs are rotated; by ``-s`` they are rotated back."""
    return (numbers[0] * c - numbers[1] * s, numbers[1] * c + numbers[0] * s) + numbers[2:]


def _turn(y, tiles, weights, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last):
    """Normalise and rotate one step of tokens and heads, and store it."""
    pairs, rest = form[0], form[1]
    x, z = numbers_of(tiles, tile_t, tile_h, form), ()
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
    write_parts(y, z, b, t, h, tile_t, tile_h, form)


@ct.kernel
def qk_norm_rope_general_forward(
    q, k, q_weight, k_weight, cos, sin, eps, offset, q_out, k_out, heads: ConstInt, kv_heads: ConstInt,
    pairs: ConstInt, rest: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt,
    whole: ConstBool, norm_last: ConstBool, interleaved: ConstBool, unrolled: ConstBool, bounded: ConstBool,
    tma: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry; unrolled, every load is issued before its first use.

    q and q_out [batch, tokens, heads, head_dim], k and k_out [batch, tokens, kv_heads, head_dim].
    weights [head_dim], cos and sin [1 or batch, tokens, pairs].
    """
    ct.grid_dependency_control_wait()
    form = (pairs, rest, width, whole, interleaved, bounded, tma)
    q_weights, k_weights = read_weights(q_weight, offset, form), read_weights(k_weight, offset, form)
    across = ct.cdiv(q.shape[1], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (read_parts(q, b, t, h, tile_t, tile_h, form),)
            k_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (read_parts(k, b, t, h, tile_t, tile_hk, form),)
        c, s = read_turns(cos, at, t, tile_t, form), read_turns(sin, at, t, tile_t, form)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                _turn(q_out, q_tiles[h], q_weights, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                _turn(k_out, k_tiles[h], k_weights, c, s, eps, b, t, h, tile_t, tile_hk, form, norm_last)
        else:
            for h in range(ct.cdiv(q.shape[2], tile_h)):
                tiles = read_parts(q, b, t, h, tile_t, tile_h, form)
                _turn(q_out, tiles, q_weights, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last)
            for h in range(ct.cdiv(k.shape[2], tile_hk)):
                tiles = read_parts(k, b, t, h, tile_t, tile_hk, form)
                _turn(k_out, tiles, k_weights, c, s, eps, b, t, h, tile_t, tile_hk, form, norm_last)


DIMENSIONS = (
    Dimension("tokens", "bucketed"),
    Dimension("batch", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("pairs", "exact"),
    Dimension("norm_last", "flag"),
    Dimension("interleaved", "flag"),
    Dimension("dtype", "dtype"),
    Dimension("weight_dtype", "dtype"),
    Dimension("angle_dtype", "dtype"),
)
PRODUCT, _ANGLES = "dtype*weight_dtype", ("batch", "tokens", "pairs")
# The inputs of the forward, which the backward reads again.
GIVEN = (
    Array("q", "dtype", Q),
    Array("k", "dtype", K),
    Array("q_weight", "weight_dtype", ("head_dim",)),
    Array("k_weight", "weight_dtype", ("head_dim",)),
    Array("cos", "angle_dtype", _ANGLES),
    Array("sin", "angle_dtype", _ANGLES),
    ScalarParameter("eps", "float32"),
    ScalarParameter("offset", "float32"),
)
_ARRAYS = (*GIVEN, Array("q_out", PRODUCT, Q, "output"), Array("k_out", PRODUCT, K, "output"))


def out_dtype(problem: Problem) -> str:
    """The dtype that torch promotes q and its weight to."""
    return promoted(problem["dtype"], problem["weight_dtype"])


def constants(problem: Problem, config: Config, item_bytes: int) -> tuple[tuple[str, int | bool], ...]:
    """The constants of both kernels; a block reads ``item_bytes`` for each element of q and k.

    Raises:
        ValueError: more numbers would turn than a head has.
    """
    pairs, tile_t, tile_h = problem["pairs"], config["tile_t"], config["tile_h"]
    rest = problem["head_dim"] - 2 * pairs
    if rest < 0:
        raise ValueError(f"qk_norm_rope: {pairs} pairs are more than heads of {problem['head_dim']} numbers have")
    tile_hk, width = tile_of_kv_heads(problem, config), power_of_two(pairs)
    whole = width == pairs and all(is_tile(*piece) for piece in pieces_of(pairs, rest))
    tails = problem["heads"] % tile_h or problem["kv_heads"] % tile_hk
    return (
        ("heads", problem["heads"]),
        ("kv_heads", problem["kv_heads"]),
        ("pairs", pairs),
        ("rest", rest),
        ("tile_t", tile_t),
        ("tile_h", tile_h),
        ("tile_hk", tile_hk),
        ("width", width),
        ("whole", width == pairs),
        ("norm_last", problem["norm_last"]),
        ("interleaved", problem["interleaved"]),
        ("unrolled", is_unrolled(problem, config, item_bytes)),
        ("bounded", bool(tile_t > 1 or tails or not whole)),
        ("tma", config["tma"]),
    )


def _implement(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=qk_norm_rope_general_forward,
        parameters=SPEC.parameters(problem),
        constants=constants(problem, config, ITEM_BYTES[problem["dtype"]]),
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _default(problem: Problem, target: Target) -> Config:
    tile_t, tile_h = default_tiles(problem, 1024)
    return Config(schedule="block", tile_t=tile_t, tile_h=tile_h, occupancy=4, num_worker_warps=0, tma=False)


def generic(problem: Problem) -> Config:
    """One token and few heads a tile, of the one schedule that both directions have."""
    tile_h = min(power_of_two(problem["heads"]), max(1, 256 // power_of_two(problem["head_dim"] // 2)))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=0, tma=False)


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Random q and k, weights near 1, and angles of any size."""
    angles = drawn_angles(problem, problem["pairs"], generator, device)
    return drawn(GIVEN[:4], problem, generator, device) | angles | {"eps": 1e-6, "offset": 0.75}


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


def small_bytes(problem: Problem) -> int:
    """Bytes of the angles and of the two weights."""
    angles = 2 * problem["tokens"] * problem["pairs"] * ITEM_BYTES[problem["angle_dtype"]]
    return int(angles + 2 * problem["head_dim"] * ITEM_BYTES[problem["weight_dtype"]])


SPEC = KernelSpec(
    name="qk_norm_rope_general_forward",
    summary="RMSNorm of each head of q and k and a rotation of pairs in it, in either order, weights with an offset",
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
    inputs=inputs,
    outputs=outputs_of(_ARRAYS),
    reference=reference,
    bytes_moved=lambda problem: (
        elements(problem) * (ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[out_dtype(problem)]) + small_bytes(problem)
    ),
    flops=lambda problem: 7 * elements(problem),
    result_dtype=out_dtype,
    arrays=_ARRAYS,
)

SPECS = (SPEC,)
