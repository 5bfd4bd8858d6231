"""swiglu: ``silu(gate) * up``; the backward computes the sigmoid again and keeps no further activation."""

from __future__ import annotations

import torch

from tilekern.kernels.swiglu import BACKWARD, FORWARD
from tilekern.ops.operation import operation


@operation(FORWARD, BACKWARD)
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
