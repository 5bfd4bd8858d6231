"""rms_norm: root mean square normalisation of the last dimension, Hugging Face's order of casts."""

from __future__ import annotations

import torch

from tilekern.kernels.rms_norm import BACKWARD, FORWARD
from tilekern.ops.operation import operation


@operation(FORWARD, BACKWARD, sums=("weight",))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``weight * cast(x / sqrt(mean(x^2) + eps))`` over the last dimension; the cast goes to the dtype of ``x``.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides.
        weight: [columns], of the dtype of ``x`` or another of the three.
        eps: added to the mean square.

    Returns:
        [..., columns] in the dtype that torch promotes ``x`` and ``weight`` to, contiguous.

    Raises:
        ValueError: ``weight`` does not have one value for each column, or is on another device.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
