"""layer_norm: layer normalisation of the last dimension, statistics in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.layer_norm import BACKWARD, FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.registration import constant_row


def _otherwise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Run the norm with ones for a missing weight and zeros for a missing bias."""
    row = next((given for given in (weight, bias) if given is not None), x)
    weight = constant_row(row, 1.0) if weight is None else weight
    return layer_norm(x, weight, constant_row(row, 0.0) if bias is None else bias, eps)


@operation(
    FORWARD, BACKWARD, sums=("weight", "bias"), reads=("x", "weight", "bias"), gathered=1,
    unless="weight is None or bias is None", otherwise=_otherwise,
)  # fmt: skip
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, rounded once.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides; DTensors as in :func:`tilekern.ops.rms_norm`.
        weight, bias: [columns], of the dtype of ``x`` or another of the three, or None if the norm has none. If their
            dtypes differ, the formula runs.
        eps: added to the variance, which is the mean square of the deviations.

    Returns:
        [..., columns] in the dtype that torch promotes ``x``, ``weight`` and ``bias`` to, contiguous.

    Raises:
        ValueError: ``weight`` or ``bias`` does not have one value for each column, or is on another device.
    """
    assert weight is not None
    assert bias is not None
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    return torch.nn.functional.layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
