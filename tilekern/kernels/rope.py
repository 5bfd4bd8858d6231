"""Rotary position embedding of q and k (Su et al. 2021, arXiv:2104.09864), out of place, in Hugging Face's layout.

A head of size 2h is split into halves (x1, x2): ``y1 = x1 * c1 - x2 * s1`` and ``y2 = x2 * c2 + x1 * s2``, where c and
s are the cosine and sine of the position's angles; Hugging Face stores them twice ([.., 2h]: c1, c2), others once
([.., h]). The backward is the transpose, the inverse rotation: ``dx1 = dy1 * c1 + dy2 * s2``, ``dx2 = dy2 * c2 -
dy1 * s1``. One launch turns q and k: a block takes some tokens, loads their angles once, and goes through the heads.
Arrays: q [batch, heads, tokens, 2h], k [batch, kv_heads, tokens, 2h], cos and sin [1 or batch, tokens, 2h or h], all
with any strides.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

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
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
)
from tilekern.targets import Target


def _halves(array, axis, half, whole):  # type: ignore[no-untyped-def]
    """Views of the two halves of a head and the tile index of each along the last axis.

    Where the half is a power of two both are tiles of the array itself, which TMA can load; else they are slices.
    """
    if ct.static_eval(whole):
        return array, array, 0, 1
    return array.slice(axis, 0, half), array.slice(axis, half, 2 * half), 0, 0


def _turn(x, y, b, t, c1, s1, c2, s2, heads, half, tile_h, tile_t, width, whole, inverse, bounded, latency, tma):  # type: ignore[no-untyped-def]
    """Rotate one step of tokens of all heads of ``x`` into ``y``."""
    xa, xb, ia, ib = _halves(x, 3, half, whole)
    ya, yb, _, _ = _halves(y, 3, half, whole)
    shape = (1, tile_h, tile_t, width)
    for h in range(ct.cdiv(heads, tile_h)):
        x1 = load(xa, (b, h, t, ia), shape, bounded, latency, tma).astype(ct.float32)
        x2 = load(xb, (b, h, t, ib), shape, bounded, latency, tma).astype(ct.float32)
        if ct.static_eval(inverse):
            y1 = x1 * c1 + x2 * s2
            y2 = x2 * c2 - x1 * s1
        else:
            y1 = x1 * c1 - x2 * s1
            y2 = x2 * c2 + x1 * s2
        ct.store(ya, (b, h, t, ia), y1.astype(y.dtype), check_bounds=bounded, allow_tma=tma)
        ct.store(yb, (b, h, t, ib), y2.astype(y.dtype), check_bounds=bounded, allow_tma=tma)


def _angles(array, b, t, half, tile_t, width, whole, full, bounded, latency, tma):  # type: ignore[no-untyped-def]
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
def rope(  # type: ignore[no-untyped-def]
    q, k, cos, sin, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt, tile_h: ConstInt,
    tile_hk: ConstInt, tile_t: ConstInt, width: ConstInt, whole: ConstBool, full: ConstBool, shared: ConstBool,
    inverse: ConstBool, bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Blocks that take steps of tokens of one batch entry and go through all heads."""
    across = ct.cdiv(q.shape[2], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.static_eval(0) if ct.static_eval(shared) else b
        c1, c2 = _angles(cos, at, t, half, tile_t, width, whole, full, bounded, latency, tma)
        s1, s2 = _angles(sin, at, t, half, tile_t, width, whole, full, bounded, latency, tma)
        _turn(q, q_out, b, t, c1, s1, c2, s2, heads, half, tile_h, tile_t, width, whole, inverse, bounded, latency, tma)
        _turn(k, k_out, b, t, c1, s1, c2, s2, kv_heads, half, tile_hk, tile_t, width, whole, inverse, bounded, latency, tma)


DIMENSIONS = (
    Dimension("tokens", "bucketed"),
    Dimension("batch", "bucketed"),
    Dimension("heads", "exact"),
    Dimension("kv_heads", "exact"),
    Dimension("head_dim", "exact"),
    Dimension("full", "flag"),
    Dimension("shared", "flag"),
    Dimension("inverse", "flag"),
    Dimension("dtype", "dtype"),
    Dimension("angle_dtype", "dtype"),
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    most = power_of_two(problem["heads"])
    return {
        "schedule": ["persistent", "block"],
        "tile_h": sorted({min(most, n) for n in (1, 2, 4, 8, 16, 32)}),
        "tile_t": [1, 2, 4, 8, 16],
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0],
        "tma": [True, False],
        "latency": [0],
    }


_SIZED = Constraint(
    "a step of fewer than 512 or more than 4096 elements of each half starves the memory system or spills",
    lambda problem, config, target: 512
    <= config["tile_h"] * config["tile_t"] * power_of_two(problem["head_dim"] // 2)
    <= 4096
    or config["tile_h"] == power_of_two(problem["heads"])
    and config["tile_t"] == 16
    and config["tile_h"] * config["tile_t"] * power_of_two(problem["head_dim"] // 2) < 512,
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
        ("shared", problem["shared"]),
        ("inverse", problem["inverse"]),
        ("bounded", bounded),
        ("latency", config["latency"]),
        ("tma", config["tma"]),
    )
    out = promoted(problem["dtype"], problem["angle_dtype"])
    given, made = (out, problem["dtype"]) if problem["inverse"] else (problem["dtype"], out)
    arrays = (
        ArrayParameter("q", given, 4),
        ArrayParameter("k", given, 4),
        ArrayParameter("cos", problem["angle_dtype"], 3),
        ArrayParameter("sin", problem["angle_dtype"], 3),
        ArrayParameter("q_out", made, 4, "output"),
        ArrayParameter("k_out", made, 4, "output"),
    )
    return Implementation(
        function=rope,
        parameters=arrays,
        constants=constants,
        grid=lambda sizes, sm_count: grid_of(sizes["batch"] * cdiv(sizes["tokens"], tile_t), config, sm_count),
        hints=hints(config),
    )


def _default(problem: Problem, target: Target) -> Config:
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 1024 // width))
    tile_t = max(1, min(16, 1024 // (width * tile_h)))
    return Config(
        schedule="block", tile_h=tile_h, tile_t=tile_t, occupancy=4, num_worker_warps=0, tma=False, latency=0
    )


def _generic(problem: Problem) -> Config:
    width = power_of_two(problem["head_dim"] // 2)
    tile_h = min(power_of_two(problem["heads"]), max(1, 128 // width))
    return Config(
        schedule="block", tile_h=tile_h, tile_t=1, occupancy=1, num_worker_warps=0, tma=False, latency=0
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """q and k as projections leave them: [batch, tokens, heads, head_dim] in memory, seen with heads before tokens."""
    import torch

    batch, tokens, size = problem["batch"], problem["tokens"], problem["head_dim"]
    given = promoted(problem["dtype"], problem["angle_dtype"]) if problem["inverse"] else problem["dtype"]

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, given))

    angles = torch.rand(
        (1 if problem["shared"] else batch, tokens, size if problem["full"] else size // 2),
        generator=generator, device=device,
    )  # fmt: skip
    angle_dtype = getattr(torch, problem["angle_dtype"])
    return {
        "q": random(batch, tokens, problem["heads"], size).transpose(1, 2),
        "k": random(batch, tokens, problem["kv_heads"], size).transpose(1, 2),
        "cos": (angles * 6.0).cos().to(angle_dtype),
        "sin": (angles * 6.0).sin().to(angle_dtype),
    }


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


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    made = problem["dtype"] if problem["inverse"] else promoted(problem["dtype"], problem["angle_dtype"])
    batch, tokens, size = problem["batch"], problem["tokens"], problem["head_dim"]
    return {
        "q_out": ((batch, problem["heads"], tokens, size), made),
        "k_out": ((batch, problem["kv_heads"], tokens, size), made),
    }


def _bytes(problem: Problem) -> int:
    width = ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[promoted(problem["dtype"], problem["angle_dtype"])]
    heads = problem["heads"] + problem["kv_heads"]
    turned = problem["batch"] * problem["tokens"] * heads * problem["head_dim"] * width
    angles = 2 * problem["tokens"] * problem["head_dim"] * ITEM_BYTES[problem["angle_dtype"]]
    return int(turned + angles * (1 if problem["shared"] else problem["batch"]) // (1 if problem["full"] else 2))


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
    outputs=_outputs,
    reference=reference,
    bytes_moved=_bytes,
    flops=lambda problem: 3
    * problem["batch"]
    * problem["tokens"]
    * (problem["heads"] + problem["kv_heads"])
    * problem["head_dim"],
    result_dtype=lambda problem: problem["dtype"]
    if problem["inverse"]
    else promoted(problem["dtype"], problem["angle_dtype"]),
)

SPECS = (SPEC,)
