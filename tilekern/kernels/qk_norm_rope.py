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

from tilekern.kernels.common.arrays import drawn, drawn_angles
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, hints, load, power_of_two, promoted
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
    outputs_of,
)
from tilekern.targets import Target


def halves(array, axis, half, whole):
    """Views of the two halves of a head and the tile index of each along the last axis.

    Where the half is a power of two both are tiles of the array itself; else they are slices.
    """
    if ct.static_eval(whole):
        return array, array, 0, 1
    return array.slice(axis, 0, half), array.slice(axis, half, 2 * half), 0, 0


def read_heads(x, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma):
    """Both halves of one step of tokens and heads, in the array's dtype."""
    xa, xb, ia, ib = halves(x, 3, half, whole)
    shape = (1, tile_t, tile_h, width)
    return load(xa, (b, t, h, ia), shape, bounded, 0, tma), load(xb, (b, t, h, ib), shape, bounded, 0, tma)


def write_heads(y, y1, y2, b, t, h, half, whole, bounded):
    """Store both halves of one step of tokens and heads."""
    ya, yb, ia, ib = halves(y, 3, half, whole)
    ct.store(ya, (b, t, h, ia), y1.astype(y.dtype), check_bounds=bounded, allow_tma=False)
    ct.store(yb, (b, t, h, ib), y2.astype(y.dtype), check_bounds=bounded, allow_tma=False)


def read_weight(weight, half, width, whole, bounded):
    """Both halves of a weight in float32, shaped to broadcast over tokens and heads."""
    wa, wb, ia, ib = halves(weight, 0, half, whole)
    one = load(wa, (ia,), (width,), bounded, 0, False).astype(ct.float32)
    other = load(wb, (ib,), (width,), bounded, 0, False).astype(ct.float32)
    return ct.reshape(one, (1, 1, 1, width)), ct.reshape(other, (1, 1, 1, width))


def read_angles(array, b, t, half, tile_t, width, whole, bounded):
    """The tokens' cosines or sines in float32, shaped to broadcast over heads."""
    first = array if ct.static_eval(whole) else array.slice(2, 0, half)
    tile = load(first, (b, t, 0), (1, tile_t, width), bounded, 0, False).astype(ct.float32)
    return ct.reshape(tile, (1, tile_t, 1, width))


def _turn(y, tiles, weights, c, s, eps, b, t, h, half, whole, bounded):
    """Normalise and rotate one step of tokens and heads, and store it."""
    x1, x2 = tiles[0].astype(ct.float32), tiles[1].astype(ct.float32)
    rstd = ct.rsqrt(ct.sum(x1 * x1 + x2 * x2, axis=3, keepdims=True) / (2 * half) + eps)
    z1, z2 = x1 * rstd * weights[0], x2 * rstd * weights[1]
    write_heads(y, z1 * c - z2 * s, z2 * c + z1 * s, b, t, h, half, whole, bounded)


@ct.kernel
def qk_norm_rope_forward(
    q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt,
    tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool, unrolled: ConstBool,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry; unrolled, every load is issued before its first use.

    q and q_out [batch, tokens, heads, 2 half], k and k_out [batch, tokens, kv_heads, 2 half], weights [2 half].
    cos and sin [1 or batch, tokens, half or 2 half].
    """
    # Its launch overlaps the end of the kernel that writes k.
    ct.grid_dependency_control_wait()
    q_weights = read_weight(q_weight, half, width, whole, bounded)
    k_weights = read_weight(k_weight, half, width, whole, bounded)
    across = ct.cdiv(q.shape[1], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (read_heads(q, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma),)
            k_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (read_heads(k, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma),)
        c = read_angles(cos, at, t, half, tile_t, width, whole, bounded)
        s = read_angles(sin, at, t, half, tile_t, width, whole, bounded)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                _turn(q_out, q_tiles[h], q_weights, c, s, eps, b, t, h, half, whole, bounded)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                _turn(k_out, k_tiles[h], k_weights, c, s, eps, b, t, h, half, whole, bounded)
        else:
            for h in range(ct.cdiv(q.shape[2], tile_h)):
                tiles = read_heads(q, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma)
                _turn(q_out, tiles, q_weights, c, s, eps, b, t, h, half, whole, bounded)
            for h in range(ct.cdiv(k.shape[2], tile_hk)):
                tiles = read_heads(k, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma)
                _turn(k_out, tiles, k_weights, c, s, eps, b, t, h, half, whole, bounded)


DIMENSIONS = (
    Dimension("tokens", "bucketed"),
    Dimension("batch", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("weight_dtype", "dtype"),
    Dimension("angle_dtype", "dtype"),
)
Q, K = ("batch", "tokens", "heads", "head_dim"), ("batch", "tokens", "kv_heads", "head_dim")
PRODUCT, _ANGLES = "dtype*weight_dtype*angle_dtype", ("batch", "tokens", "head_dim/2")
# The inputs of the forward, which the backward reads again.
GIVEN = (
    Array("q", "dtype", Q),
    Array("k", "dtype", K),
    Array("q_weight", "weight_dtype", ("head_dim",)),
    Array("k_weight", "weight_dtype", ("head_dim",)),
    Array("cos", "angle_dtype", _ANGLES),
    Array("sin", "angle_dtype", _ANGLES),
    ScalarParameter("eps", "float32"),
)
_ARRAYS = (*GIVEN, Array("q_out", PRODUCT, Q, "output"), Array("k_out", PRODUCT, K, "output"))


def out_dtype(problem: Problem) -> str:
    """The dtype that torch promotes q, its weight and the angles to."""
    return promoted(promoted(problem["dtype"], problem["weight_dtype"]), problem["angle_dtype"])


def step_elements(problem: Problem, config: Config) -> int:
    """Elements of each half that a block holds in one tile of q."""
    return int(config["tile_t"] * config["tile_h"] * power_of_two(problem["head_dim"] // 2))


def tile_of_kv_heads(problem: Problem, config: Config) -> int:
    """Heads of k in one tile."""
    return int(min(config["tile_h"], power_of_two(problem["kv_heads"])))


def held_elements(problem: Problem, config: Config) -> int:
    """Elements of both halves of q and k that a block holds at once."""
    tile_h, tile_hk = config["tile_h"], tile_of_kv_heads(problem, config)
    heads = cdiv(problem["heads"], tile_h) * tile_h + cdiv(problem["kv_heads"], tile_hk) * tile_hk
    return int(2 * heads * config["tile_t"] * power_of_two(problem["head_dim"] // 2))


# Steps of heads that are written out, and the bytes of them that the blocks on an SM, four or more, hold at once, as of
# rope.
_MOST_STEPS, _MOST_BYTES = 8, 80 << 10


def is_unrolled(problem: Problem, config: Config, item_bytes: int) -> bool:
    """Whether all steps of heads are written out, so that each load is issued before its first use; else they loop.

    ``item_bytes`` are those that a block reads for each element of q and k. One block an SM, as the generic config has
    it, loops: its loads of single elements are long code.
    """
    steps = cdiv(problem["heads"], config["tile_h"]) + cdiv(problem["kv_heads"], tile_of_kv_heads(problem, config))
    held = held_elements(problem, config) * item_bytes * max(4, config["occupancy"])
    return bool(config["occupancy"] > 1 and steps <= _MOST_STEPS and held <= _MOST_BYTES)


SIZED = Constraint(
    "a step of fewer than 512 elements of each half starves the memory system, more than 2048 take minutes to compile; "
    "several tokens are for steps whose heads are all in one tile",
    lambda problem, config, target: (
        step_elements(problem, config) <= max(2048, power_of_two(problem["head_dim"] // 2))
        and (config["tile_t"] == 1 or config["tile_h"] == power_of_two(problem["heads"]))
        and (step_elements(problem, config) >= 512 or config["tile_t"] == 4)
    ),
)


def tile_axes(problem: Problem) -> dict[str, list[Value]]:
    """Tokens and heads of a tile of q: some of the heads of one token, or all of them of one to four tokens."""
    most = power_of_two(problem["heads"])
    return {"tile_t": [1, 2, 4], "tile_h": sorted({min(most, n) for n in (2, 4, 8, 16, 32, 64)})}


def constants(problem: Problem, config: Config, item_bytes: int) -> tuple[tuple[str, int | bool], ...]:
    """The constants of both kernels; ``item_bytes`` as of :func:`is_unrolled`."""
    half, tile_t, tile_h = problem["head_dim"] // 2, config["tile_t"], config["tile_h"]
    tile_hk, width = tile_of_kv_heads(problem, config), power_of_two(half)
    bounded = bool(tile_t > 1 or width != half or problem["heads"] % tile_h or problem["kv_heads"] % tile_hk)
    return (
        ("heads", problem["heads"]),
        ("kv_heads", problem["kv_heads"]),
        ("half", half),
        ("tile_t", tile_t),
        ("tile_h", tile_h),
        ("tile_hk", tile_hk),
        ("width", width),
        ("whole", width == half),
        ("unrolled", is_unrolled(problem, config, item_bytes)),
        ("bounded", bounded),
        ("tma", config["tma"]),
    )


def grid(problem: Problem, config: Config, sm_count: int) -> int:
    """Blocks for the steps of tokens of all batch entries."""
    return grid_of(problem["batch"] * cdiv(problem["tokens"], config["tile_t"]), config, sm_count)


def _implement(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=qk_norm_rope_forward,
        parameters=SPEC.parameters(problem),
        constants=constants(problem, config, ITEM_BYTES[problem["dtype"]]),
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def default_tiles(problem: Problem, elements: int) -> tuple[int, int]:
    """Tokens and heads of a tile: as many heads, then tokens, as hold ``elements`` elements of each half."""
    width, most = power_of_two(problem["head_dim"] // 2), power_of_two(problem["heads"])
    tile_h = max(1, min(most, elements // width))
    tile_t = max(1, min(4, elements // (width * tile_h))) if tile_h == most else 1
    return tile_t, tile_h


def _default(problem: Problem, target: Target) -> Config:
    tile_t, tile_h = default_tiles(problem, 1024)
    return Config(schedule="block", tile_t=tile_t, tile_h=tile_h, occupancy=4, num_worker_warps=0, tma=False)


def generic(problem: Problem) -> Config:
    """One token and few heads a tile, of the one schedule that both directions have."""
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 256 // width))
    return Config(schedule="persistent", tile_t=1, tile_h=tile_h, occupancy=1, num_worker_warps=0, tma=False)


def inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Random q and k, weights near 1, and angles that are stored twice."""
    import torch

    angles = drawn_angles(problem, problem["head_dim"] // 2, generator, device)
    twice = {name: torch.cat((x, x), -1) for name, x in angles.items()}
    return drawn(GIVEN[:4], problem, generator, device) | twice | {"eps": 1e-6}


def normed(x: Any, weight: Any, eps: float) -> Any:
    """The RMSNorm of each head, in the dtype of ``x``."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """Heads [batch, tokens, heads, head_dim] turned by angles [batch, tokens, pairs]; numbers behind the pairs stay."""
    import torch

    size, c, s = 2 * cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    part, rest = x[..., :size], x[..., size:]
    one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    both = one * c - other * s, other * c + one * s
    return torch.cat((torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1)


def reference(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float) -> dict[str, Any]:
    """The formula in float64."""
    c, s = (angles[..., : q.shape[-1] // 2].double() for angles in (cos, sin))
    return {
        "q_out": rotated(normed(q.double(), q_weight.double(), eps), c, s),
        "k_out": rotated(normed(k.double(), k_weight.double(), eps), c, s),
    }


def elements(problem: Problem) -> int:
    """Elements of q and k together."""
    heads = problem["heads"] + problem["kv_heads"]
    return int(problem["batch"] * problem["tokens"] * heads * problem["head_dim"])


def small_bytes(problem: Problem) -> int:
    """Bytes of the angles that are read and of the two weights."""
    angles = problem["tokens"] * problem["head_dim"] * ITEM_BYTES[problem["angle_dtype"]]
    return int(angles + 2 * problem["head_dim"] * ITEM_BYTES[problem["weight_dtype"]])


SPEC = KernelSpec(
    name="qk_norm_rope_forward",
    summary="RMSNorm of each head of q and k, then their rotary embedding",
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
