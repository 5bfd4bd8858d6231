"""GPU time of whole op calls, Python and autograd included, with the host's work hidden.

Before each call the arguments are restored, a sleep kernel is queued, and then one that flushes the L2 cache. While
these run, the host queues an event, the call's kernels and another event: the time between the two events is then the
GPU's alone, gaps between its kernels included. That the host was ahead is proved for each sample: when it has queued
everything, the first event must not have been reached. A sample for which it had is thrown away and the sleep doubled;
a call that is late all the same waits for the GPU by itself, and its samples are taken as they are, waits included.
This holds for whatever can be called, needs no capture into a CUDA graph, and leaves every provider the launch path
that it has in training. All entrants of a race take turns in every round, so that a drift of clocks meets them alike;
each round has another order: what runs before a call sets the clock that a GPU at its power limit has for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilekern.tuning.measure.timing import Stopwatch, Timing

FIRST_SLEEP = 400_000  # GPU cycles, about 0.2 ms
LONGEST_SLEEP = 40_000_000
WARM_UP = 8  # turns; enough to double the sleep from the first to the longest
LEAST_SAMPLES = 5


@dataclass
class Entrant:
    """A call to time, what to do before it outside of the timed region, and its samples so far."""

    run: Callable[[], Any]
    prepare: Callable[[], None] = lambda: None
    sleep: int = FIRST_SLEEP
    samples_us: list[float] = field(default_factory=list)
    waits: bool = False

    def late(self) -> None:
        """Note that the host was not ahead: it needs more time, or the call waits for the GPU whatever it gets."""
        if self.sleep >= LONGEST_SLEEP:
            self.waits, self.sleep = True, FIRST_SLEEP
        elif not self.waits:
            self.sleep = min(2 * self.sleep, LONGEST_SLEEP)


class Race(Stopwatch):
    """Times entrants in turns."""

    def run(self, entrants: Mapping[str, Entrant], samples: int, seconds: float) -> dict[str, Timing]:
        """A timing for each entrant that got its samples within thrice as many turns; the others are left out.

        There are ``samples`` of each, or fewer where so many would take longer than ``seconds``.
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
        """One sample of each entrant, in their order."""
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
