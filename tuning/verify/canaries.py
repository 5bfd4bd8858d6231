"""Put arrays between guard bands, which show writes outside of outputs and over inputs, and reads outside of inputs.

A guarded array is a view into its own allocation, filled with a pattern that is a NaN in every floating-point dtype,
but not one that arithmetic produces. So a band without the pattern was written to, an output element with the pattern
was not written, and reads beyond an input's edge give NaN. The gaps between padded rows are bands too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilekern.spec import cdiv

# Bytes before and after an array: more than a row of tiles reaches beyond its end. A multiple of 256, the alignment of
# allocations, so that the array has it too.
BAND_BYTES = 1 << 16
# Bytes after a padded row, and the alignment of rows that kernels assume.
_GAP_BYTES, _ROW_BYTES = 128, 16
# Quiet NaNs of two bytes with a payload; arithmetic gives 0x7FC0, 0x7FFF, 0xFFC0 or 0xFFFF. A payload may pass through
# arithmetic, so inputs have another pattern than outputs.
OUTPUT_PATTERN, INPUT_PATTERN = 0xFFD5 - (1 << 16), 0xFFD6 - (1 << 16)
# Of arrays of int8: twice -128, which symmetric quantisation does not give. Of 8-bit floats: twice the negative NaN,
# where conversions on GPUs give the positive one.
_BYTES_PATTERN, _FLOAT8_PATTERN = 0x8080 - (1 << 16), 0xFFFF - (1 << 16)


@dataclass(frozen=True)
class Guarded:
    """An array, and the bytes around it that nothing may write to."""

    array: Any
    bands: tuple[Any, ...]
    pattern: int

    def is_torn(self) -> Any:
        """Return whether a band was written to, as a tensor of one bool."""
        torn = [(band != _of_width(band.element_size(), self.pattern)).any() for band in self.bands]
        return torn[0] if len(torn) == 1 else torn[0] | torn[1]

    def unwritten(self) -> Any:
        """Count the elements that still hold the pattern, as a tensor."""
        held = bits(self.array)
        return (held == _of_width(held.element_size(), self.pattern)).sum()


def _of_width(size_bytes: int, pattern: int) -> int:
    """Return a pattern of two bytes as a signed integer of another width, the upper byte as one of one."""
    if size_bytes == 1:
        return pattern >> 8
    repeats = size_bytes // 2
    return sum((pattern & 0xFFFF) << 16 * place for place in range(repeats)) - (1 << 16 * repeats)


def guarded(
    shape: Sequence[int], dtype: Any, device: str, *, padded: bool = False, order: Sequence[int] | None = None,
    pattern: int = OUTPUT_PATTERN,
) -> Guarded:  # fmt: skip
    """Make a guarded array filled with a pattern.

    Args:
        shape: its extents.
        dtype: its torch dtype.
        device: where it is.
        padded: whether a gap follows each row. Rows always begin at multiples of 16 bytes, as aligned artifacts assume.
        order: the axes in the order of memory, the contiguous one last; by default as in ``shape``.
        pattern: two bytes as a signed integer; arrays of single bytes have their own.
    """
    if dtype.itemsize == 1:
        pattern = _FLOAT8_PATTERN if dtype.is_floating_point else _BYTES_PATTERN
    order = list(range(len(shape))) if order is None else list(order)
    lying = [shape[axis] for axis in order]
    columns, lines = lying[-1], math.prod(lying[:-1])
    pitch = pitch_of(columns, dtype) + (_GAP_BYTES // dtype.itemsize if padded else 0) if len(lying) > 1 else columns
    first = BAND_BYTES // 2
    end = first + cdiv(lines * pitch * dtype.itemsize, 2)
    raw = torch.full((end + BAND_BYTES // 2,), pattern, dtype=torch.int16, device=device)
    body = raw[first:end].view(dtype)[: lines * pitch].view(*lying[:-1], pitch)
    # Both bands as one tensor, to compare them with one launch.
    bands = [raw.as_strided((2, first), (end, 1))]
    if pitch > columns:
        gap = body[..., columns:]
        bands.append(gap.view(torch.int8 if dtype.itemsize == 1 else torch.int16))
    places = [order.index(axis) for axis in range(len(shape))]
    return Guarded(body[..., :columns].permute(places), tuple(bands), pattern)


def pitch_of(columns: int, dtype: Any) -> int:
    """Return the elements from one row to the next if each begins at a multiple of 16 bytes."""
    return int(cdiv(columns * dtype.itemsize, _ROW_BYTES) * _ROW_BYTES // dtype.itemsize)


def in_whole_rows(array: Any) -> Any:
    """Return a contiguous array with rows at multiples of 16 bytes, and any other array as it is."""
    columns = array.shape[-1] if array.dim() > 1 and array.is_contiguous() else 0
    pitch = pitch_of(columns, array.dtype)
    return array if pitch == columns else array.new_empty(*array.shape[:-1], pitch)[..., :columns].copy_(array)


def guarded_copy(array: Any, *, padded: bool = False) -> Guarded:
    """Copy an array into a guarded one with the same order of axes in memory."""
    order = sorted(range(array.dim()), key=lambda axis: -array.stride(axis))
    device, pattern = str(array.device), INPUT_PATTERN
    found = guarded(array.shape, array.dtype, device, padded=padded, order=order, pattern=pattern)
    found.array.copy_(array)
    return found


def bits(array: Any) -> Any:
    """View the elements as integers, which compare where NaN does not."""
    return array.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()])


class GuardedInputs:
    """The arguments of a launch by name, with guarded arrays, and their original values."""

    def __init__(self, inputs: Mapping[str, Any], *, padded: bool = False) -> None:
        self._before = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self._guarded = {name: guarded_copy(value, padded=padded) for name, value in self._before.items()}
        self.values = {**inputs, **{name: found.array for name, found in self._guarded.items()}}

    def changes(self) -> dict[str, Any]:
        """Return whether each input or a band around it was written to, as tensors of one bool by name."""
        return {
            name: (bits(found.array) != bits(self._before[name])).any() | found.is_torn()
            for name, found in self._guarded.items()
        }
