"""Tiled views of arrays: tiles of one shape at regular steps."""

from __future__ import annotations

import operator
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arrays import Array, full_rank, read_tile, tiles_along, window, write_tile
from tilekern.interpreter.dtypes import shape_of
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.points import Selection, combine_points, stored_data
from tilekern.interpreter.tiles import Tile, as_tile


class KernelArray(Array):
    """An array argument of a kernel, which can be viewed in tiles."""

    __slots__ = ()

    def tiled_view(
        self, tile_shape: Any, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED, traversal_steps: Any = None
    ) -> TiledView:
        """See ``ct.Array.tiled_view``."""
        return TiledView(self, tile_shape, padding_mode, traversal_steps)


class TiledView:
    """See ``ct.TiledView``."""

    __slots__ = ("_array", "_order", "_padding", "tile_shape", "traversal_steps")

    def __init__(self, array: Array, tile_shape: Any, padding_mode: Any, traversal_steps: Any) -> None:
        self._array, self._padding = array, padding_mode
        self._order = tuple(range(array.ndim))
        self.tile_shape = shape_of(tile_shape)
        extents = full_rank(self.tile_shape, array.ndim)
        steps = (traversal_steps,) if isinstance(traversal_steps, int) else traversal_steps
        self.traversal_steps: tuple[int, ...] = extents if steps is None else tuple(steps)
        if len(self.traversal_steps) != array.ndim or min(self.traversal_steps, default=1) < 1:
            raise InterpreterError(f"tiled_view: steps {traversal_steps} do not fit rank {array.ndim}")

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self._array.dtype

    def num_tiles(self, axis: int) -> int:
        """How many tiles the view has along an axis."""
        return tiles_along(self._array, axis, self.traversal_steps, self._order)

    def load(
        self, index: Any, *, check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None
    ) -> Tile:
        """See ``ct.TiledView.load``."""
        check_hints(latency, allow_tma)
        steps, order = self.traversal_steps, self._order
        return read_tile(
            "TiledView.load", self._array, index, self.tile_shape, order, self._padding, check_bounds, steps
        )

    def store(
        self,
        index: Any,
        tile: Any,
        *,
        check_bounds: bool = True,
        latency: int | None = None,
        allow_tma: bool | None = None,
    ) -> None:
        """See ``ct.TiledView.store``."""
        check_hints(latency, allow_tma)
        data = self._broadcast(stored_data(tile, self.dtype, f"store to array {self._array.name!r}"))
        write_tile("TiledView.store", self._array, index, data, self._order, check_bounds, self.traversal_steps)

    def atomic_store_add(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_add``."""
        self._combine("add", index, update)

    def atomic_store_max(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_max``."""
        self._combine("max", index, update)

    def atomic_store_min(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_min``."""
        self._combine("min", index, update)

    def atomic_store_and(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_and``."""
        self._combine("and", index, update)

    def atomic_store_or(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_or``."""
        self._combine("or", index, update)

    def atomic_store_xor(self, index: Any, update: Tile, /) -> None:
        """See ``ct.TiledView.atomic_store_xor``."""
        self._combine("xor", index, update)

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        try:
            return data.broadcast_to(self.tile_shape)
        except RuntimeError:
            raise InterpreterError(f"shape {tuple(data.shape)} does not broadcast to {self.tile_shape}") from None

    def _combine(self, name: str, index: Any, update: Any) -> None:
        array, extents = self._array, full_rank(self.tile_shape, self._array.ndim)
        operation = f"TiledView.atomic_store_{name}"
        window(operation, array, index, self.tile_shape, self._order, self.traversal_steps)
        entries = index if isinstance(index, tuple) else (index,)
        indices = []
        for axis, extent in enumerate(extents):
            start = operator.index(entries[axis]) * self.traversal_steps[axis]
            line = torch.arange(start, start + extent, dtype=torch.int64, device="cpu")
            indices.append(Tile(line.reshape([-1 if i == axis else 1 for i in range(array.ndim)]), ct.int64))
        tile = as_tile(update)
        value = Tile(self._broadcast(tile.data).reshape(extents), tile.dtype)
        selection = Selection(operation, array, tuple(indices), None, True)
        combine_points(name, array, selection, value, ct.MemoryOrder.RELAXED)


def check_hints(latency: int | None, allow_tma: bool | None) -> None:
    """Refuse the hints that the compiler refuses; the others change no result."""
    if latency is not None and not 1 <= latency <= 10:
        raise InterpreterError(f"latency must be between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise InterpreterError(f"allow_tma must be a bool, got {allow_tma!r}")
