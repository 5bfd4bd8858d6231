"""The functions of ``ct`` that touch arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arrays import Array, axis_order, padding_of, read_tile, tiles_along, write_tile
from tilekern.interpreter.dtypes import INTEGERS, check_shape, filled, shape_of
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.points import (
    Selection,
    combine_points,
    read_points,
    stored_data,
    swap_points,
    write_points,
)
from tilekern.interpreter.tiles import Tile
from tilekern.interpreter.views import check_hints

_WEAK, _ACQ_REL = ct.MemoryOrder.WEAK, ct.MemoryOrder.ACQ_REL
_NONE, _DEVICE = ct.MemoryScope.NONE, ct.MemoryScope.DEVICE


def _check_order(operation: str, memory_order: Any, memory_scope: Any, allowed: tuple[str, ...]) -> None:
    weak = memory_order is _WEAK
    if memory_order.name not in allowed or weak != (memory_scope is _NONE):
        raise InterpreterError(f"{operation}: memory order {memory_order.name} with scope {memory_scope.name}")


def _check_array(operation: str, array: Any) -> None:
    if not isinstance(array, Array):
        raise InterpreterError(f"{operation}: expected an array, got {type(array).__name__}")


def num_tiles(array: Array, /, axis: int, shape: Any, order: Any = "C") -> int:
    """See ``ct.num_tiles``."""
    _check_array("num_tiles", array)
    return tiles_along(array, axis, shape_of(shape), axis_order(order, array.ndim))


def load(
    array: Array,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = _WEAK,
    memory_scope: Any = _NONE,
) -> Tile:
    """See ``ct.load``; a tile that reaches outside the array without padding is refused."""
    _check_array("load", array)
    check_hints(latency, allow_tma)
    plain = memory_order is _WEAK
    if not plain or memory_scope is not _NONE:
        _check_order("load", memory_order, memory_scope, ("WEAK", "RELAXED", "ACQUIRE"))
    axes = axis_order(order, array.ndim)
    tile = read_tile("load", array, index, shape, axes, padding_mode, check_bounds, plain=plain)
    if memory_order is ct.MemoryOrder.ACQUIRE:
        array.launch.acquired = True
    return tile


def store(
    array: Array,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = _WEAK,
    memory_scope: Any = _NONE,
) -> None:
    """See ``ct.store``; what lies beyond the edge is left out, unless that is everything."""
    _check_array("store", array)
    check_hints(latency, allow_tma)
    plain = memory_order is _WEAK
    if not plain or memory_scope is not _NONE:
        _check_order("store", memory_order, memory_scope, ("WEAK", "RELAXED", "RELEASE"))
    data = stored_data(tile, array.dtype, f"store to array {array.name!r}")
    write_tile("store", array, index, data, axis_order(order, array.ndim), check_bounds, plain=plain)


def gather(
    array: Array,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    """See ``ct.gather``."""
    _check_array("gather", array)
    check_hints(latency, None)
    selection = Selection("gather", array, indices, mask, check_bounds)
    padding = stored_data(padding_value, array.dtype, "gather: padding_value")
    return read_points("gather", array, selection, padding)


def scatter(
    array: Array,
    indices: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    """See ``ct.scatter``."""
    _check_array("scatter", array)
    check_hints(latency, None)
    selection = Selection("scatter", array, indices, mask, check_bounds)
    write_points("scatter", array, selection, stored_data(value, array.dtype, f"scatter to array {array.name!r}"))


@dataclass(frozen=True, slots=True)
class Slice:
    """See ``ct.Slice``."""

    start: Any
    length: int


def _advanced(operation: str, array: Array, indices: Any) -> tuple[Selection, tuple[int, ...], bool]:
    """The selection that slices and one tile of indices make, its shape, and whether all of it is inside."""
    _check_array(operation, array)
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
    shape = check_shape(tuple(line.numel() for line in lines))
    inside = [(line >= 0) & (line < size) for line, size in zip(lines, array.shape, strict=True)]
    if not all(bool(line.any()) for line in inside):
        array.refuse(operation, f"{indices}", "the tile lies entirely outside the array")
    columns = tuple(
        Tile(line.reshape([-1 if i == axis else 1 for i in range(array.ndim)]), ct.int64)
        for axis, line in enumerate(lines)
    )
    return Selection(operation, array, columns, None, True), shape, all(bool(line.all()) for line in inside)


def load_advanced_indexing(
    array: Array,
    indices: Any,
    /,
    *,
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    """See ``ct.load_advanced_indexing``."""
    check_hints(latency, allow_tma)
    selection, _, whole = _advanced("load_advanced_indexing", array, indices)
    if not whole and padding_mode is ct.PaddingMode.UNDETERMINED:
        array.refuse("load_advanced_indexing", f"{indices}", "it reaches outside and padding_mode is UNDETERMINED")
    padding = filled(0 if whole else padding_of(array.dtype, padding_mode), array.dtype)
    return read_points("load_advanced_indexing", array, selection, padding)


def store_advanced_indexing(
    array: Array, indices: Any, tile: Any, /, *, latency: int | None = None, allow_tma: bool | None = None
) -> None:
    """See ``ct.store_advanced_indexing``."""
    check_hints(latency, allow_tma)
    selection, shape, _ = _advanced("store_advanced_indexing", array, indices)
    data = stored_data(tile, array.dtype, f"store to array {array.name!r}")
    if tuple(data.shape) != shape:
        raise InterpreterError(f"store_advanced_indexing: tile shape {tuple(data.shape)}, indices give {shape}")
    write_points("store_advanced_indexing", array, selection, data)


_ATOMIC_ORDERS = ("RELAXED", "ACQUIRE", "RELEASE", "ACQ_REL")


def atomic_cas(
    array: Array,
    indices: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    check_bounds: bool = True,
    memory_order: Any = _ACQ_REL,
    memory_scope: Any = _DEVICE,
) -> Tile:
    """See ``ct.atomic_cas``."""
    _check_array("atomic_cas", array)
    _check_order("atomic_cas", memory_order, memory_scope, _ATOMIC_ORDERS)
    selection = Selection("atomic_cas", array, indices, None, check_bounds)
    return swap_points(array, selection, expected, desired, memory_order)


def _atomic(name: str) -> Callable[..., Tile]:
    def atomic(
        array: Array,
        indices: Any,
        update: Any,
        /,
        *,
        check_bounds: bool = True,
        memory_order: Any = _ACQ_REL,
        memory_scope: Any = _DEVICE,
    ) -> Tile:
        _check_array(f"atomic_{name}", array)
        _check_order(f"atomic_{name}", memory_order, memory_scope, _ATOMIC_ORDERS)
        selection = Selection(f"atomic_{name}", array, indices, None, check_bounds)
        return combine_points(name, array, selection, update, memory_order)

    return atomic


FUNCTIONS: dict[str, Any] = {
    "Slice": Slice,
    "num_tiles": num_tiles,
    "load": load,
    "store": store,
    "gather": gather,
    "scatter": scatter,
    "load_advanced_indexing": load_advanced_indexing,
    "store_advanced_indexing": store_advanced_indexing,
    "atomic_cas": atomic_cas,
    **{f"atomic_{name}": _atomic(name) for name in ("add", "max", "min", "and", "or", "xor", "xchg")},
}
