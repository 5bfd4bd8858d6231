"""The functions of ``ct`` that access arrays, and two atomic ones: an exchange and a sum."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arrays import Array, Points, check_hints, padding_of, read_tile, write_tile
from tilekern.interpreter.dtypes import (
    INTEGERS,
    cast,
    check_shape,
    check_stored,
    filled,
    from_memory,
    is_scalar,
    to_memory,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile


def _check(operation: str, array: Any, latency: int | None = None, allow_tma: bool | None = None) -> None:
    if not isinstance(array, Array):
        raise InterpreterError(f"{operation}: expected an array, got {type(array).__name__}")
    check_hints(latency, allow_tma)


def _stored_data(value: Any, dtype: Any, what: str) -> torch.Tensor:
    """Return a tile's or scalar's data in an array's dtype, if the compiler converts it implicitly."""
    if isinstance(value, Tile):
        check_stored(value.dtype, dtype, what)
        return cast(value.data, value.dtype, dtype)
    if not is_scalar(value):
        raise InterpreterError(f"{what}: expected a tile or a scalar, got {type(value).__name__}")
    check_stored(value, dtype, what)
    return filled(value, dtype)


def load(
    array: Array, /, index: Any, shape: Any, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None,
) -> Tile:  # fmt: skip
    """See ``ct.load``; a tile that reaches outside the array without padding is refused."""
    _check("load", array, latency, allow_tma)
    return read_tile("load", array, index, shape, padding_mode, check_bounds)


def store(
    array: Array, /, index: Any, tile: Any, *, check_bounds: bool = True, latency: int | None = None,
    allow_tma: bool | None = None,
) -> None:  # fmt: skip
    """See ``ct.store``; elements beyond the edge are skipped; a tile entirely outside is an error."""
    _check("store", array, latency, allow_tma)
    write_tile(array, index, _stored_data(tile, array.dtype, f"store to array {array.name!r}"), check_bounds)


class _Selection:
    """The elements that broadcast indices select: which of them count, and their places."""

    def __init__(self, operation: str, array: Array, indices: Any, mask: Any, check_bounds: bool) -> None:
        entries = indices if isinstance(indices, tuple) else (indices,)
        if len(entries) != array.ndim:
            raise InterpreterError(f"{operation}: {len(entries)} indices for array {array.name!r} of rank {array.ndim}")
        self._array, self._operation = array, operation
        columns = torch.broadcast_tensors(*(_index_data(operation, entry) for entry in entries))
        self.shape: tuple[int, ...] = tuple(columns[0].shape)
        flat = [column.reshape(-1) for column in columns]
        bounds = [(column >= 0) & (column < size) for column, size in zip(flat, array.shape, strict=True)]
        inside = torch.stack(bounds).all(0)
        valid = inside if mask is None else inside & _mask_data(operation, mask, self.shape)
        if not check_bounds:
            outside = ~inside if mask is None else _mask_data(operation, mask, self.shape) & ~inside
            if bool(outside.any()):
                first = int(outside.nonzero()[0, 0])
                element = tuple(int(column[first]) for column in flat)
                array.refuse(operation, f"element index {element}", "it is outside and check_bounds is False")
        self._valid = None if bool(valid.all()) else valid
        if self._valid is not None:
            flat = [column[valid] for column in flat]
        offsets = torch.full_like(flat[0], array.offset)
        for column, stride in zip(flat, array.strides, strict=True):
            offsets = offsets + column * stride
        self._points = Points(offsets, flat)

    def read(self, padding: torch.Tensor) -> Tile:
        """Load the elements that count; use ``padding`` for the others."""
        array = self._array
        array.launch.loaded(self._operation, array, self._points)
        loaded = from_memory(self._points.of(array.memory), array.dtype)
        if self._valid is None:
            return Tile(loaded.reshape(self.shape), array.dtype)
        result = padding.broadcast_to(self.shape).reshape(-1).clone()
        result[self._valid] = loaded
        return Tile(result.reshape(self.shape), array.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Store the values, broadcast to the selection's shape, for the elements that count."""
        self._array.launch.stored(self._operation, self._array, self._points)
        self._put(values)

    def exchange(self, values: torch.Tensor, memory_order: Any) -> Tile:
        """Store like :meth:`write` and return the former elements, in one access that only races with plain stores."""
        former = self.read(filled(0, self._array.dtype))
        self._put(values)
        self._order(memory_order)
        return former

    def add(self, values: torch.Tensor, memory_order: Any) -> Tile:
        """Add to the elements and return the former ones, likewise; no element is selected twice."""
        former = self.read(filled(0, self._array.dtype))
        self._put(former.data + values)
        self._order(memory_order)
        return former

    def _order(self, memory_order: Any) -> None:
        """Record how an access of the elements orders the memory of blocks."""
        acquires = memory_order in (ct.MemoryOrder.ACQUIRE, ct.MemoryOrder.ACQ_REL)
        releases = memory_order in (ct.MemoryOrder.RELEASE, ct.MemoryOrder.ACQ_REL)
        offsets = self._points.offsets.tolist()
        self._array.launch.ordered(self._array, offsets, acquires=acquires, releases=releases)

    def _put(self, values: torch.Tensor) -> None:
        try:
            flat = values.broadcast_to(self.shape).reshape(-1)
        except RuntimeError:
            raise InterpreterError(f"shape {tuple(values.shape)} does not broadcast to {self.shape}") from None
        chosen = flat if self._valid is None else flat[self._valid]
        self._array.memory[self._points.offsets] = to_memory(chosen, self._array.dtype)


def _index_data(operation: str, entry: Any) -> torch.Tensor:
    if isinstance(entry, Tile):
        if entry.dtype not in INTEGERS:
            raise InterpreterError(f"{operation}: an index has dtype {entry.dtype}")
        return entry.data.to(torch.int64)
    if isinstance(entry, int):
        return torch.full((), entry, dtype=torch.int64, device="cpu")
    raise InterpreterError(f"{operation}: an index must be an integer or a tile, got {type(entry).__name__}")


def _mask_data(operation: str, mask: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(mask, bool):
        return torch.tensor(mask, dtype=torch.bool, device="cpu")
    if not isinstance(mask, Tile) or mask.dtype != ct.bool_:
        raise InterpreterError(f"{operation}: the mask must be a bool tile")
    return mask.data.broadcast_to(shape).reshape(-1)


def gather(
    array: Array, indices: Any, /, *, mask: Any = None, padding_value: Any = 0, check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:  # fmt: skip
    """See ``ct.gather``."""
    _check("gather", array, latency)
    selection = _Selection("gather", array, indices, mask, check_bounds)
    return selection.read(_stored_data(padding_value, array.dtype, "gather: padding_value"))


def scatter(
    array: Array, indices: Any, value: Any, /, *, mask: Any = None, check_bounds: bool = True,
    latency: int | None = None,
) -> None:  # fmt: skip
    """See ``ct.scatter``."""
    _check("scatter", array, latency)
    selection = _Selection("scatter", array, indices, mask, check_bounds)
    selection.write(_stored_data(value, array.dtype, f"scatter to array {array.name!r}"))


def atomic_xchg(array: Array, indices: Any, update: Any, /, *, check_bounds: bool = True) -> Tile:
    """See ``ct.atomic_xchg``; its memory order and scope are the default ones."""
    _check("atomic_xchg", array)
    selection = _Selection("atomic_xchg", array, indices, None, check_bounds)
    data = _stored_data(update, array.dtype, f"atomic_xchg of array {array.name!r}")
    return selection.exchange(data, ct.MemoryOrder.ACQ_REL)


def atomic_add(
    array: Array, indices: Any, update: Any, /, *, check_bounds: bool = True,
    memory_order: Any = ct.MemoryOrder.ACQ_REL,
) -> Tile:  # fmt: skip
    """See ``ct.atomic_add``; its scope is the default one."""
    _check("atomic_add", array)
    selection = _Selection("atomic_add", array, indices, None, check_bounds)
    return selection.add(_stored_data(update, array.dtype, f"atomic_add to array {array.name!r}"), memory_order)


@dataclass(frozen=True, slots=True)
class Slice:
    """See ``ct.Slice``."""

    start: Any
    length: int


def load_advanced_indexing(
    array: Array, indices: Any, /, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED, latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:  # fmt: skip
    """See ``ct.load_advanced_indexing``."""
    operation = "load_advanced_indexing"
    _check(operation, array, latency, allow_tma)
    tiles = [entry for entry in indices if isinstance(entry, Tile)]
    slices = [entry for entry in indices if isinstance(entry, Slice)]
    fits = len(indices) == array.ndim > 1 and len(tiles) == 1 and len(tiles) + len(slices) == len(indices)
    if not fits or tiles[0].ndim != 1 or tiles[0].dtype not in INTEGERS:
        raise InterpreterError(f"{operation}: takes one 1-D integer tile and ct.Slice for the other axes")
    lines = [
        entry.data.to(torch.int64)
        if isinstance(entry, Tile)
        else torch.arange(entry.length, dtype=torch.int64, device="cpu") + operator.index(entry.start)
        for entry in indices
    ]
    check_shape(tuple(line.numel() for line in lines))
    inside = [(line >= 0) & (line < size) for line, size in zip(lines, array.shape, strict=True)]
    if not all(bool(line.any()) for line in inside):
        array.refuse(operation, f"{indices}", "the tile lies entirely outside the array")
    whole = all(bool(line.all()) for line in inside)
    if not whole and padding_mode is ct.PaddingMode.UNDETERMINED:
        array.refuse(operation, f"{indices}", "it reaches outside and padding_mode is UNDETERMINED")
    columns = tuple(
        Tile(line.reshape([-1 if i == axis else 1 for i in range(array.ndim)]), ct.int64)
        for axis, line in enumerate(lines)
    )
    padding = filled(0 if whole else padding_of(array.dtype, padding_mode), array.dtype)
    return _Selection(operation, array, columns, None, True).read(padding)


FUNCTIONS: dict[str, Any] = {
    "Slice": Slice,
    "load": load,
    "store": store,
    "gather": gather,
    "scatter": scatter,
    "atomic_xchg": atomic_xchg,
    "atomic_add": atomic_add,
    "load_advanced_indexing": load_advanced_indexing,
}
