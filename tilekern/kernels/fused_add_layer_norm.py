"""A residual sum and its layer normalisation in one pass over memory, forward and backward.

Forward, for rows r (residual) and x: ``total = cast(r + x)`` and ``y = layer_norm(total)``, like in the module
``layer_norm``. The cast goes to the dtype of the arrays, like in Hugging Face's decoder layers: the norm reads the
rounded sum. Backward: ``dx = dtotal + dx of layer_norm``, where dtotal is the gradient that reaches the sum past the
norm. dx is the gradient of r too. Each block stores its rows' share of dweight and dbias as one row of ``partial``, and
the spec ``column_sum`` adds these up in a fixed order. Only total and weight are saved; every matrix is read or written
once.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import layer_norm
from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, matrices, partial_sums
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import backward, default_in_blocks, default_of_two_sums, forward, spec
from tilekern.kernels.layer_norm import gradient, normal, shares, slopes, statistics
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, ScalarParameter


def _sum(tiles):
    return (tiles[0] + tiles[1],)


@ct.kernel
def fused_add_layer_norm_forward(
    residual, x, weight, bias, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight and bias [columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
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
    """Return the formula in float64, with the cast of the sum, which belongs to the op."""
    total = residual.double() + x.double()
    return {"total": total, **layer_norm.reference_forward(total.to(x.dtype), weight, bias, eps)}


def reference_backward(dtotal: Any, dy: Any, total: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`; the slope of the cast is 1, as in autograd."""
    gradients = layer_norm.reference_backward(dy, total, weight, eps)
    return {**gradients, "dx": dtotal.double() + gradients["dx"]}


FORWARD = spec(
    fused_add_layer_norm_forward,
    "total = residual + x and y = layer_norm(total), row by row",
    (
        *matrices(("residual", "x"), ()), _WEIGHT, _BIAS, _EPS, *matrices((), ("total",)),
        Array("y", PRODUCT, ROWS, "output"),
    ),
    reference_forward,
    dependent=True,
    live=3,
    flops=9,
    default=lambda problem, target: default_in_blocks(3, 4, problem, target),
)  # fmt: skip
_DTOTAL, _TOTAL = matrices(("dtotal", "total"), ())
BACKWARD = spec(
    fused_add_layer_norm_backward,
    "gradients of fused_add_layer_norm: dx, which is dresidual too, and dweight and dbias by blocks",
    (_DTOTAL, Array("dy", PRODUCT, ROWS), _TOTAL, _WEIGHT, _EPS, *matrices((), ("dx",)), partial_sums(2)),
    reference_backward,
    sums=("dweight", "dbias"),
    dependent=True,
    live=6,
    flops=19,
    default=lambda problem, target: default_of_two_sums(6, problem, target),
)
SPECS = (FORWARD, BACKWARD)
