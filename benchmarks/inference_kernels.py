"""Measure what each kernel takes of the engine's graphs, by the profiler: kernels with their sizes, and the gaps."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.inference import BENCHMARK, Job
from benchmarks.inference_parts import Models, drawn, ids_of
from benchmarks.jobs import Found
from benchmarks.profiling import events_of
from benchmarks.providers import one_line
from benchmarks.results import Row
from tilekern.inference.launches import Queued

REPLAYS = 10
# Separates a graph from its kernel in the name of a case, and a kernel from its sizes.
KERNEL, OF_SIZES = ", kernel ", ": "
# Of all kernels of a graph.
WHOLE = "all kernels"


@dataclass(frozen=True)
class Launch:
    """A kernel's launch in a graph: its spec's name, and its sizes as text."""

    kernel: str
    sizes: str


def kernels(job: Job) -> Iterator[Found]:
    """Trace a forward of each size, and a step of each batch at the first context; yield rows and notes."""
    models = Models(job)
    for way in job.ways:
        for case, graph in _graphs(models, way):
            try:
                launches, replay = graph()
                replay()
                models.stream.synchronize()
                yield from rows_of(case, way, launches, events_of(_repeated(replay)))
            except Exception as error:  # noqa: BLE001 (another graph may be possible)
                yield f"{case}: the kernels of {way} left out: {one_line(error)}"


def _repeated(replay: Callable[[], Any]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(REPLAYS):
            replay()

    return repeat


def _graphs(models: Models, way: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each graph, and what captures it: its launches, and its replay."""
    job = models.job
    for batch, tokens in job.sizes:
        if tokens <= models.of.positions:
            yield f"{job.label} forward, {batch} x {tokens}", _forward(models, way, batch, tokens)
    context = job.contexts[0]
    for batch in job.batches:
        if context <= models.of.positions:
            yield f"{job.label} decode, batch {batch}, context {context}", _step(models, way, batch, context)


def _forward(models: Models, way: str, batch: int, tokens: int) -> Callable[[], Any]:
    def capture() -> Any:
        with captured_launches() as launches:
            whole = models.engine(way).captured_forward(batch, tokens)
        whole.ids.write(ids_of(drawn(models.of.vocabulary, batch, tokens)))
        return launches, lambda: whole.graph.launch(models.stream)

    return capture


def _step(models: Models, way: str, batch: int, context: int) -> Callable[[], Any]:
    def capture() -> Any:
        engine = models.engine(way, context)
        prompts = drawn(models.of.vocabulary, batch, context - REPLAYS - 4)
        with captured_launches() as launches:
            for _ in engine.generate(prompts, 2, ignores_ends=True):
                pass
        running = engine._generation
        assert running is not None, "the engine keeps its last cache and its graph"
        has_ended = [False] * batch
        return launches, lambda: running.stepped(has_ended)

    return capture


@contextlib.contextmanager
def captured_launches() -> Iterator[list[Launch]]:
    """Yield a list; after the block it has the launches that were captured in a graph, in their order."""
    found: list[Launch] = []
    real = Queued.launch

    def launch(self: Queued, kernel: str, sizes: Mapping[str, Any], **arguments: Any) -> int:
        if self.stream.captured is not None:
            found.append(Launch(kernel, text_of(sizes)))
        return real(self, kernel, sizes, **arguments)

    with mock.patch.object(Queued, "launch", launch):
        yield found


def text_of(sizes: Mapping[str, Any]) -> str:
    """Return sizes as text: numbers with their names, and flags that are on by their names; without dtypes."""
    parts = [f"{name} {value}" for name, value in sizes.items() if type(value) is int]
    return ", ".join(parts + [name for name, value in sizes.items() if value is True])


def rows_of(case: str, who: str, launches: Sequence[Launch], traced: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the microseconds of each kernel and size, how often it runs, and those of the whole graph with its gaps.

    Args:
        case: the graph's name in the results.
        who: the engine's.
        launches: of one replay.
        traced: the events of :data:`REPLAYS` replays.

    Raises:
        RuntimeError: the trace has another number of kernels.
    """
    events = sorted((one for one in traced if one.get("cat") == "kernel"), key=lambda event: event["ts"])
    if len(events) != REPLAYS * len(launches) or not events:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {REPLAYS} replays of {len(launches)} launches")
    replays = [events[first : first + len(launches)] for first in range(0, len(events), len(launches))]
    # The first one begins before the clocks and caches are as later.
    by_launch = list(zip(*replays[1:], strict=True))
    by_kind: dict[Launch, list[float]] = {}
    for launch, found in zip(launches, by_launch, strict=True):
        by_kind.setdefault(launch, []).append(statistics.median(event["dur"] for event in found))
    for kind, times_us in by_kind.items():
        name = f"{case}{KERNEL}{kind.kernel}{OF_SIZES}{kind.sizes}"
        for metric, value, unit in (
            ("launches", len(times_us), "1"), ("launch_us", statistics.fmean(times_us), "us"),
            ("step_us", sum(times_us), "us"),
        ):  # fmt: skip
            yield Row(BENCHMARK, name, who, metric, round(value, 4), unit)
    spans = [one[-1]["ts"] + one[-1]["dur"] - one[0]["ts"] for one in replays[1:]]
    total, span = sum(map(sum, by_kind.values())), statistics.median(spans)
    name = f"{case}{KERNEL}{WHOLE}"
    yield Row(BENCHMARK, name, who, "launches", len(launches), "1")
    yield Row(BENCHMARK, name, who, "step_us", round(total, 4), "us")
    yield Row(BENCHMARK, name, who, "gaps_us", round(span - total, 4), "us")
