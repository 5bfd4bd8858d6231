"""swiglu: ``silu(gate) * up``; the backward recomputes the sigmoid and saves no further activation."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.swiglu import BACKWARD, FORWARD, SCALED_BACKWARD, SCALED_FORWARD
from tilekern.ops.operation import operation


@operation(SCALED_FORWARD, SCALED_BACKWARD)
def swiglu_scaled(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Return ``swiglu`` with multipliers that are not both 1."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    y = torch.nn.functional.silu(gate.to(dtype) * gate_multiplier) * up.to(dtype) * down_multiplier
    return y.to(torch.promote_types(gate.dtype, up.dtype))


@operation(
    FORWARD, BACKWARD, options=("gate_multiplier", "down_multiplier"), gathered=0,
    unless="gate_multiplier != 1.0 or down_multiplier != 1.0", otherwise=swiglu_scaled,
)  # fmt: skip
def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Return ``silu(gate_multiplier * gate) * up * down_multiplier``, computed in float32 and rounded once.

    Args:
        gate, up: [..., columns], of one shape and dtype; bfloat16, float16 or float32, any strides. With DTensors each
            rank computes its own part, and the result is a DTensor too.
        gate_multiplier, down_multiplier: multipliers of Falcon-H1's MLP. There the second one multiplies the result of
            ``down_proj``, here its input.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the shapes or the devices differ.
    """
    return torch.nn.functional.silu(gate) * up
