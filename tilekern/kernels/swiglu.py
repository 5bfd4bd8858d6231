"""SwiGLU's elementwise part (Shazeer 2020, arXiv:2002.05202): ``y = silu(gate) * up``, forward and backward.

With s = sigmoid(gate): ``y = gate * s * up``; ``dgate = dy * up * s * (1 + gate * (1 - s))``; ``dup = dy * gate * s``.
All in float32 registers, rounded once. The backward computes s again, so that no activation is saved; one form of it
also computes y again, for a caller that did not save y either.

With multipliers, like Falcon-H1: ``y = silu(gate_multiplier * gate) * up * down_multiplier``.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import gradients, matrices
from tilekern.kernels.families.elements import each_tile, spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import ScalarParameter

_LOG2_E = 1.4426950408889634


def sigmoid(x):
    """Return 1 / (1 + exp(-x)) by hardware exponential and reciprocal: 2 ulp; exact division costs 20 % of time."""
    grown = 1.0 + ct.exp2(x * -_LOG2_E, flush_to_zero=True)
    return ct.truediv(1.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def _forward(gate, up):
    return (gate * sigmoid(gate) * up,)


def _remake(dy, gate, up):
    """Return dgate, dup and y."""
    s = sigmoid(gate)
    return dy * up * s * (1.0 + gate * (1.0 - s)), dy * gate * s, gate * s * up


@ct.kernel
def swiglu_forward(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool, bounded: ConstBool
):
    """All arrays [rows, columns]."""
    each_tile(_forward, (gate, up), (y,), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def swiglu_backward(
    dy, gate, up, dgate, dup, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]; y, which nothing stores, is not computed."""
    each_tile(_remake, (dy, gate, up), (dgate, dup), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def swiglu_backward_remake(
    dy, gate, up, dgate, dup, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""
    each_tile(_remake, (dy, gate, up), (dgate, dup, y), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def swiglu_scaled_forward(
    gate, up, y, gate_multiplier, down_multiplier, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    persistent: ConstBool, bounded: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""

    def formula(gate_tile, up_tile):
        return _forward(gate_tile * gate_multiplier, up_tile * down_multiplier)

    each_tile(formula, (gate, up), (y,), columns, tile_m, tile_n, persistent, bounded)


@ct.kernel
def swiglu_scaled_backward(
    dy, gate, up, dgate, dup, gate_multiplier, down_multiplier, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    persistent: ConstBool, bounded: ConstBool,
):  # fmt: skip
    """All arrays [rows, columns]."""

    def formula(dy_tile, gate_tile, up_tile):
        made = _remake(dy_tile * down_multiplier, gate_tile * gate_multiplier, up_tile)
        return made[0] * gate_multiplier, made[1]

    each_tile(formula, (dy, gate, up), (dgate, dup), columns, tile_m, tile_n, persistent, bounded)


def reference_forward(gate: Any, up: Any) -> dict[str, Any]:
    """Return the formula in float64."""
    import torch

    return {"y": torch.nn.functional.silu(gate.double()) * up.double()}


def reference_backward(dy: Any, gate: Any, up: Any) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`."""
    return gradients(reference_forward, {"y": dy}, gate=gate, up=up)


def reference_remake(dy: Any, gate: Any, up: Any) -> dict[str, Any]:
    """Return the gradients and y in float64."""
    return {**reference_backward(dy, gate, up), **reference_forward(gate, up)}


def reference_scaled_forward(gate: Any, up: Any, gate_multiplier: float, down_multiplier: float) -> dict[str, Any]:
    """Return the formula with multipliers in float64."""
    return reference_forward(gate.double() * gate_multiplier, up.double() * down_multiplier)


def reference_scaled_backward(dy: Any, gate: Any, up: Any, **multipliers: float) -> dict[str, Any]:
    """Return the gradients of :func:`reference_scaled_forward`."""
    return gradients(reference_scaled_forward, {"y": dy}, gate=gate, up=up, **multipliers)


# The multipliers of Falcon-H1-34B.
_MULTIPLIERS = (
    ScalarParameter("gate_multiplier", "float32", 0.8838834764831844),
    ScalarParameter("down_multiplier", "float32", 0.3535533905932738),
)

FORWARD = spec(swiglu_forward, "y = silu(gate) * up", matrices(("gate", "up"), ("y",)), reference_forward, flops=5)
BACKWARD = spec(
    swiglu_backward,
    "gradients of swiglu with respect to gate and up",
    matrices(("dy", "gate", "up"), ("dgate", "dup")),
    reference_backward,
    flops=12,
)
REMAKE = spec(
    swiglu_backward_remake,
    "gradients of swiglu, and its result once more",
    matrices(("dy", "gate", "up"), ("dgate", "dup", "y")),
    reference_remake,
    flops=14,
)
SCALED_FORWARD = spec(
    swiglu_scaled_forward,
    "y = silu(gate_multiplier * gate) * up * down_multiplier",
    (*matrices(("gate", "up"), ("y",)), *_MULTIPLIERS),
    reference_scaled_forward,
    flops=7,
)
SCALED_BACKWARD = spec(
    swiglu_scaled_backward,
    "gradients of swiglu with multipliers with respect to gate and up",
    (*matrices(("dy", "gate", "up"), ("dgate", "dup")), *_MULTIPLIERS),
    reference_scaled_backward,
    flops=15,
)
SPECS = (FORWARD, BACKWARD, REMAKE, SCALED_FORWARD, SCALED_BACKWARD)
