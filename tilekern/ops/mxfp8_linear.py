"""mxfp8_linear: a linear layer whose three products are of MXFP8, on GPUs of sm_100 and newer.

With x [tokens, in], weight [out, in] and dy [tokens, out], where ``q`` rounds a matrix to e4m3 with a scale for each 32
numbers of a row (:mod:`tilekern.kernels.fp8.mx_scales`):

    forward          y = q(x) @ q(weight)^T + bias
    input gradient   dx = q(dy) @ q(weight^T)^T
    weight gradient  dweight = q(dy^T) @ q(x^T)^T

Each matrix is rounded along rows and along columns from its own dtype, ``x`` and ``dy`` in one launch each. Of the
forward only ``q(x^T)`` stays. All sums have a fixed order, so a step gives the same bits again.

The rest is as in :mod:`tilekern.ops.fp8_linear`: layers that share ``x``, autocast, and when torch's layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.fp8.block_scales import SIDE, whole
from tilekern.kernels.fp8.mx_blocks import SPEC as BLOCKS
from tilekern.kernels.fp8.mx_product import SPEC as PRODUCT
from tilekern.kernels.fp8.mx_product import mx_product
from tilekern.kernels.fp8.mx_scales import SCALES, mx_rows
from tilekern.ops.foreseen import written
from tilekern.ops.fp8_linear import E4M3, Format, Gradients, Layer, Rounded, gradients, launched, layers_of, linears
from tilekern.ops.registration import as_rows, uncast
from tilekern.spec import cdiv


def mxfp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias``, with products of MXFP8 in the forward and in both gradients.

    Up to 64 rows without a gradient, as in decoding, run in the dtype of ``x``.

    Args:
        x: [..., in_features]; bfloat16, float16 or float32, any strides.
        weight: [out_features, in_features], of the dtype of ``x``. Under autocast both are cast, as a linear layer's.
        bias: [out_features], of the dtype of ``x``, or None.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    return mxfp8_linears(x, [(weight, bias)])[0]


def mxfp8_linears(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Return the result of :func:`mxfp8_linear` for each of some layers, weight and bias, that share ``x``."""
    return linears(MX, x, layers)


def blocked(x: Tensor, *, along: bool, turned: bool) -> list[Rounded]:
    """Return a matrix [rows, columns] in MXFP8, then its transpose, each if it is asked for; one of them must be.

    Scales are [rows / 128, columns / 128, 32, 16].
    """
    rows, columns = x.shape

    def allocate() -> Sequence[Tensor]:
        # Rows of turned matrices are stored as whole 16 bytes, as TMA writes and reads them.
        made = [_empty(x, rows, columns, columns)] if along else []
        made += [_empty(x, columns, rows, whole(rows))] if turned else []
        return [part for each in made for part in each]

    made = written(BLOCKS, (rows, columns, along and turned, turned, x.dtype), (x,), allocate)
    if made is None:
        return [mx_rows(each) for each, is_asked in ((x, along), (x.t(), turned)) if is_asked]
    pairs = list(zip(made[::2], made[1::2], strict=True))
    return [*pairs[:-1], (pairs[-1][0][:, :rows], pairs[-1][1])] if turned else pairs


def _empty(x: Tensor, rows: int, columns: int, stored: int) -> Rounded:
    """Return memory for numbers, in rows of ``stored``, and for their scales."""
    numbers = torch.empty((rows, stored), dtype=E4M3, device=x.device)
    shape = (cdiv(rows, SIDE), cdiv(columns, SIDE), *SCALES)
    return numbers, torch.empty(shape, dtype=torch.int8, device=x.device)


def multiplied(
    a: Rounded, b: Rounded, dtype: torch.dtype, bias: Tensor | None = None, addend: Tensor | None = None, *,
    over_rows: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a @ b^T + bias + addend`` [a's rows, b's rows], of results of :func:`blocked`, in a dtype.

    The result may have the memory of ``addend``. ``over_rows``: the sums are over tokens, as a weight's gradient.
    """
    (left, down), (right, across) = a, b
    c = launched(PRODUCT, left, right, down, across, dtype, bias, addend, over_rows=over_rows)
    if c is not None:
        return c
    with uncast(left.device.type):
        c = mx_product(left, right, down, across, bias, dtype)
    return c if addend is None else addend.add_(c)


def _forward(
    needs: Sequence[bool], x: Tensor, parameters: Sequence[Any], **_: bool
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    (along, *across), made = blocked(as_rows(x), along=True, turned=any(needs[1::2])), []
    for weight, bias in layers_of(parameters):
        (rounded,) = blocked(as_rows(weight), along=True, turned=False)
        made.append(multiplied(along, rounded, x.dtype, bias))
    return made, across[0] if across else ()


def _backward(
    needs: Sequence[bool], given: Sequence[Tensor | None], kept: Sequence[Tensor], weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor | None]:  # fmt: skip
    def of_layer(n: int, dy: Tensor, dx: Tensor | None, of_weight: bool) -> Gradients:
        slopes = blocked(dy, along=needs[0], turned=of_weight)
        if needs[0]:
            (weight,) = blocked(as_rows(weights[n]), along=False, turned=True)
            dx = multiplied(slopes[0], weight, dtype, addend=dx)
        return dx, multiplied(slopes[-1], (kept[0], kept[1]), dtype, over_rows=True) if of_weight else None

    return gradients(needs, given, of_layer)


MX = Format("mxfp8_linear", PRODUCT, _forward, _backward)
