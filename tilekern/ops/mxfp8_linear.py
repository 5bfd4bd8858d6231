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

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilekern.kernels.fp8.block_scales import SIDE, whole
from tilekern.kernels.fp8.mx_blocks import SPEC as BLOCKS
from tilekern.kernels.fp8.mx_product import SPEC as PRODUCT
from tilekern.kernels.fp8.mx_product import mx_product
from tilekern.kernels.fp8.mx_scales import SCALES, mx_rows
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


def blocked(x: Tensor, *, along: bool, turned: bool, rooms: Sequence[Room | None] = (None, None)) -> list[Rounded]:
    """Return a matrix [rows, columns] in MXFP8, then its transpose, each if it is asked for; one of them must be.

    Scales are [rows / 128, columns / 128, 32, 16]. ``rooms`` have memory for both.
    """
    rows, columns = x.shape
    # Rows of turned matrices are stored as whole 16 bytes, as TMA writes and reads them.
    made = [_memory(x, rows, columns, columns, rooms[0])] if along else []
    made += [_memory(x, columns, rows, whole(rows), rooms[1])] if turned else []
    arrays = itertools.chain(*made)
    if not launch(BLOCKS, (rows, columns, along and turned, turned, x.dtype), x, *arrays):
        return [mx_rows(each) for each, is_asked in ((x, along), (x.t(), turned)) if is_asked]
    return [*made[:-1], (narrowed(made[-1][0], rows), made[-1][1])] if turned else made


def _memory(x: Tensor, rows: int, columns: int, stored: int, room: Room | None) -> Rounded:
    """Return memory for numbers, in rows of ``stored``, and for their scales."""
    shape = (cdiv(rows, SIDE), cdiv(columns, SIDE), *SCALES)
    return memory((rows, stored), E4M3, x.device, room), memory(shape, torch.int8, x.device, room)


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
    needs: Needs, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], **_: bool
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    (along, *across), made = blocked(as_rows(x), along=True, turned=any(needs.weights)), []
    rooms = Room(), None
    for weight, bias in zip(weights, biases, strict=True):
        (rounded,) = blocked(as_rows(weight), along=True, turned=False, rooms=rooms)
        made.append(multiplied(along, rounded, x.dtype, bias))
    return made, across[0] if across else ()


def _backward(
    needs: Needs, given: Sequence[Tensor | None], kept: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype
) -> Gradients:
    # Of gradients, turned gradients and weights; a layer's are read before the next layer's are written.
    rooms, of_weights = (Room(), Room()), (None, Room())

    def of_layer(n: int, dy: Tensor, dx: Tensor | None, of_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        slopes = blocked(dy, along=needs.rows, turned=of_weight, rooms=rooms)
        if needs.rows:
            (weight,) = blocked(as_rows(weights[n]), along=False, turned=True, rooms=of_weights)
            dx = multiplied(slopes[0], weight, dtype, addend=dx)
        return dx, multiplied(slopes[-1], (kept[0], kept[1]), dtype, over_rows=True) if of_weight else None

    return gradients(needs, given, of_layer)


MX = Format("mxfp8_linear", PRODUCT, _forward, _backward)
