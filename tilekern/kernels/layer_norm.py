"""Layer normalisation forward and backward (Ba, Kiros and Hinton 2016, arXiv:1607.06450), statistics in float32.

Forward, for a row x of n columns: ``mean = sum(x) / n``, ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)`` and
``y = (x - mean) * rstd * weight + bias``, rounded once, to the dtype that torch promotes x and the weight to.
Backward, with g = dy * weight: ``dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * mean(g * (x - mean)))``,
``dweight = sum over rows of dy * (x - mean) * rstd`` and ``dbias = sum over rows of dy``. The row is read anyway, so
its statistics are computed again.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, gradients, partial_sums
from tilekern.kernels.families.overlap import launch_next
from tilekern.kernels.families.rows import add_up, backward, default_in_blocks, default_of_two_sums, forward, spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array, ScalarParameter


def _level(tiles, weights, known):
    return (tiles[0],)


def _spread(tiles, weights, known):
    """Return squares of the distances from the mean, whose sum does not cancel."""
    left = tiles[0] - known[0]
    return (left * left,)


def statistics(rows, columns, eps):
    """Return the mean and rstd, [tile_m, 1] each."""
    mean = add_up(_level, 1, rows, (), False)[0] / columns
    return mean, ct.rsqrt(add_up(_spread, 1, rows, (mean,), True)[0] / columns + eps)


def normal(tiles, weights, known):
    """Return y; ``known`` are the mean and rstd."""
    return ((tiles[0] - known[0]) * known[1] * weights[0] + weights[1],)


@ct.kernel
def layer_norm_forward(
    x, weight, bias, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, few: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], weight and bias [columns]."""
    launch_next(few)
    forward(
        statistics, normal, (x,), (weight, bias), (y,), (eps,), columns, tile_m, tile_n, chunks, persistent, long,
        bounded, tma,
    )  # fmt: skip


def _levels(tiles, weights, known):
    """Return x and g."""
    return tiles[1], tiles[0] * weights[0]


def _spreads(tiles, weights, known):
    """Return the terms of rstd and of its product with g; ``known`` are the means of x and g."""
    left = tiles[1] - known[0]
    return left * left, tiles[0] * weights[0] * left


def slopes(rows, columns, eps):
    """Return the means of x and g, rstd, and what pulls dx along x, [tile_m, 1] each."""
    level, slope = add_up(_levels, 2, rows, (), False)
    means = (level / columns, slope / columns)
    squares, products = add_up(_spreads, 2, rows, means, True)
    rstd = ct.rsqrt(squares / columns + eps)
    return means[0], means[1], rstd, products * rstd * rstd / columns


def gradient(tiles, weights, known):
    """Return dx; ``known`` are the results of :func:`slopes`."""
    return ((tiles[0] * weights[0] - known[1] - (tiles[1] - known[0]) * known[3]) * known[2],)


def shares(tiles, weights, known):
    """Return the share of each element in dweight and in dbias."""
    return tiles[0] * ((tiles[1] - known[0]) * known[2]), tiles[0]


@ct.kernel
def layer_norm_backward(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x and dx [rows, columns], weight [columns], partial [blocks, 2 * columns]."""
    backward(
        slopes, gradient, shares, (dy, x), (weight,), (dx,), partial, 2, (eps,), columns, tile_m, tile_n,
        chunks, long, bounded, tma,
    )  # fmt: skip


_X, _EPS = Array("x", "dtype", ROWS), ScalarParameter("eps", "float32", 1e-5)
_WEIGHT, _BIAS = (Array(name, "weight_dtype", COLUMNS) for name in ("weight", "bias"))


def reference_forward(x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """Return the formula in float64."""
    wide = x.double()
    left = wide - wide.mean(-1, keepdim=True)
    rstd = (left.square().mean(-1, keepdim=True) + eps).rsqrt()
    return {"y": left * rstd * weight.double() + bias.double()}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`, which are the same for any bias."""
    return gradients(reference_forward, {"y": dy}, x=x, weight=weight, bias=weight, eps=eps)


FORWARD = spec(
    layer_norm_forward,
    "y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row",
    (_X, _WEIGHT, _BIAS, Array("y", PRODUCT, ROWS, "output"), _EPS),
    reference_forward,
    live=2,
    flops=8,
    default=lambda problem, target: default_in_blocks(3, 8, problem, target),
)
BACKWARD = spec(
    layer_norm_backward,
    "gradients of layer_norm: dx, and dweight and dbias as one float32 row for each block",
    (Array("dy", PRODUCT, ROWS), _X, _WEIGHT, Array("dx", "dtype", ROWS, "output"), partial_sums(2), _EPS),
    reference_backward,
    sums=("dweight", "dbias"),
    live=5,
    flops=18,
    default=lambda problem, target: default_of_two_sums(5, problem, target),
)
SPECS = (FORWARD, BACKWARD)
