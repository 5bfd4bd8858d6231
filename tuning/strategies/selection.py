"""Rank candidates by the timings of a journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from tilekern.tuning.strategies.lineup import WON

Key = TypeVar("Key")


def ranked(timings: Mapping[Key, Mapping[str, Any]]) -> list[Key]:
    """Rank the keys of timings from ``Timing.as_dict``, the winner first.

    The strategy's winner comes first, then the others by how far they were behind. Older timings without these fields
    are ranked by their medians, those with fewer samples last, since they left the race early. Equals keep their order.
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
