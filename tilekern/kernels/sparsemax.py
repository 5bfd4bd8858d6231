"""Sparsemax of rows (Martins and Astudillo 2016, arXiv:1602.02068) forward and backward, in float32.

Forward: ``y = max(x - tau, 0)`` with the tau for which a row of y sums to 1. The row is not sorted. Michelot's steps
(1986) lead to tau: ``tau = (sum(x) - 1) / count`` over the x above the previous tau; the first tau is max(x) - 1. They
are Newton steps on the excess ``sum(max(x - tau, 0)) - 1``, which is convex and falling, so tau rises to its final
value, and is exact once a step finds as many numbers as the previous one. Each step divides the product of excess and
count by 4 or more: 32 are enough for float32 and 2^20 columns, and rows of normal numbers take about five.

Most steps look at a part of the row: the largest of each column over the chunks that the row is cut into. The rest can
only raise tau, so the steps over the whole row may begin at the tau of that part. Mostly the first of these is the
last, since it finds no further number above tau.

Backward, from the stored y: dx is dy minus its mean over the support (y > 0), and 0 elsewhere.

Rows that registers hold are read once, longer ones in each step out of the L2 cache. A row is NaN if it holds NaN or
+inf, or only -inf.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import matrices
from tilekern.kernels.families.rows import add_up, default_in_blocks, forward, maxima, space_of, spec
from tilekern.kernels.tiles import LONGEST_HELD, ConstBool, ConstInt, add_pairs
from tilekern.spec import Problem, Value

_STEPS = 32


def _x(tiles, weights, known):
    return tiles[0]


def _above(left, tau):
    """Return the elements of tiles minus the maximum that are above tau, and 1 for each; NaN counts."""
    below = left <= tau
    return ct.where(below, 0.0, left), ct.where(below, 0.0, 1.0)


def _support(tiles, weights, known):
    """Return the support's elements and their number; ``known`` are the maximum, and tau minus the maximum."""
    return _above(tiles[0] - known[0], known[1])


def _step(total, count, before, tau, steps):
    """Return tau after a step of Michelot's, and how many steps may follow: none if the support did not change."""
    after = (total - 1.0) / count
    # Rounding may lower tau in the last step. NaN is kept.
    return ct.where(after <= tau, tau, after), (steps - 1) * ct.max(ct.where(count != before, 1, 0))


def _top_and_tau(rows, columns):
    """Return the maximum, and tau minus the maximum, [tile_m, 1] each; large x have no digits for tau itself."""
    part = maxima(_x, rows, ())
    top = ct.max(part, axis=1, keepdims=True)
    left = part - top
    before = ct.zeros((rows[5][1], 1), ct.float32)
    tau = before - 1.0
    steps = _STEPS
    while steps > 0:
        total, count = ct.reduce(_above(left, tau), 1, add_pairs, (0.0, 0.0), keepdims=True)
        tau, steps = _step(total, count, before, tau, steps)
        before = count
    steps = _STEPS
    while steps > 0:
        total, count = add_up(_support, 2, rows, (top, tau), True)
        tau, steps = _step(total, count, before, tau, steps)
        before = count
    return top, tau


def _y(tiles, weights, known):
    above = tiles[0] - known[0] - known[1]
    return (ct.where(above <= 0.0, 0.0, above),)


@ct.kernel
def sparsemax_forward(
    x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, persistent: ConstBool,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns]."""
    forward(
        _top_and_tau, _y, (x,), (), (y,), (), columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def _slopes(tiles, weights, known):
    """Return dy of the support, and 1 for each element of it."""
    inside = tiles[1] > 0.0
    return ct.where(inside, tiles[0], 0.0), ct.where(inside, 1.0, 0.0)


def _mean_slope(rows, columns):
    total, count = add_up(_slopes, 2, rows, (), False)
    return (total / count,)


def _dx(tiles, weights, known):
    return (ct.where(tiles[1] > 0.0, tiles[0] - known[0], 0.0),)


@ct.kernel
def sparsemax_backward(
    dy, y, dx, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt, persistent: ConstBool,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; dy, y and dx [rows, columns]."""
    forward(
        _mean_slope, _dx, (dy, y), (), (dx,), (), columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def by_sorting(x: Any) -> Any:
    """Apply the definition in x's dtype: the support is the k largest, for the most k whose least is above tau."""
    left = x - x.amax(-1, keepdim=True)
    ordered = left.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    k = (ordered * ordered.new_ones(ordered.shape[-1]).cumsum(-1) > excess).sum(-1, keepdim=True).clamp(min=1)
    return (left - excess.gather(-1, k - 1) / k).relu()


def reference_forward(x: Any) -> dict[str, Any]:
    """Return the definition in float64."""
    return {"y": by_sorting(x.double())}


def slope(dy: Any, y: Any) -> Any:
    """Return the gradient by x, in the dtype of ``dy``."""
    inside = y > 0
    mean = dy.where(inside, 0).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
    return (dy - mean).where(inside, 0)


def reference_backward(dy: Any, y: Any) -> dict[str, Any]:
    """Return the gradient of :func:`reference_forward` in float64."""
    return {"dx": slope(dy.double(), y)}


def _widths(problem: Problem, usual: list[Value]) -> list[Value]:
    # The first loop goes over the maxima of all chunks, as many as a chunk has columns.
    return [512, *usual] if 1024 < problem["columns"] <= LONGEST_HELD["forward"] else usual


FORWARD = spec(
    sparsemax_forward,
    "y = max(x - tau, 0) with the tau for which y sums to 1, row by row",
    matrices(("x",), ("y",)),
    reference_forward,
    live=1,
    flops=30,
    space=space_of(1, tile_n=_widths),
    default=lambda problem, target: default_in_blocks(1, 2, problem, target, 512),
)
BACKWARD = spec(
    sparsemax_backward,
    "gradient of sparsemax from its result: dx = dy - mean(dy) over the support, row by row",
    # Half of the normal numbers are the support.
    matrices(("dy", "y"), ("dx",)),
    reference_backward,
    live=2,
    flops=3,
    default=lambda problem, target: default_in_blocks(2, 2, problem, target),
)
SPECS = (FORWARD, BACKWARD)
