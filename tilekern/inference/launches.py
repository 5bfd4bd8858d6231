"""Where the launches of a step go: to a stream, or to a list of problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tilekern.arrays import Array, ArrayPlan, empty, plan
from tilekern.runtime.driver import Stream
from tilekern.spec import ArrayParameter

Sizes = Mapping[str, Any]


class Launches(Protocol):
    """Takes the launches of a step in their order."""

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


class Queued:
    """Queues launches on a stream; an array that nobody uses any more serves later ones, in a capture too."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._absent: dict[tuple[int, str], Array] = {}
        # A step asks for few kinds, once in each layer.
        self._plans: dict[tuple[str, frozenset[tuple[str, Any]]], ArrayPlan] = {}

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array of the stream's device."""
        return empty(shape, dtype, self.stream)

    def launch(self, kernel: str, sizes: Sizes, **arguments: Any) -> int:
        """Queue a launch; see :class:`Launches`.

        Raises:
            CacheMiss: no record serves the problem, and no default was compiled.
        """
        kind = kernel, frozenset(sizes.items())
        found = self._plans.get(kind)
        if found is None:
            found = self._plans[kind] = plan(kernel, device=self.stream.device, **sizes)
        given = []
        for parameter in found.parameters:
            value = arguments.pop(parameter.name, None)
            if value is None:
                value = self._absence(parameter)
            given.append(value(found.blocks) if callable(value) else value)
        assert not arguments, f"{kernel} has no {', '.join(arguments)}"
        found.launch(self.stream, *given)
        return found.blocks

    def _absence(self, parameter: Any) -> Any:
        """Return what stands for an array or a number that a kernel does not read."""
        if not isinstance(parameter, ArrayParameter):
            return 1.0 if parameter.dtype.startswith("float") else 1
        key = parameter.ndim, parameter.dtype
        if key not in self._absent:
            self._absent[key] = empty((1,) * parameter.ndim, parameter.dtype, self.stream)
        return self._absent[key]
