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
from tilekern.ops.foreseen import launch
from tilekern.ops.fp8_block_linear import of_blocks
from tilekern.ops.fp8_linear import E4M3, Layer, Room, Rounded, linears, memory, narrowed
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


def blocked(
    x: Tensor, *, along: bool, turned: bool, rooms: Sequence[Room | None] = (None, None)
) -> tuple[Rounded | None, Rounded | None]:
    """Return a matrix [rows, columns] in MXFP8, and its transpose, each if it is asked for; one of them must be.

    Scales are [rows / 128, columns / 128, 32, 16]. ``rooms`` have memory for both.
    """
    rows, columns = x.shape
    made = _memory(x, rows, columns, columns, rooms[0]) if along else None
    # Rows of turned matrices are stored as whole 16 bytes, as TMA writes and reads them.
    across = _memory(x, columns, rows, whole(rows), rooms[1]) if turned else None
    arrays = (*(made or ()), *(across or ()))
    if not launch(BLOCKS, (rows, columns, along and turned, turned, x.dtype), x, *arrays):
        return mx_rows(x) if along else None, mx_rows(x.t()) if turned else None
    return made, None if across is None else (narrowed(across[0], rows), across[1])


def _memory(x: Tensor, rows: int, columns: int, stored: int, room: Room | None) -> Rounded:
    """Return memory for numbers, in rows of ``stored``, and for their scales."""
    shape = (cdiv(rows, SIDE), cdiv(columns, SIDE), *SCALES)
    return memory((rows, stored), E4M3, x.device, room), memory(shape, torch.int8, x.device, room)


def _weight_of(weight: Tensor, *, turned: bool, room: Room) -> Rounded:
    """Return a weight, or its transpose, in MXFP8."""
    made: Any = blocked(weight, along=not turned, turned=turned, rooms=(room, room))[turned]
    return made


def _by_torch(*given: Any, over_rows: bool) -> Tensor:
    return mx_product(*given)


MX = of_blocks("mxfp8_linear", PRODUCT, blocked, _weight_of, _by_torch)
