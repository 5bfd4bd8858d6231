"""Softmax of rows forward and backward, in float32.

Forward: ``y = exp(x - max(x)) / sum(exp(x - max(x)))``. Backward, from the stored y:
``dx = y * (dy - sum(dy * y))``. Rows that fit registers are read once, longer ones again out of the L2 cache. A row is
NaN if it holds NaN or +inf, or only -inf.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, matrices
from tilekern.kernels.families.rows import add_up, default_in_blocks, forward, largest, spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array

_LOG2_E = 1.4426950408889634


def _x(tiles, weights, known):
    return tiles[0]


def _power(x, top):
    # The difference first: one fused product and sum would lose the digits of large x.
    return ct.exp2((x - top) * _LOG2_E, flush_to_zero=True)


def _powers(tiles, weights, known):
    return (_power(tiles[0], known[0]),)


def _top_and_share(rows, columns):
    """Return the maximum, and 1 / the sum of the powers, [tile_m, 1] each."""
    top = largest(_x, rows, ())
    return top, 1.0 / add_up(_powers, 1, rows, (top,), True)[0]


def _y(tiles, weights, known):
    return (_power(tiles[0], known[0]) * known[1],)


@ct.kernel
def softmax_forward(
    x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, persistent: ConstBool,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns]."""
    forward(
        _top_and_share, _y, (x,), (), (y,), (), columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def _products(tiles, weights, known):
    return (tiles[0] * tiles[1],)


def _mean_slope(rows, columns):
    return add_up(_products, 1, rows, (), False)


def _dx(tiles, weights, known):
    return (tiles[1] * (tiles[0] - known[0]),)


@ct.kernel
def softmax_backward(
    dy, y, dx, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, persistent: ConstBool,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; dy, y and dx [rows, columns]."""
    forward(
        _mean_slope, _dx, (dy, y), (), (dx,), (), columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def reference_forward(x: Any) -> dict[str, Any]:
    """Return the formula in float64."""
    return {"y": x.double().softmax(-1)}


def reference_backward(dy: Any, y: Any) -> dict[str, Any]:
    """Return the gradient of :func:`reference_forward` in float64."""
    slope, wide = dy.double(), y.double()
    return {"dx": wide * (slope - (slope * wide).sum(-1, keepdim=True))}


FORWARD = spec(
    softmax_forward,
    "y = exp(x) / sum(exp(x)), row by row",
    matrices(("x",), ("y",)),
    reference_forward,
    live=1,
    flops=5,
    default=lambda problem, target: default_in_blocks(1, 8, problem, target),
)
BACKWARD = spec(
    softmax_backward,
    "gradient of softmax from its result: dx = y * (dy - sum(dy * y)), row by row",
    (Array("dy", "dtype", ROWS), Array("y", "dtype", ROWS, nonnegative=True), Array("dx", "dtype", ROWS, "output")),
    reference_backward,
    live=2,
    flops=4,
    default=lambda problem, target: default_in_blocks(2, 2, problem, target),
)
SPECS = (FORWARD, BACKWARD)
