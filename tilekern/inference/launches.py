"""Where the launches of a step go: to a stream, or to a list of problems."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from tilekern.arrays import Array, ArrayPlan, empty, plan
from tilekern.kernels import spec_named
from tilekern.runtime.driver import Stream
from tilekern.spec import ArrayParameter, KernelSpec

Sizes = Mapping[str, Any]
# Where the engine's kernels are, so that a process loads those that it launches and no others.
MODULES = {
    "advance": "advance",
    "append_to_cache": "append_to_cache",
    "attention_forward": "attention.forward",
    "decode_attention": "decode_attention",
    "decode_join": "decode_attention",
    "dequantize_rows": "quantize",
    "embedding": "embedding",
    "experts_combine": "experts.combine",
    "experts_gate": "experts.gate",
    "fused_add_layer_norm_forward": "fused_add_layer_norm",
    "fused_add_rms_norm_forward": "fused_add_rms_norm",
    "greedy": "sample",
    "grouped_linear": "grouped.product",
    "lay_out": "lay_out",
    "layer_norm_forward": "layer_norm",
    "matmul": "matmul.product",
    "quantize_rows": "quantize",
    "rms_norm_forward": "rms_norm",
    "route_count": "experts.route",
    "route_place": "experts.route",
    "router_softmax_forward": "experts.router",
    "sample": "sample",
    "skinny_linear": "skinny.linear",
    "skinny_linear_int8": "skinny.int8",
    "swiglu_forward": "swiglu",
}


@functools.cache
def spec_of(kernel: str) -> KernelSpec:
    """Return the spec of a kernel; of one that is not in :data:`MODULES` only after all kernels are loaded."""
    if kernel not in MODULES:
        return spec_named(kernel)
    module = importlib.import_module(f"tilekern.kernels.{MODULES[kernel]}")
    (found,) = (value for value in vars(module).values() if isinstance(value, KernelSpec) and value.name == kernel)
    return found


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
            found = self._plans[kind] = plan(spec_of(kernel), device=self.stream.device, **sizes)
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
