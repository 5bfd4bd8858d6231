"""swiglu: ``silu(gate) * up``; the backward computes the sigmoid again and keeps no further activation."""

from __future__ import annotations

import dataclasses

import torch

from tilekern.kernels import swiglu as kernels
from tilekern.ops.operation import operation
from tilekern.spec import Array

_ROWS = ("rows", "columns")
_GATE, _UP = Array("gate", "dtype", _ROWS), Array("up", "dtype", _ROWS)
_FORWARD = dataclasses.replace(kernels.FORWARD, arrays=(_GATE, _UP, Array("y", "dtype", _ROWS, "output")))
_BACKWARD = dataclasses.replace(
    kernels.BACKWARD,
    arrays=(
        Array("dy", "dtype", _ROWS),
        _GATE,
        _UP,
        Array("dgate", "dtype", _ROWS, "output"),
        Array("dup", "dtype", _ROWS, "output"),
    ),
)


@operation(_FORWARD, _BACKWARD)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate, up: [..., columns], of one shape and dtype; bfloat16, float16 or float32, any strides.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the shapes or the devices differ.
    """
    return torch.nn.functional.silu(gate) * up
