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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilekern.kernels.fp8.block_product import SPEC as PRODUCT
from tilekern.kernels.fp8.block_product import block_product
from tilekern.kernels.fp8.block_scales import SIDE, block_rows, block_squares, whole
from tilekern.kernels.fp8.blocks import SPEC as BLOCKS
from tilekern.kernels.fp8.weight_blocks import SPEC as WEIGHT
from tilekern.ops.foreseen import launch
from tilekern.ops.fp8_linear import (
    E4M3,
    Format,
    Gradients,
    Layer,
    Needs,
    Room,
    Rounded,
    gradients,
    launched,
    linears,
    memory,
    narrowed,
)
from tilekern.ops.registration import as_rows, uncast
from tilekern.spec import KernelSpec, cdiv


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


def blocked(
    x: Tensor, *, along: bool, turned: bool, rooms: Sequence[Room | None] = (None, None)
) -> tuple[Rounded, Rounded | None]:
    """Return a matrix [rows, columns] in e4m3 with its scales [columns / 128, rows], which its launch always makes.

    If ``turned``, also its transpose [columns, rows] with scales [rows / 128, columns], rounded from ``x`` too.
    ``rooms`` have memory for the two.
    """
    rows, columns = x.shape
    # Rows of turned matrices, and of scales, are stored as whole 16 bytes, as TMA writes and reads them.
    y, scale = _memory(x, rows, columns, rooms[0])
    if not turned:
        is_launched = launch(BLOCKS, (rows, columns, False, x.dtype), x, y, scale)
        return (y, narrowed(scale, rows)) if is_launched else _by_torch(x), None
    z, across = _memory(x, columns, whole(rows), rooms[1])
    if not launch(BLOCKS, (rows, columns, True, x.dtype), x, y, scale, z, across):
        return _by_torch(x), _by_torch(x.t())
    return (y, narrowed(scale, rows)), (narrowed(z, rows), narrowed(across, columns))


def _memory(x: Tensor, rows: int, columns: int, room: Room | None) -> Rounded:
    """Return memory for numbers, and for the scales of their rows."""
    device = x.device
    scale = memory((cdiv(columns, SIDE), whole(rows)), torch.float32, device, room)
    return memory((rows, columns), E4M3, device, room), scale


def _by_torch(x: Tensor) -> Rounded:
    numbers, scale = block_rows(x)
    return numbers, scale[:, : x.shape[0]]


def squared(weight: Tensor, *, turned: bool, room: Room) -> Rounded:
    """Return a weight [rows, columns], or its transpose, in e4m3, with the scales of its 128 x 128 blocks."""
    (rows, columns), device = weight.shape, weight.device
    sides, stored = (columns, rows) if turned else (rows, columns), whole(rows) if turned else columns
    y = memory((sides[0], stored), E4M3, device, room)
    scale = memory((cdiv(sides[0], SIDE), cdiv(sides[1], SIDE)), torch.float32, device, room)
    if launch(WEIGHT, (rows, columns, turned, weight.dtype), weight, y, scale):
        return narrowed(y, sides[1]), scale
    y, scale = block_squares(weight)
    return (y.t().contiguous(), scale.t().contiguous()) if turned else (y, scale)


def of_blocks(
    op: str, product: KernelSpec, blocked: Callable[..., tuple[Rounded | None, Rounded | None]],
    weight_of: Callable[..., Rounded], by_torch: Callable[..., Tensor],
) -> Format:  # fmt: skip
    """Return a format that rounds matrices along rows and along columns, each with scales of its own.

    Args:
        op, product: as in :class:`Format`.
        blocked: as :func:`blocked`; returns None for what is not asked.
        weight_of: as :func:`squared`.
        by_torch: takes two rounded matrices, their scales, a bias or None, a dtype and ``over_rows``, whether the sums
            are over tokens, as in a weight's gradient; returns their product.
    """

    def multiplied(
        a: Rounded, b: Rounded, dtype: torch.dtype, bias: Tensor | None = None, addend: Tensor | None = None, *,
        over_rows: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return ``a @ b^T + bias + addend`` [a's rows, b's rows], which may have the memory of ``addend``."""
        (left, down), (right, across) = a, b
        c = launched(product, left, right, down, across, dtype, bias, addend, over_rows=over_rows)
        if c is not None:
            return c
        with uncast(left.device.type):
            c = by_torch(left, right, down, across, bias, dtype, over_rows=over_rows)
        return c if addend is None else addend.add_(c)

    def forward(
        needs: Needs, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], **_: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        (along, across), made, room = blocked(as_rows(x), along=True, turned=any(needs.weights)), [], Room()
        assert along is not None
        for weight, bias in zip(weights, biases, strict=True):
            of_weight = weight_of(as_rows(weight), turned=False, room=room)
            made.append(multiplied(along, of_weight, x.dtype, bias))
        return made, across or ()

    def backward(
        needs: Needs, given: Sequence[Tensor | None], kept: Sequence[Tensor], weights: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> Gradients:  # fmt: skip
        # Of gradients, turned gradients and weights; a layer's are read before the next layer's are written.
        *rooms, room = Room(), Room(), Room()

        def of_layer(n: int, dy: Tensor, dx: Tensor | None, of_weight: bool) -> tuple[Tensor | None, Tensor | None]:
            along, down = blocked(dy, along=needs.rows, turned=of_weight, rooms=rooms)
            if needs.rows and along is not None:
                weight = weight_of(as_rows(weights[n]), turned=True, room=room)
                dx = multiplied(along, weight, dtype, addend=dx)
            return dx, None if down is None else multiplied(down, (kept[0], kept[1]), dtype, over_rows=True)

        return gradients(needs, given, of_layer)

    return Format(op, product, forward, backward)


BLOCKWISE = of_blocks("fp8_block_linear", PRODUCT, blocked, squared, block_product)
