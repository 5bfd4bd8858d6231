"""Arrays: views of the launch's tensors, and the bounds that every access to them is held to."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NoReturn

import cuda.tile as ct
import torch

from tilekern.interpreter.dtypes import dtype_of, from_memory, normal_axis, shape_of, to_memory
from tilekern.interpreter.errors import InterpreterError, OutOfBounds
from tilekern.interpreter.tiles import Tile, is_float

if TYPE_CHECKING:
    from tilekern.interpreter.races import Launch

_PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}


class Box:
    """A rectangle of an array's elements, as a strided view of its storage."""

    __slots__ = ("offset", "order", "shape", "start", "strides")

    def __init__(
        self, shape: list[int], strides: list[int], offset: int, start: list[int], order: tuple[int, ...]
    ) -> None:
        self.shape, self.strides, self.offset, self.start, self.order = shape, strides, offset, start, order

    def of(self, memory: torch.Tensor, scale: int = 1) -> torch.Tensor:
        """The elements in a memory that has ``scale`` items for each of them, then as a last axis."""
        if scale == 1:
            return memory.as_strided(self.shape, self.strides, self.offset)
        strides = [stride * scale for stride in self.strides]
        return memory.as_strided([*self.shape, scale], [*strides, 1], self.offset * scale)

    def fill(self, memory: torch.Tensor, value: int, scale: int) -> None:
        """Write one value to all the elements."""
        self.of(memory, scale).fill_(value)

    def element(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """The index into the array of a position in the box, whose axes may be permuted."""
        index = [0] * len(self.order)
        for axis, dimension in enumerate(self.order):
            index[dimension] = self.start[axis] + position[axis]
        return tuple(index)


class Points:
    """Single elements of an array, as offsets into its storage, with their indices."""

    __slots__ = ("indices", "offsets")

    def __init__(self, offsets: torch.Tensor, indices: list[torch.Tensor]) -> None:
        self.offsets, self.indices = offsets, indices

    def _items(self, scale: int) -> torch.Tensor:
        if scale == 1:
            return self.offsets
        return self.offsets[:, None] * scale + torch.arange(scale, dtype=torch.int64, device="cpu")

    def of(self, memory: torch.Tensor, scale: int = 1) -> torch.Tensor:
        """The elements (a copy), as :meth:`Box.of`."""
        return memory[self._items(scale)]

    def fill(self, memory: torch.Tensor, value: int, scale: int) -> None:
        """Write one value to all the elements."""
        memory[self._items(scale)] = value

    def element(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """The index into the array of one of the points."""
        return tuple(int(index[position[0]]) for index in self.indices)


class Array:
    """A kernel's array argument, or a slice of one: typed, strided memory with bounds."""

    __slots__ = ("dtype", "key", "launch", "memory", "name", "offset", "shape", "strides")

    def __init__(self, launch: Launch, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InterpreterError(f"argument {name!r} is on {tensor.device}; the interpreter takes CPU tensors")
        storage = tensor.untyped_storage()
        self.launch, self.name, self.dtype = launch, name, dtype_of(tensor)
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.strides: tuple[int, ...] = tuple(tensor.stride())
        self.offset: int = operator.index(tensor.storage_offset())
        self.memory = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        self.key: int = storage.data_ptr()
        launch.register(self)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        """The same memory with one axis restricted to [start, stop)."""
        axis, first, last = normal_axis(axis, self.ndim), operator.index(start), operator.index(stop)
        size = self.shape[axis]
        if not (0 <= first < size and first <= last <= size):
            self.refuse("slice", f"axis {axis} from {first} to {last}", "it is outside the array")
        part = object.__new__(type(self))
        part.launch, part.dtype, part.memory, part.key = self.launch, self.dtype, self.memory, self.key
        part.name = f"{self.name}.slice({axis}, {first}, {last})"
        part.shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        part.strides = self.strides
        part.offset = self.offset + first * self.strides[axis]
        return part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InterpreterError(f"the interpreter does not know Array.{name}")

    def __getitem__(self, index: Any) -> Any:
        raise InterpreterError("arrays have no subscript: use load or gather")

    def refuse(self, operation: str, what: str, reason: str) -> NoReturn:
        """Raise what names the kernel, block, operation, array and its shape, index and reason."""
        raise OutOfBounds(
            f"kernel {self.launch.kernel}, block {self.launch.where()}: {operation} of array {self.name!r} "
            f"with shape {self.shape} at {what}: {reason}"
        )


def axis_order(order: Any, rank: int) -> tuple[int, ...]:
    """The permutation that an ``order`` argument stands for."""
    if order == "C":
        return tuple(range(rank))
    if order == "F":
        return tuple(reversed(range(rank)))
    result = tuple(normal_axis(axis, rank) for axis in order)
    if sorted(result) != list(range(rank)):
        raise InterpreterError(f"order {order!r} is not a permutation of {rank} axes")
    return result


def full_rank(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A tile's shape as steps along all of an array's axes: () stands for one element."""
    if shape and len(shape) != rank:
        raise InterpreterError(f"a tile of shape {shape} does not have the array's rank {rank}")
    return shape or (1,) * rank


def tiles_along(array: Array, axis: int, shape: tuple[int, ...], order: tuple[int, ...]) -> int:
    """How many tiles of a shape (or steps of a view) cover an array along an axis of its tile space."""
    position = normal_axis(axis, array.ndim)
    return -(-array.shape[order[position]] // full_rank(shape, array.ndim)[position])


def window(
    operation: str,
    array: Array,
    index: Any,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    steps: tuple[int, ...] | None,
) -> tuple[Box, bool]:
    """The part of a tile that lies in the array, and whether that is the whole tile; never nothing."""
    extents = full_rank(shape, array.ndim)
    entries = index if isinstance(index, tuple) else (index,)
    if len(entries) != array.ndim:
        raise InterpreterError(f"{operation}: index {index!r} does not have the rank {array.ndim} of {array.name!r}")
    sizes, strides, starts, offset, whole = [], [], [], array.offset, True
    for axis, dimension in enumerate(order):
        position, size, extent = operator.index(entries[axis]), array.shape[dimension], extents[axis]
        start = position * (extent if steps is None else steps[axis])
        if position < 0 or start >= size:
            where = f"tile index {tuple(operator.index(i) for i in entries)} (tile shape {shape})"
            array.refuse(operation, where, "the tile lies entirely outside the array")
        if start + extent > size:
            extent, whole = size - start, False
        stride = array.strides[dimension]
        sizes.append(extent)
        strides.append(stride)
        starts.append(start)
        offset += start * stride
    return Box(sizes, strides, offset, starts, order), whole


def _refuse_partial(operation: str, array: Array, index: Any, box: Box, shape: tuple[int, ...], why: str) -> NoReturn:
    entries = tuple(operator.index(i) for i in (index if isinstance(index, tuple) else (index,)))
    inside = tuple(box.shape)
    array.refuse(
        operation,
        f"tile index {entries} (tile shape {shape})",
        f"the tile reaches beyond the array, only {inside} of it is inside, {why}",
    )


def read_tile(
    operation: str,
    array: Array,
    index: Any,
    shape: Any,
    order: tuple[int, ...],
    padding_mode: Any,
    check_bounds: bool,
    steps: tuple[int, ...] | None = None,
    plain: bool = True,
) -> Tile:
    """Load a tile, refusing what is undefined: elements outside the array that nothing pads."""
    shape = shape_of(shape)
    box, whole = window(operation, array, index, shape, order, steps)
    if plain:
        array.launch.loaded(operation, array, box)
    inside = box.of(array.memory)
    if whole:
        data = inside.clone(memory_format=torch.contiguous_format)
    else:
        if not check_bounds:
            _refuse_partial(operation, array, index, box, shape, "and check_bounds is False")
        if padding_mode is ct.PaddingMode.UNDETERMINED:
            _refuse_partial(operation, array, index, box, shape, "and padding_mode is UNDETERMINED")
        data = inside.new_full(full_rank(shape, array.ndim), padding_of(array.dtype, padding_mode))
        data[tuple(slice(size) for size in box.shape)] = inside
    return Tile(from_memory(data.reshape(shape) if not shape else data, array.dtype), array.dtype)


def padding_of(dtype: Any, mode: Any) -> float:
    """The value with which a padding mode fills a dtype."""
    value = _PADDING[mode]
    if not is_float(dtype) and mode is not ct.PaddingMode.ZERO:
        raise InterpreterError(f"padding mode {mode.value} is for floats, the array has {dtype}")
    return value if is_float(dtype) else 0


def write_tile(
    operation: str,
    array: Array,
    index: Any,
    data: torch.Tensor,
    order: tuple[int, ...],
    check_bounds: bool,
    steps: tuple[int, ...] | None = None,
    plain: bool = True,
) -> None:
    """Store a tile that has the array's dtype; what lies beyond the edge is left out if bounds are checked."""
    shape = tuple(data.shape)
    box, whole = window(operation, array, index, shape, order, steps)
    if not whole and not check_bounds:
        _refuse_partial(operation, array, index, box, shape, "and check_bounds is False")
    if plain:
        array.launch.stored(operation, array, box)
    data = to_memory(data, array.dtype)
    if not shape:
        data = data.reshape((1,) * array.ndim)
    elif not whole:
        data = data[tuple(slice(size) for size in box.shape)]
    box.of(array.memory).copy_(data)
