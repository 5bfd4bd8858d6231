"""How the candidates of a problem are timed until the fastest is known: strategies over a runner.

A strategy decides who runs and when to stop, and touches no device. A runner takes the times: on a GPU
(:mod:`tilekern.tuning.strategies.runner`), or in tests from recorded measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tilekern.errors import InputError
from tilekern.tuning.measure.timing import Timing

# How a timing ended (``Timing.left``): it won; it cannot be told from the winner; it is slower; it is slower by so
# much that one sample was enough; or it was only timed for comparison.
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
        """GPU time so far, with all that timing costs beside the launches."""

    def round(self, keys: Sequence[str]) -> list[float]:
        """A sample of each key in microseconds, one after the other in this order; a key may come more than once."""


@dataclass(frozen=True)
class Lineup:
    """The field of a race.

    Attributes:
        keys: the candidates, the best predicted first.
        default: the candidate that gains are told against; preferred among equals. None where it does not run.
        beside: what is timed with them for comparison and cannot win.
        predicted: their predicted times in seconds by key, as far as there are any.
    """

    keys: tuple[str, ...]
    default: str | None = None
    beside: tuple[str, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """The keys that need a figure whether fast or slow."""
        return (*(() if self.default is None else (self.default,)), *self.beside)


# Times a lineup; a timing for each that ran, by key. Exactly one of the candidates has won.
Strategy = Callable[[Runner, Lineup], dict[str, Timing]]


def strategy_named(name: str) -> Strategy:
    """The strategy of a name.

    Raises:
        InputError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    from tilekern.tuning.strategies import race

    found: Strategy = getattr(race, STRATEGIES[name][1])
    return found
