"""A residual sum and its RMSNorm in one pass over memory, forward and backward.

Forward, for rows r (residual) and x of n columns: ``total = cast(r + x)``, and with ``rstd = 1 / sqrt(mean(total^2) +
eps)``, ``y = weight * cast(total * rstd)`` (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467). Both casts go to the
dtype of the arrays, as in Hugging Face's decoder layers: the norm reads the rounded sum.
Backward, with g = dy * weight: ``dx = dtotal + rstd * (g - total * rstd^2 * mean(g * total))``, where dtotal is the
gradient that reaches the sum past the norm. dx is the gradient of r too. ``dweight = sum over rows of dy * cast(total *
rstd)``: each block stores its rows' share as one row of ``partial``, and the spec ``column_sum`` adds these up in a
fixed order. Only total and weight are saved; every matrix is read or written once. As in the module ``rms_norm``, a
second pair of kernels multiplies by ``weight + offset``, with or without the cast before the weight.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import rms_norm
from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, matrices, partial_sums
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import backward, forward, spec
from tilekern.kernels.rms_norm import EPS, gradient, normal, share, slopes, statistics, with_offset
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array


def _sum(tiles):
    return (tiles[0] + tiles[1],)


@ct.kernel
def fused_add_rms_norm_forward(
    residual, x, weight, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight [columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    forward(
        statistics, normal, (residual, x), (weight,), (y,), (eps, None, x.dtype), columns, tile_m, tile_n, chunks,
        persistent, long, bounded, tma, _sum, (total,),
    )  # fmt: skip


def _dx(tiles, weights, known):
    return (gradient(tiles, weights, known)[0] + tiles[2],)


@ct.kernel
def fused_add_rms_norm_backward(
    dtotal, dy, total, weight, eps, dx, partial, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; matrices [rows, columns], weight [columns], partial [blocks, columns]."""
    ct.grid_dependency_control_wait()
    backward(
        slopes, _dx, share, (dy, total, dtotal), (weight,), (dx,), partial, 1, (eps, None, total.dtype), columns,
        tile_m, tile_n, chunks, long, bounded, tma,
    )  # fmt: skip


@ct.kernel
def fused_add_rms_norm_offset_forward(
    residual, x, weight, eps, offset, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool, cast: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight [columns]."""
    ct.grid_dependency_control_wait()
    launch_next(few)
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    forward(
        statistics, normal, (residual, x), (weight,), (y,), (eps, offset, dtype), columns, tile_m, tile_n, chunks,
        persistent, long, bounded, tma, _sum, (total,),
    )  # fmt: skip


@ct.kernel
def fused_add_rms_norm_offset_backward(
    dtotal, dy, total, weight, eps, offset, dx, partial, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, long: ConstBool, bounded: ConstBool, tma: ConstBool, cast: ConstBool,
):  # fmt: skip
    """Resident blocks; matrices [rows, columns], weight [columns], partial [blocks, columns]."""
    ct.grid_dependency_control_wait()
    dtype = total.dtype if ct.static_eval(cast) else ct.float32
    backward(
        slopes, _dx, share, (dy, total, dtotal), (weight,), (dx,), partial, 1, (eps, offset, dtype), columns, tile_m,
        tile_n, chunks, long, bounded, tma,
    )  # fmt: skip


_WEIGHT = Array("weight", "weight_dtype", COLUMNS)


def reference_forward(
    residual: Any, x: Any, weight: Any, eps: float, offset: float = 0.0, cast: bool = True
) -> dict[str, Any]:
    """Return the formula in float64, with the casts of the sum and of the normalised row, which belong to the op."""
    total = residual.double() + x.double()
    return {"total": total, **rms_norm.reference_forward(total.to(x.dtype), weight, eps, offset, cast)}


def reference_backward(
    dtotal: Any, dy: Any, total: Any, weight: Any, eps: float, offset: float = 0.0, cast: bool = True
) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`; the slopes of the casts are 1, as in autograd."""
    gradients = rms_norm.reference_backward(dy, total, weight, eps, offset, cast)
    return {**gradients, "dx": dtotal.double() + gradients["dx"]}


FORWARD = spec(
    fused_add_rms_norm_forward,
    "total = residual + x and y = weight * cast(total / sqrt(mean(total^2) + eps)), row by row",
    (*matrices(("residual", "x"), ()), _WEIGHT, EPS, *matrices((), ("total",)), Array("y", PRODUCT, ROWS, "output")),
    reference_forward,
    dependent=True,
    live=2,
    flops=5,
)
_DTOTAL, _TOTAL = matrices(("dtotal", "total"), ())
BACKWARD = spec(
    fused_add_rms_norm_backward,
    "gradients of fused_add_rms_norm: dx, which is dresidual too, and dweight as a float32 row of each block",
    (_DTOTAL, Array("dy", PRODUCT, ROWS), _TOTAL, _WEIGHT, EPS, *matrices((), ("dx",)), partial_sums(1)),
    reference_backward,
    sums=("dweight",),
    dependent=True,
    live=4,
    flops=11,
)
OFFSET_FORWARD = spec(
    fused_add_rms_norm_offset_forward,
    "total = residual + x and y = (weight + offset) * total / sqrt(mean(total^2) + eps), row by row",
    with_offset(FORWARD.arrays),
    reference_forward,
    flags=("cast",),
    dependent=True,
    live=2,
    flops=6,
)
OFFSET_BACKWARD = spec(
    fused_add_rms_norm_offset_backward,
    "gradients of fused_add_rms_norm with an offset: dx, which is dresidual too, and dweight by blocks",
    with_offset(BACKWARD.arrays),
    reference_backward,
    sums=("dweight",),
    flags=("cast",),
    dependent=True,
    live=4,
    flops=12,
)
SPECS = (FORWARD, BACKWARD, OFFSET_FORWARD, OFFSET_BACKWARD)
