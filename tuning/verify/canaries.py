"""Arrays between guard bands: a launch that writes outside its outputs or over its inputs shows, and reads outside do.

A guarded array is a view into an allocation of its own that was filled with a pattern, which is a NaN in every
floating-point dtype, and none that arithmetic makes of numbers. So a band that does not hold it any more was written
to; an element of an output that still holds it was not written; and what a kernel reads beyond an input's edge is NaN.
Where rows are padded, the gap between two rows is a band as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilekern.spec import cdiv

# Bytes before and after an array: more than a row of tiles reaches over its end, and a multiple of the 256 bytes at
# whose multiples allocations begin, so that the array begins at one too.
BAND_BYTES = 1 << 16
# Bytes after a padded row, which begins at a multiple of the alignment that kernels take for granted.
_GAP_BYTES, _ROW_BYTES = 128, 16
# Two bytes each, quiet NaN with a payload; arithmetic gives 0x7FC0, 0x7FFF, 0xFFC0 or 0xFFFF in their place. A payload
# may pass through it, so what is read around an input is not taken for what an output was before.
OUTPUT_PATTERN, INPUT_PATTERN = 0xFFD5 - (1 << 16), 0xFFD6 - (1 << 16)


@dataclass(frozen=True)
class Guarded:
    """An array, and the bytes around it that nothing may write to."""

    array: Any
    bands: tuple[Any, ...]
    pattern: int

    def is_torn(self) -> Any:
        """Whether a band was written to, as a tensor of one bool."""
        torn = [(band != self.pattern).any() for band in self.bands]
        return torn[0] if len(torn) == 1 else torn[0] | torn[1]

    def unwritten(self) -> Any:
        """How many elements hold what they were allocated with, as a tensor."""
        held = bits(self.array)
        repeats = held.element_size() // 2
        pattern = sum((self.pattern & 0xFFFF) << 16 * place for place in range(repeats)) - (1 << 16 * repeats)
        return (held == pattern).sum()


def guarded(
    shape: Sequence[int], dtype: Any, device: str, *, padded: bool = False, order: Sequence[int] | None = None,
    pattern: int = OUTPUT_PATTERN,
) -> Guarded:  # fmt: skip
    """An array filled with a pattern, of elements of two bytes or more.

    Args:
        shape: its extents.
        dtype: its torch dtype.
        device: where it is.
        padded: whether a gap follows each row. Rows begin at whole 16 bytes in any case, as callers lay out what odd
            sizes have, and as aligned artifacts assume.
        order: the axes as they lie in memory, the one of neighbouring elements last; as in ``shape`` where None.
        pattern: two bytes as a signed integer.
    """
    order = list(range(len(shape))) if order is None else list(order)
    lying = [shape[axis] for axis in order]
    columns, lines = lying[-1], math.prod(lying[:-1])
    pitch = pitch_of(columns, dtype) + (_GAP_BYTES // dtype.itemsize if padded else 0) if len(lying) > 1 else columns
    first, end = BAND_BYTES // 2, (BAND_BYTES + lines * pitch * dtype.itemsize) // 2
    raw = torch.full((end + BAND_BYTES // 2,), pattern, dtype=torch.int16, device=device)
    body = raw[first:end].view(dtype).view(*lying[:-1], pitch)
    # Both bands as one tensor: one look at it is one launch.
    bands = [raw.as_strided((2, first), (end, 1))]
    if pitch > columns:
        bands.append(body[..., columns:].view(torch.int16))
    places = [order.index(axis) for axis in range(len(shape))]
    return Guarded(body[..., :columns].permute(places), tuple(bands), pattern)


def pitch_of(columns: int, dtype: Any) -> int:
    """Elements from the start of a row to that of the next, where each begins at whole 16 bytes."""
    return int(cdiv(columns * dtype.itemsize, _ROW_BYTES) * _ROW_BYTES // dtype.itemsize)


def in_whole_rows(array: Any) -> Any:
    """A contiguous array with its rows at whole 16 bytes, as aligned artifacts assume; any other array as it is."""
    columns = array.shape[-1] if array.dim() > 1 and array.is_contiguous() else 0
    pitch = pitch_of(columns, array.dtype)
    return array if pitch == columns else array.new_empty(*array.shape[:-1], pitch)[..., :columns].copy_(array)


def guarded_copy(array: Any, *, padded: bool = False) -> Guarded:
    """A guarded array with the values of another, its axes in the same order in memory."""
    order = sorted(range(array.dim()), key=lambda axis: -array.stride(axis))
    device, pattern = str(array.device), INPUT_PATTERN
    found = guarded(array.shape, array.dtype, device, padded=padded, order=order, pattern=pattern)
    found.array.copy_(array)
    return found


def bits(array: Any) -> Any:
    """The elements as integers of their size, which compare where NaN does not."""
    return array.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()])


class GuardedInputs:
    """The arguments of a launch by name, its arrays guarded, and their values at the start."""

    def __init__(self, inputs: Mapping[str, Any], *, padded: bool = False) -> None:
        self._before = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self._guarded = {name: guarded_copy(value, padded=padded) for name, value in self._before.items()}
        self.values = {**inputs, **{name: found.array for name, found in self._guarded.items()}}

    def changes(self) -> dict[str, Any]:
        """Whether each input or a band around it was written to, as tensors of one bool by name."""
        return {
            name: (bits(found.array) != bits(self._before[name])).any() | found.is_torn()
            for name, found in self._guarded.items()
        }
