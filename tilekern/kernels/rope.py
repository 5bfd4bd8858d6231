"""Rotary position embedding of q and k (Su et al. 2021, arXiv:2104.09864), out of place, in Hugging Face's layout.

A head of size 2h is split into halves (x1, x2): ``y1 = x1 * c1 - x2 * s1`` and ``y2 = x2 * c2 + x1 * s2``, where c and
s are the cosine and sine of the position's angles. If ``full``, each half has its own ([.., 2h]: c1, c2); else both
halves use the first half's, stored once ([.., h]) or, like Hugging Face's, twice. The backward is the transpose, the
inverse rotation: ``dx1 = dy1 * c1 + dy2 * s2``, ``dx2 = dy2 * c2 - dy1 * s1``. One launch turns q and
k: a block loads the angles of some tokens once, and goes through the heads.
Arrays: q [batch, heads, tokens, 2h], k [batch, kv_heads, tokens, 2h], cos and sin [1 or batch, tokens, 2h or h], all
with any strides; all batch entries share the angles of a single one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rotations import (
    GRADIENTS,
    HEADS_FIRST,
    angles_of,
    arrays_of,
    each_step,
    halves,
    read_halves,
    spec,
    step_elements,
    write_halves,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, load, power_of_two
from tilekern.spec import Config, Constraint, Problem, Space, Value
from tilekern.spec.targets import Target


def _turn(y, tiles, weights, angles, sums, place, shape, form):
    c1, c2, s1, s2 = angles
    (_, _, _, _, tma, _), _, inverse = form
    x1, x2 = tiles[0][0].astype(ct.float32), tiles[0][1].astype(ct.float32)
    if ct.static_eval(inverse):
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    write_halves(y, y1, y2, place, form, tma)
    return sums


def _angles(turns, at, t, tile_t, form):
    return _of_both(turns[0], at, t, tile_t, form) + _of_both(turns[1], at, t, tile_t, form)


def _of_both(array, at, t, tile_t, form):
    """Load the tokens' cosines or sines for both halves of a head, shaped to broadcast over heads."""
    (half, width, whole, bounded, tma, latency), full, _ = form
    shape = (1, tile_t, width)
    if ct.static_eval(full):
        first, second, ia, ib = halves(array, 2, half, whole)
        one = load(first, (at, t, ia), shape, bounded, latency, tma).astype(ct.float32)
        other = load(second, (at, t, ib), shape, bounded, latency, tma).astype(ct.float32)
        return ct.reshape(one, (1, 1, tile_t, width)), ct.reshape(other, (1, 1, tile_t, width))
    one = ct.reshape(load(array, (at, t, 0), shape, bounded, latency, tma).astype(ct.float32), (1, 1, tile_t, width))
    return one, one


@ct.kernel
def rope(
    q, k, cos, sin, q_out, k_out, heads: ConstInt, kv_heads: ConstInt, half: ConstInt, tile_h: ConstInt,
    tile_hk: ConstInt, tile_t: ConstInt, width: ConstInt, whole: ConstBool, full: ConstBool,
    inverse: ConstBool, unrolled: ConstBool, bounded: ConstBool, latency: ConstInt, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """q and q_out [batch, heads, tokens, 2 half], k and k_out [batch, kv_heads, tokens, 2 half].

    cos and sin [1 or batch, tokens, half or 2 half].
    """
    launch_next(few)
    form = ((half, width, whole, bounded, tma, latency), full, inverse)
    sizes = (heads, kv_heads, tile_t, tile_h, tile_hk, unrolled, True)
    of_q, of_k = ((q,), q_out, ()), ((k,), k_out, ())
    each_step(read_halves, _angles, _turn, of_q, of_k, (cos, sin), ((), ()), sizes, form)


_ANGLES, _PRODUCT = angles_of("batch", "tokens", "head_dim/2"), "dtype*angle_dtype"


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


_SIZED = Constraint(
    "a step of fewer than 512 elements of each half starves the memory system, more than 2048 take minutes to compile; "
    "steps of several tokens gather short pieces of memory",
    lambda problem, config, target: (
        step_elements(problem, config) <= 2048
        and config["tile_t"] <= max(2, 256 // power_of_two(problem["head_dim"] // 2) // config["tile_h"])
        and (step_elements(problem, config) >= 512 or config["tile_h"] == power_of_two(problem["heads"]))
    ),
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


def reference(q: Any, k: Any, cos: Any, sin: Any, inverse: bool) -> dict[str, Any]:
    """Return the rotation, or its transpose, in float64."""
    import torch

    half = q.shape[-1] // 2
    (c1, c2), (s1, s2) = (
        (wide[..., :half], wide[..., -half:]) for wide in (cos.double().unsqueeze(1), sin.double().unsqueeze(1))
    )
    if inverse:
        s1, s2 = -s2, -s1

    def turn(x: Any) -> Any:
        x1, x2 = x.double().split(half, -1)
        return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1)

    return {"q_out": turn(q), "k_out": turn(k)}


SPEC = spec(
    rope,
    "rotary embedding of q and k, or its inverse",
    arrays_of(HEADS_FIRST, _ANGLES, "dtype", _PRODUCT),
    reference,
    inverse=arrays_of(HEADS_FIRST, _ANGLES, _PRODUCT, "dtype"),
    flags=("full", "inverse"),
    space=Space(_axes, (_SIZED, TMA_NEEDS_HOPPER)),
    default=_default,
    generic=_generic,
    unrolls_lone=True,
    flops=3,
)
# The backward calls this: the rotation's transpose turns gradients back.
INVERSE = dataclasses.replace(SPEC, arrays=arrays_of(HEADS_FIRST, _ANGLES, _PRODUCT, "dtype", GRADIENTS))

SPECS = (SPEC,)
