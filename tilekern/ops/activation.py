"""activation: gelu, silu, relu and others, without a gate; the backward recomputes them from the input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.activation import BACKWARD, FORWARD
from tilekern.ops.operation import operation


class Curve(NamedTuple):
    """The kernels' arguments for an activation; :mod:`tilekern.kernels.activation` has their table."""

    linear: float = 0.0
    cubic: float = 0.0
    erf: bool = False
    relu: bool = False


CURVES = {
    "gelu": Curve(erf=True),
    "gelu_tanh": Curve((8 / math.pi) ** 0.5, 0.044715 * (8 / math.pi) ** 0.5),
    "quick_gelu": Curve(1.702),
    "silu": Curve(1.0),
    "relu": Curve(erf=True, relu=True),
    "relu2": Curve(relu=True),
}


def activation(x: Tensor, kind: str = "gelu") -> Tensor:
    """Apply an activation to each element, computed in float32 and rounded once.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides.
        kind: ``gelu``, ``gelu_tanh`` (its approximation by tanh), ``quick_gelu`` (``x * sigmoid(1.702 * x)``),
            ``silu``, ``relu``, or ``relu2``, the square of relu.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the kind is unknown.
    """
    return curved(x, *curve_of("activation", kind))


def curve_of(op: str, kind: str) -> Curve:
    """Return the curve of an activation.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in CURVES:
        raise ValueError(f"{op}: the activation must be one of {', '.join(CURVES)}, got {kind!r}")
    return CURVES[kind]


@operation(FORWARD, BACKWARD, flags={"erf": "erf", "relu": "relu"})
def curved(x: Tensor, linear: float = 1.0, cubic: float = 0.0, erf: bool = False, relu: bool = False) -> Tensor:
    """Return ``x * p(x)``, by the p of a :class:`Curve`."""
    if relu:
        return x.relu() if erf else x.relu().square()
    if erf:
        return torch.nn.functional.gelu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    argument = linear * wide + cubic * wide**3 if cubic else linear * wide
    return (wide * torch.sigmoid(argument)).to(x.dtype)
