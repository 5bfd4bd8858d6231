"""Tiles: immutable torch tensors with a ct dtype; their operators are in :mod:`tilekern.interpreter.arithmetic`."""

from __future__ import annotations

import math
import operator
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.dtypes import (
    FLOATS,
    INTEGERS,
    RESTRICTED_FLOATS,
    cast,
    check_shape,
    filled,
    normal_axis,
    promoted_with_scalar,
    shape_of,
)
from tilekern.interpreter.errors import InterpreterError


class Tile:
    """One block's value: a tensor with a ct dtype. Operators as in cuTile; nothing changes a tile in place."""

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
        """The single element as a scalar tile."""
        return self.reshape(())

    def astype(self, dtype: Any, *, rounding_mode: Any = None) -> Tile:
        """See ``ct.astype``; rounding other than to nearest is approximated by it."""
        both_floats = is_float(self.dtype) and is_float(dtype)
        if rounding_mode is not None and not both_floats:
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

    def permute(self, axes: tuple[int, ...]) -> Tile:
        """See ``ct.permute``."""
        order = tuple(normal_axis(axis, self.ndim) for axis in axes)
        if sorted(order) != list(range(self.ndim)):
            raise InterpreterError(f"permute: {tuple(axes)} is not a permutation of {self.ndim} axes")
        return Tile(self.data.permute(order), self.dtype)

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        """See ``ct.transpose``."""
        if axis0 is None and axis1 is None and self.ndim == 2:
            return Tile(self.data.T, self.dtype)
        if axis0 is None or axis1 is None or self.ndim < 2:
            raise InterpreterError(f"transpose of rank {self.ndim} needs two axes, got {axis0} and {axis1}")
        return Tile(self.data.transpose(normal_axis(axis0, self.ndim), normal_axis(axis1, self.ndim)), self.dtype)

    def extract(self, index: Any, shape: Any) -> Tile:
        """See ``ct.extract``."""
        result = shape_of(shape)
        part = result or (1,) * self.ndim
        data = self.data[self._part(index, part, "extract")]
        return Tile(data.reshape(result), self.dtype)

    def insert(self, index: Any, value: Tile) -> Tile:
        """See ``ct.insert``."""
        if value.dtype != self.dtype:
            raise InterpreterError(f"insert: cannot insert a tile of {value.dtype} into one of {self.dtype}")
        part = value.shape or (1,) * self.ndim
        data = self.data.clone()
        data[self._part(index, part, "insert")] = value.data.reshape(part)
        return Tile(data, self.dtype)

    def _part(self, index: Any, part: tuple[int, ...], operation: str) -> tuple[slice, ...]:
        steps = tuple(operator.index(i) for i in (index if isinstance(index, tuple) else (index,)))
        if not len(steps) == len(part) == self.ndim or any(n % p for n, p in zip(self.shape, part, strict=True)):
            raise InterpreterError(f"{operation}: parts of shape {part} at {steps} do not divide shape {self.shape}")
        if any(not 0 <= i < n // p for i, n, p in zip(steps, self.shape, part, strict=True)):
            raise InterpreterError(f"{operation}: index {steps} of parts {part} is outside a tile of {self.shape}")
        return tuple(slice(i * p, (i + 1) * p) for i, p in zip(steps, part, strict=True))

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

    def __pos__(self) -> Tile:
        return self.astype(ct.int32) if self.dtype == ct.bool_ else self

    def __repr__(self) -> str:
        return f"<tile[{self.dtype}, {self.shape}]>"

    def __str__(self) -> str:
        return format(self, "")

    def __format__(self, spec: str) -> str:
        default = ".6f" if is_float(self.dtype) else "d"
        return _nested(self.data.tolist(), spec or default)


def _nested(values: Any, spec: str) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_nested(value, spec) for value in values) + "]"
    return format(int(values) if isinstance(values, bool) else values, spec)


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a float of any kind."""
    return dtype in FLOATS or dtype in RESTRICTED_FLOATS


def is_scalar(value: Any) -> bool:
    """Whether a value is a Python scalar."""
    return isinstance(value, (bool, int, float))


def as_tile(value: Any, dtype: Any = None) -> Tile:
    """A tile from a tile or a Python scalar, which becomes the given dtype or the compiler's default for it."""
    if isinstance(value, Tile):
        return value if dtype is None else value.astype(dtype)
    if not is_scalar(value):
        raise InterpreterError(f"expected a tile or a scalar, got {type(value).__name__}")
    if dtype is None:
        dtype = promoted_with_scalar(ct.bool_, value)
    return Tile(filled(value, dtype), dtype)
