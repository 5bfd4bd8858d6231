"""The gradients of qk_norm_rope: dq, dk, and the two weights' as one float32 row for each block.

With the forward's names (see ``qk_norm_rope``): the rotation is undone, ``dz1 = dy1 * c + dy2 * s`` and ``dz2 = dy2 *
c - dy1 * s``; then, with g = dz * w, ``dx = rstd * (g - x * rstd^2 * mean(g * x))``, and dw is the sum of ``dz * x *
rstd`` over all tokens and heads. q and k are read anyway, so rstd is computed again and the forward saves nothing but
its inputs. Each block adds up its tokens' share of both dw in float32 and stores it as one row of ``partial`` [blocks,
4h], the weight of q first; the spec ``column_sum`` adds the rows up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn
from tilekern.kernels.qk_norm_rope import (
    DIMENSIONS,
    GIVEN,
    PRODUCT,
    SIZED,
    K,
    Q,
    constants,
    default_tiles,
    elements,
    generic,
    grid,
    inputs,
    out_dtype,
    read_angles,
    read_heads,
    read_weight,
    small_bytes,
    tile_axes,
    write_heads,
)
from tilekern.kernels.qk_norm_rope import reference as reference_forward
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, hints, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    outputs_of,
)
from tilekern.targets import Target


def _add_pairs(a, b, c, d):
    """Two sums in one reduction: one barrier among a block's warps in place of two."""
    return a + c, b + d


# A public name, for other kernels: renamed where it is written, the records of this one would be stale.
add_pairs = _add_pairs


def _pull(dx, slopes, tiles, weights, sums, c, s, eps, b, t, h, half, whole, bounded):
    """The gradients of one step of tokens and heads: dx is stored, the shares of dw are added to ``sums``."""
    x1, x2 = tiles[0].astype(ct.float32), tiles[1].astype(ct.float32)
    dy1, dy2 = slopes[0].astype(ct.float32), slopes[1].astype(ct.float32)
    dz1, dz2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
    g1, g2 = dz1 * weights[0], dz2 * weights[1]
    square, product = ct.reduce(
        (x1 * x1 + x2 * x2, g1 * x1 + g2 * x2), 3, _add_pairs, (0.0, 0.0), keepdims=True
    )  # fmt: skip
    rstd = ct.rsqrt(square / (2 * half) + eps)
    pull = product * rstd * rstd / (2 * half)
    write_heads(dx, (g1 - x1 * pull) * rstd, (g2 - x2 * pull) * rstd, b, t, h, half, whole, bounded)
    return sums[0] + dz1 * x1 * rstd, sums[1] + dz2 * x2 * rstd


def _store_sums(partial, sums, offset, half, width, whole):
    """One weight's gradient as a piece of this block's row."""
    for i in ct.static_iter(range(2)):
        row = ct.reshape(ct.sum(ct.sum(sums[i], axis=2), axis=1), (1, width))
        if ct.static_eval(whole):
            ct.store(partial, (ct.bid(0), offset + i), row)
        else:
            piece = partial.slice(1, (offset + i) * half, (offset + i + 1) * half)
            ct.store(piece, (ct.bid(0), 0), row)


@ct.kernel
def qk_norm_rope_backward(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, dq, dk, partial, heads: ConstInt, kv_heads: ConstInt,
    half: ConstInt, tile_t: ConstInt, tile_h: ConstInt, tile_hk: ConstInt, width: ConstInt, whole: ConstBool,
    unrolled: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over steps of tokens; weights and the sums for their gradients stay in registers.

    dq_out, q and dq [batch, tokens, heads, 2 half], dk_out, k and dk [batch, tokens, kv_heads, 2 half].
    weights [2 half], cos and sin [1 or batch, tokens, half or 2 half], partial [blocks, 4 half].
    """
    ct.grid_dependency_control_wait()
    q_weights = read_weight(q_weight, half, width, whole, bounded)
    k_weights = read_weight(k_weight, half, width, whole, bounded)
    q_zeros = ct.zeros((1, tile_t, tile_h, width), ct.float32)
    k_zeros = ct.zeros((1, tile_t, tile_hk, width), ct.float32)
    q_sums, k_sums = (q_zeros, q_zeros), (k_zeros, k_zeros)
    across = ct.cdiv(q.shape[1], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles, q_slopes, k_tiles, k_slopes = (), (), (), ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (read_heads(q, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma),)
                q_slopes = q_slopes + (read_heads(dq_out, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma),)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (read_heads(k, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma),)
                k_slopes = k_slopes + (read_heads(dk_out, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma),)
        c = read_angles(cos, at, t, half, tile_t, width, whole, bounded)
        s = read_angles(sin, at, t, half, tile_t, width, whole, bounded)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_sums = _pull(dq, q_slopes[h], q_tiles[h], q_weights, q_sums, c, s, eps, b, t, h, half, whole, bounded)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_sums = _pull(dk, k_slopes[h], k_tiles[h], k_weights, k_sums, c, s, eps, b, t, h, half, whole, bounded)
        else:
            for h in range(ct.cdiv(q.shape[2], tile_h)):
                tiles = read_heads(q, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma)
                slopes = read_heads(dq_out, b, t, h, half, tile_t, tile_h, width, whole, bounded, tma)
                q_sums = _pull(dq, slopes, tiles, q_weights, q_sums, c, s, eps, b, t, h, half, whole, bounded)
            for h in range(ct.cdiv(k.shape[2], tile_hk)):
                tiles = read_heads(k, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma)
                slopes = read_heads(dk_out, b, t, h, half, tile_t, tile_hk, width, whole, bounded, tma)
                k_sums = _pull(dk, slopes, tiles, k_weights, k_sums, c, s, eps, b, t, h, half, whole, bounded)
    _store_sums(partial, q_sums, 0, half, width, whole)
    _store_sums(partial, k_sums, 2, half, width, whole)


_ARRAYS = (
    Array("dq_out", PRODUCT, Q),
    Array("dk_out", PRODUCT, K),
    *GIVEN,
    Array("dq", "dtype", Q, "output"),
    Array("dk", "dtype", K, "output"),
    Array("partial", "float32", ("blocks", "2*head_dim"), "scratch"),
)


def _implement(problem: Problem, config: Config) -> Implementation:
    return Implementation(
        function=qk_norm_rope_backward,
        parameters=SPEC.parameters(problem),
        constants=constants(problem, config, ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[out_dtype(problem)]),
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _default(problem: Problem, target: Target) -> Config:
    half = problem["head_dim"] // 2
    # Twice as many elements of float32, or of heads that fill no tile, take the compiler 4 s.
    short = out_dtype(problem) != "float32" and half == power_of_two(half)
    tile_t, tile_h = default_tiles(problem, 1024 if short else 512)
    return Config(schedule="persistent", tile_t=tile_t, tile_h=tile_h, occupancy=2, num_worker_warps=0, tma=False)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    return drawn(_ARRAYS[:2], problem, generator, device) | inputs(problem, generator, device)


def gradients_of(forward: Callable[..., dict[str, Any]], dq_out: Any, dk_out: Any, **given: Any) -> dict[str, Any]:
    """The gradients of a forward's reference by autograd in float64; ``given`` are its inputs."""
    import torch

    names = ("q", "k", "q_weight", "k_weight")
    leaves = {name: given[name].detach().double().requires_grad_() for name in names}
    with torch.enable_grad():
        made = forward(**given | leaves)
    slopes = [dq_out.double(), dk_out.double()]
    gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), slopes)
    return {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}


def reference(dq_out: Any, dk_out: Any, **given: Any) -> dict[str, Any]:
    """The gradients of the forward's reference in float64; ``given`` are its inputs."""
    return gradients_of(reference_forward, dq_out, dk_out, **given)


def results(outputs: dict[str, Any]) -> dict[str, Any]:
    """The gradients, those of the weights added up over blocks."""
    dq_weight, dk_weight = outputs["partial"].double().sum(0).chunk(2)
    return {"dq": outputs["dq"], "dk": outputs["dk"], "dq_weight": dq_weight, "dk_weight": dk_weight}


SPEC = KernelSpec(
    name="qk_norm_rope_backward",
    summary="gradients of qk_norm_rope: dq, dk, and the weights' as one float32 row for each block",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(
        lambda problem: {
            "schedule": ["persistent"],
            **tile_axes(problem),
            "occupancy": [2, 3, 4],
            "num_worker_warps": [0, 8],
            "tma": [False, True],
        },
        (SIZED, TMA_NEEDS_HOPPER),
    ),
    implement=_implement,
    default=_default,
    generic=generic,
    inputs=_inputs,
    outputs=outputs_of(_ARRAYS),
    reference=reference,
    results=results,
    bytes_moved=lambda problem: (
        elements(problem) * (2 * ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[out_dtype(problem)])
        + small_bytes(problem)
        + 2 * problem["head_dim"] * ITEM_BYTES[problem["weight_dtype"]]
    ),
    flops=lambda problem: 16 * elements(problem),
    result_dtype=lambda problem: problem["dtype"],
    arrays=_ARRAYS,
)

SPECS = (SPEC,)
