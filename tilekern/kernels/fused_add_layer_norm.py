"""A residual sum and its layer normalisation in one pass over memory, forward and backward.

Forward, for rows r (residual) and x: ``total = cast(r + x)`` and ``y = layer_norm(total)``, as the module
``layer_norm`` has it. The cast goes to the dtype of the arrays, where Hugging Face's decoder layers have it: the norm
reads the rounded sum. Backward: ``dx = dtotal + dx of layer_norm``, where dtotal is what reaches the sum past the norm.
It is the gradient of r as well as of x. Each block stores its rows' share of dweight and dbias as one row of
``partial``, which the spec ``column_sum`` adds up in a fixed order. Nothing but total and weight is saved; every matrix
is read or written once.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import layer_norm
from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, partial_sums
from tilekern.kernels.families.rows import backward, default_in_blocks, default_of_two_sums, forward, spec
from tilekern.kernels.layer_norm import gradient, normal, shares, slopes, statistics
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, ScalarParameter


def _sum(tiles):
    return (tiles[0] + tiles[1],)


@ct.kernel
def fused_add_layer_norm_forward(
    residual, x, weight, bias, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight and bias [columns]."""
    # Its launch overlaps the end of the kernel that writes x.
    ct.grid_dependency_control_wait()
    forward(
        statistics, normal, (residual, x), (weight, bias), (y,), (eps,), columns, tile_m, tile_n, chunks, persistent,
        long, bounded, tma, _sum, (total,),
    )  # fmt: skip


def _dx(tiles, weights, known):
    return (gradient(tiles, weights, known)[0] + tiles[2],)


@ct.kernel
def fused_add_layer_norm_backward(
    dtotal, dy, total, weight, eps, dx, partial, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; matrices [rows, columns], weight [columns], partial [blocks, 2 * columns]."""
    ct.grid_dependency_control_wait()
    backward(
        slopes, _dx, shares, (dy, total, dtotal), (weight,), (dx,), partial, 2, (eps,), columns, tile_m,
        tile_n, chunks, long, bounded, tma,
    )  # fmt: skip


_WEIGHT, _BIAS = (Array(name, "weight_dtype", COLUMNS) for name in ("weight", "bias"))
_EPS = ScalarParameter("eps", "float32", 1e-5)


def reference_forward(residual: Any, x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """The formula in float64 but for the cast of the sum, which belongs to the op."""
    total = residual.double() + x.double()
    return {"total": total, **layer_norm.reference_forward(total.to(x.dtype), weight, bias, eps)}


def reference_backward(dtotal: Any, dy: Any, total: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The gradients of :func:`reference_forward`, the cast's own slope taken as 1, as autograd does."""
    gradients = layer_norm.reference_backward(dy, total, weight, eps)
    return {**gradients, "dx": dtotal.double() + gradients["dx"]}


FORWARD = spec(
    fused_add_layer_norm_forward,
    "total = residual + x and y = layer_norm(total), row by row",
    (
        Array("residual", "dtype", ROWS),
        Array("x", "dtype", ROWS),
        _WEIGHT,
        _BIAS,
        _EPS,
        Array("total", "dtype", ROWS, "output"),
        Array("y", PRODUCT, ROWS, "output"),
    ),
    reference_forward,
    dependent=True,
    live=3,
    flops=9,
    default=lambda problem, target: default_in_blocks(3, 4, problem, target),
)
BACKWARD = spec(
    fused_add_layer_norm_backward,
    "gradients of fused_add_layer_norm: dx, which is dresidual too, and dweight and dbias by blocks",
    (
        Array("dtotal", "dtype", ROWS),
        Array("dy", PRODUCT, ROWS),
        Array("total", "dtype", ROWS),
        _WEIGHT,
        _EPS,
        Array("dx", "dtype", ROWS, "output"),
        partial_sums(2),
    ),
    reference_backward,
    sums=("dweight", "dbias"),
    dependent=True,
    live=6,
    flops=19,
    default=lambda problem, target: default_of_two_sums(6, problem, target),
)
SPECS = (FORWARD, BACKWARD)
