"""Tiles: immutable torch tensors with a ct dtype; their operators are in :mod:`tilekern.interpreter.arithmetic`."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.dtypes import (
    INTEGERS,
    cast,
    check_shape,
    filled,
    is_float,
    is_scalar,
    normal_axis,
    promoted,
)
from tilekern.interpreter.errors import InterpreterError


class Tile:
    """A block's value: a tensor with a ct dtype, never changed in place."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: torch.Tensor, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    def item(self) -> Tile:
        """See ``ct.Tile.item``."""
        return self.reshape(())

    def astype(self, dtype: Any, *, rounding_mode: Any = None) -> Tile:
        """See ``ct.astype``; every rounding mode rounds to nearest."""
        if rounding_mode is not None and not (is_float(self.dtype) and is_float(dtype)):
            raise InterpreterError("astype: rounding_mode is only valid from float to float")
        return self if dtype == self.dtype else Tile(cast(self.data, self.dtype, dtype), dtype)

    def reshape(self, shape: Any) -> Tile:
        """See ``ct.reshape``."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if math.prod(sizes) != self.data.numel() and -1 not in sizes:
            raise InterpreterError(f"cannot reshape {self.shape} to {sizes}")
        data = self.data.reshape(sizes)
        check_shape(tuple(data.shape))
        return Tile(data, self.dtype)

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        """See ``ct.transpose``."""
        if axis0 is None and axis1 is None and self.ndim == 2:
            return Tile(self.data.T, self.dtype)
        if axis0 is None or axis1 is None or self.ndim < 2:
            raise InterpreterError(f"transpose of rank {self.ndim} needs two axes, got {axis0} and {axis1}")
        return Tile(self.data.transpose(normal_axis(axis0, self.ndim), normal_axis(axis1, self.ndim)), self.dtype)

    def __getitem__(self, index: Any) -> Tile:
        entries = index if isinstance(index, tuple) else (index,)
        if any(entry is not None and entry is not Ellipsis and entry != slice(None) for entry in entries):
            raise InterpreterError(f"a tile's subscript may only add axes (None, :, ...), got {index!r}")
        return Tile(self.data[index], self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InterpreterError(f"the interpreter does not know Tile.{name}")

    def _scalar(self) -> Any:
        if self.ndim:
            raise InterpreterError(f"a tile of shape {self.shape} is used where a scalar is needed")
        return self.data.item()

    def __index__(self) -> int:
        if self.dtype not in INTEGERS:
            raise InterpreterError(f"a tile of {self.dtype} is used as an integer")
        return int(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __float__(self) -> float:
        return float(self._scalar())

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __repr__(self) -> str:
        return f"<tile[{self.dtype}, {self.shape}] {self.data.tolist()}>"


def as_tile(value: Any, dtype: Any = None) -> Tile:
    """Make a tile from a tile or a Python scalar, in the given dtype or the compiler's default for it."""
    if isinstance(value, Tile):
        return value if dtype is None else value.astype(dtype)
    if not is_scalar(value):
        raise InterpreterError(f"expected a tile or a scalar, got {type(value).__name__}")
    if dtype is None:
        dtype = promoted(ct.bool_, value)
    return Tile(filled(value, dtype), dtype)
