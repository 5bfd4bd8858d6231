"""geglu: ``gelu(gate) * up``; the backward computes gelu again and keeps no further activation."""

from __future__ import annotations

import torch

from tilekern.kernels.geglu import BACKWARD, FORWARD
from tilekern.ops.operation import operation


@operation(FORWARD, BACKWARD, flags={"tanh": "tanh"})
def geglu(gate: torch.Tensor, up: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """``gelu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate, up: [..., columns], of one shape and dtype; bfloat16, float16 or float32, any strides.
        tanh: takes gelu's approximation by tanh, as ``approximate="tanh"`` does in torch; else gelu is exact.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the shapes or the devices differ.
    """
    return torch.nn.functional.gelu(gate, approximate="tanh" if tanh else "none") * up
