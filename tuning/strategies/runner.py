"""The runner that times on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tuning.timing import Launch, Stopwatch

# The first launch of a kernel loads its code, about 1 ms of the host's time on an H200's host.
LOADING_US = 1_500.0
# Before a race the GPU may have had nothing to do while inputs were made; this brings it back to its clocks.
WAKING_US = 2_000.0


class GpuRunner:
    """Times launches in interleaved rounds.

    A round is queued as a whole and waited for launch by launch, so that whoever hangs is the one announced last. The
    first launch of each key has the GPU to itself, so that one that faults is known too.

    Args:
        watch: the stopwatch.
        launches: a function that launches, by key.
        refresh: puts into L2 what a launch is to find there; None where it finds nothing.
        announce: called with a key before its first launch, and whenever it is the one that is waited for: once a
            launch, while the GPU works. Some microseconds are free, more are not.
    """

    def __init__(
        self, watch: Stopwatch, launches: Mapping[str, Launch], refresh: Launch | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._watch, self._launches, self._refresh, self._announce = watch, launches, refresh, announce
        self._loaded: set[str] = set()
        self._fastest_us = math.inf
        self.spent_us = 0.0

    def round(self, keys: Sequence[str]) -> list[float]:
        """One sample of each key in microseconds."""
        if not self._loaded:
            self._watch.wait(WAKING_US)
            self.spent_us += WAKING_US
        if self._loaded.issuperset(keys):
            return self._batch(keys)
        return [self._batch([key])[0] if key in self._loaded else self._first(key) for key in keys]

    def _batch(self, keys: Sequence[str]) -> list[float]:
        before_us = self._watch.spent_us
        launches = [self._launches[key] for key in keys]
        samples = self._watch.round(launches, self._refresh, lambda place: self._announce(keys[place]))
        self.spent_us += self._watch.spent_us - before_us
        self._fastest_us = min(self._fastest_us, *samples)
        return samples

    def _first(self, key: str) -> float:
        """The first sample of a key; the loading of its code is not in it.

        It is hidden behind a wait of the GPU where that costs less than the untimed launch that is made otherwise.
        """
        self._announce(key)
        waits = bool(self._loaded) and self._fastest_us > LOADING_US
        if waits:
            self._watch.wait(LOADING_US)
        else:
            self._launches[key]()
        sample = self._batch([key])[0]
        self._loaded.add(key)
        self.spent_us += LOADING_US if waits else sample
        return sample
