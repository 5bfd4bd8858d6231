"""layer_norm: layer normalisation of the last dimension, statistics in float32."""

from __future__ import annotations

import torch

from tilekern.kernels.layer_norm import BACKWARD, FORWARD
from tilekern.ops.operation import operation


@operation(
    FORWARD, BACKWARD, sums=("weight", "bias"), reads=("x", "weight", "bias"),
    constants={"weight": 1.0, "bias": 0.0}, gathered=1,
)  # fmt: skip
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, rounded once.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides; DTensors as in :func:`tilekern.ops.rms_norm`.
        weight, bias: [columns], of the dtype of ``x`` or another of the three, or None for a norm without it. Where
            theirs differ, the formula runs.
        eps: added to the variance, which is the mean square of what differs from the mean.

    Returns:
        [..., columns] in the dtype that torch promotes ``x``, ``weight`` and ``bias`` to, contiguous.

    Raises:
        ValueError: ``weight`` or ``bias`` does not have one value for each column, or is on another device.
    """
    # `constants` has seen to that.
    assert weight is not None
    assert bias is not None
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    return torch.nn.functional.layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
