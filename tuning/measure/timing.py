"""Time launches on the GPU: CUDA events around each, L2 flushed before it if asked for, rounds over all candidates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Launch = Callable[[], Any]
# At least the clock rate of any GPU.
CYCLES_PER_US = 2_000
# The host's time to queue one launch: the first guess, and the most that counts, since loading code is not part of it.
# The GPU waits this many times longer than the last launches needed.
FIRST_HOST_US, MOST_HOST_US, SAFETY = 50.0, 300.0, 1.5
# A launch for which the GPU may have waited is timed again, this many times in all.
TRIES = 4


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in microseconds; the spread is half the distance between the quartiles.

    A strategy adds the candidate's result (``left``, one of the words of :mod:`tilekern.tuning.strategies`) and how far
    it was ``behind`` the winner (0.01 is one per cent, negative is ahead). Where a candidate was timed on variations of
    the inputs too, ``on`` has its medians there, in microseconds.
    """

    median_us: float
    spread_us: float
    samples: int
    left: str | None = None
    behind: float | None = None
    on: Mapping[str, float] | None = None

    @classmethod
    def of(cls, times_us: Sequence[float], left: str | None = None, behind: float | None = None) -> Timing:
        """Summarise samples."""
        if len(times_us) < 2:
            return cls(times_us[0], 0.0, len(times_us), left, behind)
        low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(middle, (high - low) / 2, len(times_us), left, behind)

    def as_dict(self) -> dict[str, Any]:
        """Return the timing as a record keeps it, without the fields that no strategy set."""
        said: dict[str, Any] = {
            "left": self.left,
            "behind": None if self.behind is None else round(self.behind, 5),
            "on": None if self.on is None else {name: round(time_us, 3) for name, time_us in self.on.items()},
        }
        return {
            "median_us": round(self.median_us, 3),
            "spread_us": round(self.spread_us, 3),
            "samples": self.samples,
            **{name: value for name, value in said.items() if value is not None},
        }


def rewriting(arrays: Iterable[Any]) -> Launch:
    """Return a launch that rewrites each array with its own bits, so that as much as fits is in L2."""
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views = [array.view(whole[array.element_size()]) for array in arrays]

    def rewrite() -> None:
        for view in views:
            view.add_(0)

    return rewrite


@dataclass
class Events:
    """CUDA events before the flush, after it, and after the launch.

    ``late`` means that the GPU had reached the second event before the launch was queued, so it may have waited.
    """

    flush: Any
    start: Any
    end: Any
    late: bool = False

    @property
    def time_us(self) -> float:
        """Return the time of the launch."""
        return 1000 * float(self.start.elapsed_time(self.end))

    @property
    def spent_us(self) -> float:
        """Return the time that the GPU was busy, including the flush."""
        return 1000 * float(self.flush.elapsed_time(self.end))


@dataclass(frozen=True)
class Queue:
    """Queued launches, and how long the GPU was made to wait before them, in microseconds."""

    events: list[Events]
    lead_us: float

    @property
    def spent_us(self) -> float:
        """Return the time that the GPU was kept busy, including waits and flushes; all launches must be over."""
        return self.lead_us + sum(events.spent_us for events in self.events)


class Stopwatch:
    """Times launches on the current stream of the current device.

    Launches are queued while the GPU waits, so that it does not wait for the host between an event and its launch. If
    the host was held up, the launch is timed again.

    Attributes:
        spent_us: GPU time of all rounds, including waits and flushes.
    """

    def __init__(self, flush_bytes: int) -> None:
        import torch

        self._torch, self.spent_us = torch, 0.0
        self._flush = torch.empty(max(flush_bytes, 1 << 26), dtype=torch.int8, device="cuda")
        # Of the last launches: the host's mean and longest time for one, and the GPU's shortest.
        self._host_us, self._slowest_host_us, self._gpu_us = FIRST_HOST_US, FIRST_HOST_US, 0.0

    def warm_clocks(self, seconds: float = 0.4) -> None:
        """Keep the GPU busy until its clocks have risen."""
        torch = self._torch
        self.wait(1)  # loads the code of the wait
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        end = torch.cuda.Event(enable_timing=True)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        while True:
            for _ in range(20):
                a @ a
            end.record()
            end.synchronize()
            if start.elapsed_time(end) > 1000 * seconds:
                return

    def queue(self, launches: Sequence[Launch], before: Launch | None = None, *, flushes: bool = True) -> Queue:
        """Queue launches.

        Args:
            launches: the launches to time.
            before: queued before each, after a flush, and not timed.
            flushes: whether the L2 cache is flushed before each. A flush leaves lines that must be written back before
                others come in: 100 MB that are read take 8 us longer on an H200.
        """
        # Long enough for the host, at its last pace, to stay ahead of the GPU.
        falls_behind_us = max(0.0, self._host_us - self._gpu_us)
        self.wait(lead_us := SAFETY * (self._slowest_host_us + (len(launches) - 1) * falls_behind_us))
        took_us, queued = [], []
        for launch in launches:
            began = time.perf_counter()
            events = Events(*(self._torch.cuda.Event(enable_timing=True) for _ in range(3)))
            events.flush.record()
            if flushes:
                self._flush.zero_()
            if before is not None:
                before()
            events.start.record()
            launch()
            events.late = events.start.query()
            events.end.record()
            queued.append(events)
            took_us.append(min(1e6 * (time.perf_counter() - began), MOST_HOST_US))
        self._host_us, self._slowest_host_us = statistics.fmean(took_us), max(took_us)
        return Queue(queued, lead_us)

    def read(self, queued: Queue) -> list[float]:
        """Return the times of launches that are over, in microseconds."""
        self._gpu_us = min(events.spent_us for events in queued.events)
        return [events.time_us for events in queued.events]

    def wait(self, time_us: float) -> None:
        """Keep the GPU waiting for at least this long."""
        self._torch.cuda._sleep(int(time_us * CYCLES_PER_US))

    def round(
        self, launches: Sequence[Launch], before: Launch | None = None, waiting: Callable[[int], None] = lambda _: None,
        *, flushes: bool = True,
    ) -> list[float]:  # fmt: skip
        """Time each launch once, in microseconds.

        Args:
            launches: the launches to time.
            before: queued before each, after a flush, and not timed.
            waiting: called with the index of each launch when it is waited for.
            flushes: whether the L2 cache is flushed before each.
        """
        found = [0.0] * len(launches)
        places = list(range(len(launches)))
        for _ in range(TRIES):
            queued = self.queue([launches[place] for place in places], before, flushes=flushes)
            for place, events in zip(places, queued.events, strict=True):
                waiting(place)
                events.end.synchronize()
            for place, time_us in zip(places, self.read(queued), strict=True):
                found[place] = time_us
            self.spent_us += queued.spent_us
            places = [place for place, events in zip(places, queued.events, strict=True) if events.late]
            if not places:
                break
        return found

    def measure(self, launch: Launch, samples: int = 50) -> Timing:
        """Time one launch many times, after warm-up."""
        self.round([launch] * 5)
        return Timing.of(self.round([launch] * samples))
