"""The runner that times on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tilekern.tuning.measure.timing import Launch, Stopwatch

# Before a race the GPU may have had nothing to do while inputs were made; this brings it back to its clocks.
WAKING_US = 2_000.0

# What finds its inputs in L2 finds them there again: where it is short, a sample is the mean of launches in a row, as
# many for each key, that take so long together. On an H200 single launches of 5 us spread by 6 %.
LONG_US, MOST_LAUNCHES = 40.0, 16


class GpuRunner:
    """Times launches in interleaved rounds.

    Launches asked for at once are queued as a whole and waited for one by one, so that the one that hangs is the one
    announced last. The first launch of each key has the GPU to itself, so that one that faults is known too.

    Args:
        watch: the stopwatch.
        launches: a function that launches, by key.
        load_code: loads a key's code without running it; False where that cannot be done, and then an untimed launch
            loads it.
        refresh: puts into L2 what a launch is to find there, before each sample; None where it finds nothing.
        announce: called with a key before its first launch, and whenever it is the one that is waited for: once a
            launch, while the GPU works. Some microseconds are free, more are not.
    """

    def __init__(
        self, watch: Stopwatch, launches: Mapping[str, Launch], load_code: Callable[[str], bool] = lambda _: False,
        refresh: Launch | None = None, announce: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._watch, self._launches, self._load_code = watch, launches, load_code
        self._refresh, self._announce = refresh, announce
        self._loaded: set[str] = set()
        self._launches_a_sample = 1
        self.spent_us = 0.0

    def round(self, keys: Sequence[str]) -> list[float]:
        """One sample of each key in microseconds; a key may come more than once."""
        if not self._loaded:
            self._watch.wait(WAKING_US)
            self.spent_us += WAKING_US
        if self._loaded.issuperset(keys):
            return self._batch(keys)
        return [self._batch([key])[0] if key in self._loaded else self._first(key) for key in keys]

    def _batch(self, keys: Sequence[str]) -> list[float]:
        before_us = self._watch.spent_us
        launches = [self._sampled(key) for key in keys]
        samples = self._watch.round(launches, self._refresh, lambda place: self._announce(keys[place]))
        self.spent_us += self._watch.spent_us - before_us
        return [sample / self._launches_a_sample for sample in samples]

    def _sampled(self, key: str) -> Launch:
        """The launch that one sample times: a launch, or several in a row."""
        launch, times = self._launches[key], self._launches_a_sample

        def in_a_row() -> None:
            for _ in range(times):
                launch()

        return launch if times == 1 else in_a_row

    def _first(self, key: str) -> float:
        """The first sample of a key; the loading of its code is not in it."""
        self._announce(key)
        if has_run := not self._load_code(key):
            self._launches[key]()
        sample = self._batch([key])[0]
        self.spent_us += sample if has_run else 0.0
        if self._refresh is not None and not self._loaded:
            self._launches_a_sample = min(MOST_LAUNCHES, math.ceil(LONG_US / sample))
            sample = self._batch([key])[0]
        self._loaded.add(key)
        return sample
