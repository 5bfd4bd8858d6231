"""softmax: over the last dimension, in float32; the backward reads only the result."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.softmax import BACKWARD, FORWARD
from tilekern.ops.operation import operation


def _slope(dy: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    slope, shares = dy.to(wide), y.to(wide)
    return (shares * (slope - (slope * shares).sum(-1, keepdim=True))).to(y.dtype)


@operation(FORWARD, BACKWARD, fallback_backward=_slope)
def softmax(x: Tensor) -> Tensor:
    """Return ``exp(x) / sum(exp(x))`` over the last dimension, computed in float32 and rounded once.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides.

    Returns:
        [..., columns] in the dtype of ``x``, contiguous. A row is NaN if it holds NaN or +inf, or only -inf.
    """
    return torch.nn.functional.softmax(x, dim=-1)
