"""Launches in their order: queued at once, or recorded with the arrays that they use and queued as often as wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tilekern.arrays import Array, ArrayPlan, empty, plan
from tilekern.runtime.driver import Stream
from tilekern.spec import ArrayParameter

Sizes = Mapping[str, Any]


class Launches(Protocol):
    """Where a step's launches go: to a GPU now or later, or to a list of problems."""

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array that the launches use."""

    def launch(self, kernel: str, sizes: Sizes, **arguments: Any) -> int:
        """Add a launch; return its number of blocks.

        Args:
            kernel: the name of a spec.
            sizes: its dimensions; flags that are left out are off.
            arguments: arrays and numbers by the kernel's names; those that no flag needs may be left out. One that is
                a function is called with the number of blocks.
        """


class Direct:
    """Queues launches on a stream at once; an array that nobody uses any more serves later launches."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._absent: dict[tuple[int, str], Array] = {}

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array of the stream's device."""
        return empty(shape, dtype, self.stream)

    def launch(self, kernel: str, sizes: Sizes, **arguments: Any) -> int:
        """Add a launch; see :class:`Launches`.

        Raises:
            CacheMiss: no record serves the problem, and no default was compiled.
        """
        found = plan(kernel, device=self.stream.device, **sizes)
        given = []
        for parameter in found.parameters:
            value = arguments.pop(parameter.name, None)
            if value is None:
                value = self._absence(parameter)
            given.append(value(found.blocks) if callable(value) else value)
        assert not arguments, f"{kernel} has no {', '.join(arguments)}"
        self._add(found, tuple(given))
        return found.blocks

    def _add(self, found: ArrayPlan, given: tuple[Any, ...]) -> None:
        found.launch(self.stream, *given)

    def _absence(self, parameter: Any) -> Any:
        """Return what stands for an array or a number that a kernel does not read."""
        if not isinstance(parameter, ArrayParameter):
            return 1.0 if parameter.dtype.startswith("float") else 1
        key = parameter.ndim, parameter.dtype
        if key not in self._absent:
            self._absent[key] = empty((1,) * parameter.ndim, parameter.dtype, self.stream)
        return self._absent[key]


class Tape(Direct):
    """Keeps launches and their arrays, and queues them as often as wanted."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._launches: list[tuple[ArrayPlan, tuple[Any, ...]]] = []

    def _add(self, found: ArrayPlan, given: tuple[Any, ...]) -> None:
        self._launches.append((found, given))

    def run(self) -> None:
        """Queue all launches."""
        for found, given in self._launches:
            found.launch(self.stream, *given)
