"""fused_rms_norm_add_rms_norm: the norm of a sublayer's result, the residual sum and the norm of it, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.fused_rms_norm_add_rms_norm import BACKWARD, FORWARD
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add, has_another_dtype
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_tensors, check_vectors
from tilekern.ops.rms_norm import CASTING_MODES, rms_norm, rms_norm_offset

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def fused_rms_norm_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor | None, next_weight: Tensor | None, eps: float = 1e-6,
    offset: float = 0.0, casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``total = fused_rms_norm_add(residual, x, weight, ...)`` and ``rms_norm(total, next_weight, ...)``.

    Gemma's and GLM-4's layers have a norm before and after a sum, with the same eps, offset and casting mode. The
    second norm reads the rounded sum. The op runs as two steps if

    - the casting mode ``llama`` gives a norm another dtype than ``x`` has
    - the weights' dtypes differ
    - a weight is None

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides; DTensors as in
            :func:`tilekern.ops.rms_norm`. If their dtypes differ, the formula runs.
        weight, next_weight: [columns], of the dtype of ``x`` or another of the three, or None: for the norm before the
            sum, and for the norm after it.
        eps: added to the mean squares.
        offset, casting_mode: as in :func:`tilekern.ops.rms_norm`.

    Returns:
        The sum, in the dtype that torch promotes the residual and the first norm to, and the norm of it, in the dtype
        that :func:`tilekern.ops.rms_norm` gives it; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, a weight does not have one value for each column, the
            devices differ, or the casting mode is unknown.
    """
    options = (eps, offset, casting_mode)
    if x.__class__ is not Tensor and is_dtensor(residual, x, weight, next_weight):
        vectors = (weight, next_weight)
        one, other = by_shards(fused_rms_norm_add_rms_norm, (residual, x), vectors, *options, gathered=1)
        return one, other
    cast = casting_mode == "llama"
    if (
        weight is None or next_weight is None or weight.dtype != next_weight.dtype
        or (cast and has_another_dtype(x, weight)) or casting_mode not in CASTING_MODES
    ):  # fmt: skip
        check_vectors("fused_rms_norm_add_rms_norm", x.shape[-1], weight=weight, next_weight=next_weight)
        check_tensors("fused_rms_norm_add_rms_norm", residual=residual, x=x, weight=weight, next_weight=next_weight)
        total = fused_rms_norm_add(residual, x, weight, *options)
        return total, rms_norm(total, next_weight, *options)
    return rms_norm_add_rms_norm(residual, x, weight, next_weight, eps, offset, cast)


def _fallback_backward(
    dtotal: Tensor, dy: Tensor, total: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, *scalars: Any
) -> Gradients:
    through, dnext_weight = _backward(dy, total, next_weight, *scalars)
    dresidual = (dtotal + through).contiguous()
    return dresidual, *_backward(dresidual, x, weight, *scalars), dnext_weight


def _absent(
    needs: tuple[bool, ...], dtotal: Tensor | None, dy: Tensor | None, total: Tensor, x: Tensor, weight: Tensor,
    next_weight: Tensor, *scalars: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients if one of the incoming gradients is None."""
    dresidual, dnext_weight = dtotal, None
    if dy is not None:
        dresidual, dnext_weight = _backward(dy, total, next_weight, *scalars)
    assert dresidual is not None
    return dresidual, *_backward(dresidual, x, weight, *scalars), dnext_weight


def _backward(*given: Any) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.ops.tilekern.rms_norm_offset_backward.default(*given)
    return dx, dweight


@operation(
    FORWARD, BACKWARD, sums=("weight", "next_weight"), flags={"cast": "cast"}, absent=_absent,
    fallback_backward=_fallback_backward,
)  # fmt: skip
def rms_norm_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor, eps: float = 1e-6, offset: float = 1.0,
    cast: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the sum and its norm, with ``offset`` added to both weights; ``cast`` rounds norms before them."""
    total = residual + rms_norm_offset(x, weight, eps, offset, cast)
    return total, rms_norm_offset(total, next_weight, eps, offset, cast)
