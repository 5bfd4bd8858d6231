"""fused_add_rms_norm: a residual sum and the root mean square normalisation of it, in one launch."""

from __future__ import annotations

import torch

from tilekern.kernels.fused_add_rms_norm import BACKWARD, FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import rms_norm

Pair = tuple[torch.Tensor, torch.Tensor]


def _norm_alone(
    dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the norm, by its own op."""
    dx, dweight = torch.ops.tilekern.rms_norm_backward.default(dy, total, weight, eps)
    return dx, dweight


def _absent(
    needs: tuple[bool, ...], dtotal: torch.Tensor | None, dy: torch.Tensor | None, total: torch.Tensor,
    weight: torch.Tensor, eps: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients where nothing reached the sum past the norm, or nothing the norm."""
    return (dtotal, None) if dy is None else _norm_alone(dy, total, weight, eps)


def _fallback_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float
) -> Pair:
    dx, dweight = _norm_alone(dy, total, weight, eps)
    return (dtotal + dx).contiguous(), dweight


@operation(
    FORWARD, BACKWARD, sums=("weight",), gradients={"residual": "dx"}, absent=_absent,
    fallback_backward=_fallback_backward,
)  # fmt: skip
def fused_add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Pair:
    """``total = residual + x`` and ``weight * cast(total / sqrt(mean(total^2) + eps))`` over the last dimension.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides.
        weight: [columns], of the dtype of ``x`` or another of the three.
        eps: added to the mean square.

    Returns:
        The sum, rounded to the dtype of its terms, and its norm, in the dtype that torch promotes the sum and
        ``weight`` to; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` does not have one value for each column, or
            the devices differ.
    """
    total = residual + x
    return total, rms_norm(total, weight, eps)
