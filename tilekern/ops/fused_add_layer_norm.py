"""fused_add_layer_norm: a residual sum and the layer normalisation of it, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.kernels.fused_add_layer_norm import BACKWARD, FORWARD
from tilekern.ops.layer_norm import layer_norm
from tilekern.ops.operation import operation

Pair = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _absent(needs: tuple[bool, ...], dtotal: torch.Tensor | None, dy: torch.Tensor | None, *rest: Any) -> Gradients:
    """The gradients where none reached the sum past the norm, or none the norm."""
    return (dtotal, None, None) if dy is None else torch.ops.tilekern.layer_norm_backward.default(dy, *rest)


def _fallback_backward(dtotal: torch.Tensor, dy: torch.Tensor, *rest: Any) -> Gradients:
    dx, dweight, dbias = torch.ops.tilekern.layer_norm_backward.default(dy, *rest)
    return (dtotal + dx).contiguous(), dweight, dbias


def _otherwise(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Pair:
    total = residual + x
    return total, layer_norm(total, weight, bias, eps)


@operation(
    FORWARD, BACKWARD, sums=("weight", "bias"), gradients={"residual": "dx"}, reads=("total", "weight", "bias"),
    unless="weight is None or bias is None", otherwise=_otherwise, absent=_absent,
    fallback_backward=_fallback_backward,
)  # fmt: skip
def fused_add_layer_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> Pair:
    """``total = residual + x``, and ``layer_norm(total, weight, bias, eps)``.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides.
        weight, bias: as those of :func:`tilekern.ops.layer_norm`.
        eps: added to the variance.

    Returns:
        The sum, rounded to the dtype of its terms, and its norm, in the dtype that torch promotes the sum, ``weight``
        and ``bias`` to; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` or ``bias`` does not have one value for each
            column, or the devices differ.
    """
    total = residual + x
    return total, layer_norm(total, weight, bias, eps)
