"""Runners: one times on a GPU, one over it times candidates on several inputs of one problem."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from tilekern.tuning.measure.tasks import on
from tilekern.tuning.measure.timing import Launch, Stopwatch, Timing
from tilekern.tuning.strategies.lineup import Runner

# Before a race the GPU may have been idle while inputs were made; this raises its clocks.
WAKING_US = 2_000.0

# A short kernel that finds its inputs in L2 is launched several times in a row, equally often for each key, for about
# this long; a sample is the mean. On an H200 single launches of 5 us spread by 6 %.
LONG_US, MOST_LAUNCHES = 40.0, 16


class GpuRunner:
    """Times launches in interleaved rounds.

    The launches of a round are queued together and waited for one by one, so a launch that hangs is the one announced
    last. The first launch of each key has the GPU to itself, so a launch that faults is known too.

    Args:
        watch: the stopwatch.
        launches: functions that launch, by key.
        load_code: loads a key's code without running it; returns False if it cannot, and an untimed launch loads it.
        refresh: before each sample, puts the arrays into L2 that are there in real use; None for nothing.
        announce: called with a key before its first launch and when it is waited for, while the GPU works: it must take
            only some microseconds.
        in_a_row: of a streamed kernel, how many launches each function makes: a sample is their mean, and no L2 is
            flushed before them. None for others.
    """

    def __init__(
        self, watch: Stopwatch, launches: Mapping[str, Launch], load_code: Callable[[str], bool] = lambda _: False,
        refresh: Launch | None = None, announce: Callable[[str], None] = lambda _: None, in_a_row: int | None = None,
    ) -> None:  # fmt: skip
        self._watch, self._launches, self._load_code = watch, launches, load_code
        self._refresh, self._announce = refresh, announce
        self._loaded: set[str] = set()
        self._launches_a_sample, self._in_a_row = 1, in_a_row
        self.spent_us = 0.0

    def round(self, keys: Sequence[str]) -> list[float]:
        """Take a sample of each key in microseconds; keys may repeat."""
        if not self._loaded:
            self._watch.wait(WAKING_US)
            self.spent_us += WAKING_US
        if self._loaded.issuperset(keys):
            return self._batch(keys)
        return [self._batch([key])[0] if key in self._loaded else self._first(key) for key in keys]

    def _batch(self, keys: Sequence[str]) -> list[float]:
        before_us = self._watch.spent_us
        launches = [self._sampled(key) for key in keys]
        waiting = lambda place: self._announce(keys[place])  # noqa: E731
        samples = self._watch.round(launches, self._refresh, waiting, flushes=self._in_a_row is None)
        self.spent_us += self._watch.spent_us - before_us
        return [sample / (self._launches_a_sample * (self._in_a_row or 1)) for sample in samples]

    def _sampled(self, key: str) -> Launch:
        """Return the function that one sample times: a launch, or several in a row."""
        launch, times = self._launches[key], self._launches_a_sample

        def in_a_row() -> None:
            for _ in range(times):
                launch()

        return launch if times == 1 else in_a_row

    def _first(self, key: str) -> float:
        """Take the first sample of a key, without the time to load its code."""
        self._announce(key)
        # A graph, which makes launches in a row, is loaded by its first replay.
        if has_run := self._in_a_row is not None or not self._load_code(key):
            self._launches[key]()
        sample = self._batch([key])[0]
        self.spent_us += sample * (self._in_a_row or 1) if has_run else 0.0
        if self._refresh is not None and not self._loaded:
            self._launches_a_sample = min(MOST_LAUNCHES, math.ceil(LONG_US / sample))
            sample = self._batch([key])[0]
        self._loaded.add(key)
        return sample


class Several:
    """A runner over another one, which has a launch of each candidate on each variation of the inputs.

    A loss is a candidate's time on some inputs over the best time of any candidate on these, by the first samples.
    A sample is the time that the candidate's worst loss would mean on the ordinary inputs, so strategies need not know
    of other inputs.

    Args:
        runner: takes the times, by keys and by those of :func:`tilekern.tuning.measure.tasks.on`.
        candidates: the keys with such launches; others are timed on ordinary inputs only.
        variations: the names of the variations.
    """

    def __init__(self, runner: Runner, candidates: Container[str], variations: Sequence[str]) -> None:
        self._runner, self._candidates, self._variations = runner, candidates, variations
        # By the name of a variation, None for ordinary inputs: samples of each key, and the best time.
        self._samples_us: dict[str | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._best_us: dict[str | None, float] = {}

    @property
    def spent_us(self) -> float:
        """GPU time so far."""
        return self._runner.spent_us

    def round(self, keys: Sequence[str]) -> list[float]:
        """Take a sample of each key in microseconds, on the scale of the ordinary inputs."""
        if not self._variations:
            return self._runner.round(keys)
        names = [(key, name) for key in keys for name in self._inputs_of(key)]
        taken = self._runner.round([key if name is None else on(key, name) for key, name in names])
        found: list[dict[str | None, float]] = [{} for _ in keys]
        places = (place for place, key in enumerate(keys) for _ in self._inputs_of(key))
        for place, (key, name), time_us in zip(places, names, taken, strict=True):
            found[place][name] = time_us
            self._samples_us[name][key].append(time_us)
        if not self._best_us:
            of_candidates = [times for key, times in zip(keys, found, strict=True) if key in self._candidates]
            self._best_us = {name: min(times[name] for times in of_candidates) for name in (None, *self._variations)}
        best_us = self._best_us
        return [max(time_us * best_us[None] / best_us[name] for name, time_us in times.items()) for times in found]

    def _inputs_of(self, key: str) -> tuple[str | None, ...]:
        return (None, *self._variations) if key in self._candidates else (None,)

    def told(self, timings: Mapping[str, Timing]) -> dict[str, Timing]:
        """Return a strategy's timings with the times on the ordinary inputs and on the variations."""
        return {key: self._told(key, timing) for key, timing in timings.items()}

    def _told(self, key: str, timing: Timing) -> Timing:
        if not self._variations or key not in self._candidates:
            return timing
        own = Timing.of(self._samples_us[None][key], timing.left, timing.behind)
        return replace(own, on={name: statistics.median(self._samples_us[name][key]) for name in self._variations})
