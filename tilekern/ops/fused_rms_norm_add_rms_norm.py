"""fused_rms_norm_add_rms_norm: the norm of a sublayer's result, the residual sum and the norm of it, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.kernels.fused_rms_norm_add_rms_norm import BACKWARD, FORWARD
from tilekern.ops.dtensors import by_shards, is_dtensor
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add, has_another_dtype
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import CASTING_MODES, rms_norm, rms_norm_offset

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fused_rms_norm_add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, next_weight: torch.Tensor | None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``total = fused_rms_norm_add(residual, x, weight, ...)`` and ``rms_norm(total, next_weight, ...)``.

    Gemma's and GLM-4's layers have the two norms around a sum, both with one eps, offset and casting mode. The second
    norm reads the rounded sum. The steps are two where the casting mode ``llama`` gives a norm another dtype than that
    of ``x``, where the weights' dtypes differ, and where a weight is None.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides; DTensors as in
            :func:`tilekern.ops.rms_norm`. Where their dtypes differ, the formula runs.
        weight, next_weight: [columns], of the dtype of ``x`` or another of the three, or None: of the norm before the
            sum, and of the norm behind it.
        eps: added to the mean squares.
        offset, casting_mode: as those of :func:`tilekern.ops.rms_norm`.

    Returns:
        The sum, in the dtype that torch promotes the residual and the first norm to, and the norm of it, in the dtype
        that :func:`tilekern.ops.rms_norm` gives it; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, a weight does not have one value for each column, the
            devices differ, or the casting mode is unknown.
    """
    options = (eps, offset, casting_mode)
    if x.__class__ is not torch.Tensor and is_dtensor(residual, x, weight, next_weight):
        vectors = (weight, next_weight)
        one, other = by_shards(fused_rms_norm_add_rms_norm, (residual, x), vectors, *options, gathered=1)
        return one, other
    cast = casting_mode == "llama"
    if (
        weight is None or next_weight is None or weight.dtype != next_weight.dtype
        or (cast and has_another_dtype(x, weight)) or casting_mode not in CASTING_MODES
    ):  # fmt: skip
        total = fused_rms_norm_add(residual, x, weight, *options)
        return total, rms_norm(total, next_weight, *options)
    return rms_norm_add_rms_norm(residual, x, weight, next_weight, eps, offset, cast)


def _fallback_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
    next_weight: torch.Tensor, *scalars: Any,
) -> Gradients:  # fmt: skip
    through, dnext_weight = _backward(dy, total, next_weight, *scalars)
    dresidual = (dtotal + through).contiguous()
    return dresidual, *_backward(dresidual, x, weight, *scalars), dnext_weight


def _absent(
    needs: tuple[bool, ...], dtotal: torch.Tensor | None, dy: torch.Tensor | None, total: torch.Tensor,
    x: torch.Tensor, weight: torch.Tensor, next_weight: torch.Tensor, *scalars: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients where none reached the sum past its norm, or none the norm."""
    dresidual, dnext_weight = dtotal, None
    if dy is not None:
        dresidual, dnext_weight = _backward(dy, total, next_weight, *scalars)
    assert dresidual is not None
    return dresidual, *_backward(dresidual, x, weight, *scalars), dnext_weight


def _backward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight = torch.ops.tilekern.rms_norm_offset_backward.default(*given)
    return dx, dweight


@operation(
    FORWARD, BACKWARD, sums=("weight", "next_weight"), flags={"cast": "cast"}, absent=_absent,
    fallback_backward=_fallback_backward,
)  # fmt: skip
def rms_norm_add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, next_weight: torch.Tensor, eps: float = 1e-6,
    offset: float = 1.0, cast: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum and its norm, with ``offset`` added to both weights, before which norms are rounded where ``cast``."""
    total = residual + rms_norm_offset(x, weight, eps, offset, cast)
    return total, rms_norm_offset(total, next_weight, eps, offset, cast)
