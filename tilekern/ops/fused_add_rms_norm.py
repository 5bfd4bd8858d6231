"""fused_add_rms_norm: a residual sum and the root mean square normalisation of it, in one launch."""

from __future__ import annotations

from torch import Tensor

from tilekern.kernels import rms_norm_to as to
from tilekern.kernels.fused_add_rms_norm import BACKWARD, FORWARD, OFFSET_BACKWARD, OFFSET_FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.rms_norm import WITH_OPTIONS, gradients_by_norm, rms_norm, rms_norm_offset, weight_of

Pair = tuple[Tensor, Tensor]


def _otherwise(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Pair:
    weight, offset, cast = weight_of("fused_add_rms_norm", x, weight, offset, casting_mode)
    if cast and not offset:
        return fused_add_rms_norm(residual, x, weight, eps)
    return _with_offset(residual, x, weight, eps, offset, cast)


@operation(
    FORWARD, BACKWARD, sums=("weight",), gradients={"residual": "dx"}, options=("offset", "casting_mode"),
    unless=WITH_OPTIONS, otherwise=_otherwise, gathered=1, **gradients_by_norm("rms_norm"),
)  # fmt: skip
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> Pair:  # fmt: skip
    """Return ``total = residual + x``, and ``rms_norm(total, weight, eps, offset, casting_mode)``.

    Args:
        residual, x: [..., columns] of one shape; bfloat16, float16 or float32, any strides; DTensors as in
            :func:`tilekern.ops.rms_norm`.
        weight: [columns], of the dtype of ``x`` or another of the three, or None.
        eps: added to the mean square.
        offset, casting_mode: as in :func:`tilekern.ops.rms_norm`.

    Returns:
        The sum, rounded to the dtype of its terms, and its norm, in the dtype that torch promotes the sum and
        ``weight`` to, or that of the sum if the casting mode is not ``llama``; both contiguous.

    Raises:
        ValueError: the shapes of ``residual`` and ``x`` differ, ``weight`` does not have one value for each column, the
            devices differ, or the casting mode is unknown.
    """
    total = residual + x
    return total, rms_norm(total, weight, eps)


@operation(
    OFFSET_FORWARD, OFFSET_BACKWARD, name="fused_add_rms_norm_offset", sums=("weight",), gradients={"residual": "dx"},
    flags={"cast": "cast"}, **gradients_by_norm("rms_norm_offset"),
)  # fmt: skip
def _with_offset(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0, cast: bool = False
) -> Pair:
    """Compute the sum and its norm with ``weight + offset``; ``cast`` rounds before the weight."""
    total = residual + x
    return total, rms_norm_offset(total, weight, eps, offset, cast)


@operation(
    to.ADD_FORWARD, BACKWARD, sums=("weight",), gradients={"residual": "dx"},
    **gradients_by_norm("rms_norm_to", is_cast=True),
)  # fmt: skip
def fused_add_rms_norm_to(residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Return :func:`fused_add_rms_norm` of two dtypes: the sum in that of the residual, its norm in that of x."""
    total, y = fused_add_rms_norm(residual, x.to(residual.dtype), weight, eps)
    return total, y.to(x.dtype)


@operation(
    to.ADD_OFFSET_FORWARD, OFFSET_BACKWARD, sums=("weight",), gradients={"residual": "dx"}, flags={"cast": "cast"},
    **gradients_by_norm("rms_norm_offset_to", is_cast=True),
)  # fmt: skip
def fused_add_rms_norm_offset_to(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0, cast: bool = False
) -> Pair:
    """Return the same with ``weight + offset``."""
    total, y = _with_offset(residual, x.to(residual.dtype), weight, eps, offset, cast)
    return total, y.to(x.dtype)
