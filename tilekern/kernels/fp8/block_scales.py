"""Scales of blocks of e4m3 numbers, by torch's operations: for 1 x 128 numbers of a row, or 128 x 128 of a matrix.

The format is that of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): activations and gradients have a scale for each 128
numbers along the sums, weights one for each 128 x 128, so an outlier costs its own block resolution and no other.
DeepSeek's scales are float32 numbers. Ours are powers of two (:mod:`tilekern.kernels.fp8.scales`): dividing by them
rounds nothing, and a weight that is turned has the numbers it had.

Scales of rows are [blocks of columns, rows], so those that a tile needs at one step of the sums are next to each other.
Blocks at the edges of a matrix have fewer numbers. Rows that are as long as there are tokens, or outputs, are stored
with zeros up to a multiple of 16, which TMA writes at once and reads.
"""

from __future__ import annotations

from typing import Any

from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.spec import Problem, cdiv

SIDE, UNIT = 128, 16


def whole(size: int) -> int:
    """Return the least multiple of 16 that is not below ``size``."""
    return UNIT * cdiv(size, UNIT)


def block_sizes(problem: Problem) -> dict[str, int]:
    """Return the blocks down and across a matrix [rows, columns], and both sizes as they are stored."""
    rows, columns = problem["rows"], problem["columns"]
    return {
        "down": cdiv(rows, SIDE), "across": cdiv(columns, SIDE), "whole_rows": whole(rows),
        "whole_columns": whole(columns),
    }  # fmt: skip


def padded(x: Any, rows: int, columns: int) -> Any:
    """Return a matrix of any dtype with zeros after its rows and columns."""
    out = x.new_zeros((rows, columns))
    out[: x.shape[0], : x.shape[1]] = x
    return out


def block_rows(x: Any) -> tuple[Any, Any]:
    """Compute e4m3 numbers, a scale for 1 x 128 of them.

    Args:
        x: [rows, columns], of a float dtype.

    Returns:
        The numbers [rows, columns], and the scales [columns / 128, rows up to a multiple of 16].
    """
    rows, columns = x.shape
    blocks = padded(x, whole(rows), SIDE * cdiv(columns, SIDE))
    numbers, scale = scaled_rows(blocks.view(-1, SIDE))
    return numbers.view(blocks.shape)[:rows, :columns].contiguous(), scale.view(len(blocks), -1).t().contiguous()


def block_squares(x: Any) -> tuple[Any, Any]:
    """Compute e4m3 numbers [rows, columns] and scales [rows / 128, columns / 128], a scale for 128 x 128 numbers.

    Args:
        x: [rows, columns], of a float dtype.
    """
    rows, columns = x.shape
    down, across = cdiv(rows, SIDE), cdiv(columns, SIDE)
    blocks = padded(x, SIDE * down, SIDE * across).view(down, SIDE, across, SIDE).transpose(1, 2)
    numbers, scale = scaled_rows(blocks.reshape(-1, SIDE * SIDE))
    matrix = numbers.view(blocks.shape).transpose(1, 2).reshape(SIDE * down, SIDE * across)
    return matrix[:rows, :columns].contiguous(), scale.view(down, across)


def wide_rows(numbers: Any, scale: Any, dtype: Any) -> Any:
    """Return the matrix of the numbers and scales of :func:`block_rows`, in a dtype."""
    rows, columns = numbers.shape
    return numbers.to(dtype) * scale.to(dtype).t().repeat_interleave(SIDE, 1)[:rows, :columns]


def wide_squares(numbers: Any, scale: Any, dtype: Any) -> Any:
    """Return the matrix of the numbers and scales of :func:`block_squares`, in a dtype."""
    rows, columns = numbers.shape
    return numbers.to(dtype) * scale.to(dtype).repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)[:rows, :columns]
