"""fused_rms_norm_add: the root mean square normalisation of a sublayer's result and the residual sum, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.fused_rms_norm_add import SPEC
from tilekern.kernels.rms_norm import OFFSET_BACKWARD
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import rms_norm, rms_norm_offset, weight_of


def fused_rms_norm_add(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:  # fmt: skip
    """Return ``residual + rms_norm(x, weight, eps, offset, casting_mode)``, as in OLMo 2 and EXAONE 4.

    The norm is rounded to the dtype of ``x`` before the sum, like a separate module's result. If the casting mode
    ``llama`` gives the norm another dtype than ``x`` has, the norm and the sum are two steps.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides; DTensors as in
            :func:`tilekern.ops.rms_norm`. If their dtypes differ, the formula runs.
        weight: [columns], of the dtype of ``x`` or another of the three, or None.
        eps: added to the mean square.
        offset, casting_mode: as in :func:`tilekern.ops.rms_norm`.

    Returns:
        [..., columns], contiguous, in the dtype that torch promotes the residual and the norm to.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` does not have one value for each column, the
            devices differ, or the casting mode is unknown.
    """
    if x.__class__ is not Tensor and is_dtensor(residual, x, weight):
        sharded: Tensor = by_shards(fused_rms_norm_add, (residual, x), (weight,), eps, offset, casting_mode, gathered=1)
        return sharded
    weight, offset, cast = weight_of("fused_rms_norm_add", x, weight, offset, casting_mode)
    if cast and has_another_dtype(x, weight):
        return residual + rms_norm(x, weight, eps, offset)
    return rms_norm_add(residual, x, weight, eps, offset, cast)


def has_another_dtype(x: Tensor, weight: Tensor) -> bool:
    """Return whether the product of two tensors has another dtype than the first."""
    return weight.dtype != x.dtype and torch.promote_types(weight.dtype, x.dtype) != x.dtype


def _fallback_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float, cast: bool) -> Any:
    return torch.ops.tilekern.rms_norm_offset_backward.default(dy, x, weight, eps, offset, cast)


@operation(
    SPEC, OFFSET_BACKWARD, sums=("weight",), gradients={"residual": "dy"}, flags={"cast": "cast"},
    fallback_backward=_fallback_backward,
)  # fmt: skip
def rms_norm_add(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0, cast: bool = False
) -> Tensor:
    """Compute the sum and the norm with ``weight + offset``; ``cast`` rounds before the weight."""
    return residual + rms_norm_offset(x, weight, eps, offset, cast)
