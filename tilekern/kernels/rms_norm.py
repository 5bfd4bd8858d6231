"""RMSNorm forward and backward (Zhang and Sennrich 2019, arXiv:1910.07467), with Hugging Face's order of casts.

Forward, for a row x of n columns: ``rstd = 1 / sqrt(mean(x^2) + eps)``, ``y = weight * cast(x * rstd)``, where the
cast goes to the dtype of x before the weight is applied, as in Llama and Qwen3.
Backward, with g = dy * weight: ``dx = rstd * (g - x * rstd^2 * mean(g * x))`` and ``dweight = sum over rows of
dy * cast(x * rstd)``. The row is read anyway, so rstd is computed again and only x and weight are saved. Each
block adds up its rows' share of dweight in float32 and stores one row of ``partial``; the spec ``column_sum`` adds
these up in a fixed order, so that the result does not depend on timing.

A second pair of kernels multiplies by ``weight + offset``, like Gemma with an offset of 1, and casts inside only with
``cast``; else the row is rounded once, at its end, to the dtype of x. Both pairs have the same formulas, and the same
times: for 4096 rows of 3584 bfloat16 an H200 takes 19.8 and 19.7 us forward, 31.9 and 30.9 us backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, Arrays, partial_sums
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import add_up, backward, forward, spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, ScalarParameter


def _factor(weight, offset):
    """Return the factor of the normalised row; without an offset (None) the weight itself."""
    return weight if ct.static_eval(offset is None) else weight + offset


def _square(tiles, weights, known):
    return (tiles[0] * tiles[0],)


def statistics(rows, columns, eps, offset, dtype):
    """Return rstd [tile_m, 1]."""
    return (ct.rsqrt(add_up(_square, 1, rows, (), False)[0] / columns + eps),)


def normal(tiles, weights, known):
    """Return y."""
    rstd, _, offset, dtype = known
    factor = _factor(weights[0], offset)
    return ((tiles[0] * rstd).astype(dtype).astype(ct.float32) * factor,)


@ct.kernel
def rms_norm_forward(
    x, weight, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, persistent: ConstBool,
    long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], weight [columns]."""
    launch_next(few)
    forward(
        statistics, normal, (x,), (weight,), (y,), (eps, None, x.dtype), columns, tile_m, tile_n, chunks, persistent,
        long, bounded, tma,
    )  # fmt: skip


@ct.kernel
def rms_norm_offset_forward(
    x, weight, y, eps, offset, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool, cast: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], weight [columns]."""
    launch_next(few)
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    forward(
        statistics, normal, (x,), (weight,), (y,), (eps, offset, dtype), columns, tile_m, tile_n, chunks, persistent,
        long, bounded, tma,
    )  # fmt: skip


def _square_and_product(tiles, weights, known):
    """Return x^2 and g * x."""
    factor = _factor(weights[0], known[0])
    return tiles[1] * tiles[1], tiles[0] * factor * tiles[1]


def slopes(rows, columns, eps, offset, dtype):
    """Return rstd and the factor of dx along x, [tile_m, 1] each."""
    square, product = add_up(_square_and_product, 2, rows, (offset,), False)
    rstd = ct.rsqrt(square / columns + eps)
    return rstd, product * rstd * rstd / columns


def gradient(tiles, weights, known):
    """Return dx."""
    rstd, pull, _, offset, _ = known
    return ((tiles[0] * _factor(weights[0], offset) - tiles[1] * pull) * rstd,)


def share(tiles, weights, known):
    """Return the share of each element in dweight."""
    rstd, _, _, _, dtype = known
    return (tiles[0] * (tiles[1] * rstd).astype(dtype).astype(ct.float32),)


@ct.kernel
def rms_norm_backward(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x and dx [rows, columns], weight [columns], partial [blocks, columns]."""
    backward(
        slopes, gradient, share, (dy, x), (weight,), (dx,), partial, 1, (eps, None, x.dtype), columns, tile_m, tile_n,
        chunks, long, bounded, tma,
    )  # fmt: skip


@ct.kernel
def rms_norm_offset_backward(
    dy, x, weight, dx, partial, eps, offset, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    long: ConstBool, bounded: ConstBool, tma: ConstBool, cast: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x and dx [rows, columns], weight [columns], partial [blocks, columns]."""
    dtype = x.dtype if ct.static_eval(cast) else ct.float32
    backward(
        slopes, gradient, share, (dy, x), (weight,), (dx,), partial, 1, (eps, offset, dtype), columns, tile_m, tile_n,
        chunks, long, bounded, tma,
    )  # fmt: skip


_X, _WEIGHT = Array("x", "dtype", ROWS), Array("weight", "weight_dtype", COLUMNS)
EPS, OFFSET = ScalarParameter("eps", "float32", 1e-6), ScalarParameter("offset", "float32", 1.0)


def with_offset(arrays: Arrays) -> Arrays:
    """Return the arrays of a kernel with an offset, which follows eps; all except the weight have the dtype of x."""
    plain = (replace(x, dtype="dtype") if isinstance(x, Array) and x.dtype == PRODUCT else x for x in arrays)
    return tuple(one for x in plain for one in ((x, OFFSET) if x == EPS else (x,)))


def reference_forward(x: Any, weight: Any, eps: float, offset: float = 0.0, cast: bool = True) -> dict[str, Any]:
    """Return the formula in float64, with the op's cast of the normalised row, if there is one."""
    import torch

    wide = x.double()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return {"y": _cast(normal, x, cast) * (weight.double() + offset)}


def reference_backward(
    dy: Any, x: Any, weight: Any, eps: float, offset: float = 0.0, cast: bool = True
) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`; the slope of the cast is 1, as in autograd."""
    import torch

    wide, gradient = x.double(), dy.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    pulled = gradient * (weight.double() + offset)
    dx = rstd * (pulled - wide * rstd.square() * (pulled * wide).mean(-1, keepdim=True))
    return {"dx": dx, "dweight": (gradient * _cast(wide * rstd, x, cast)).sum(0)}


def _cast(normal: Any, x: Any, cast: bool) -> Any:
    return normal.to(x.dtype).double() if cast else normal


# The row is rounded to the dtype of x before y, which may be wider.
FORWARD = replace(
    spec(
        rms_norm_forward,
        "y = weight * cast(x / sqrt(mean(x^2) + eps)), row by row",
        (_X, _WEIGHT, Array("y", PRODUCT, ROWS, "output"), EPS),
        reference_forward,
        live=2,
        flops=4,
    ),
    result_dtype=_X.dtype_in,
)
BACKWARD = spec(
    rms_norm_backward,
    "gradients of rms_norm: dx, and dweight as one float32 row for each block",
    (Array("dy", PRODUCT, ROWS), _X, _WEIGHT, Array("dx", "dtype", ROWS, "output"), partial_sums(1), EPS),
    reference_backward,
    sums=("dweight",),
    live=4,
    flops=10,
)
OFFSET_FORWARD = spec(
    rms_norm_offset_forward,
    "y = (weight + offset) * x / sqrt(mean(x^2) + eps), row by row, with or without the inner cast",
    with_offset(FORWARD.arrays),
    reference_forward,
    flags=("cast",),
    live=2,
    flops=5,
)
OFFSET_BACKWARD = spec(
    rms_norm_offset_backward,
    "gradients of rms_norm with an offset: dx, and dweight as one float32 row for each block",
    with_offset(BACKWARD.arrays),
    reference_backward,
    sums=("dweight",),
    flags=("cast",),
    live=4,
    flops=11,
)
SPECS = (FORWARD, BACKWARD, OFFSET_FORWARD, OFFSET_BACKWARD)
