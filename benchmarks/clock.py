"""Measure the GPU time of whole op calls, Python and autograd included, with the host's work hidden.

Before each call the arguments are restored, a sleep kernel is queued, and then one that flushes the L2 cache. While
these run, the host queues an event, the call's kernels and another event: the time between the two events is then GPU
time only, including gaps between kernels. Each sample is checked: when the host has queued everything, the GPU must not
have reached the first event. Otherwise the sample is dropped and the sleep is doubled. If a call is still late, it
waits for the GPU by itself; its samples count, waits included. This works for any callable, needs no capture into a
CUDA graph, and every provider keeps its launch path from training. All entrants of a race take turns in every round, so
that clock drift affects them equally. Each round has another order, because at the power limit the work before a call
sets the GPU's clock during the call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.environment import require_gpu
from tilekern.tuning.measure.timing import Stopwatch, Timing

FIRST_SLEEP = 400_000  # GPU cycles, about 0.2 ms
LONGEST_SLEEP = 40_000_000
WARM_UP = 8  # turns; enough to double the sleep from the first to the longest
LEAST_SAMPLES = 5


@dataclass
class Entrant:
    """A call to time, its untimed preparation, and its samples so far."""

    run: Callable[[], Any]
    prepare: Callable[[], None] = lambda: None
    sleep: int = FIRST_SLEEP
    samples_us: list[float] = field(default_factory=list)
    waits: bool = False

    def late(self) -> None:
        """Note that the host was not ahead: it needs a longer sleep, or the call itself waits for the GPU."""
        if self.sleep >= LONGEST_SLEEP:
            self.waits, self.sleep = True, FIRST_SLEEP
        elif not self.waits:
            self.sleep = min(2 * self.sleep, LONGEST_SLEEP)


class Race(Stopwatch):
    """Times entrants in turns."""

    def run(self, entrants: Mapping[str, Entrant], samples: int, seconds: float) -> dict[str, Timing]:
        """Return a timing for each entrant that got its samples within three times as many turns; omit the others.

        Each entrant gets ``samples`` samples, or fewer if these would take longer than ``seconds``.
        """
        given, draw = list(entrants.items()), random.Random(0)
        for _ in range(WARM_UP):
            started = time.perf_counter()
            self.turn(dict(draw.sample(given, len(given))))
            turn_s = time.perf_counter() - started
        for entrant in entrants.values():
            entrant.samples_us.clear()
        wanted = max(LEAST_SAMPLES, min(samples, int(seconds / turn_s)))
        for _ in range(3 * wanted):
            if all(len(entrant.samples_us) >= wanted for entrant in entrants.values()):
                break
            self.turn(dict(draw.sample(given, len(given))))
        return {
            name: Timing.of(entrant.samples_us)
            for name, entrant in entrants.items()
            if len(entrant.samples_us) >= wanted
        }

    def turn(self, entrants: Mapping[str, Entrant]) -> None:
        """Take one sample of each entrant, in their order."""
        events = {name: self._sample(entrant) for name, entrant in entrants.items()}
        self._torch.cuda.synchronize()
        for name, (start, end, ahead) in events.items():
            if ahead or entrants[name].waits:
                entrants[name].samples_us.append(1000 * start.elapsed_time(end))
            else:
                entrants[name].late()

    def _sample(self, entrant: Entrant) -> tuple[Any, Any, bool]:
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        entrant.prepare()
        cuda._sleep(entrant.sleep)
        self._flush.zero_()
        start.record()
        result = entrant.run()
        end.record()
        ahead = not start.query()
        del result
        return start, end, ahead


class HostClock:
    """Times each entrant by the host's clock, for runs on the CPU, whose times mean nothing."""

    def run(self, entrants: Mapping[str, Entrant], samples: int, seconds: float) -> dict[str, Timing]:
        """Return a timing for each entrant: of ``samples`` samples, or fewer if ``seconds`` are over."""
        times: dict[str, list[float]] = {name: [] for name in entrants}
        until = time.perf_counter() + seconds
        for turn in range(samples):
            if turn and time.perf_counter() > until:
                break
            for name, entrant in entrants.items():
                entrant.prepare()
                started = time.perf_counter()
                entrant.run()
                times[name].append(1e6 * (time.perf_counter() - started))
        return {name: Timing.of(samples_us) for name, samples_us in times.items()}


def clock_on(device: str) -> Any:
    """Return a clock for calls on a device: a race on a GPU whose clock is warm, or the host's."""
    if device == "cpu":
        return HostClock()
    race = Race(2 * require_gpu().l2_bytes)
    race.warm_clocks()
    return race
