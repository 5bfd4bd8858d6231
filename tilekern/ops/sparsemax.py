"""sparsemax: a softmax with exact zeros; the backward reads only the result."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.sparsemax import BACKWARD, FORWARD, by_sorting, slope
from tilekern.ops.operation import operation


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """Return ``max(x - tau, 0)`` with the tau that makes it sum to 1 over a dimension, in float32, rounded once.

    Args:
        x: bfloat16, float16 or float32, any shape of one dimension or more, any strides.
        dim: the dimension that is normalised; if it is not the last one, the data is copied.

    Returns:
        The shape and dtype of ``x``; contiguous if ``dim`` is the last dimension, else after moving it there. NaN along
        ``dim`` if ``x`` holds NaN or +inf there, or only -inf.

    Raises:
        IndexError: ``x`` does not have the dimension ``dim``.
    """
    if dim in (-1, x.dim() - 1):
        return _rows(x)
    return _rows(x.transpose(dim, -1)).transpose(dim, -1)


def _slope(dy: Tensor, y: Tensor) -> Tensor:
    return slope(dy.to(torch.promote_types(dy.dtype, torch.float32)), y).to(y.dtype)


@operation(FORWARD, BACKWARD, name="sparsemax_rows", fallback_backward=_slope)
def _rows(x: Tensor) -> Tensor:
    """Compute the op over the last dimension."""
    if x.numel() == 0:
        return x.clone()
    return by_sorting(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
