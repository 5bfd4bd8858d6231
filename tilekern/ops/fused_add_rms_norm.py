"""fused_add_rms_norm: a residual sum and the root mean square normalisation of it, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilekern.kernels.fused_add_rms_norm import BACKWARD, FORWARD, OFFSET_BACKWARD, OFFSET_FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import WITH_OPTIONS, rms_norm, rms_norm_offset, weight_of

Pair = tuple[torch.Tensor, torch.Tensor]


def _gradients(norm: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``absent`` and ``fallback_backward``, by the backward of the norm's own op."""

    def alone(*given: Any) -> Pair:
        dx, dweight = getattr(torch.ops.tilekern, f"{norm}_backward").default(*given)
        return dx, dweight

    def absent(
        needs: tuple[bool, ...], dtotal: torch.Tensor | None, dy: torch.Tensor | None, *rest: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients where none reached the sum past the norm, or none the norm."""
        return (dtotal, None) if dy is None else alone(dy, *rest)

    def fallback_backward(dtotal: torch.Tensor, dy: torch.Tensor, *rest: Any) -> Pair:
        dx, dweight = alone(dy, *rest)
        return (dtotal + dx).contiguous(), dweight

    return absent, fallback_backward


_absent, _fallback_backward = _gradients("rms_norm")
_absent_with_offset, _fallback_backward_with_offset = _gradients("rms_norm_offset")


def _otherwise(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str
) -> Pair:
    weight, offset, cast = weight_of("fused_add_rms_norm", x, weight, offset, casting_mode)
    if cast and not offset:
        return fused_add_rms_norm(residual, x, weight, eps)
    return _with_offset(residual, x, weight, eps, offset, cast)


@operation(
    FORWARD, BACKWARD, sums=("weight",), gradients={"residual": "dx"}, options=("offset", "casting_mode"),
    unless=WITH_OPTIONS, otherwise=_otherwise, gathered=1, absent=_absent, fallback_backward=_fallback_backward,
)  # fmt: skip
def fused_add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> Pair:  # fmt: skip
    """``total = residual + x``, and ``rms_norm(total, weight, eps, offset, casting_mode)``.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides; DTensors as in
            :func:`tilekern.ops.rms_norm`.
        weight: [columns], of the dtype of ``x`` or another of the three, or None.
        eps: added to the mean square.
        offset, casting_mode: as those of :func:`tilekern.ops.rms_norm`.

    Returns:
        The sum, rounded to the dtype of its terms, and its norm, in the dtype that torch promotes the sum and
        ``weight`` to, or that of the sum where the casting mode is not ``llama``; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` does not have one value for each column, the
            devices differ, or the casting mode is unknown.
    """
    total = residual + x
    return total, rms_norm(total, weight, eps)


@operation(
    OFFSET_FORWARD, OFFSET_BACKWARD, name="fused_add_rms_norm_offset", sums=("weight",), gradients={"residual": "dx"},
    flags={"cast": "cast"}, absent=_absent_with_offset, fallback_backward=_fallback_backward_with_offset,
)  # fmt: skip
def _with_offset(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 1.0,
    cast: bool = False,
) -> Pair:  # fmt: skip
    """The sum and its norm with ``weight + offset``, rounded before the weight where ``cast``."""
    total = residual + x
    return total, rms_norm_offset(total, weight, eps, offset, cast)
