"""Scales of rows of e4m3 numbers: powers of two, so that a row moves to another scale without a second rounding.

e4m3 has 4 significant bits, a largest number of 448 = 1.75 * 2^8 and a smallest normal one of 2^-6 (Micikevicius et al.
2022, arXiv:2209.05433). A row's scale is the least power of two by which its largest magnitude, divided, is 448 or
less, and at least 2^-126. So division by it is exact, and each number is rounded once, to nearest even. A row with NaN
or an infinity has the scale NaN and numbers that are NaN, so that all sums which read it are NaN.

The bits of float32 do it: a mantissa above 1.75 carries into the exponent.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

E4M3 = "float8_e4m3fn"
# All bits of a mantissa below 1.75; an exponent's bits; 2^-126, the least scale; infinity; and 2^8 as exponents count.
_CARRY, _EXPONENT, _LEAST, INFINITY, _EIGHT = 0x1FFFFF, 0x7F800000, 0x00800000, 0x7F800000, 8 << 23
# The bits of a power of two and of its reciprocal add up to this.
_BOTH = 0x7F000000
MAGNITUDE = 0x7FFFFFFF


def bits_of(tile):
    """Return the bits of the magnitudes of float32 numbers, which are in the order of the magnitudes, NaN above all."""
    return ct.bitcast(tile, ct.int32) & MAGNITUDE


def scale_of(largest):
    """Return the scales, and their reciprocals, of rows whose largest magnitudes have these bits."""
    power = ct.maximum(((largest + _CARRY) & _EXPONENT) - _EIGHT, _LEAST)
    is_finite = largest < INFINITY
    scale = ct.where(is_finite, ct.bitcast(power, ct.float32), math.nan)
    return scale, ct.where(is_finite, reciprocal(power), math.nan)


def reciprocal(bits):
    """Return 1 / scale of scales with these bits."""
    return ct.bitcast(_BOTH - bits, ct.float32)


def scaled_rows(x: Any) -> tuple[Any, Any]:
    """Compute e4m3 numbers [rows, columns] and scales [rows] of a matrix, by torch's operations.

    Args:
        x: [rows, columns], of a float dtype.
    """
    import torch

    numbers = x.float()
    largest = numbers.abs().amax(1, keepdim=True)
    bits = largest.view(torch.int32)
    power = (((bits + _CARRY) & _EXPONENT) - _EIGHT).clamp_min(_LEAST).view(torch.float32)
    scale = torch.where(largest.isfinite(), power, math.nan)
    return (numbers / scale).to(torch.float8_e4m3fn), scale[:, 0]


def turned_rows(x: Any, scale: Any) -> tuple[Any, Any]:
    """Compute the transpose of a matrix at the largest of its rows' scales, by torch's operations.

    Args:
        x: [rows, columns]; e4m3 numbers of these scales, or numbers that are rounded to them first.
        scale: [rows].

    Returns:
        e4m3 numbers [columns, rows], and their scales [columns], which are equal.
    """
    import torch

    common = scale.amax() if scale.numel() else scale.new_ones(())
    numbers = x if x.dtype == torch.float8_e4m3fn else (x.float() / scale[:, None]).to(torch.float8_e4m3fn)
    moved = (numbers.float() * (scale / common)[:, None]).to(torch.float8_e4m3fn)
    return moved.t().contiguous(), common.expand(x.shape[1]).contiguous()
