"""A token of the engine to be timed: the engine's own graph, of a model with few layers and weights of random numbers.

A tuner has no checkpoint, and need not have one: what a token takes depends on the sizes alone. Its layers repeat, so a
few of them show how launches follow one another.
"""

from __future__ import annotations

import dataclasses
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilekern.arrays import Array, ArrayPlan, plan
from tilekern.inference import weights as layout
from tilekern.inference.architectures import Architecture
from tilekern.inference.caches import STATIC
from tilekern.inference.engine import Engine
from tilekern.inference.launches import Queued
from tilekern.inference.steps import rounded
from tilekern.runtime.driver import Event, Graph, Stream
from tilekern.spec import ITEM_BYTES

# So many of its layers make some fifty launches.
_MOST_LAYERS = 6
# Random numbers that are drawn; an array has them again and again.
_DRAWN = 1 << 20
# How far weights are from 0, as when training begins; scales of int8 ones are smaller by the largest int8.
_LARGEST, _LARGEST_INT8 = 0.04, 128
# A sample takes this long, so that what lies between two graphs does not count; a token of a small model takes 0.05 ms.
_SAMPLE_MS, _MOST_REPEATS = 1.0, 32


@dataclass(frozen=True)
class TokenStep:
    """The step of an engine that computes a token of each sequence, the likeliest.

    Attributes:
        architecture: the model, which has one GPU.
        dtype: of activations, caches and the weights that are not int8.
        int8: whether the weights of products are int8.
        batch: how many sequences there are.
        context: the room of a sequence in the cache, which is full.
        cache: the kind of the cache.
    """

    architecture: Architecture
    dtype: str
    batch: int
    context: int
    cache: str = STATIC
    int8: bool = False

    @property
    def layers(self) -> int:
        """How many layers are rehearsed."""
        return min(self.architecture.layers, _MOST_LAYERS)

    def __str__(self) -> str:
        of, sequences = self.architecture, "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        weights = f"{self.dtype} with int8 weights" if self.int8 else self.dtype
        model = f"{of.kind} of {of.layers} layers of {of.width}"
        return f"a token of {sequences} of {self.context} by {model}, {self.cache} cache, {weights}"


class Rehearsal:
    """A step on a GPU, captured and timed as often as one likes.

    Args:
        step: the step.
        stream: where it runs.

    Raises:
        DriverError: the GPU has too little memory.
    """

    def __init__(self, step: TokenStep, stream: Stream) -> None:
        architecture, queue = dataclasses.replace(step.architecture, layers=step.layers), Queued(stream)
        arrays = layout.unwritten(architecture, step.dtype, queue, int8=step.int8)
        drawn = _Drawn()
        for key, to in arrays.items():
            drawn.fill(to, is_scale=key.endswith(".scale"))
        weights = layout.assembled(architecture, arrays)
        engine = Engine(architecture, weights, step.dtype, stream, step.context, cache=step.cache)
        lengths = [step.context] * step.batch
        self._generation, self._stream, self._step, self._repeats = engine.generation(lengths), stream, step, 0
        # All that a step reads is finite: NaN has no likeliest token, and no row of the embedding is its.
        self._generation.cache.hold(lengths)
        self._generation.choice.ids.write(bytes(ITEM_BYTES["int64"] * step.batch))
        for number in range(step.layers):
            found = self._generation.cache.keys.of_layer(number)
            drawn.fill(found["keys"])
            drawn.fill(found["values"])

    def capture(self, find: Callable[..., ArrayPlan] = plan) -> Graph:
        """Return the graph of the step with the plans that ``find`` returns, as :func:`tilekern.arrays.plan` does.

        Raises:
            CacheMiss: no plan serves one of the kernels.
            tilekern.errors.TilekernError: a kernel cannot be launched.
        """
        return self._generation.capture(greedy=True, find=find)

    def samples(self, graphs: Sequence[Graph], count: int) -> list[list[float]]:
        """Return ``count`` times of each graph in us, as taken in turn, so that all have the same clocks.

        A sample is the mean of some replays that follow one another.

        Raises:
            DriverError: a launch failed.
        """
        if not self._repeats:
            self._repeats = 1
            token_ms = min(first.ms_since(begin) for begin, first in [self._sample(graphs[0]) for _ in range(3)])
            self._repeats = max(1, min(_MOST_REPEATS, self._step.context - 1, round(_SAMPLE_MS / max(token_ms, 1e-3))))
        for graph in graphs:
            self._sample(graph)  # the first one loads code
        events = [[self._sample(graph) for graph in graphs] for _ in range(count)]
        return [
            [1e3 * end.ms_since(begin) / self._repeats for begin, end in (turn[number] for turn in events)]
            for number in range(len(graphs))
        ]

    def _sample(self, graph: Graph) -> tuple[Event, Event]:
        """Queue the replays of a sample; return events before and after them.

        One replay goes before them, during which the host queues the others. The last one sees the whole context.
        """
        self._generation.place([max(0, self._step.context - 1 - self._repeats)] * self._step.batch)
        graph.launch(self._stream)
        begin = self._stream.record()
        for _ in range(self._repeats):
            graph.launch(self._stream)
        return begin, self._stream.record()


class _Drawn:
    """Random numbers in each dtype, drawn once."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self._numbers = array("f", (draw.uniform(-_LARGEST, _LARGEST) for _ in range(_DRAWN)))
        self._scales = array("f", (number / _LARGEST_INT8 for number in self._numbers)).tobytes()
        self._by_dtype = {layout.INT8: draw.randbytes(_DRAWN)}

    def fill(self, to: Array, *, is_scale: bool = False) -> None:
        """Write them into a contiguous array, again and again."""
        if to.dtype not in self._by_dtype:
            self._by_dtype[to.dtype] = rounded(self._numbers, to.dtype)
        data = memoryview(self._scales if is_scale else self._by_dtype[to.dtype])
        first, size = to.address - to.memory.address, math.prod(to.shape) * ITEM_BYTES[to.dtype]
        for at in range(0, size, len(data)):
            part = data[: size - at]
            to.memory.write(part, first + at, len(part))
