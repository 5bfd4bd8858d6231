"""Select the winner, and who would have won in its place, from the timings of a journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from tilekern.tuning.strategies import WON

Key = TypeVar("Key")


def ranked(timings: Mapping[Key, Mapping[str, Any]]) -> list[Key]:
    """The keys in the order in which they would win, of timings as ``Timing.as_dict`` gives them.

    First who a strategy said has won, then the others by how far they were behind. Timings of before strategies said
    so come in the order of their medians, those with fewer samples last: they were out of the race early. Of equals
    the first stays the first.
    """
    most = max((timing["samples"] for timing in timings.values()), default=0)

    def place(key: Key) -> tuple[bool, float, bool, float]:
        timing = timings[key]
        return (
            timing.get("left") != WON,
            float(timing.get("behind", math.inf)),
            timing["samples"] < most,
            float(timing["median_us"]),
        )

    return sorted(timings, key=place)
