"""GeGLU's elementwise part (Shazeer 2020, arXiv:2002.05202): ``y = gelu(gate) * up``, forward and backward.

gelu (Hendrycks and Gimpel 2016, arXiv:1606.08415) is ``x * p(x)``. Exact, p is the normal distribution function
``(1 + erf(x / sqrt(2))) / 2``; with ``tanh``, it is ``(1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2``, a sigmoid.
Then ``dgate = dy * up * (p + gate * p')`` and ``dup = dy * gate * p``. All in float32 registers, rounded once. cuTile
has no erf; the formula of Abramowitz and Stegun (1964, 7.1.26) gives p within 8e-8.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import gradients, matrices
from tilekern.kernels.families.elements import each_tile, spec
from tilekern.kernels.tiles import ConstBool, ConstInt

_LOG2_E, _SQRT_HALF = 1.4426950408889634, 0.7071067811865476
_DENSITY_AT_0 = 0.3989422804014327
# The coefficients of the sigmoid's argument sqrt(8 / pi) * (x + 0.044715 x^3).
_LINEAR, _CUBIC = 1.5957691216057308, 0.07135481282636
# 7.1.26 with halved coefficients: the upper tail of the normal distribution.
_P, _TAIL = 0.3275911, (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)


def _reciprocal(x):
    return ct.truediv(1.0, x, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def exact(x):
    """Return p and p' of float32 tiles."""
    z = ct.abs(x) * _SQRT_HALF
    t = _reciprocal(1.0 + _P * z)
    decay = ct.exp2(z * z * -_LOG2_E, flush_to_zero=True)
    polynomial = (((_TAIL[4] * t + _TAIL[3]) * t + _TAIL[2]) * t + _TAIL[1]) * t + _TAIL[0]
    tail = polynomial * t * decay
    return ct.where(x < 0.0, tail, 1.0 - tail), _DENSITY_AT_0 * decay


def by_tanh(x):
    """Return p and p' of float32 tiles."""
    square = x * x
    p = _reciprocal(1.0 + ct.exp2(x * (_LINEAR + _CUBIC * square) * -_LOG2_E, flush_to_zero=True))
    return p, p * (1.0 - p) * (_LINEAR + 3.0 * _CUBIC * square)


@ct.kernel
def geglu_forward(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool, bounded: ConstBool,
    tanh: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""
    curve = by_tanh if ct.static_eval(tanh) else exact

    def formula(gate_tile, up_tile):
        return (gate_tile * curve(gate_tile)[0] * up_tile,)

    each_tile(formula, (gate, up), (y,), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def geglu_backward(
    dy, gate, up, dgate, dup, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool, tanh: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""
    curve = by_tanh if ct.static_eval(tanh) else exact

    def formula(dy_tile, gate_tile, up_tile):
        p, slope = curve(gate_tile)
        return dy_tile * up_tile * (p + gate_tile * slope), dy_tile * gate_tile * p

    each_tile(formula, (dy, gate, up), (dgate, dup), columns, tile_m, tile_n, persistent, bounded)


def reference_forward(gate: Any, up: Any, tanh: bool) -> dict[str, Any]:
    """Return the formula in float64."""
    import torch

    return {"y": torch.nn.functional.gelu(gate.double(), approximate="tanh" if tanh else "none") * up.double()}


def reference_backward(dy: Any, gate: Any, up: Any, tanh: bool) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`."""
    return gradients(reference_forward, {"y": dy}, gate=gate, up=up, tanh=tanh)


FORWARD = spec(
    geglu_forward,
    "y = gelu(gate) * up",
    matrices(("gate", "up"), ("y",)),
    reference_forward,
    flags=("tanh",),
    flops=20,
)
BACKWARD = spec(
    geglu_backward,
    "gradients of geglu with respect to gate and up",
    matrices(("dy", "gate", "up"), ("dgate", "dup")),
    reference_backward,
    flags=("tanh",),
    flops=28,
)
SPECS = (FORWARD, BACKWARD)
