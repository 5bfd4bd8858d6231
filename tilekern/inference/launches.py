"""Where the launches of a step go: to a stream of a GPU or of several, or to a list of problems."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tilekern.arrays import Array, ArrayPlan, empty, plan
from tilekern.errors import CannotRun
from tilekern.kernels import spec_named
from tilekern.runtime.driver import Stream
from tilekern.runtime.joint import JointMemory, JointStream, Window, each_of, parts_of
from tilekern.spec import ITEM_BYTES, ArrayParameter, KernelSpec

Sizes = Mapping[str, Any]
# Where the engine's kernels are, so that a process loads those that it launches and no others.
MODULES = {
    "advance": "advance",
    "append_to_cache": "append_to_cache",
    "attention_forward": "attention.forward",
    "decode_attention": "decode_attention",
    "decode_join": "decode_attention",
    "dequantize_rows": "quantize",
    "early_attention_forward": "early.attention",
    "early_fused_add_layer_norm_forward": "early.norms",
    "early_fused_add_rms_norm_forward": "early.norms",
    "early_linear": "early.linear",
    "embedding": "embedding",
    "experts_combine": "experts.combine",
    "experts_gate": "experts.gate",
    "fused_add_layer_norm_forward": "fused_add_layer_norm",
    "fused_add_rms_norm_forward": "fused_add_rms_norm",
    "greedy": "sample",
    "greedy_join": "greedy",
    "greedy_parts": "greedy",
    "grouped_linear": "grouped.product",
    "grouped_linear_tf32": "tf32",
    "lay_out": "lay_out",
    "layer_norm_forward": "layer_norm",
    "matmul": "matmul.product",
    "matmul_tf32": "tf32",
    "narrow_block": "narrow.block",
    "narrow_linear": "narrow.linear",
    "quantize_rows": "quantize",
    "rms_norm_forward": "rms_norm",
    "route_count": "experts.route",
    "route_place": "experts.route",
    "router_softmax_forward": "experts.router",
    "sample": "sample",
    "skinny_held_linear": "skinny.held",
    "skinny_linear": "skinny.linear",
    "skinny_linear_int8": "skinny.int8",
    "skinny_linear_int8_tf32": "tf32",
    "skinny_linear_tf32": "tf32",
    "swiglu_forward": "swiglu",
    "token_attention": "token_attention",
}


@functools.cache
def spec_of(kernel: str) -> KernelSpec:
    """Return the spec of a kernel; of one that is not in :data:`MODULES` only after all kernels are loaded."""
    if kernel not in MODULES:
        return spec_named(kernel)
    module = importlib.import_module(f"tilekern.kernels.{MODULES[kernel]}")
    return next(found for found in module.SPECS if found.name == kernel)


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

    def add_up(self, parts: Array) -> None:
        """Add that the parts of a sum that several GPUs have become the whole on each; one GPU has the whole."""

    def gather(self, part: Array, to: Array) -> None:
        """Add that each of several GPUs gets the parts of all, one behind the other."""


class Queued:
    """Queues launches on a stream; an array that nobody uses any more serves later ones, in a capture too.

    Args:
        stream: the stream.
        find: returns the plans, as :func:`tilekern.arrays.plan` does.
    """

    def __init__(self, stream: Stream, find: Callable[..., ArrayPlan] = plan) -> None:
        self.stream, self._find = stream, find
        self._absent: dict[tuple[int, str], Array] = {}
        # A step asks for few kinds, once in each layer.
        self._plans: dict[tuple[str, frozenset[tuple[str, Any]]], ArrayPlan | JointPlan] = {}

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
            plans = [self._find(spec_of(kernel), device=stream.device, **sizes) for stream in each_of(self.stream)]
            found = self._plans[kind] = JointPlan(plans) if len(plans) > 1 else plans[0]
        given = []
        for parameter in found.parameters:
            value = arguments.pop(parameter.name, None)
            if value is None:
                value = self._absence(parameter)
            given.append(value(found.blocks) if callable(value) else value)
        assert not arguments, f"{kernel} has no {', '.join(arguments)}"
        found.launch(self.stream, *given)
        return found.blocks

    def add_up(self, parts: Array) -> None:
        """Queue that contiguous parts of a sum become the whole on each GPU.

        Raises:
            CannotRun: NCCL failed.
        """
        if isinstance(self.stream, JointStream):
            self.stream.sum(parts.memory, *_place(parts), parts.dtype)

    def gather(self, part: Array, to: Array) -> None:
        """Queue that each GPU gets the contiguous parts of all, one behind the other.

        Raises:
            CannotRun: NCCL failed.
        """
        assert isinstance(self.stream, JointStream)
        first, count = _place(part)
        self.stream.gather(part.memory, first, to.memory, _place(to)[0], count, part.dtype)

    def _absence(self, parameter: Any) -> Any:
        """Return what stands for an array or a number that a kernel does not read."""
        if not isinstance(parameter, ArrayParameter):
            return 1.0 if parameter.dtype.startswith("float") else 1
        key = parameter.ndim, parameter.dtype
        if key not in self._absent:
            self._absent[key] = empty((1,) * parameter.ndim, parameter.dtype, self.stream)
        return self._absent[key]


class JointPlan:
    """The plans of a problem on several GPUs, which launch one after the other, each with its own part of the arrays.

    All have one config: what each GPU computes of the whole, such as norms and the choice of experts and tokens, must
    be the same on all, bit by bit.
    """

    def __init__(self, plans: Sequence[ArrayPlan]) -> None:
        """Join them.

        Raises:
            CannotRun: their configs differ.
        """
        first = plans[0]
        if any(other.config != first.config for other in plans):
            raise CannotRun(f"{first.kernel}: its record changed while the GPUs looked it up; try again")
        self._plans, self.parameters, self.blocks = plans, first.parameters, first.blocks

    def launch(self, stream: Stream, *arguments: Any) -> None:
        """Queue the kernel on each GPU; see :meth:`tilekern.arrays.ArrayPlan.launch`."""
        for number, (found, lane) in enumerate(zip(self._plans, each_of(stream), strict=True)):
            # A joint array has the first GPU's address.
            mine = [of_gpu(x, number) if isinstance(x, Array) else x for x in arguments] if number else arguments
            found.launch(lane, *mine)


def joined(arrays: Sequence[Array], stream: Stream) -> Array:
    """Return one array for contiguous ones of one shape, one of each GPU of a joint stream."""
    windows = []
    for array in arrays:
        first, count = _place(array)
        windows.append(Window(array.memory, first, count * ITEM_BYTES[array.dtype]))
    return Array(JointMemory(windows, stream), arrays[0].shape, arrays[0].dtype)


def of_gpu(array: Array, number: int) -> Array:
    """Return the part of a joint array that a GPU has, by its number in the joint stream."""
    return array.moved(parts_of(array.memory)[number])


def _place(array: Array) -> tuple[int, int]:
    """Return the byte of its memory where an array begins, and the number of its elements."""
    return array.address - array.memory.address, math.prod(array.shape)
