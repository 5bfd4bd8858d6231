"""The RMSNorm of a sublayer, the residual sum after it and the norm of that sum in one pass, forward and backward.

Gemma and GLM-4 have two norms around each sum. Forward, for rows r (residual) and x: ``total = cast(r + norm(x,
weight))`` like in the module ``fused_rms_norm_add``, and ``y = norm(total, next_weight)``; both norms share eps, offset
and order of casts. Backward, with g = dy * (next_weight + offset) and the sum's rstd: ``dresidual = dtotal + rstd * (g
- total * rstd^2 * mean(g * total))``, where dtotal is the gradient that reaches the sum past its norm. dresidual is the
gradient of the first norm's result too, and dx follows from it and x in the same way. Rows are read anyway, so both
rstd are computed again, and only x, total and the weights are saved. Each block stores its rows' share of the gradients
of both weights as one row of ``partial``, and the spec ``column_sum`` adds these up in a fixed order. The forward moves
four matrices and the backward six; a separate norm, and a sum with its norm, move six and seven.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import fused_rms_norm_add, rms_norm
from tilekern.kernels.families.arrays import COLUMNS, matrices, partial_sums
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import add_up, backward, default_in_blocks, forward, spec
from tilekern.kernels.fused_rms_norm_add import norm_and_sum
from tilekern.kernels.rms_norm import EPS, OFFSET, gradient, normal, share, statistics
from tilekern.kernels.tiles import HELD_BY_DEFAULT, ConstBool, ConstInt, power_of_two
from tilekern.spec import Array, Config, Problem
from tilekern.spec.targets import Target


def _total(tiles, weights, known):
    """Return the sum, rounded as it is stored, in float32; ``known`` are x's rstd and the scalars."""
    return norm_and_sum(tiles, weights, known)[0].astype(known[4]).astype(ct.float32)


def _square_of_total(tiles, weights, known):
    total = _total(tiles, weights, known)
    return (total * total,)


def _statistics(rows, columns, eps, offset, dtype, rounded):
    """Return the rstd of x and that of the sum, [tile_m, 1] each."""
    rstd = statistics(rows, columns, eps, offset, dtype)[0]
    square = add_up(_square_of_total, 1, rows, (rstd, eps, offset, dtype, rounded), False)[0]
    return rstd, ct.rsqrt(square / columns + eps)


def _sum_and_norm(tiles, weights, known):
    rstd, next_rstd, eps, offset, dtype, rounded = known
    total = _total(tiles, weights, (rstd, eps, offset, dtype, rounded))
    return total, normal((total,), (weights[1],), (next_rstd, eps, offset, dtype))[0]


@ct.kernel
def fused_rms_norm_add_rms_norm_forward(
    residual, x, weight, next_weight, eps, offset, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
    cast: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weights [columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    forward(
        _statistics, _sum_and_norm, (x, residual), (weight, next_weight), (total, y), (eps, offset, dtype, x.dtype),
        columns, tile_m, tile_n, chunks, persistent, long, bounded, tma,
    )  # fmt: skip


def _of_total(tiles, weights, known):
    return tiles[2] * tiles[2], tiles[1] * (weights[1] + known[0]) * tiles[2]


def _dresidual(tiles, weights, known):
    """Return dresidual; ``known`` are the sum's rstd, the factor of its gradient along it, and the offset."""
    rstd, pull, offset = known
    return tiles[0] + gradient((tiles[1], tiles[2]), (weights[1],), (rstd, pull, 0, offset, 0))[0]


def _of_x(tiles, weights, known):
    """Return x^2, and x times the gradient of its normalised row."""
    return tiles[3] * tiles[3], _dresidual(tiles, weights, known) * (weights[0] + known[2]) * tiles[3]


def _slopes(rows, columns, eps, offset, dtype):
    """Return, for the sum and for x, rstd and the factor of the gradient along it, [tile_m, 1] each."""
    square, product = add_up(_of_total, 2, rows, (offset,), False)
    next_rstd = ct.rsqrt(square / columns + eps)
    next_pull = product * next_rstd * next_rstd / columns
    square, product = add_up(_of_x, 2, rows, (next_rstd, next_pull, offset), False)
    rstd = ct.rsqrt(square / columns + eps)
    return next_rstd, next_pull, rstd, product * rstd * rstd / columns


def _gradients(tiles, weights, known):
    next_rstd, next_pull, rstd, pull, _, offset, _ = known
    dresidual = _dresidual(tiles, weights, (next_rstd, next_pull, offset))
    return dresidual, gradient((dresidual, tiles[3]), (weights[0],), (rstd, pull, 0, offset, 0))[0]


def _shares(tiles, weights, known):
    """Return the shares of dweight and dnext_weight."""
    next_rstd, next_pull, rstd, _, _, offset, dtype = known
    dresidual = _dresidual(tiles, weights, (next_rstd, next_pull, offset))
    dweight = share((dresidual, tiles[3]), (), (rstd, 0, 0, 0, dtype))[0]
    return dweight, share((tiles[1], tiles[2]), (), (next_rstd, 0, 0, 0, dtype))[0]


@ct.kernel
def fused_rms_norm_add_rms_norm_backward(
    dtotal, dy, total, x, weight, next_weight, eps, offset, dresidual, dx, partial, columns: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, long: ConstBool, bounded: ConstBool, tma: ConstBool,
    cast: ConstBool,
):  # fmt: skip
    """Resident blocks; matrices [rows, columns], weights [columns], partial [blocks, 2 * columns]."""
    ct.grid_dependency_control_wait()
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    backward(
        _slopes, _gradients, _shares, (dtotal, dy, total, x), (weight, next_weight), (dresidual, dx), partial, 2,
        (eps, offset, dtype), columns, tile_m, tile_n, chunks, long, bounded, tma,
    )  # fmt: skip


_WEIGHTS = (Array("weight", "weight_dtype", COLUMNS), Array("next_weight", "weight_dtype", COLUMNS))


def reference_forward(
    residual: Any, x: Any, weight: Any, next_weight: Any, eps: float, offset: float, cast: bool
) -> dict[str, Any]:
    """Return the formula in float64, with its casts, which belong to the op."""
    total = fused_rms_norm_add.reference(residual, x, weight, eps, offset, cast)["y"]
    return {"total": total, **rms_norm.reference_forward(total.to(x.dtype), next_weight, eps, offset, cast)}


def reference_backward(
    dtotal: Any, dy: Any, total: Any, x: Any, weight: Any, next_weight: Any, eps: float, offset: float, cast: bool
) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`; the slopes of the casts are 1, as in autograd."""
    second = rms_norm.reference_backward(dy, total, next_weight, eps, offset, cast)
    dresidual = dtotal.double() + second["dx"]
    first = rms_norm.reference_backward(dresidual, x, weight, eps, offset, cast)
    return {"dresidual": dresidual, **first, "dnext_weight": second["dweight"]}


def _default_backward(problem: Problem, target: Target) -> Config:
    """Return one resident block of eight warps, two for short rows: more, or chunks of 1024 columns, would spill."""
    columns, hopper = problem["columns"], target.has_tma
    width, held = power_of_two(columns), columns <= (4096 if problem["dtype"] == "float32" else HELD_BY_DEFAULT)
    return Config(
        schedule="persistent",
        passes=1 if held else 2,
        tile_m=max(1, min(64, 2048 // width)) if held else 1,
        tile_n=min(width, 4096) if held else 1024,
        occupancy=2 if width <= 2048 else 1,
        num_worker_warps=8 if hopper else 0,
        tma=hopper,
    )


FORWARD = spec(
    fused_rms_norm_add_rms_norm_forward,
    "total = residual + rms_norm(x, weight) and y = rms_norm(total, next_weight), row by row",
    (*matrices(("residual", "x"), ()), *_WEIGHTS, EPS, OFFSET, *matrices((), ("total", "y"))),
    reference_forward,
    flags=("cast",),
    dependent=True,
    live=2,
    flops=11,
    default=lambda problem, target: default_in_blocks(4, 4, problem, target, num_worker_warps=8),
)
BACKWARD = spec(
    fused_rms_norm_add_rms_norm_backward,
    "gradients of fused_rms_norm_add_rms_norm: dresidual, dx, and the weights' as float32 rows of blocks",
    (
        *matrices(("dtotal", "dy", "total", "x"), ()), *_WEIGHTS, EPS, OFFSET, *matrices((), ("dresidual", "dx")),
        partial_sums(2),
    ),
    reference_backward,
    sums=("dweight", "dnext_weight"),
    flags=("cast",),
    dependent=True,
    live=6,
    flops=24,
    default=_default_backward,
)  # fmt: skip
SPECS = (FORWARD, BACKWARD)
