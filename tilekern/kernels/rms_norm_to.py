"""RMSNorm, alone and of a residual sum, between matrix products of another dtype.

Under autocast over float32 the stream of residual sums is of float32, what is added to it was made by a product of a
half type, and its norm is read by such products. The kernels are those of ``rms_norm`` and ``fused_add_rms_norm``,
which compute in float32 and round each result once, as they store it: a config has the bits of a cast, a sum and its
norm in float32, and another cast, without the launches and passes over memory of the casts. The backward is that of
these modules, in the dtype of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels import fused_add_rms_norm, rms_norm
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import forward, spec
from tilekern.kernels.rms_norm import normal, statistics
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import TOLERANCES, Dimension, KernelSpec, Problem


def _sum(tiles):
    return (tiles[0] + tiles[1],)


@ct.kernel
def fused_add_rms_norm_to_forward(
    residual, x, weight, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight [columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own.
    ct.grid_dependency_control_wait()
    launch_next(few)
    forward(
        statistics, normal, (residual, x), (weight,), (y,), (eps, None, total.dtype), columns, tile_m, tile_n, chunks,
        persistent, long, bounded, tma, _sum, (total,),
    )  # fmt: skip


@ct.kernel
def fused_add_rms_norm_offset_to_forward(
    residual, x, weight, eps, offset, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool, cast: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; matrices [rows, columns], weight [columns]."""
    ct.grid_dependency_control_wait()
    launch_next(few)
    dtype = total.dtype if ct.static_eval(cast) else ct.float32
    forward(
        statistics, normal, (residual, x), (weight,), (y,), (eps, offset, dtype), columns, tile_m, tile_n, chunks,
        persistent, long, bounded, tma, _sum, (total,),
    )  # fmt: skip


def reference_add(
    residual: Any, x: Any, weight: Any, eps: float, offset: float = 0.0, cast: bool = True
) -> dict[str, Any]:
    """Return the formula in float64, with casts to the dtype of the residual, which the formula takes of its x."""
    return fused_add_rms_norm.reference_forward(x, residual, weight, eps, offset, cast)


def _coarser(problem: Problem) -> str:
    """Return the dtype that sets the tolerance: a row may be rounded to that of the sum before that of y."""
    return max(problem["dtype"], problem["product_dtype"], key=lambda dtype: TOLERANCES[dtype].relative)


def _to(
    norm: KernelSpec, function: Any, reference: Callable[..., dict[str, Any]], *of_products: str, **more: Any
) -> KernelSpec:
    """Return the spec of a norm with a dimension for the dtype of the arrays named."""
    arrays = tuple(replace(x, dtype="product_dtype") if x.name in of_products else x for x in norm.arrays)
    made = spec(
        function, f"{norm.summary}, between products of another dtype", arrays, reference, live=2, module=__name__,
        result_dtype=_coarser, **more,
    )  # fmt: skip
    name = f"{norm.name.removesuffix('_forward')}_to_forward"
    return replace(made, name=name, dimensions=(*made.dimensions, Dimension("product_dtype", "dtype")))


FORWARD = _to(rms_norm.FORWARD, rms_norm.rms_norm_forward, rms_norm.reference_forward, "y", flops=4)
OFFSET_FORWARD = _to(
    rms_norm.OFFSET_FORWARD, rms_norm.rms_norm_offset_forward, rms_norm.reference_forward, "y", flags=("cast",),
    flops=5,
)  # fmt: skip
ADD_FORWARD = _to(
    fused_add_rms_norm.FORWARD, fused_add_rms_norm_to_forward, reference_add, "x", "y", dependent=True, flops=5
)
ADD_OFFSET_FORWARD = _to(
    fused_add_rms_norm.OFFSET_FORWARD, fused_add_rms_norm_offset_to_forward, reference_add, "x", "y", flags=("cast",),
    dependent=True, flops=6,
)  # fmt: skip
SPECS = (FORWARD, OFFSET_FORWARD, ADD_FORWARD, ADD_OFFSET_FORWARD)
