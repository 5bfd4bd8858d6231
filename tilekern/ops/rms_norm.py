"""rms_norm: root mean square normalisation of the last dimension, Hugging Face's order of casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import rms_norm_to as to
from tilekern.kernels.rms_norm import BACKWARD, FORWARD, OFFSET_BACKWARD, OFFSET_FORWARD
from tilekern.ops.operation import operation
from tilekern.ops.registration import constant_row

CASTING_MODES = ("llama", "gemma", "none")
# Calls that the plain ops do not serve.
WITH_OPTIONS = 'offset or casting_mode != "llama" or weight is None'


def weight_of(
    op: str, x: Tensor, weight: Tensor | None, offset: float, casting_mode: str
) -> tuple[Tensor, float, bool]:
    """Return the weight of a norm with options, its offset, and whether the normalised row is rounded before it.

    A missing weight becomes ones. If ``x`` and ``weight`` differ in dtype and the row is rounded, the result has the
    dtype of ``x * weight``: then the offset is added here, in float32.

    Raises:
        ValueError: ``casting_mode`` is unknown.
    """
    if casting_mode not in CASTING_MODES:
        raise ValueError(f"{op}: casting_mode must be llama, gemma or none, got {casting_mode!r}")
    if weight is None:
        weight, offset = constant_row(x, 1.0), 0.0
    cast = casting_mode == "llama"
    if cast and offset and weight.dtype != x.dtype:
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset, 0.0, cast
    return weight, offset, cast


def gradients_by_norm(norm: str, *, is_cast: bool = False) -> dict[str, Any]:
    """Return ``absent`` and ``fallback_backward`` of a sum and its norm, by the registered backward of the norm.

    It ``is_cast`` if its last argument is the dtype of its result.
    """

    def of_norm(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
        given = (*given, dy.dtype) if is_cast else given
        found: tuple[Tensor, ...] = getattr(torch.ops.tilekern, f"{norm}_backward").default(dy, *given)
        return found

    def absent(
        needs: tuple[bool, ...], dtotal: Tensor | None, dy: Tensor | None, total: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        if dy is not None:
            return of_norm(dy, total, *rest)
        return dtotal, *(None for x in rest if isinstance(x, Tensor))

    def fallback_backward(dtotal: Tensor, dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        dx, *of_weights = of_norm(dy, *rest)
        return (dtotal + dx).contiguous(), *of_weights

    return {"absent": absent, "fallback_backward": fallback_backward}


def _otherwise(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str) -> Tensor:
    weight, offset, cast = weight_of("rms_norm", x, weight, offset, casting_mode)
    return rms_norm(x, weight, eps) if cast and not offset else rms_norm_offset(x, weight, eps, offset, cast)


@operation(
    FORWARD, BACKWARD, sums=("weight",), options=("offset", "casting_mode"), unless=WITH_OPTIONS, otherwise=_otherwise,
    gathered=1,
)  # fmt: skip
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """Return ``(weight + offset) * cast(x / sqrt(mean(x^2) + eps))`` over the last dimension.

    Args:
        x: [..., columns]; bfloat16, float16 or float32, any strides. With a DTensor each rank computes its own rows;
            the last dimension is gathered if it is sharded, and the result is a DTensor too.
        weight: [columns], of the dtype of ``x`` or another of the three. None for a norm without a weight, which has
            no offset either.
        eps: added to the mean square.
        offset: added to the weight, in float32; 1 for Gemma.
        casting_mode: ``llama`` rounds the normalised row to the dtype of ``x`` before the weight is applied, ``gemma``
            and ``none`` round only the result. Liger's ``none`` computes in the dtype of ``x`` throughout; here it is
            as exact as ``gemma``.

    Returns:
        [..., columns], contiguous: for ``llama`` in the dtype that torch promotes ``x`` and ``weight`` to, otherwise in
        the dtype of ``x``.

    Raises:
        ValueError: ``weight`` does not have one value for each column, or is on another device, or the casting mode is
            unknown.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@operation(OFFSET_FORWARD, OFFSET_BACKWARD, sums=("weight",), flags={"cast": "cast"})
def rms_norm_offset(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0, cast: bool = False) -> Tensor:
    """Return the norm with ``weight + offset`` in the dtype of ``x``; ``cast`` rounds before the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide.to(x.dtype) if cast else wide
    return (normal * (weight.to(torch.float32) + offset)).to(x.dtype)


@operation(to.FORWARD, BACKWARD, sums=("weight",), flags={"product_dtype": "dtype"})
def rms_norm_to(x: Tensor, weight: Tensor, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return :func:`rms_norm` in another dtype, rounded once if x and weight are of float32."""
    return rms_norm(x, weight, eps).to(dtype)


@operation(to.OFFSET_FORWARD, OFFSET_BACKWARD, sums=("weight",), flags={"cast": "cast", "product_dtype": "dtype"})
def rms_norm_offset_to(
    x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0, cast: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return :func:`rms_norm_offset` in another dtype, rounded once if x is of float32."""
    return rms_norm_offset(x, weight, eps, offset, cast).to(dtype)
