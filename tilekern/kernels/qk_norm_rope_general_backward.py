"""The gradients of qk_norm_rope_general: dq, dk, and the two weights' as one float32 row for each block.

With the forward's names (see ``qk_norm_rope_general``): the norm is of u, which is x, or x rotated where ``norm_last``,
and its gradient dz is dy, rotated back unless ``norm_last``. Then, with g = dz * (weight + offset), ``du = rstd *
(g - u * rstd^2 * mean(g * u))``, which is dx, or dx after it is rotated back; dw is the sum of ``dz * u * rstd`` over
all tokens and heads. As in ``qk_norm_rope_backward`` u and rstd are computed again, and each block stores its tokens'
share of both dw as one row of ``partial`` [blocks, 2 * head_dim], the weight of q first, for ``column_sum`` to add up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn
from tilekern.kernels.qk_norm_rope import SIZED, K, Q, default_tiles, elements, grid, tile_axes
from tilekern.kernels.qk_norm_rope_backward import add_pairs, gradients_of, results
from tilekern.kernels.qk_norm_rope_general import (
    DIMENSIONS,
    GIVEN,
    PRODUCT,
    constants,
    generic,
    inputs,
    joined,
    numbers_of,
    out_dtype,
    pieces_of,
    read_parts,
    read_turns,
    read_weights,
    small_bytes,
    turned,
    write_parts,
)
from tilekern.kernels.qk_norm_rope_general import reference as reference_forward
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, hints, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Implementation, KernelSpec, Problem, Space, outputs_of
from tilekern.targets import Target


def _pull(dx, slopes, tiles, weights, sums, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last):
    """The gradients of one step of tokens and heads: dx is stored, the shares of dw are added to ``sums``."""
    pairs, rest = form[0], form[1]
    u, dz = numbers_of(tiles, tile_t, tile_h, form), numbers_of(slopes, tile_t, tile_h, form)
    if ct.static_eval(norm_last):
        u = turned(u, c, s)
    else:
        dz = turned(dz, c, -s)
    g, du, shares = (dz[0] * weights[0], dz[1] * weights[1]), (), ()
    square, product = ct.reduce(
        (u[0] * u[0] + u[1] * u[1], g[0] * u[0] + g[1] * u[1]), 3, add_pairs, (0.0, 0.0), keepdims=True
    )  # fmt: skip
    for i in ct.static_iter(range(2, 2 + len(pieces_of(pairs, rest)))):
        g = g + (dz[i] * weights[i],)
        more = ct.reduce((u[i] * u[i], g[i] * u[i]), 3, add_pairs, (0.0, 0.0), keepdims=True)
        square, product = square + more[0], product + more[1]
    rstd = ct.rsqrt(square / (2 * pairs + rest) + eps)
    pull = product * rstd * rstd / (2 * pairs + rest)
    for i in ct.static_iter(range(2 + len(pieces_of(pairs, rest)))):
        du = du + ((g[i] - u[i] * pull) * rstd,)
        shares = shares + (dz[i] * u[i] * rstd,)
    if ct.static_eval(norm_last):
        du = turned(du, c, -s)
    write_parts(dx, du, b, t, h, tile_t, tile_h, form)
    return _plus(sums, shares, tile_t, tile_h, form)


def _plus(sums, shares, tile_t, tile_h, form):
    """The sums with one step's shares added; pairs in one tile, as they are loaded."""
    pairs, rest, width, _, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        found, others = (sums[0] + joined(shares[0], shares[1], tile_t, tile_h, width),), shares[2:]
    else:
        found, others = (sums[0] + shares[0], sums[1] + shares[1]), shares[2:]
    so_far = sums[1:] if ct.static_eval(interleaved) else sums[2:]
    for i in ct.static_iter(range(len(pieces_of(pairs, rest)))):
        found = found + (so_far[i] + ct.reshape(others[i], so_far[i].shape),)
    return found


def _zeros(tile_t, tile_h, form):
    """Nothing yet of a weight's gradient."""
    pairs, rest, width, _, interleaved, _, _ = form
    if ct.static_eval(interleaved):
        sums = (ct.zeros((1, tile_t, tile_h, 2 * width), ct.float32),)
    else:
        zeros = ct.zeros((1, tile_t, tile_h, width), ct.float32)
        sums = (zeros, zeros)
    for _, size in ct.static_iter(pieces_of(pairs, rest)):
        shape = ct.static_eval((1, tile_t, tile_h, power_of_two(size)))
        sums = sums + (ct.zeros(shape, ct.float32),)
    return sums


def _store_piece(partial, sums, start, size):
    """The sum over tokens and heads as a piece of this block's row."""
    row = ct.reshape(ct.sum(ct.sum(sums, axis=2), axis=1), (1, sums.shape[3]))
    ct.store(partial.slice(1, start, start + size), (ct.bid(0), 0), row)


def _store_sums(partial, sums, first, form):
    """One weight's gradient as a part of this block's row."""
    pairs, rest, _, _, interleaved, _, _ = form
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
    """Resident blocks that loop over steps of tokens; weights and the sums for their gradients stay in registers.

    dq_out, q and dq [batch, tokens, heads, head_dim], dk_out, k and dk [batch, tokens, kv_heads, head_dim].
    weights [head_dim], cos and sin [1 or batch, tokens, pairs], partial [blocks, 2 * head_dim].
    """
    ct.grid_dependency_control_wait()
    form = (pairs, rest, width, whole, interleaved, bounded, tma)
    q_weights, k_weights = read_weights(q_weight, offset, form), read_weights(k_weight, offset, form)
    q_sums, k_sums = _zeros(tile_t, tile_h, form), _zeros(tile_t, tile_hk, form)
    across = ct.cdiv(q.shape[1], tile_t)
    for item in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
        b, t = item // across, item % across
        at = ct.minimum(b, cos.shape[0] - 1)
        if ct.static_eval(unrolled):
            q_tiles, q_slopes, k_tiles, k_slopes = (), (), (), ()
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_tiles = q_tiles + (read_parts(q, b, t, h, tile_t, tile_h, form),)
                q_slopes = q_slopes + (read_parts(dq_out, b, t, h, tile_t, tile_h, form),)
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_tiles = k_tiles + (read_parts(k, b, t, h, tile_t, tile_hk, form),)
                k_slopes = k_slopes + (read_parts(dk_out, b, t, h, tile_t, tile_hk, form),)
        c, s = read_turns(cos, at, t, tile_t, form), read_turns(sin, at, t, tile_t, form)
        if ct.static_eval(unrolled):
            for h in ct.static_iter(range(ct.cdiv(heads, tile_h))):
                q_sums = _pull(
                    dq, q_slopes[h], q_tiles[h], q_weights, q_sums, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last
                )
            for h in ct.static_iter(range(ct.cdiv(kv_heads, tile_hk))):
                k_sums = _pull(
                    dk, k_slopes[h], k_tiles[h], k_weights, k_sums, c, s, eps, b, t, h, tile_t, tile_hk, form, norm_last
                )
        else:
            for h in range(ct.cdiv(q.shape[2], tile_h)):
                tiles = read_parts(q, b, t, h, tile_t, tile_h, form)
                slopes = read_parts(dq_out, b, t, h, tile_t, tile_h, form)
                q_sums = _pull(
                    dq, slopes, tiles, q_weights, q_sums, c, s, eps, b, t, h, tile_t, tile_h, form, norm_last
                )
            for h in range(ct.cdiv(k.shape[2], tile_hk)):
                tiles = read_parts(k, b, t, h, tile_t, tile_hk, form)
                slopes = read_parts(dk_out, b, t, h, tile_t, tile_hk, form)
                k_sums = _pull(
                    dk, slopes, tiles, k_weights, k_sums, c, s, eps, b, t, h, tile_t, tile_hk, form, norm_last
                )
    _store_sums(partial, q_sums, 0, form)
    _store_sums(partial, k_sums, 2 * pairs + rest, form)


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
        function=qk_norm_rope_general_backward,
        parameters=SPEC.parameters(problem),
        constants=constants(problem, config, ITEM_BYTES[problem["dtype"]] + ITEM_BYTES[out_dtype(problem)]),
        grid=lambda sizes, sm_count: grid(sizes, config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _default(problem: Problem, target: Target) -> Config:
    pairs = problem["pairs"]
    # As of qk_norm_rope_backward: more elements of float32, or of heads that fill no tile, take long; pairs spill.
    short = out_dtype(problem) != "float32" and pairs == power_of_two(pairs) and not problem["interleaved"]
    tile_t, tile_h = default_tiles(problem, 1024 if short else 512)
    return Config(schedule="persistent", tile_t=tile_t, tile_h=tile_h, occupancy=2, num_worker_warps=0, tma=False)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    return drawn(_ARRAYS[:2], problem, generator, device) | inputs(problem, generator, device)


def reference(dq_out: Any, dk_out: Any, norm_last: bool, interleaved: bool, **given: Any) -> dict[str, Any]:
    """The gradients of the forward's reference in float64; ``given`` are its inputs."""
    return gradients_of(reference_forward, dq_out, dk_out, norm_last=norm_last, interleaved=interleaved, **given)


SPEC = KernelSpec(
    name="qk_norm_rope_general_backward",
    summary="gradients of qk_norm_rope_general: dq, dk, and the weights' as one float32 row for each block",
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
