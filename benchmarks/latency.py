"""Time calls one after the other, without waits between them: the distribution of their times, not their median alone.

Some calls are queued at once with an event between any two. What a graph takes is then the GPU's time, since the host
is ahead; what waits for the host at each kernel takes the host's. All entrants take turns in bursts, in another order
each time.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.results import Row
from tilekern.runtime.driver import Stream
from tilekern.tuning.measure.timing import Timing

BURST = 8
WARM_UP = 2  # bursts
PERCENTILES = (95, 99)


@dataclass
class Entrant:
    """A call, what marks a moment on its device, and the milliseconds of each call so far.

    Attributes:
        run: queues the call.
        mark: returns an event behind what is queued.
        ms_between: waits for the later of two marks, and returns the milliseconds between them.
    """

    run: Callable[[], Any]
    mark: Callable[[], Any]
    ms_between: Callable[[Any, Any], float]
    samples_ms: list[float] = field(default_factory=list)

    @classmethod
    def on_stream(cls, run: Callable[[], Any], stream: Stream) -> Entrant:
        """Return an entrant that queues on a stream of tilekern's."""
        return cls(run, stream.record, lambda first, last: last.ms_since(first))

    @classmethod
    def of_torch(cls, run: Callable[[], Any], device: str) -> Entrant:
        """Return an entrant that queues on torch's current stream; on the CPU it is done when it returns."""
        import torch

        if device == "cpu":
            return cls(run, time.perf_counter, lambda first, last: 1000 * (last - first))

        def mark() -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def ms_between(first: Any, last: Any) -> float:
            last.synchronize()
            return float(first.elapsed_time(last))

        return cls(run, mark, ms_between)

    def burst(self) -> list[float]:
        """Call some times; return the milliseconds of each call but the first, which hides the host's start."""
        self.run()
        marks = [self.mark()]
        for _ in range(BURST):
            self.run()
            marks.append(self.mark())
        return [self.ms_between(first, last) for first, last in itertools.pairwise(marks)]


def calls_of(samples: int) -> int:
    """Return how often :func:`race` calls each entrant at most."""
    return (WARM_UP + -(-samples // BURST)) * (1 + BURST)


def race(entrants: Mapping[str, Entrant], samples: int, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of calls of each entrant.

    Args:
        entrants: by name.
        samples: of each, rounded up to whole bursts.
        seconds: after which no further turn begins; each has one burst at least.
    """
    order, until = random.Random(0), time.perf_counter() + seconds
    for turn in range(WARM_UP + -(-samples // BURST)):
        if turn > WARM_UP and time.perf_counter() > until:
            break
        for one in order.sample(list(entrants.values()), len(entrants)):
            times = one.burst()
            if turn >= WARM_UP:
                one.samples_ms += times
    return {name: one.samples_ms for name, one in entrants.items()}


def percentile(times: Sequence[float], percent: float) -> float:
    """Return the smallest time that is not below this share of the times."""
    return sorted(times)[max(0, math.ceil(percent / 100 * len(times)) - 1)]


def rows_of(benchmark: str, case: str, provider: str, metric: str, times_ms: Sequence[float]) -> Iterator[Row]:
    """Yield the median of times under a metric's name, with its spread; and its extremes and percentiles."""
    timing = Timing.of(list(times_ms))
    yield Row(benchmark, case, provider, metric, round(timing.median_us, 5), "ms", round(timing.spread_us, 5))
    shares = {f"p{one}": percentile(times_ms, one) for one in PERCENTILES}
    others = {"min": min(times_ms), **shares, "max": max(times_ms)}
    for name, value in others.items():
        yield Row(benchmark, case, provider, f"{metric}_{name}", round(value, 5), "ms")
    yield Row(benchmark, case, provider, f"{metric}_samples", len(times_ms), "1")
