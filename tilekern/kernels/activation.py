"""Activations without a gate: ``y = x * p(x)``, forward and backward.

| erf | relu | p(x) | for |
|---|---|---|---|
| False | False | ``sigmoid(linear * x + cubic * x^3)`` | silu, gelu by tanh, and by a sigmoid (quick_gelu) |
| True | False | the normal distribution function ``(1 + erf(x / sqrt(2))) / 2`` | gelu |
| False | True | ``max(x, 0)`` | the square of relu (So et al. 2021, arXiv:2109.08668) |
| True | True | 1 where x is positive, else 0 | relu |

gelu (Hendrycks and Gimpel 2016, arXiv:1606.08415) by tanh is a sigmoid of twice the argument:
``(1 + tanh(u)) / 2 = sigmoid(2 u)``, so that ``linear = sqrt(8 / pi)`` and ``cubic = 0.044715 * linear``.
Then ``dx = dy * (p + x * p')``. All in float32 registers, rounded once.

For an MLP the backward also computes y again, for the gradient of the next layer's weight, and sums dx over all rows,
which is the gradient of a bias that was added to x. It goes down stripes of columns
(:mod:`tilekern.kernels.families.stripes`); the spec ``column_sum`` adds its partial sums up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import stripes
from tilekern.kernels.families.arrays import gradients, matrices, partial_sums
from tilekern.kernels.families.elements import each_tile, spec
from tilekern.kernels.geglu import exact
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import ScalarParameter

_LOG2_E = 1.4426950408889634
# At the root of this |x|, any such sigmoid is 0 or 1; a larger square would overflow, and times 0 be NaN.
_FAR = 1e8


def _sigmoid(x, linear, cubic):
    """Return p and p' of float32 tiles."""
    square = ct.minimum(x * x, _FAR)
    grown = 1.0 + ct.exp2(x * (linear + cubic * square) * -_LOG2_E, flush_to_zero=True)
    p = ct.truediv(1.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return p, p * (1.0 - p) * (linear + 3.0 * cubic * square)


def _value_and_slope(x, linear, cubic, erf, relu):
    """Return y and dy/dx of float32 tiles."""
    if ct.static_eval(relu):
        # NaN stays NaN.
        ramp = ct.where(x <= 0.0, 0.0, x)
        if ct.static_eval(erf):
            return ramp, ct.where(x <= 0.0, 0.0, 1.0)
        return ramp * ramp, 2.0 * ramp
    p, slope = exact(x) if ct.static_eval(erf) else _sigmoid(x, linear, cubic)
    return x * p, p + x * slope


def _gradient(dy, x, linear, cubic, erf, relu):
    """Return dx and y."""
    y, slope = _value_and_slope(x, linear, cubic, erf, relu)
    if ct.static_eval(relu):
        # dx is 0 below 0, even if dy is infinite.
        return ct.where(x <= 0.0, 0.0, dy * slope), y
    return dy * slope, y


@ct.kernel
def activation_forward(
    x, y, linear, cubic, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool, erf: ConstBool, relu: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""

    def formula(x_tile):
        return (_value_and_slope(x_tile, linear, cubic, erf, relu)[0],)

    each_tile(formula, (x,), (y,), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def activation_backward(
    dy, x, dx, linear, cubic, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool, erf: ConstBool, relu: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""

    def formula(dy_tile, x_tile):
        return (_gradient(dy_tile, x_tile, linear, cubic, erf, relu)[0],)

    each_tile(formula, (dy, x), (dx,), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def activation_backward_remake(
    dy, x, dx, y, partial, linear, cubic, columns: ConstInt, stripe: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    bounded: ConstBool, tma: ConstBool, erf: ConstBool, relu: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x, dx and y [rows, columns], partial [groups, columns]."""
    across = ct.cdiv(columns, stripe)
    groups = ct.cdiv(ct.num_blocks(0), across)
    for item in range(ct.bid(0), across * groups, ct.num_blocks(0)):
        group, first = item // across, (item % across) * (stripe // tile_n)
        for c in range(first, ct.minimum(first + stripe // tile_n, ct.cdiv(columns, tile_n))):
            total = ct.zeros((tile_m, tile_n), ct.float32)
            for step in range(group, ct.cdiv(x.shape[0], tile_m), groups):
                above = load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                below = load(x, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                slope, value = _gradient(above, below, linear, cubic, erf, relu)
                ct.store(dx, (step, c), slope.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
                ct.store(y, (step, c), value.astype(y.dtype), check_bounds=bounded, allow_tma=tma)
                total = total + slope
            ct.store(partial, (group, c), ct.sum(total, axis=0, keepdims=True))


def reference_forward(x: Any, linear: float, cubic: float, erf: bool, relu: bool) -> dict[str, Any]:
    """Return the formula in float64."""
    import torch

    wide = x.double()
    if relu:
        ramp = wide.relu()
        return {"y": ramp if erf else ramp.square()}
    return {"y": torch.nn.functional.gelu(wide) if erf else wide * torch.sigmoid(linear * wide + cubic * wide**3)}


def reference_backward(dy: Any, x: Any, linear: float, cubic: float, erf: bool, relu: bool) -> dict[str, Any]:
    """Return the gradient of :func:`reference_forward`."""
    return gradients(reference_forward, {"y": dy}, x=x, linear=linear, cubic=cubic, erf=erf, relu=relu)


def reference_remake(dy: Any, x: Any, linear: float, cubic: float, erf: bool, relu: bool) -> dict[str, Any]:
    """Return the gradient, y and the gradient's sums in float64."""
    dx = reference_backward(dy, x, linear, cubic, erf, relu)["dx"]
    return {"dx": dx, **reference_forward(x, linear, cubic, erf, relu), "dbias": dx.sum(0)}


# Those of gelu by tanh.
_SCALARS = (
    ScalarParameter("linear", "float32", 1.5957691216057308),
    ScalarParameter("cubic", "float32", 0.07135481627260026),
)
_FLAGS = ("erf", "relu")

FORWARD = spec(
    activation_forward,
    "y = x * p(x): gelu, silu, relu or the square of relu",
    (*matrices(("x",), ("y",)), *_SCALARS),
    reference_forward,
    flags=_FLAGS,
    flops=12,
)
BACKWARD = spec(
    activation_backward,
    "gradient of an activation",
    (*matrices(("dy", "x"), ("dx",)), *_SCALARS),
    reference_backward,
    flags=_FLAGS,
    flops=18,
)
_REMAKE_ARRAYS = (*matrices(("dy", "x"), ("dx", "y")), partial_sums(1), *_SCALARS)
REMAKE = stripes.spec(
    activation_backward_remake,
    "gradient of an activation, its result once more, and the gradient's sums over rows, by groups of them",
    lambda problem: _REMAKE_ARRAYS,
    reference_remake,
    results=lambda outputs: {"dx": outputs["dx"], "y": outputs["y"], "dbias": outputs["partial"].double().sum(0)},
    flags=_FLAGS,
    flops=20,
)
SPECS = (FORWARD, BACKWARD, REMAKE)
