"""The strategies: all candidates run in the same rounds, and medians of their samples compare them.

Each round runs its keys in another order. So medians are comparable even if clocks change, and no key always pays for
its neighbour's power on a GPU at its limit.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies.lineup import BESIDE, HOPELESS, SLOWER, TIED, WON, Lineup, Runner

# One in this many candidates runs on from field to field, until this few are left.
KEPT, FEW = 3, 4
# GPU time of a race: at least this much, and this share of the first round beyond it, but no more than the last.
LEAST_US, MORE_ROUNDS, MOST_US = 20_000.0, 0.55, 4e6
# GPU time for further samples before the first cut. On an H100, a single sample of 2 us once cost a winner 15 %.
FIRST_US = 10_000.0
# Samples of a candidate of the last field: at least, whatever they cost, and at most; then the least of the winner and
# of each key that needs a timing.
ENOUGH_SAMPLES, MOST_SAMPLES, LEAST_SAMPLES = 6, 100, 4
# Candidates predicted to take this many times as long as the best do not run, except the first few. In a sweep of
# Qwen3-8B on an H200 no winner was predicted to take 1.5 times as long.
FAR, LEAST_CANDIDATES = 2.5, 6
# Of candidates within this factor of the fastest the default wins, or else the first, so that the next run agrees.
EQUAL = 1.0025
# The resolution of CUDA events.
TICK_US = 0.032
# Rounds of an exhaustive run, and the fewer rounds, five times those of cuda.tile's own search, that are enough once so
# much GPU time is spent.
ROUNDS, LEAST_ROUNDS, LONGEST_US = 50, 25, 20e6


class Samples:
    """The samples that a runner took, by key."""

    def __init__(self, runner: Runner, lineup: Lineup) -> None:
        self._runner, self._lineup, self._shuffle = runner, lineup, random.Random(0)
        self.taken_us: dict[str, list[float]] = {}

    def take(self, keys: Sequence[str]) -> None:
        """Run a round; the first round keeps the given order."""
        order = self._shuffle.sample(keys, len(keys)) if self.taken_us else list(keys)
        for key, time_us in zip(order, self._runner.round(order), strict=True):
            self.taken_us.setdefault(key, []).append(max(time_us, TICK_US))

    def median_us(self, key: str) -> float:
        """Return the median of a key that has run."""
        return statistics.median(self.taken_us[key])

    def outcome(self, field: Sequence[str]) -> dict[str, Timing]:
        """Return a timing of each key that has run; the winner is in ``field``, whose keys have equal sample counts."""
        taken, lineup, least = self.taken_us, self._lineup, min(map(self.median_us, field))
        equals = [key for key in lineup.keys if key in field and self.median_us(key) <= EQUAL * least]
        winner = lineup.default if lineup.default in equals else equals[0]
        needed = [winner, *filter(None, (lineup.default,)), *lineup.beside]  # even if they are slow
        while lacking := [key for key in needed if len(taken.get(key, ())) < LEAST_SAMPLES]:
            self.take(list(dict.fromkeys(lacking)))
        found = {}
        for key, times_us in taken.items():
            if key == winner or key in lineup.beside:
                found[key] = Timing.of(times_us, WON if key == winner else BESIDE)
            else:
                left = TIED if key in field else SLOWER if len(times_us) > 1 else HOPELESS
                found[key] = Timing.of(times_us, left, self.median_us(key) / self.median_us(winner) - 1)
        return found


def run(runner: Runner, lineup: Lineup) -> dict[str, Timing]:
    """Run short rounds, keep the best third, and so on; the last few run in more rounds.

    After Karnin, Koren and Somekh 2013, "Almost optimal exploration in multi-armed bandits", who keep halves.
    """
    samples, started_us, best = Samples(runner, lineup), runner.spent_us, min(lineup.predicted.values(), default=0.0)
    field = [
        key
        for place, key in enumerate(lineup.keys)
        if place < LEAST_CANDIDATES or key == lineup.default or lineup.predicted.get(key, best) <= FAR * best
    ]
    samples.take([*field, *lineup.beside])
    first_us = runner.spent_us - started_us
    while len(samples.taken_us[field[0]]) < LEAST_SAMPLES and runner.spent_us - started_us < FIRST_US:
        samples.take(field)
    latest_us = started_us + max(MOST_US, first_us)
    until_us = min(started_us + max(LEAST_US, first_us) + MORE_ROUNDS * first_us, latest_us)
    sizes = [max(FEW, len(field) // KEPT)]
    while sizes[-1] > FEW:
        sizes.append(max(FEW, sizes[-1] // KEPT))
    for place, size in enumerate(sizes):
        field = sorted(field, key=samples.median_us)[:size]
        ends_us = runner.spent_us + (until_us - runner.spent_us) / (len(sizes) - place)
        enough = ENOUGH_SAMPLES if size == sizes[-1] else 0
        while len(field) > 1 and (taken := len(samples.taken_us[field[0]])) < MOST_SAMPLES:
            if runner.spent_us >= (ends_us if taken >= enough else latest_us):
                break
            samples.take(field)
            taken_us = samples.taken_us[min(field, key=samples.median_us)]
            if len(taken_us) >= LEAST_SAMPLES:
                # A candidate whose best sample is slower than the worst of the fastest cannot win.
                field = [key for key in field if min(samples.taken_us[key]) <= EQUAL * max(taken_us)]
    return samples.outcome(field)


def exhaustive(
    runner: Runner, lineup: Lineup, rounds: int = ROUNDS, longest_us: float = LONGEST_US
) -> dict[str, Timing]:
    """Time every candidate equally often; other strategies are judged by this one.

    Args:
        runner: takes the times.
        lineup: the candidates.
        rounds: the number of rounds.
        longest_us: after the first rounds, no round begins once this much GPU time is spent.
    """
    samples, started_us = Samples(runner, lineup), runner.spent_us
    for done in range(rounds):
        if done >= LEAST_ROUNDS and runner.spent_us - started_us > longest_us:
            break
        samples.take([*lineup.keys, *lineup.beside])
    return samples.outcome(lineup.keys)
