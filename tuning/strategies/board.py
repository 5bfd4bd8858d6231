"""The board of a race: the rounds so far, who may still win, and the verdict at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import BESIDE, HOPELESS, SLOWER, TIED, WON, Lineup, Runner
from tilekern.tuning.strategies.standing import TICK_US, Standing, standing

# A winner need not be told from others that are faster by no more than this.
CERTAIN = math.log(1.01)
# Of those that are no further from the leader than this, always the same one is chosen, so that the next run of the
# tuner chooses it too.
EQUAL = math.log(1.0025)


class Board:
    """Runs rounds on a runner and keeps what came out."""

    def __init__(self, runner: Runner, lineup: Lineup) -> None:
        self.runner, self.lineup = runner, lineup
        self._rounds: list[dict[str, float]] = []
        self._standing: Standing | None = None

    def run(self, keys: Sequence[str], rounds: int = 1) -> dict[str, float]:
        """Run rounds over some keys, between which nobody looks; the last samples in microseconds.

        The first runs in the order given, each later one in another order: a drift within a round then favours none,
        nor does the neighbour before, whose power a GPU at its limit makes the next one pay for. On an H200 matrix
        products that are within 3 % when each runs alone came out 9 % apart where the order was always the same.
        """
        first = len(self._rounds)
        orders = [_shuffled(dict.fromkeys(keys), number) for number in range(first, first + rounds)]
        samples = iter(self.runner.round([key for order in orders for key in order]))
        self._rounds += [{key: max(next(samples), TICK_US) for key in order} for order in orders]
        self._standing = None
        return self._rounds[-1]

    @property
    def standing(self) -> Standing:
        """The standing by the rounds so far."""
        if self._standing is None:
            self._standing = standing(self._rounds)
        return self._standing

    @property
    def candidates(self) -> list[str]:
        """The candidates that have run, in the lineup's order."""
        return [key for key in self.lineup.keys if key in self.standing.typical]

    @property
    def leader(self) -> str:
        """The candidate that is the fastest by now."""
        return min(self.candidates, key=lambda key: self.standing.typical[key])

    def typical_us(self, key: str) -> float:
        """The time of a candidate that has run, in microseconds."""
        return math.exp(self.standing.typical[key])

    def doubt(self, key: str, leader: str) -> float:
        """By how much a candidate may be faster than the leader at most, as a logarithm."""
        return self.standing.doubt(key, leader, len(self.lineup.keys) - 1)

    def contenders(self) -> list[str]:
        """The keys that may still be faster than the leader by more than :data:`CERTAIN`, the fastest first."""
        leader = self.leader
        found = [key for key in self.candidates if key != leader and self.doubt(key, leader) > CERTAIN]
        return sorted(found, key=lambda key: self.standing.typical[key])

    def short_of(self, keys: Sequence[str], samples: int) -> list[str]:
        """Those keys that have fewer samples than this."""
        return [key for key in dict.fromkeys(keys) if len(self.samples_us(key)) < samples]

    def samples_us(self, key: str) -> list[float]:
        """The samples of a key in microseconds."""
        return [times[key] for times in self._rounds if key in times]

    def choice(self) -> str:
        """The winner: the leader, or the first of those that are its equals: the default, then in lineup order."""
        leader, found = self.leader, self.standing
        enough = found.samples[leader] / 2
        equals = [
            key
            for key in self.candidates
            if found.typical[key] - found.typical[leader] <= EQUAL and found.samples[key] >= enough
        ]
        return self.lineup.default if self.lineup.default in equals else equals[0]

    def verdict(self) -> dict[str, Timing]:
        """A timing for each that has run."""
        winner, found = self.choice(), self.standing
        doubts = {key: self.doubt(key, winner) for key in self.candidates if key != winner}
        timings = {}
        for key, typical in found.typical.items():
            times_us = self.samples_us(key)
            behind = math.expm1(typical - found.typical[winner])
            if key == winner:
                within = math.expm1(max([0.0, *doubts.values()]))
                timings[key] = Timing.of(times_us, WON, within=within)
            elif key not in doubts:
                timings[key] = Timing.of(times_us, BESIDE)
            elif doubts[key] > 0:
                timings[key] = Timing.of(times_us, TIED, behind)
            else:
                timings[key] = Timing.of(times_us, SLOWER if len(times_us) > 1 else HOPELESS, behind)
        return timings


def _shuffled(keys: Iterable[str], number: int) -> list[str]:
    """The order of a round; that of the first is as given."""
    order = list(keys)
    if number:
        random.Random(number).shuffle(order)
    return order
