"""The candidates of a race, the runner that times them, and how each one ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tilekern.tuning.measure.timing import Timing

# The results of a candidate (``Timing.left``): it won; it may be as fast as the winner; it is slower; one sample showed
# that it is slower; or it was timed for comparison only.
WON, TIED, SLOWER, HOPELESS, BESIDE = "won", "tied", "slower", "hopeless", "beside"


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
