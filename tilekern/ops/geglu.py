"""geglu: ``gelu(gate) * up``; the backward recomputes gelu and saves no further activation."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.geglu import BACKWARD, FORWARD
from tilekern.ops.operation import operation


@operation(FORWARD, BACKWARD, flags={"tanh": "tanh"})
def geglu(gate: Tensor, up: Tensor, tanh: bool = False) -> Tensor:
    """Return ``gelu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate, up: [..., columns], of one shape and dtype; bfloat16, float16 or float32, any strides.
        tanh: use gelu's tanh approximation, like torch's ``approximate="tanh"``; otherwise gelu is exact.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the shapes or the devices differ.
    """
    return torch.nn.functional.gelu(gate, approximate="tanh" if tanh else "none") * up
