"""A sublayer's RMSNorm and the residual sum after it in one pass over memory.

Forward, for rows r (residual) and x of n columns, with ``rstd = 1 / sqrt(mean(x^2) + eps)``: ``y = cast(r +
cast((weight + offset) * x * rstd))`` (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467). Both casts go to the arrays'
dtype, as in Hugging Face's decoder layers: the norm's result is rounded before the sum. Llama's norm also rounds before
the weight (``cast``), Gemma's and OLMo's do not.
One launch reads r and x and writes y: three matrices; a separate norm and sum move five. In the backward, the gradient
of r equals the gradient of y, and ``rms_norm_offset_backward`` computes the gradients of x and the weight.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels import rms_norm
from tilekern.kernels.families.arrays import COLUMNS, matrices
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import default_in_blocks, forward, spec
from tilekern.kernels.rms_norm import EPS, OFFSET, normal, statistics
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array


def norm_statistics(rows, columns, eps, offset, dtype, rounded):
    """Return rstd of x [tile_m, 1]."""
    return statistics(rows, columns, eps, offset, dtype)


def norm_and_sum(tiles, weights, known):
    """Return y of x and the residual, not rounded yet."""
    rstd, eps, offset, dtype, rounded = known
    normed = normal(tiles, weights, (rstd, eps, offset, dtype))[0]
    return (tiles[1] + normed.astype(rounded).astype(ct.float32),)


@ct.kernel
def fused_rms_norm_add_forward(
    residual, x, weight, eps, offset, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool, cast: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight [columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    forward(
        norm_statistics, norm_and_sum, (x, residual), (weight,), (y,), (eps, offset, dtype, x.dtype), columns, tile_m,
        tile_n, chunks, persistent, long, bounded, tma,
    )  # fmt: skip


def reference(residual: Any, x: Any, weight: Any, eps: float, offset: float, cast: bool) -> dict[str, Any]:
    """Return the formula in float64, with the casts of the norm, which belong to the op."""
    normed = rms_norm.reference_forward(x, weight, eps, offset, cast)["y"]
    return {"y": residual.double() + normed.to(x.dtype).double()}


SPEC = spec(
    fused_rms_norm_add_forward,
    "y = residual + (weight + offset) * x / sqrt(mean(x^2) + eps), row by row",
    (*matrices(("residual", "x"), ()), Array("weight", "weight_dtype", COLUMNS), EPS, OFFSET, *matrices((), ("y",))),
    reference,
    flags=("cast",),
    dependent=True,
    live=2,
    flops=6,
    # More blocks of longer rows would spill.
    default=lambda problem, target: default_in_blocks(2, 8 if problem["columns"] <= 4096 else 4, problem, target),
)
SPECS = (SPEC,)
