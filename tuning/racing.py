"""Times launches in interleaved rounds and drops those that cannot win."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tuning.tasks import COPY
from tuning.timing import Stopwatch, Timing

# (rounds, keep those within this factor of the leader): a race by elimination; the default config always stays.
STAGES = ((5, 1.4), (10, 1.12), (30, 1.04), (40, 1.0))
# No round of the later stages begins after a race has taken this long: a step of a whole loss takes tens of
# milliseconds, and its spread is as small after fifteen rounds as after a hundred.
LONGEST_RACE_S = 4.0


def race(watch: Stopwatch, launches: dict[str, Any], stay: Sequence[str]) -> dict[str, Timing]:
    """Time launches in interleaved rounds and drop those that cannot win; a timing for every entrant."""
    deadline = time.perf_counter() + LONGEST_RACE_S
    samples: dict[str, list[float]] = {name: [] for name in launches}
    alive = list(launches)
    watch.round([launches[name] for name in alive] * 2)
    for stage, (rounds, factor) in enumerate(STAGES):
        for _ in range(rounds):
            if stage > 1 and time.perf_counter() > deadline:
                break
            for name, time_us in zip(alive, watch.round([launches[name] for name in alive]), strict=True):
                samples[name].append(time_us)
        medians = {name: statistics.median(samples[name]) for name in alive}
        best = min(value for name, value in medians.items() if name != COPY)
        alive = [name for name in alive if medians[name] <= best * factor or name in stay]
    return {name: Timing.of(times) for name, times in samples.items()}
