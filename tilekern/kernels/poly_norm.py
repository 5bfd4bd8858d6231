"""PolyNorm (Zhuo et al. 2024, arXiv:2411.03884): a sum of three normalised powers, statistics in float32.

With rms(u) the root mean square of a row of n numbers, ``sqrt(mean(u^2) + eps)``, and four parameters,
``y = w0 * x^3 / rms(x^3) + w1 * x^2 / rms(x^2) + w2 * x / rms(x) + b``.
Backward, where r is 1 / rms(x^p) and w the weight of the power p: each power adds
``w * p * x^(p-1) * (r * dy - x^p * r^3 * mean(dy * x^p))`` to dx; each row adds ``r * sum(dy * x^p)`` to the gradient
of w, and sum(dy) to that of b. A block adds its rows' shares up and stores the four of them as its row of ``partial``,
which the spec ``column_sum`` adds up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import drawn
from tilekern.kernels.common.rows import add_up, forward, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, load, promoted
from tilekern.spec import ITEM_BYTES, Array, KernelSpec, Problem, ScalarParameter


def _number(array, n):
    """One number of a vector, [1, 1] in float32."""
    return ct.load(array, (n,), (1,)).astype(ct.float32).reshape((1, 1))


def _square(tiles, weights, known):
    return (tiles[0] * tiles[0],)


def _higher_squares(tiles, weights, known):
    """Of the square and the cube."""
    square = tiles[0] * tiles[0]
    return square * square, square * square * square


def _norms(rows, columns, eps, w0, w1, w2, bias):
    """The weights of x^3, x^2 and x over the rms of each, [tile_m, 1]."""
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
    """Sums of squares of the three powers, of their products with dy, and of dy, with another tile added."""
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
    """A tile of both in the dtypes that they are stored in."""
    return (
        load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma), load(x, (step, c), (tile_m, tile_n), bounded, 0, tma)
    )  # fmt: skip


def _slopes(sums, columns, eps, weight):
    """What makes dx, a polynomial of x with dy in some terms, of a step's sums; and the shares of the gradients."""
    r1 = ct.rsqrt(sums[0] / columns + eps)
    r2 = ct.rsqrt(sums[1] / columns + eps)
    r3 = ct.rsqrt(sums[2] / columns + eps)
    w1, w2, w3 = weight[2] * r1, 2.0 * weight[1] * r2, 3.0 * weight[0] * r3
    pulls = (
        w1 * sums[3] * r1 * r1 / columns, w2 * sums[4] * r2 * r2 / columns, w3 * sums[5] * r3 * r3 / columns
    )  # fmt: skip
    return (w1, w2, w3), pulls, (sums[5] * r3, sums[4] * r2, sums[3] * r1, sums[6])


def _inside(shares, x, step, tile_m):
    """Shares, but 0 of rows beyond the last, whose r is infinite where eps is 0."""
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


_ROWS, _PRODUCT, _POWERS = ("rows", "columns"), "dtype*weight_dtype", (3, 2, 1)
_X, _EPS = Array("x", "dtype", _ROWS), ScalarParameter("eps", "float32")
# Three numbers, in an array of a size that the compiled code does not know.
_WEIGHT, _BIAS = Array("weight", "weight_dtype", ()), Array("bias", "weight_dtype", ())


def reference_forward(x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """The formula in float64."""
    wide, y = x.double(), bias.double()
    for w, p in zip(weight.double(), _POWERS, strict=True):
        y = y + w * wide**p * (wide ** (2 * p)).mean(-1, keepdim=True).add(eps).rsqrt()
    return {"y": y}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The gradients of :func:`reference_forward` in float64."""
    import torch

    wide, slope = x.double(), dy.double()
    dx, shares = torch.zeros_like(wide), []
    for w, p in zip(weight.double(), _POWERS, strict=True):
        power = wide**p
        r = power.square().mean(-1, keepdim=True).add(eps).rsqrt()
        pull = (slope * power).mean(-1, keepdim=True) * r**3
        dx = dx + w * p * wide ** (p - 1) * (r * slope - power * pull)
        shares.append((slope * power * r).sum())
    return {"dx": dx, "dweight": torch.stack(shares), "dbias": slope.sum().reshape(1)}


def _with_three_weights(arrays: tuple[Any, ...], problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Inputs of either direction."""
    import torch

    weights = torch.rand((3,), generator=generator, device=device) + 0.25
    made = drawn(arrays, problem, generator, device)
    return {**made, "weight": weights.to(made["weight"].dtype), "eps": 1e-6}


def _bytes(problem: Problem, *, backward: bool) -> int:
    """Partial sums count as the one row that is made of them."""
    elements, size, weight = (
        problem["rows"] * problem["columns"], ITEM_BYTES[problem["dtype"]], ITEM_BYTES[problem["weight_dtype"]],
    )  # fmt: skip
    product = ITEM_BYTES[promoted(problem["dtype"], problem["weight_dtype"])]
    if backward:
        return int(elements * (product + 2 * size) + 3 * weight + 16)
    return int(elements * (product + size) + 4 * weight)


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    shape = (problem["rows"], problem["columns"])
    return {"dx": (shape, problem["dtype"]), "partial": ((blocks, 4), "float32")}


def _results(outputs: dict[str, Any]) -> dict[str, Any]:
    """The shares of all blocks, added up."""
    sums = outputs["partial"].double().sum(0)
    return {"dx": outputs["dx"], "dweight": sums[:3], "dbias": sums[3:]}


_FORWARD_ARRAYS = (_X, _WEIGHT, _BIAS, Array("y", _PRODUCT, _ROWS, "output"), _EPS)
_BACKWARD_ARRAYS = (
    Array("dy", _PRODUCT, _ROWS),
    _X,
    _WEIGHT,
    Array("dx", "dtype", _ROWS, "output"),
    Array("partial", "float32", ("blocks", "columns"), "scratch"),
    _EPS,
)
FORWARD: KernelSpec = dataclasses.replace(
    spec(
        name="poly_norm_forward",
        summary="y = the sum of x^3, x^2 and x, each divided by its root mean square and weighted, and a bias",
        module=__name__,
        op="poly_norm",
        function=poly_norm_forward,
        arrays=_FORWARD_ARRAYS,
        scalars={},
        sums=(),
        direction="forward",
        live=2,
        exact_as="y",
        dependent=False,
        reference=reference_forward,
        flops=14,
    ),
    inputs=lambda problem, generator, device: _with_three_weights(_FORWARD_ARRAYS, problem, generator, device),
    bytes_moved=lambda problem: _bytes(problem, backward=False),
)
BACKWARD: KernelSpec = dataclasses.replace(
    spec(
        name="poly_norm_backward",
        summary="gradients of poly_norm: dx, and those of weight and bias as one float32 row of four for each block",
        module=__name__,
        op="poly_norm",
        function=poly_norm_backward,
        arrays=_BACKWARD_ARRAYS,
        scalars={},
        sums=(),
        direction="backward",
        live=5,
        exact_as="dx",
        dependent=False,
        reference=reference_backward,
        flops=34,
    ),
    inputs=lambda problem, generator, device: _with_three_weights(_BACKWARD_ARRAYS, problem, generator, device),
    bytes_moved=lambda problem: _bytes(problem, backward=True),
    outputs=_outputs,
    results=_results,
    arrays=(),
)
SPECS = (FORWARD, BACKWARD)
