"""PolyNorm (Zhuo et al. 2024, arXiv:2411.03884): a sum of three normalised powers, statistics in float32.

With rms(u) the root mean square of a row of n numbers, ``sqrt(mean(u^2) + eps)``, and four parameters,
``y = w0 * x^3 / rms(x^3) + w1 * x^2 / rms(x^2) + w2 * x / rms(x) + b``.
Backward, where r is 1 / rms(x^p) and w the weight of the power p: each power adds
``w * p * x^(p-1) * (r * dy - x^p * r^3 * mean(dy * x^p))`` to dx; each row adds ``r * sum(dy * x^p)`` to the gradient
of w, and sum(dy) to the gradient of b. A block adds up its rows' shares and stores all four as its row of ``partial``;
the spec ``column_sum`` adds these up.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import PRODUCT, ROWS, drawn, gradients
from tilekern.kernels.families.rows import (
    add_up,
    default_in_blocks,
    default_of_two_sums,
    forward,
    generic,
    space_of,
    spec,
)
from tilekern.kernels.tiles import HELD_BY_DEFAULT, LONGEST_HELD, ConstBool, ConstInt, load, power_of_two, row_tiles
from tilekern.spec import Array, Config, Problem, ScalarParameter, Value
from tilekern.spec.targets import Target


def _number(array, n):
    """Load one number of a vector, [1, 1] in float32."""
    return ct.load(array, (n,), (1,)).astype(ct.float32).reshape((1, 1))


def _square(tiles, weights, known):
    return (tiles[0] * tiles[0],)


def _higher_squares(tiles, weights, known):
    """Return the squares of the square and of the cube."""
    square = tiles[0] * tiles[0]
    return square * square, square * square * square


def _norms(rows, columns, eps, w0, w1, w2, bias):
    """Return the weights of x^3, x^2 and x over the rms of each, [tile_m, 1]."""
    one = add_up(_square, 1, rows, (), False)[0]
    two, three = add_up(_higher_squares, 2, rows, (), False)
    return (
        w0 * ct.rsqrt(three / columns + eps), w1 * ct.rsqrt(two / columns + eps), w2 * ct.rsqrt(one / columns + eps)
    )  # fmt: skip


def _polynomial(tiles, weights, known):
    x = tiles[0]
    return (((known[0] * x + known[1]) * x + known[2]) * x + known[7],)


@ct.kernel
def poly_norm_forward(
    x, weight, bias, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], weight [3], bias [1]."""
    scalars = (eps, _number(weight, 0), _number(weight, 1), _number(weight, 2), _number(bias, 0))
    forward(
        _norms, _polynomial, (x,), (), (y,), scalars, columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def _add_seven(a, b, c, d, e, f, g, h, i, j, k, m, n, o):
    return a + h, b + i, c + j, d + k, e + m, f + n, g + o


def _terms(sums, dy, x):
    """Add a tile to the sums of squares of the three powers, of their products with dy, and of dy."""
    square, product = x * x, dy * x
    return (
        sums[0] + square, sums[1] + square * square, sums[2] + square * square * square, sums[3] + product,
        sums[4] + product * x, sums[5] + product * square, sums[6] + dy,
    )  # fmt: skip


def _nothing(tile_m, tile_n):
    sums = ()
    for _ in ct.static_iter(range(7)):
        sums = sums + (ct.zeros((tile_m, tile_n), ct.float32),)
    return sums


def _read(dy, x, step, c, tile_m, tile_n, bounded, tma):
    return (
        load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma), load(x, (step, c), (tile_m, tile_n), bounded, 0, tma)
    )  # fmt: skip


def _slopes(sums, columns, eps, weight):
    """Return the factors of dx, a polynomial of x with dy in some terms, and the parameters' gradients."""
    r1 = ct.rsqrt(sums[0] / columns + eps)
    r2 = ct.rsqrt(sums[1] / columns + eps)
    r3 = ct.rsqrt(sums[2] / columns + eps)
    w1, w2, w3 = weight[2] * r1, 2.0 * weight[1] * r2, 3.0 * weight[0] * r3
    pulls = (
        w1 * sums[3] * r1 * r1 / columns, w2 * sums[4] * r2 * r2 / columns, w3 * sums[5] * r3 * r3 / columns
    )  # fmt: skip
    return (w1, w2, w3), pulls, (sums[5] * r3, sums[4] * r2, sums[3] * r1, sums[6])


def _inside(shares, x, step, tile_m):
    """Zero the shares of rows beyond the last, whose r is infinite if eps is 0."""
    if ct.static_eval(tile_m == 1):
        return shares
    inside = step * tile_m + ct.arange(tile_m, dtype=ct.int32).reshape((tile_m, 1)) < x.shape[0]
    kept = ()
    for n in ct.static_iter(range(4)):
        kept = kept + (ct.where(inside, shares[n], 0.0),)
    return kept


def _dx(dy, x, factors, pulls):
    square = x * x
    direct = (factors[2] * x + factors[1]) * x + factors[0]
    return dy * direct - x * ((pulls[2] * square + pulls[1]) * square + pulls[0])


@ct.kernel
def poly_norm_backward(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x and dx [rows, columns], weight [3], partial [blocks, 4]."""
    weights = (_number(weight, 0), _number(weight, 1), _number(weight, 2))
    one = ct.zeros((tile_m, 1), ct.float32)
    totals = (one, one, one, one)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        sums, held = _nothing(tile_m, tile_n), ()
        if ct.static_eval(long):
            for c in range(ct.cdiv(x.shape[1], tile_n)):
                above, below = _read(dy, x, step, c, tile_m, tile_n, bounded, tma)
                sums = _terms(sums, above.astype(ct.float32), below.astype(ct.float32))
        else:
            for c in ct.static_iter(range(chunks)):
                held = held + (_read(dy, x, step, c, tile_m, tile_n, bounded, tma),)
            for c in ct.static_iter(range(chunks)):
                sums = _terms(sums, held[c][0].astype(ct.float32), held[c][1].astype(ct.float32))
        added = ct.reduce(sums, 1, _add_seven, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), keepdims=True)
        factors, pulls, shares = _slopes(added, columns, eps, weights)
        shares = _inside(shares, x, step, tile_m)
        totals = (totals[0] + shares[0], totals[1] + shares[1], totals[2] + shares[2], totals[3] + shares[3])
        if ct.static_eval(long):
            for c in range(ct.cdiv(x.shape[1], tile_n)):
                above, below = _read(dy, x, step, c, tile_m, tile_n, bounded, tma)
                made = _dx(above.astype(ct.float32), below.astype(ct.float32), factors, pulls)
                ct.store(dx, (step, c), made.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
        else:
            for c in ct.static_iter(range(chunks)):
                made = _dx(held[c][0].astype(ct.float32), held[c][1].astype(ct.float32), factors, pulls)
                ct.store(dx, (step, c), made.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
    for n in ct.static_iter(range(4)):
        ct.store(partial, (ct.bid(0), n), ct.sum(totals[n], axis=0, keepdims=True), allow_tma=False)


_POWERS = (3, 2, 1)


def reference_forward(x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """Return the formula in float64."""
    wide, y = x.double(), bias.double()
    for w, p in zip(weight.double(), _POWERS, strict=True):
        y = y + w * wide**p * (wide ** (2 * p)).mean(-1, keepdim=True).add(eps).rsqrt()
    return {"y": y}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`, which are the same for any bias.

    The gradients of weight and bias are one vector: a single sum of terms of both signs may be only rounding.
    """
    import torch

    found = gradients(reference_forward, {"y": dy}, x=x, weight=weight, bias=weight[:1], eps=eps)
    return {"dx": found["dx"], "sums": torch.cat((found["dweight"], found["dbias"]))}


def _default_backward(problem: Problem, target: Target) -> Config:
    width = power_of_two(problem["columns"])
    if 1024 <= width <= 4096 and problem["dtype"] != "float32":
        # Seven sums take many registers: short chunks leave some for another block.
        return Config(
            schedule="persistent", passes=1, tile_m=2048 // min(width, 2048), tile_n=1024, occupancy=3,
            num_worker_warps=0, tma=target.has_tma,
        )  # fmt: skip
    warps = 8 if 2048 < problem["columns"] <= HELD_BY_DEFAULT else 0
    return default_of_two_sums(4, problem, target).but(num_worker_warps=warps)


def _tiles(problem: Problem, usual: list[Value]) -> list[Value]:
    return row_tiles(problem["columns"], 2048, 8192) if problem["columns"] <= LONGEST_HELD["forward"] else [1]


_X, _WEIGHT = Array("x", "dtype", ROWS), Array("weight", "weight_dtype", ("3",))
_EPS = ScalarParameter("eps", "float32", 1e-6)
_FORWARD_ARRAYS = (_X, _WEIGHT, Array("bias", "weight_dtype", ("1",)), Array("y", PRODUCT, ROWS, "output"), _EPS)
_BACKWARD_ARRAYS = (
    Array("dy", PRODUCT, ROWS), _X, _WEIGHT, Array("dx", "dtype", ROWS, "output"),
    Array("partial", "float32", ("blocks", "4"), "scratch"), _EPS,
)  # fmt: skip
# The specs have no arrays, since the op declares different ones. Its cubes overflow for values that ops with such
# arrays accept.
FORWARD = replace(
    spec(
        poly_norm_forward,
        "y = the sum of x^3, x^2 and x, each divided by its root mean square and weighted, and a bias",
        _FORWARD_ARRAYS,
        reference_forward,
        live=2,
        flops=14,
        space=space_of(2, tile_m=_tiles),
        default=lambda problem, target: default_in_blocks(2, 8, problem, target),
        generic=lambda problem: generic(problem, 256),
        given=functools.partial(drawn, _FORWARD_ARRAYS, about_one=False),
    ),
    arrays=(),
)
BACKWARD = replace(
    spec(
        poly_norm_backward,
        "gradients of poly_norm: dx, and those of weight and bias as one float32 row of four for each block",
        _BACKWARD_ARRAYS,
        reference_backward,
        sums=("sums",),
        live=5,
        flops=34,
        default=_default_backward,
        cute=False,
        generic=lambda problem: generic(problem, 256),
        given=functools.partial(drawn, _BACKWARD_ARRAYS, about_one=False),
    ),
    arrays=(),
)
SPECS = (FORWARD, BACKWARD)
