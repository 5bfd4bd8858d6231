"""Arrays: views of the launch's tensors, and the bounds of every access to them."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NoReturn

import cuda.tile as ct
import torch

from tilekern.interpreter.dtypes import dtype_of, from_memory, is_float, normal_axis, shape_of, to_memory
from tilekern.interpreter.errors import InterpreterError, OutOfBounds
from tilekern.interpreter.tiles import Tile

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

    __slots__ = ("offset", "shape", "start", "strides")

    def __init__(self, shape: list[int], strides: tuple[int, ...], offset: int, start: list[int]) -> None:
        self.shape, self.strides, self.offset, self.start = shape, strides, offset, start

    def of(self, memory: torch.Tensor, scale: int = 1) -> torch.Tensor:
        """Return the elements in a memory with ``scale`` items for each of them, as a last axis."""
        if scale == 1:
            return memory.as_strided(self.shape, self.strides, self.offset)
        strides = [stride * scale for stride in self.strides]
        return memory.as_strided([*self.shape, scale], [*strides, 1], self.offset * scale)

    def fill(self, memory: torch.Tensor, value: int, scale: int) -> None:
        """Write one value to all elements."""
        self.of(memory, scale).fill_(value)

    def element(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index into the array of a position in the box."""
        return tuple(map(operator.add, self.start, position))


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
        """Return a copy of the elements, like :meth:`Box.of`."""
        return memory[self._items(scale)]

    def fill(self, memory: torch.Tensor, value: int, scale: int) -> None:
        """Write one value to all elements."""
        memory[self._items(scale)] = value

    def element(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index into the array of one of the points."""
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
        """See ``ct.Array.slice``."""
        axis, first, last = normal_axis(axis, self.ndim), operator.index(start), operator.index(stop)
        size = self.shape[axis]
        if not (0 <= first < size and first <= last <= size):
            self.refuse("slice", f"axis {axis} from {first} to {last}", "it is outside the array")
        part = object.__new__(Array)
        part.launch, part.dtype, part.memory, part.key = self.launch, self.dtype, self.memory, self.key
        part.name = f"{self.name}.slice({axis}, {first}, {last})"
        part.shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        part.strides = self.strides
        part.offset = self.offset + first * self.strides[axis]
        return part

    def tiled_view(
        self, tile_shape: Any, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED, traversal_steps: Any = None
    ) -> TiledView:
        """See ``ct.Array.tiled_view``."""
        return TiledView(self, tile_shape, padding_mode, traversal_steps)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InterpreterError(f"the interpreter does not know Array.{name}")

    def __getitem__(self, index: Any) -> Any:
        raise InterpreterError("arrays have no subscript: use load or gather")

    def refuse(self, operation: str, what: str, reason: str) -> NoReturn:
        """Raise an error that names the kernel, the block, the operation, the array and its shape."""
        raise OutOfBounds(
            f"kernel {self.launch.kernel}, block {self.launch.where()}: {operation} of array {self.name!r} "
            f"with shape {self.shape} at {what}: {reason}"
        )


class TiledView:
    """See ``ct.TiledView``; tiles can be loaded."""

    def __init__(self, array: Array, tile_shape: Any, padding_mode: Any, traversal_steps: Any) -> None:
        self._array, self._shape, self._padding = array, shape_of(tile_shape), padding_mode
        self._steps = (traversal_steps,) if isinstance(traversal_steps, int) else traversal_steps
        if self._steps is not None and (len(self._steps) != array.ndim or min(self._steps) < 1):
            raise InterpreterError(f"tiled_view: steps {traversal_steps} do not fit rank {array.ndim}")

    def load(
        self, index: Any, *, check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None
    ) -> Tile:
        """See ``ct.TiledView.load``."""
        check_hints(latency, allow_tma)
        return read_tile("TiledView.load", self._array, index, self._shape, self._padding, check_bounds, self._steps)


def check_hints(latency: int | None, allow_tma: bool | None) -> None:
    """Refuse the hints that the compiler refuses; other hints do not change results."""
    if latency is not None and not 1 <= latency <= 10:
        raise InterpreterError(f"latency must be between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise InterpreterError(f"allow_tma must be a bool, got {allow_tma!r}")


def _window(
    operation: str, array: Array, index: Any, shape: tuple[int, ...], steps: tuple[int, ...] | None
) -> tuple[Box, bool]:
    """Return the part of a tile that lies in the array, never empty, and whether it is the whole tile.

    The shape () means one element.
    """
    extents = shape or (1,) * array.ndim
    entries = index if isinstance(index, tuple) else (index,)
    if len(extents) != array.ndim:
        raise InterpreterError(f"a tile of shape {shape} does not have the array's rank {array.ndim}")
    if len(entries) != array.ndim:
        raise InterpreterError(f"{operation}: index {index!r} does not have the rank {array.ndim} of {array.name!r}")
    sizes, starts, offset, whole = [], [], array.offset, True
    for axis, size in enumerate(array.shape):
        position, extent = operator.index(entries[axis]), extents[axis]
        start = position * (extent if steps is None else steps[axis])
        if position < 0 or start >= size:
            array.refuse(operation, _where(index, shape), "the tile lies entirely outside the array")
        if start + extent > size:
            extent, whole = size - start, False
        sizes.append(extent)
        starts.append(start)
        offset += start * array.strides[axis]
    return Box(sizes, array.strides, offset, starts), whole


def _where(index: Any, shape: tuple[int, ...]) -> str:
    entries = tuple(operator.index(i) for i in (index if isinstance(index, tuple) else (index,)))
    return f"tile index {entries} (tile shape {shape})"


def _refuse_partial(operation: str, array: Array, index: Any, box: Box, shape: tuple[int, ...], why: str) -> NoReturn:
    reason = f"the tile reaches beyond the array, only {tuple(box.shape)} of it is inside, and {why}"
    array.refuse(operation, _where(index, shape), reason)


def read_tile(
    operation: str, array: Array, index: Any, shape: Any, padding_mode: Any, check_bounds: bool,
    steps: tuple[int, ...] | None = None,
) -> Tile:  # fmt: skip
    """Load a tile; refuse elements outside the array that nothing pads."""
    shape = shape_of(shape)
    box, whole = _window(operation, array, index, shape, steps)
    array.launch.loaded(operation, array, box)
    inside = box.of(array.memory)
    if whole:
        data = inside.clone(memory_format=torch.contiguous_format).reshape(shape)
    else:
        if not check_bounds:
            _refuse_partial(operation, array, index, box, shape, "check_bounds is False")
        if padding_mode is ct.PaddingMode.UNDETERMINED:
            _refuse_partial(operation, array, index, box, shape, "padding_mode is UNDETERMINED")
        data = inside.new_full(shape, padding_of(array.dtype, padding_mode))
        data[tuple(slice(size) for size in box.shape)] = inside
    return Tile(from_memory(data, array.dtype), array.dtype)


def padding_of(dtype: Any, mode: Any) -> float:
    """Return the value with which a padding mode fills a dtype."""
    if not is_float(dtype) and mode is not ct.PaddingMode.ZERO:
        raise InterpreterError(f"padding mode {mode.value} is for floats, the array has {dtype}")
    return _PADDING[mode] if is_float(dtype) else 0


def write_tile(array: Array, index: Any, data: torch.Tensor, check_bounds: bool) -> None:
    """Store a tile of the array's dtype; skip elements beyond the edge if bounds are checked."""
    shape = tuple(data.shape)
    box, whole = _window("store", array, index, shape, None)
    if not whole and not check_bounds:
        _refuse_partial("store", array, index, box, shape, "check_bounds is False")
    array.launch.stored("store", array, box)
    data = to_memory(data, array.dtype)
    if not shape:
        data = data.reshape((1,) * array.ndim)
    elif not whole:
        data = data[tuple(slice(size) for size in box.shape)]
    box.of(array.memory).copy_(data)
