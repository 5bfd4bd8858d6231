"""Rotary position embedding of q and k (Su et al. 2021, arXiv:2104.09864), out of place, in Hugging Face's layout.

A head of size 2h is split into halves (x1, x2): ``y1 = x1 * c1 - x2 * s1`` and ``y2 = x2 * c2 + x1 * s2``, where c and
s are the cosine and sine of the position's angles. Where ``full`` each half has its own ([.., 2h]: c1, c2); else the
first half's serve both, whether they are stored once ([.., h]) or, as Hugging Face does, twice. The backward is the
transpose, the inverse rotation: ``dx1 = dy1 * c1 + dy2 * s2``, ``dx2 = dy2 * c2 - dy1 * s1``. One launch turns q and
k: a block takes some tokens, loads their angles once, and goes through the heads.
Arrays: q [batch, heads, tokens, 2h], k [batch, kv_heads, tokens, 2h], cos and sin [1 or batch, tokens, 2h or h], all
with any strides; the angles of a single batch entry are shared by all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn_angles
from tilekern.kernels.tiles import (
    TMA_NEEDS_HOPPER,
    ConstBool,
    ConstInt,
    grid_of,
    hints,
    load,
    power_of_two,
    promoted,
)
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
    outputs_of,
    parameters_of,
)
from tilekern.targets import Target


def _halves(array, axis, half, whole):
    """Views of the two halves of a head and the tile index of each along the last axis.

    Where the half is a power of two both are tiles of the array itself, which TMA can load; else they are slices.
    """
    if ct.static_eval(whole):
        return array, array, 0, 1
    return array.slice(axis, 0, half), array.slice(axis, half, 2 * half), 0, 0


def _read(x, b, h, t, half, tile_h, tile_t, width, whole, bounded, latency, tma):
    """Both halves of one step of heads and tokens."""
    xa, xb, ia, ib = _halves(x, 3, half, whole)
    shape = (1, tile_h, tile_t, width)
    one = load(xa, (b, h, t, ia), shape, bounded, latency, tma)
    return one, load(xb, (b, h, t, ib), shape, bounded, latency, tma)


def _write(y, tiles, b, h, t, c1, s1, c2, s2, half, whole, inverse, bounded, tma):
    """Rotate both halves and store them."""
    ya, yb, ia, ib = _halves(y, 3, half, whole)
    x1, x2 = tiles[0].astype(ct.float32), tiles[1].astype(ct.float32)
    if ct.static_eval(inverse):
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    ct.store(ya, (b, h, t, ia), y1.astype(y.dtype), check_bounds=bounded, allow_tma=tma)
    ct.store(yb, (b, h, t, ib), y2.astype(y.dtype), check_bounds=bounded, allow_tma=tma)


def _angles(array, b, t, half, tile_t, width, whole, full, bounded, latency, tma):
    """The tokens' angles for both halves of a head, shaped to broadcast over heads."""
    shape = (1, tile_t, width)
    if ct.static_eval(full):
        first, second, ia, ib = _halves(array, 2, half, whole)
        one = load(first, (b, t, ia), shape, bounded, latency, tma).astype(ct.float32)
        other = load(second, (b, t, ib), shape, bounded, latency, tma).astype(ct.float32)
        return ct.reshape(one, (1, 1, tile_t, width)), ct.reshape(other, (1, 1, tile_t, width))
    one = ct.reshape(load(array, (b, t, 0), shape, bounded, latency, tma).astype(ct.float32), (1, 1, tile_t, width))
    return one, one


@ct.kernel
def rope(
    q, k, cos, sin, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt, tile_h: ConstInt,
    tile_hk: ConstInt, tile_t: ConstInt, width: ConstInt, whole: ConstBool, full: ConstBool,
    inverse: ConstBool, unrolled: ConstBool, bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry; unrolled, every load is issued before its first use.

    q and q_out [batch, heads, tokens, 2 half], k and k_out [batch, kv_heads, tokens, 2 half].
    cos and sin [1 or batch, tokens, half or 2 half].
    """
    across = ct.cdiv(q.shape[2], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (_read(q, b, h, t, half, tile_h, tile_t, width, whole, bounded, latency, tma),)
            k_tiles = ()
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (_read(k, b, h, t, half, tile_hk, tile_t, width, whole, bounded, latency, tma),)
        c1, c2 = _angles(cos, at, t, half, tile_t, width, whole, full, bounded, latency, tma)
        s1, s2 = _angles(sin, at, t, half, tile_t, width, whole, full, bounded, latency, tma)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                _write(q_out, q_tiles[h], b, h, t, c1, s1, c2, s2, half, whole, inverse, bounded, tma)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                _write(k_out, k_tiles[h], b, h, t, c1, s1, c2, s2, half, whole, inverse, bounded, tma)
        else:
            for h in range(ct.cdiv(q.shape[1], tile_h)):
                tiles = _read(q, b, h, t, half, tile_h, tile_t, width, whole, bounded, latency, tma)
                _write(q_out, tiles, b, h, t, c1, s1, c2, s2, half, whole, inverse, bounded, tma)
            for h in range(ct.cdiv(k.shape[1], tile_hk)):
                tiles = _read(k, b, h, t, half, tile_hk, tile_t, width, whole, bounded, latency, tma)
                _write(k_out, tiles, b, h, t, c1, s1, c2, s2, half, whole, inverse, bounded, tma)


DIMENSIONS = (
    Dimension("tokens", "bucketed"),
    Dimension("batch", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("full", "flag"),
    Dimension("inverse", "flag"),
    Dimension("dtype", "dtype"),
    Dimension("angle_dtype", "dtype"),
)
_Q, _K = ("batch", "heads", "tokens", "head_dim"), ("batch", "kv_heads", "tokens", "head_dim")
_ANGLES, _PRODUCT = ("batch", "tokens", "head_dim/2"), "dtype*angle_dtype"


def _arrays(inverse: bool, q: str = "q", k: str = "k", q_out: str = "q_out", k_out: str = "k_out") -> tuple[Array, ...]:
    """The arrays of one direction; the inverse reads gradients of the other's results."""
    given, made = (_PRODUCT, "dtype") if inverse else ("dtype", _PRODUCT)
    return (
        Array(q, given, _Q),
        Array(k, given, _K),
        Array("cos", "angle_dtype", _ANGLES),
        Array("sin", "angle_dtype", _ANGLES),
        Array(q_out, made, _Q, "output"),
        Array(k_out, made, _K, "output"),
    )


def _axes(problem: Problem) -> dict[str, list[Value]]:
    most = power_of_two(problem["heads"])
    return {
        "schedule": ["block", "persistent"],
        "tile_h": sorted({min(most, n) for n in (4, 8, 16, 32, 64)}),
        "tile_t": [1, 2],
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [False],
        "latency": [0],
    }


def _step(problem: Problem, config: Config) -> int:
    """Elements of each half that a block holds in one tile."""
    return int(config["tile_h"] * config["tile_t"] * power_of_two(problem["head_dim"] // 2))


def _given(problem: Problem) -> str:
    """The dtype of q and k: of gradients where ``inverse``."""
    return promoted(problem["dtype"], problem["angle_dtype"]) if problem["inverse"] else problem["dtype"]


def _held(problem: Problem, config: Config) -> int:
    """Elements of both halves of q and k that a block holds at once."""
    tile_hk = min(config["tile_h"], power_of_two(problem["kv_heads"]))
    heads = cdiv(problem["heads"], config["tile_h"]) * config["tile_h"] + cdiv(problem["kv_heads"], tile_hk) * tile_hk
    return int(2 * heads * config["tile_t"] * power_of_two(problem["head_dim"] // 2))


# Steps of heads that are written out, and the bytes of them that the blocks on an SM, four or more, hold at once: a
# third of its registers. The compiler takes 1 s for a loop; 73 and 155 heads of 92, written out, took it 29 s, and so
# do fewer that spill.
_MOST_STEPS, _MOST_BYTES = 8, 80 << 10


def _is_unrolled(problem: Problem, config: Config) -> bool:
    """Whether all steps of heads are written out, so that each load is issued before its first use; else they loop."""
    tile_hk = min(config["tile_h"], power_of_two(problem["kv_heads"]))
    steps = cdiv(problem["heads"], config["tile_h"]) + cdiv(problem["kv_heads"], tile_hk)
    held = _held(problem, config) * ITEM_BYTES[_given(problem)] * max(4, config["occupancy"])
    return bool(steps <= _MOST_STEPS and held <= _MOST_BYTES)


_SIZED = Constraint(
    "a step of fewer than 512 elements of each half starves the memory system, more than 2048 take minutes to compile; "
    "steps of several tokens gather short pieces of memory",
    lambda problem, config, target: (
        _step(problem, config) <= 2048
        and config["tile_t"] <= max(2, 256 // power_of_two(problem["head_dim"] // 2) // config["tile_h"])
        and (_step(problem, config) >= 512 or config["tile_h"] == power_of_two(problem["heads"]))
    ),
)


def _implement(problem: Problem, config: Config) -> Implementation:
    half = problem["head_dim"] // 2
    width, tile_t, tile_h = power_of_two(half), config["tile_t"], config["tile_h"]
    tile_hk = min(tile_h, power_of_two(problem["kv_heads"]))
    bounded = bool(tile_t > 1 or width != half or problem["heads"] % tile_h or problem["kv_heads"] % tile_hk)
    constants = (
        ("heads", problem["heads"]),
        ("kv_heads", problem["kv_heads"]),
        ("half", half),
        ("tile_h", tile_h),
        ("tile_hk", tile_hk),
        ("tile_t", tile_t),
        ("width", width),
        ("whole", width == half),
        ("full", problem["full"]),
        ("inverse", problem["inverse"]),
        ("unrolled", _is_unrolled(problem, config)),
        ("bounded", bounded),
        ("latency", config["latency"]),
        ("tma", config["tma"]),
    )
    return Implementation(
        function=rope,
        parameters=parameters_of(_arrays(problem["inverse"]), DIMENSIONS, problem),
        constants=constants,
        grid=lambda sizes, sm_count: grid_of(sizes["batch"] * cdiv(sizes["tokens"], tile_t), config, sm_count),
        hints=hints(config),
    )


def _default(problem: Problem, target: Target) -> Config:
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 1024 // width))
    tile_t = max(1, min(max(2, 256 // (width * tile_h)), 1024 // (width * tile_h)))
    return Config(schedule="block", tile_h=tile_h, tile_t=tile_t, occupancy=4, num_worker_warps=0, tma=False, latency=0)


def _generic(problem: Problem) -> Config:
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 128 // width))
    return Config(schedule="block", tile_h=tile_h, tile_t=1, occupancy=1, num_worker_warps=0, tma=False, latency=0)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """q and k as projections leave them: [batch, tokens, heads, head_dim] in memory, seen with heads before tokens."""
    import torch

    size, dtype = problem["head_dim"], getattr(torch, _given(problem))

    def random(heads: str) -> Any:
        shape = (problem["batch"], problem["tokens"], problem[heads], size)
        return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

    angles = drawn_angles(problem, size if problem["full"] else size // 2, generator, device)
    return {"q": random("heads"), "k": random("kv_heads"), **angles}


def reference(q: Any, k: Any, cos: Any, sin: Any, inverse: bool) -> dict[str, Any]:
    """The rotation, or its transpose, in float64."""
    import torch

    half = q.shape[-1] // 2

    def both(angles: Any) -> tuple[Any, Any]:
        wide = angles.double().unsqueeze(1)
        return wide[..., :half], wide[..., -half:]

    (c1, c2), (s1, s2) = both(cos), both(sin)

    def turn(x: Any) -> Any:
        x1, x2 = x.double().split(half, -1)
        if inverse:
            return torch.cat((x1 * c1 + x2 * s2, x2 * c2 - x1 * s1), -1)
        return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1)

    return {"q_out": turn(q), "k_out": turn(k)}


def _bytes(problem: Problem) -> int:
    width = ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[promoted(problem["dtype"], problem["angle_dtype"])]
    heads = problem["heads"] + problem["kv_heads"]
    turned = problem["batch"] * problem["tokens"] * heads * problem["head_dim"] * width
    angles = 2 * problem["tokens"] * problem["head_dim"] * ITEM_BYTES[problem["angle_dtype"]]
    return int(turned + angles // (1 if problem["full"] else 2))


SPEC = KernelSpec(
    name="rope",
    summary="rotary embedding of q and k, or its inverse",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_axes, (_SIZED, TMA_NEEDS_HOPPER)),
    implement=_implement,
    default=_default,
    generic=_generic,
    inputs=_inputs,
    outputs=lambda problem, blocks: outputs_of(_arrays(problem["inverse"]))(problem, blocks),
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: (
        3 * problem["batch"] * problem["tokens"] * (problem["heads"] + problem["kv_heads"]) * problem["head_dim"]
    ),
    result_dtype=lambda problem: (
        problem["dtype"] if problem["inverse"] else promoted(problem["dtype"], problem["angle_dtype"])
    ),
    arrays=_arrays(inverse=False),
)
# As the backward calls it: the rotation's transpose turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=_arrays(True, "dq_out", "dk_out", "dq", "dk"))

SPECS = (SPEC,)
