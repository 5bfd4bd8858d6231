"""Successive halving by medians: run short rounds, keep the best third, and compare the last few in more rounds.

All candidates of a field have run in the same rounds, each round in another order, so their medians compare whatever
the clocks do meanwhile. After Karnin, Koren and Somekh 2013, "Almost optimal exploration in multi-armed bandits".
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import BESIDE, HOPELESS, SLOWER, TIED, WON, Lineup, Runner

# One in this many candidates runs on from field to field, until this few are left.
KEPT, FEW = 3, 4
# GPU time: at least this much in all, or this share of the first round after it, but no more than the last.
LEAST_US, SHARE, MOST_US = 20_000.0, 0.55, 4e6
# Samples of a candidate of the last field, and of the winner, the default and the copy.
MOST_SAMPLES, LEAST_SAMPLES = 100, 4
# Of candidates within this factor of the fastest the first wins, so that the next run chooses it too.
EQUAL = 1.0025
# The resolution of CUDA events.
TICK_US = 0.032
# Candidates that are predicted to take this many times as long as the best do not run, except the first few.
FAR, LEAST_CANDIDATES = 2.5, 6


def run(runner: Runner, lineup: Lineup) -> dict[str, Timing]:
    """Time the lineup; see :data:`tilekern.tuning.strategies.Strategy`."""
    samples: dict[str, list[float]] = defaultdict(list)

    def take(keys: Sequence[str]) -> None:
        for key, time_us in zip(keys, runner.round(keys), strict=True):
            samples[key].append(max(time_us, TICK_US))

    def typical(key: str) -> float:
        return statistics.median(samples[key])

    started_us, field = runner.spent_us, promising(lineup)
    take([*field, *lineup.beside])
    first_us = runner.spent_us - started_us
    until_us = started_us + min(max(LEAST_US, first_us) + SHARE * first_us, max(MOST_US, first_us))
    sizes = [max(FEW, len(field) // KEPT)]
    while sizes[-1] > FEW:
        sizes.append(max(FEW, sizes[-1] // KEPT))
    shuffle = random.Random(0)
    for place, size in enumerate(sizes):
        field = sorted(field, key=typical)[:size]
        phase_us = runner.spent_us + (until_us - runner.spent_us) / (len(sizes) - place)
        while len(field) > 1 and runner.spent_us < phase_us and len(samples[field[0]]) < MOST_SAMPLES:
            take(shuffle.sample(field, len(field)))
            fastest = min(field, key=typical)
            if len(samples[fastest]) >= LEAST_SAMPLES:
                # A candidate whose best sample is slower than the worst of the fastest cannot win.
                field = [key for key in field if min(samples[key]) <= EQUAL * max(samples[fastest])]
    least = min(map(typical, field))
    equals = [key for key in lineup.keys if key in field and typical(key) <= EQUAL * least]
    winner = lineup.default if lineup.default in equals else equals[0]
    while lacking := [key for key in dict.fromkeys((winner, *lineup.yardsticks)) if len(samples[key]) < LEAST_SAMPLES]:
        take(lacking)
    return {key: _timing(key, samples, winner, field, lineup) for key in samples}


def _timing(key: str, samples: dict[str, list[float]], winner: str, field: Sequence[str], lineup: Lineup) -> Timing:
    if key in lineup.beside:
        return Timing.of(samples[key], BESIDE)
    if key == winner:
        return Timing.of(samples[key], WON)
    behind = statistics.median(samples[key]) / statistics.median(samples[winner]) - 1
    return Timing.of(samples[key], TIED if key in field else SLOWER if samples[key][1:] else HOPELESS, behind)


def promising(lineup: Lineup) -> list[str]:
    """The candidates that are not predicted to be far from winning, and the default."""
    best = min(lineup.predicted.values(), default=0.0)
    return [
        key
        for place, key in enumerate(lineup.keys)
        if place < LEAST_CANDIDATES or key == lineup.default or lineup.predicted.get(key, best) <= FAR * best
    ]
