"""The candidates of a race, the runner that times them, how each one ends, and their ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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


# Times a lineup and returns a timing by key for each that ran. Exactly one candidate has won.
Strategy = Callable[[Runner, Lineup], dict[str, Timing]]
_Key = TypeVar("_Key")


def ranked(timings: Mapping[_Key, Mapping[str, Any]]) -> list[_Key]:
    """Rank the keys of timings from ``Timing.as_dict``, the winner first.

    The strategy's winner comes first, then the others by how far they were behind. Older timings without these fields
    are ranked by their medians, those with fewer samples last, since they left the race early. Equals keep their order.
    """
    most = max((timing["samples"] for timing in timings.values()), default=0)

    def place(key: _Key) -> tuple[bool, float, bool, float]:
        timing = timings[key]
        return (
            timing.get("left") != WON,
            float(timing.get("behind", math.inf)),
            timing["samples"] < most,
            float(timing["median_us"]),
        )

    return sorted(timings, key=place)
