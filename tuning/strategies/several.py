"""Candidates that are timed on several inputs of one problem: each is as good as the worst of its losses.

A loss is a candidate's time on some inputs by the best time of any on these. A sample is the time that a candidate of
such a loss would have on the ordinary inputs, so a strategy that knows nothing of other inputs ranks by it. The best
times are those of the first samples that all candidates gave.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from tilekern.tuning.measure.tasks import on
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.strategies import Runner


class Several:
    """A runner over another one, which has a launch of each candidate on each variation of the inputs.

    Args:
        runner: takes the times, by keys and by what :func:`tilekern.tuning.measure.tasks.on` makes of them.
        candidates: the keys that have such launches; others are timed as they are.
        variations: the names of the variations; with none each key is timed as it is.
    """

    def __init__(self, runner: Runner, candidates: Container[str], variations: Sequence[str]) -> None:
        self._runner, self._candidates, self._variations = runner, candidates, variations
        # By the name of a variation, and None for the ordinary inputs: samples of each key, and the best time.
        self._samples_us: dict[str | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._best_us: dict[str | None, float] = {}

    @property
    def spent_us(self) -> float:
        """GPU time so far."""
        return self._runner.spent_us

    def round(self, keys: Sequence[str]) -> list[float]:
        """A sample of each key in microseconds, on the scale of the ordinary inputs."""
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
        return [self._worst(times) for times in found]

    def _inputs_of(self, key: str) -> tuple[str | None, ...]:
        return (None, *self._variations) if key in self._candidates else (None,)

    def _worst(self, times_us: Mapping[str | None, float]) -> float:
        return max(time_us * self._best_us[None] / self._best_us[name] for name, time_us in times_us.items())

    def told(self, timings: Mapping[str, Timing]) -> dict[str, Timing]:
        """Timings of a strategy, with the times on the ordinary inputs in place of its samples, and those on others."""
        return {key: self._told(key, timing) for key, timing in timings.items()}

    def _told(self, key: str, timing: Timing) -> Timing:
        if not self._variations or key not in self._candidates:
            return timing
        own = Timing.of(self._samples_us[None][key], timing.left, timing.behind)
        return replace(own, on={name: statistics.median(self._samples_us[name][key]) for name in self._variations})
