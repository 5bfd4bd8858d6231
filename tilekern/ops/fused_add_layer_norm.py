"""fused_add_layer_norm: a residual sum and the layer normalisation of it, in one launch."""

from __future__ import annotations

from torch import Tensor

from tilekern.kernels.fused_add_layer_norm import BACKWARD, FORWARD
from tilekern.ops.layer_norm import layer_norm
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import gradients_by_norm

Pair = tuple[Tensor, Tensor]


def _otherwise(residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Pair:
    total = residual + x
    return total, layer_norm(total, weight, bias, eps)


@operation(
    FORWARD, BACKWARD, sums=("weight", "bias"), gradients={"residual": "dx"}, reads=("total", "weight", "bias"),
    unless="weight is None or bias is None", otherwise=_otherwise, **gradients_by_norm("layer_norm"),
)  # fmt: skip
def fused_add_layer_norm(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Pair:
    """Return ``total = residual + x``, and ``layer_norm(total, weight, bias, eps)``.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides.
        weight, bias: as in :func:`tilekern.ops.layer_norm`.
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
