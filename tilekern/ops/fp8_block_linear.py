"""fp8_block_linear: a linear layer whose three products are of 8-bit floats (e4m3), with scales of blocks.

With x [tokens, in], weight [out, in] and dy [tokens, out], where ``q`` rounds a matrix to e4m3 with a scale for each
1 x 128 numbers of a row, and ``s`` one with a scale for each 128 x 128 (:mod:`tilekern.kernels.fp8.block_scales`):

    forward          y = q(x) @ s(weight)^T + bias
    input gradient   dx = q(dy) @ s(weight^T)^T
    weight gradient  dweight = q(dy^T) @ q(x^T)^T

``x`` and ``dy`` are rounded along rows and along columns in one launch each, from their own dtype. Of the forward only
``q(x^T)`` stays, half of what a linear layer keeps. ``s(weight^T)`` has the numbers of ``s(weight)``; weights are
rounded anew in both directions. All sums have a fixed order, so a step gives the same bits again.

The rest is as in :mod:`tilekern.ops.fp8_linear`: layers that share ``x``, autocast, and when torch's layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.fp8.block_product import SPEC as PRODUCT
from tilekern.kernels.fp8.block_product import block_product
from tilekern.kernels.fp8.block_scales import SIDE, block_rows, block_squares, whole
from tilekern.kernels.fp8.blocks import SPEC as BLOCKS
from tilekern.kernels.fp8.weight_blocks import SPEC as WEIGHT
from tilekern.ops.foreseen import written
from tilekern.ops.fp8_linear import E4M3, Format, Gradients, Layer, Rounded, gradients, launched, layers_of, linears
from tilekern.ops.registration import as_rows, uncast
from tilekern.spec import cdiv


def fp8_block_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias``, with products of 8-bit floats with scales of blocks, and so in both gradients.

    Up to 64 rows without a gradient, as in decoding, run in the dtype of ``x``: rounding the weight would take longer
    than the product.

    Args:
        x: [..., in_features]; bfloat16, float16 or float32, any strides.
        weight: [out_features, in_features], of the dtype of ``x``. Under autocast both are cast, as a linear layer's.
        bias: [out_features], of the dtype of ``x``, or None.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    return fp8_block_linears(x, [(weight, bias)])[0]


def fp8_block_linears(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Return the result of :func:`fp8_block_linear` for each of some layers, weight and bias, that share ``x``."""
    return linears(BLOCKWISE, x, layers)


def blocked(x: Tensor, *, both: bool) -> tuple[Rounded, Rounded | None]:
    """Return a matrix [rows, columns] in e4m3 with its scales [columns / 128, rows].

    If ``both``, also its transpose [columns, rows] with scales [rows / 128, columns], rounded from ``x`` too.
    """
    rows, columns = x.shape

    def allocate() -> Sequence[Tensor]:
        # Rows of turned matrices, and of scales, are stored as whole 16 bytes, as TMA writes and reads them.
        return (*_empty(x, rows, columns), *(_empty(x, columns, whole(rows)) if both else ()))

    made = written(BLOCKS, (rows, columns, both, x.dtype), (x,), allocate)
    if made is None:
        return _by_torch(x), _by_torch(x.t()) if both else None
    return (made[0], made[1][:, :rows]), (made[2][:, :rows], made[3][:, :columns]) if both else None


def _empty(x: Tensor, rows: int, columns: int) -> Rounded:
    """Return memory for numbers, and for the scales of their rows."""
    numbers = torch.empty((rows, columns), dtype=E4M3, device=x.device)
    return numbers, torch.empty((cdiv(columns, SIDE), whole(rows)), dtype=torch.float32, device=x.device)


def _by_torch(x: Tensor) -> Rounded:
    numbers, scale = block_rows(x)
    return numbers, scale[:, : x.shape[0]]


def squared(weight: Tensor, *, turned: bool) -> Rounded:
    """Return a weight [rows, columns], or its transpose, in e4m3, with the scales of its 128 x 128 blocks."""
    rows, columns = weight.shape
    down, across = cdiv(rows, SIDE), cdiv(columns, SIDE)
    shapes = ((columns, whole(rows)), (across, down)) if turned else ((rows, columns), (down, across))

    def allocate() -> Rounded:
        return weight.new_empty(shapes[0], dtype=E4M3), weight.new_empty(shapes[1], dtype=torch.float32)

    made = written(WEIGHT, (rows, columns, turned, weight.dtype), (weight,), allocate)
    if made is not None:
        return (made[0][:, :rows] if turned else made[0]), made[1]
    numbers, scale = block_squares(weight)
    return (numbers.t().contiguous(), scale.t().contiguous()) if turned else (numbers, scale)


def multiplied(
    a: Rounded, b: Rounded, dtype: torch.dtype, bias: Tensor | None = None, addend: Tensor | None = None, *,
    over_rows: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a @ b^T + bias + addend`` [a's rows, b's rows], of results of :func:`blocked`, in a dtype.

    The result may have the memory of ``addend``. ``b`` is a weight of :func:`squared`. If ``over_rows``, the sums are
    over tokens, as in a weight's gradient, and ``b`` is a result of :func:`blocked` too.
    """
    (left, down), (right, across) = a, b
    c = launched(PRODUCT, left, right, down, across, dtype, bias, addend, over_rows=over_rows)
    if c is not None:
        return c
    with uncast(left.device.type):
        c = block_product(left, right, down, across, bias, dtype, over_rows=over_rows)
    return c if addend is None else addend.add_(c)


def _forward(
    needs: Sequence[bool], x: Tensor, parameters: Sequence[Any], **_: bool
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    along, across = blocked(as_rows(x), both=any(needs[1::2]))
    layers = layers_of(parameters)
    made = [multiplied(along, squared(as_rows(weight), turned=False), x.dtype, bias) for weight, bias in layers]
    return made, across or ()


def _backward(
    needs: Sequence[bool], given: Sequence[Tensor | None], kept: Sequence[Tensor], weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor | None]:  # fmt: skip
    def of_layer(n: int, dy: Tensor, dx: Tensor | None, of_weight: bool) -> Gradients:
        along, down = blocked(dy, both=of_weight)
        if needs[0]:
            dx = multiplied(along, squared(as_rows(weights[n]), turned=True), dtype, addend=dx)
        return dx, None if down is None else multiplied(down, (kept[0], kept[1]), dtype, over_rows=True)

    return gradients(needs, given, of_layer)


BLOCKWISE = Format("fp8_block_linear", PRODUCT, _forward, _backward)
