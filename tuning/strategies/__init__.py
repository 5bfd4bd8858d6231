"""Strategies time the candidates of a problem until the fastest is known.

A strategy decides which candidates run and when to stop, and touches no device. A runner takes the times, on a GPU
(:mod:`tilekern.tuning.strategies.runner`) or, in tests, from recorded measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tilekern.errors import InputError
from tilekern.tuning.measure.timing import Timing

# The results of a candidate (``Timing.left``): it won; it may be as fast as the winner; it is slower; one sample showed
# that it is slower; or it was timed for comparison only.
WON, TIED, SLOWER, HOPELESS, BESIDE = "won", "tied", "slower", "hopeless", "beside"

# By name, what a strategy does, and its function in :mod:`tilekern.tuning.strategies.race`.
STRATEGIES = {
    "race": ("keeps the best third by medians of short rounds until few are left, which run in more rounds", "run"),
    "exhaustive": ("times every candidate equally often", "exhaustive"),
}


class Runner(Protocol):
    """Takes times."""

    @property
    def spent_us(self) -> float:
        """GPU time so far, including flushes and waits."""

    def round(self, keys: Sequence[str]) -> list[float]:
        """Take a sample of each key in microseconds, in this order; keys may repeat."""


@dataclass(frozen=True)
class Lineup:
    """The candidates of a race.

    Attributes:
        keys: the candidates, the best predicted first.
        default: the candidate to which gains refer, preferred among equals; None if it does not run.
        beside: keys that are timed for comparison and cannot win.
        predicted: predicted times in seconds by key, where known.
    """

    keys: tuple[str, ...]
    default: str | None = None
    beside: tuple[str, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """Return the keys that need a timing even if they are slow."""
        return (*(() if self.default is None else (self.default,)), *self.beside)


# Times a lineup and returns a timing by key for each that ran. Exactly one candidate has won.
Strategy = Callable[[Runner, Lineup], dict[str, Timing]]


def strategy_named(name: str) -> Strategy:
    """Return a strategy by its name.

    Raises:
        InputError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    from tilekern.tuning.strategies import race

    found: Strategy = getattr(race, STRATEGIES[name][1])
    return found
