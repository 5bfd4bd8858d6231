"""Element-wise memory: gather, scatter and the atomics, as sequential blocks see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arrays import Array, Points
from tilekern.interpreter.dtypes import (
    CARRIERS,
    INTEGERS,
    cast,
    check_stored,
    check_stored_scalar,
    filled,
    from_memory,
    to_memory,
    wrapped,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile, is_scalar

_WORDS = (ct.int32, ct.int64, ct.uint32, ct.uint64)
_ADDABLE = (*_WORDS, ct.float32, ct.float64, ct.float16, ct.bfloat16)
_SWAPPABLE = (*_WORDS, ct.float32, ct.float64)
_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_ATOMICS: dict[str, tuple[_Combine, tuple[Any, ...]]] = {
    "add": (torch.add, _ADDABLE),
    "max": (torch.maximum, _WORDS),
    "min": (torch.minimum, _WORDS),
    "and": (torch.bitwise_and, _WORDS),
    "or": (torch.bitwise_or, _WORDS),
    "xor": (torch.bitwise_xor, _WORDS),
    "xchg": (lambda _, update: update, _SWAPPABLE),
}


class Selection:
    """The elements that broadcast indices select: which of them count, and where those lie."""

    __slots__ = ("points", "shape", "valid")

    def __init__(self, operation: str, array: Array, indices: Any, mask: Any, check_bounds: bool) -> None:
        entries = indices if isinstance(indices, tuple) else (indices,)
        if len(entries) != array.ndim:
            raise InterpreterError(f"{operation}: {len(entries)} indices for array {array.name!r} of rank {array.ndim}")
        columns = torch.broadcast_tensors(*(_index_data(operation, entry) for entry in entries))
        self.shape: tuple[int, ...] = tuple(columns[0].shape) if columns else ()
        flat = [column.reshape(-1) for column in columns]
        inside = torch.ones(1, dtype=torch.bool, device="cpu") if not flat else None
        for column, size in zip(flat, array.shape, strict=True):
            within = (column >= 0) & (column < size)
            inside = within if inside is None else inside & within
        assert inside is not None
        wanted = None if mask is None else _mask_data(operation, mask, self.shape).reshape(-1)
        if not check_bounds:
            outside = ~inside if wanted is None else wanted & ~inside
            if bool(outside.any()):
                first = int(outside.nonzero()[0, 0])
                element = tuple(int(column[first]) for column in flat)
                array.refuse(operation, f"element index {element}", "it is outside and check_bounds is False")
        valid = inside if wanted is None else inside & wanted
        offsets = (
            torch.full_like(flat[0], array.offset)
            if flat
            else torch.tensor([array.offset], dtype=torch.int64, device="cpu")
        )
        for column, stride in zip(flat, array.strides, strict=True):
            offsets = offsets + column * stride
        self.valid = None if bool(valid.all()) else valid
        if self.valid is not None:
            offsets, flat = offsets[valid], [column[valid] for column in flat]
        self.points = Points(offsets, flat)

    def spread(self, found: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Values of the elements that count, in the selection's shape, with other values elsewhere."""
        if self.valid is None:
            return found.reshape(self.shape)
        result = otherwise.broadcast_to(self.shape).reshape(-1).clone()
        result[self.valid] = found
        return result.reshape(self.shape)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Of values broadcastable to the selection's shape, those of the elements that count."""
        try:
            flat = values.broadcast_to(self.shape).reshape(-1)
        except RuntimeError:
            raise InterpreterError(f"shape {tuple(values.shape)} does not broadcast to {self.shape}") from None
        return flat if self.valid is None else flat[self.valid]


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
        return torch.full(shape, mask, dtype=torch.bool, device="cpu")
    if not isinstance(mask, Tile) or mask.dtype != ct.bool_:
        raise InterpreterError(f"{operation}: the mask must be a bool tile")
    return mask.data.broadcast_to(shape)


def stored_data(value: Any, dtype: Any, what: str) -> torch.Tensor:
    """A tile's or scalar's data in an array's dtype, if the compiler converts it without being asked."""
    if isinstance(value, Tile):
        check_stored(value.dtype, dtype, what)
        return cast(value.data, value.dtype, dtype)
    if not is_scalar(value):
        raise InterpreterError(f"{what}: expected a tile or a scalar, got {type(value).__name__}")
    check_stored_scalar(value, dtype, what)
    return filled(value, dtype)


def read_points(operation: str, array: Array, selection: Selection, padding: torch.Tensor) -> Tile:
    """Load the selected elements; the others are padded."""
    array.launch.loaded(operation, array, selection.points)
    found = from_memory(selection.points.of(array.memory), array.dtype)
    return Tile(selection.spread(found, padding), array.dtype)


def write_points(operation: str, array: Array, selection: Selection, values: torch.Tensor) -> None:
    """Store to the selected elements."""
    data = to_memory(selection.gathered(values), array.dtype)
    array.launch.stored(operation, array, selection.points)
    array.memory[selection.points.offsets] = data


def synchronise(array: Array, operation: str, access: Any, memory_order: Any) -> None:
    """Note an atomic access: it races with a plain store, and after acquiring the block counts as ordered."""
    array.launch.loaded(operation, array, access)
    if memory_order in (ct.MemoryOrder.ACQUIRE, ct.MemoryOrder.ACQ_REL):
        array.launch.acquired = True


def combine_points(name: str, array: Array, selection: Selection, update: Any, memory_order: Any) -> Tile:
    """An atomic read-modify-write of the selected elements; gives what they were before."""
    operation = f"atomic_{name}"
    combine, dtypes = _ATOMICS[name]
    if array.dtype not in dtypes:
        raise InterpreterError(f"{operation} does not support arrays of {array.dtype}")
    if name in ("and", "or", "xor") and not (isinstance(update, Tile) and update.dtype == array.dtype):
        raise InterpreterError(f"{operation}: the update must be a tile of {array.dtype}")
    updates = selection.gathered(stored_data(update, array.dtype, operation))

    def apply(old: torch.Tensor, chosen: Any) -> torch.Tensor:
        return wrapped(combine(old, updates[chosen]), array.dtype)

    return _modify(operation, array, selection, apply, filled(0, array.dtype), memory_order)


def swap_points(array: Array, selection: Selection, expected: Any, desired: Any, memory_order: Any) -> Tile:
    """An atomic compare-and-swap of the selected elements; gives what they were before."""
    operation = "atomic_cas"
    if array.dtype not in _SWAPPABLE:
        raise InterpreterError(f"{operation} does not support arrays of {array.dtype}")
    expected_data = stored_data(expected, array.dtype, operation)
    wanted = selection.gathered(expected_data)
    replacing = selection.gathered(stored_data(desired, array.dtype, operation))

    def apply(old: torch.Tensor, chosen: Any) -> torch.Tensor:
        return torch.where(old == wanted[chosen], replacing[chosen], old)

    return _modify(operation, array, selection, apply, expected_data, memory_order)


def _modify(
    operation: str,
    array: Array,
    selection: Selection,
    apply: Callable[[torch.Tensor, Any], torch.Tensor],
    otherwise: torch.Tensor,
    memory_order: Any,
) -> Tile:
    offsets, memory = selection.points.offsets, array.memory
    synchronise(array, operation, selection.points, memory_order)
    if offsets.unique().numel() == offsets.numel():
        old = from_memory(memory[offsets], array.dtype)
        memory[offsets] = to_memory(apply(old, slice(None)), array.dtype)
    else:
        # Elements that are hit twice see each other's updates, one after the other.
        old = torch.empty(offsets.shape, dtype=CARRIERS[array.dtype], device="cpu")
        for i, offset in enumerate(offsets.tolist()):
            old[i] = from_memory(memory[offset].clone(), array.dtype)
            memory[offset] = to_memory(apply(old[i], i), array.dtype)
    return Tile(selection.spread(old, otherwise), array.dtype)
