"""Dynamic Tanh (Zhu et al. 2025, arXiv:2503.10622), instead of a norm: ``gamma * tanh(alpha * x) + beta``.

alpha is one number, gamma and beta have one for each column, and beta is optional. With t = tanh(alpha * x) and its
slope s = 1 - t^2 the gradients are ``dx = dy * gamma * s * alpha``, ``dalpha = sum(dy * gamma * s * x)``,
``dgamma = sum over rows of dy * t`` and ``dbeta = sum over rows of dy``. All in float32, rounded once.

The backward goes down stripes of columns (:mod:`tilekern.kernels.families.stripes`); the spec ``dyt_sums`` adds its
partial sums up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct

from tilekern.kernels.column_sum import config_of_sums, default_of_sums, space_of_sums
from tilekern.kernels.families import rows, stripes, tables
from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, Arrays, bytes_of, tensors
from tilekern.kernels.families.stripes import stripes_of
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import Array, Problem, cdiv

_TWICE_LOG2_E = 2.8853900817779268
# The odd terms of tanh's series from the third: below 1/4 they leave 1e-8, where 1 - exp(-2 u) has lost digits.
_THIRD, _FIFTH, _SEVENTH, _NINTH = -0.3333333333, 0.1333333333, -0.0539682540, 0.0218694885
# Below this, u equals tanh(u) to 5e-6 of it; above it, 1 - 2 / (1 + exp(2 u)) does to 1e-4.
_LINEAR = 0.00390625


def _tanh(u, dtype):
    """Return tanh of float32 tiles and a quarter of its slope, as exact as results in the dtype need."""
    if ct.static_eval(dtype == ct.float32):
        return _exact_tanh(u)
    e = ct.exp2(u * _TWICE_LOG2_E, flush_to_zero=True)
    r = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return ct.where(ct.abs(u) < _LINEAR, u, 1.0 - 2.0 * r), r - r * r


def _exact_tanh(u):
    size = ct.abs(u)
    e = ct.exp2(size * -_TWICE_LOG2_E, flush_to_zero=True)
    r = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    square = u * u
    series = (((_NINTH * square + _SEVENTH) * square + _FIFTH) * square + _THIRD) * square
    far = (1.0 - e) * r
    t = ct.where(size < 0.25, u + u * series, ct.where(u < 0.0, -far, far))
    return t, e * r * r


def _none(held, columns, alpha, dtype):
    return ()


def _y(tiles, weights, known):
    scaled = _tanh(tiles[0] * known[0], known[1])[0] * weights[0]
    return (scaled if ct.static_eval(len(weights) == 1) else scaled + weights[1],)


@ct.kernel
def dyt_forward(
    x, alpha, gamma, beta, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, shifted: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], alpha [1], gamma and beta [columns]."""
    factor = ct.load(alpha, (0,), (1,)).astype(ct.float32).reshape((1, 1))
    weights = (gamma, beta) if ct.static_eval(shifted) else (gamma,)
    rows.forward(
        _none, _y, (x,), weights, (y,), (factor, y.dtype), columns, tile_m, tile_n, chunks, persistent, long, bounded,
        tma,
    )  # fmt: skip


@ct.kernel
def dyt_backward(
    dy, x, alpha, gamma, dx, partial, slopes, columns: ConstInt, stripe: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    bounded: ConstBool, tma: ConstBool, shifted: ConstBool,
):  # fmt: skip
    """dy, x and dx [rows, columns], alpha [1], gamma [columns], slopes [groups * stripes].

    partial [groups, columns or 2 * columns] has the sums for dgamma, then those for dbeta if there is a beta; slopes
    has dalpha's sum over each stripe.
    """
    factor = ct.load(alpha, (0,), (1,)).astype(ct.float32).reshape((1, 1))
    across = ct.cdiv(columns, stripe)
    groups = ct.cdiv(ct.num_blocks(0), across)
    for item in range(ct.bid(0), across * groups, ct.num_blocks(0)):
        group, first = item // across, (item % across) * (stripe // tile_n)
        slope = ct.zeros((1, tile_n), ct.float32)
        for c in range(first, ct.minimum(first + stripe // tile_n, ct.cdiv(columns, tile_n))):
            # Four times the weight, for a quarter of the slope.
            weight = load(gamma, (c,), (tile_n,), True, 0, tma).astype(ct.float32).reshape((1, tile_n)) * 4.0
            scale = weight * factor
            scales, shifts = ct.zeros((tile_m, tile_n), ct.float32), ct.zeros((tile_m, tile_n), ct.float32)
            pulls = ct.zeros((tile_m, tile_n), ct.float32)
            for step in range(group, ct.cdiv(x.shape[0], tile_m), groups):
                above = load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                below = load(x, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                t, s = _tanh(below * factor, dy.dtype)
                pull = above * s
                ct.store(dx, (step, c), (pull * scale).astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
                scales, pulls = scales + above * t, pulls + pull * below
                if ct.static_eval(shifted):
                    shifts = shifts + above
            ct.store(partial.slice(1, 0, columns), (group, c), ct.sum(scales, axis=0, keepdims=True))
            if ct.static_eval(shifted):
                ct.store(partial.slice(1, columns, 2 * columns), (group, c), ct.sum(shifts, axis=0, keepdims=True))
            slope = slope + ct.sum(pulls, axis=0, keepdims=True) * weight
        ct.store(slopes, (item,), ct.sum(slope, axis=1))


@ct.kernel
def dyt_sums(
    partial, slopes, slope, sums, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tma: ConstBool
):  # fmt: skip
    """Each block adds up ``tile_n`` columns of partial, [rows, columns]; one block adds up all slopes."""
    # Its launch overlaps the end of the kernel that writes them.
    ct.grid_dependency_control_wait()
    across = ct.cdiv(columns, tile_n)
    for c in range(ct.bid(0), across + 1, ct.num_blocks(0)):
        if c < across:
            total = ct.zeros((tile_m, tile_n), ct.float32)
            for r in range(ct.cdiv(partial.shape[0], tile_m)):
                total = total + load(partial, (r, c), (tile_m, tile_n), True, 0, tma)
            ct.store(sums, (c,), ct.sum(total, axis=0).astype(sums.dtype))
        else:
            each = ct.zeros((tile_m * tile_n,), ct.float32)
            for r in range(ct.cdiv(slopes.shape[0], tile_m * tile_n)):
                each = each + load(slopes, (r,), (tile_m * tile_n,), True, 0, False)
            ct.store(slope, (0,), ct.sum(each, axis=0, keepdims=True).astype(slope.dtype))


_X, _ALPHA = Array("x", "dtype", ROWS), Array("alpha", "weight_dtype", ())
_GAMMA, _BETA = (Array(name, "weight_dtype", COLUMNS) for name in ("gamma", "beta"))


def reference_forward(x: Any, alpha: Any, gamma: Any, beta: Any, shifted: bool) -> dict[str, Any]:
    """Return the formula in float64."""
    y = gamma.double() * (alpha.double() * x.double()).tanh()
    return {"y": y + beta.double() if shifted else y}


def reference_backward(dy: Any, x: Any, alpha: Any, gamma: Any, shifted: bool) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward` in float64.

    The gradients of alpha, gamma and beta are one vector: a single sum of terms of both signs may be only rounding.
    """
    import torch

    wide, slope, factor = x.double(), dy.double(), alpha.double()
    t = (factor * wide).tanh()
    pull = slope * gamma.double() * (1 - t * t)
    sums = ((pull * wide).sum().reshape(1), (slope * t).sum(0), *([slope.sum(0)] if shifted else []))
    return {"dx": pull * factor, "sums": torch.cat(sums)}


FORWARD = rows.spec(
    dyt_forward,
    "y = gamma * tanh(alpha * x) + beta, or without beta",
    (_X, _ALPHA, _GAMMA, _BETA, Array("y", PRODUCT, ROWS, "output")),
    reference_forward,
    flags=("shifted",),
    live=2,
    flops=20,
    default=lambda problem, target: rows.default_in_blocks(3, 8, problem, target, 1024, 8),
    cute=False,
)


def _width(problem: Problem) -> str:
    return "2*columns" if problem["shifted"] else "columns"


def _backward_arrays(problem: Problem) -> Arrays:
    sums = (
        Array("partial", "float32", ("blocks", _width(problem)), "scratch"),
        Array("slopes", "float32", ("slopes",), "scratch"),
    )
    return (Array("dy", PRODUCT, ROWS), _X, _ALPHA, _GAMMA, Array("dx", "dtype", ROWS, "output"), *sums)


def _results(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"dx": outputs["dx"], **reference_sums(outputs["partial"], outputs["slopes"])}


BACKWARD = stripes.spec(
    dyt_backward,
    "gradients of dyt: dx, and the sums for alpha, gamma and beta as one float32 row for each group of rows",
    _backward_arrays,
    reference_backward,
    results=_results,
    flags=("shifted",),
    flops=30,
)


def _sums_arrays(problem: Problem) -> Arrays:
    width = _width(problem)
    sums = Array("sums", "dtype", (width,), "output")
    return (
        Array("partial", "float32", ("rows", width)),
        Array("slopes", "float32", ("slopes",)),
        Array("slope", "dtype", ("1",), "output", aligned=False),
        # A store of 16 bytes would reach beyond a shorter result.
        dataclasses.replace(sums, aligned=sums.shape_in(problem)[0] >= 8),
    )


def reference_sums(partial: Any, slopes: Any) -> dict[str, Any]:
    """Return the sums in float64, as one vector."""
    import torch

    return {"sums": torch.cat((slopes.double().sum().reshape(1), partial.double().sum(0)))}


def _all_sums(outputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"sums": torch.cat((outputs["slope"], outputs["sums"]))}


def _sizes_of_sums(problem: Problem) -> dict[str, int]:
    return {"slopes": problem["rows"] * stripes_of(problem["columns"])}


def _columns_of_sums(problem: Problem) -> int:
    return int(problem["columns"] * (2 if problem["shifted"] else 1))


SUMS = tables.spec(
    "dyt_sums",
    "the sums of dyt_backward added up in a fixed order: one for alpha, and those for gamma and beta",
    tables.dimensions_of((), ("shifted",)),
    _sums_arrays,
    reference_sums,
    function=dyt_sums,
    sizes=_sizes_of_sums,
    constants=lambda problem, config: {"columns": _columns_of_sums(problem)},
    grid=lambda sizes, config, sm_count: cdiv(_columns_of_sums(sizes), config["tile_n"]) + 1,
    space=space_of_sums([16, 32, 64, 128], [16, 32, 64]),
    default=default_of_sums,
    generic=lambda problem: config_of_sums(32, 16),
    results=_all_sums,
    bytes_moved=lambda problem: bytes_of(tensors(_sums_arrays(problem)), problem.but(**_sizes_of_sums(problem))),
    flops=lambda problem: problem["rows"] * _columns_of_sums(problem),
    dependent=True,
    inputs_in_l2=True,
)
SPECS = (FORWARD, BACKWARD, SUMS)
