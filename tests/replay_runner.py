"""A runner over recorded measurements, so that strategies run with no GPU.

Each sample is a recorded median with noise as timings on a GPU have it: a drift that neighbours in time share (the
clocks), noise of the sample's own that is wider to the right, now and then an outlier, and the events' resolution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """Noise around a recorded median.

    Attributes:
        drift_share: the share of the variance that is the clocks' drift.
        drift_us: how long the drift takes to forget where it was.
        outliers: the probability of one.
        outlier_us: how much time one adds on average, or ``outlier_factor`` of the median where that is more.
        tick_us: the resolution of the events.
        flush_us: what the flush of the L2 cache before each launch takes.
    """

    drift_share: float = 0.3
    drift_us: float = 5_000.0
    outliers: float = 0.01
    outlier_us: float = 3.0
    outlier_factor: float = 0.1
    tick_us: float = 0.032
    flush_us: float = 24.0


class ReplayRunner:
    """Replays measurements.

    Args:
        medians_us: the recorded median of each key.
        spread: half the distance between the quartiles, as a share of the median.
        seed: two runners of one seed give the same samples.
        noise: what surrounds the medians.
        announce: called with each key before it runs.
    """

    def __init__(
        self, medians_us: Mapping[str, float], spread: float, seed: int, noise: Noise | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._medians_us, self._noise, self._announce = medians_us, noise or Noise(), announce
        self._random = random.Random(seed)
        deviation = spread / 0.6745  # of a normal distribution, whose quartiles these are
        self._drift_size = deviation * math.sqrt(self._noise.drift_share)
        self._own_size = deviation * math.sqrt(1 - self._noise.drift_share)
        self._drift = self._random.gauss()
        self.spent_us = 0.0
        self.launches = 0

    def round(self, keys: Sequence[str]) -> list[float]:
        """One sample of each key in microseconds."""
        return [self.sample(key) for key in keys]

    def sample(self, key: str) -> float:
        """One sample of a key in microseconds."""
        if self._announce:
            self._announce(key)
        noise, median_us, own = self._noise, self._medians_us[key], self._random.gauss()
        skewed = own * (1.25 if own > 0 else 0.75)
        time_us = median_us * math.exp(self._drift_size * self._drift + self._own_size * skewed)
        if self._random.random() < noise.outliers:
            time_us += self._random.expovariate(1.0) * max(noise.outlier_us, noise.outlier_factor * median_us)
        time_us = max(1, round(time_us / noise.tick_us)) * noise.tick_us
        self._advance(time_us + noise.flush_us)
        self.launches += 1
        return time_us

    def _advance(self, passed_us: float) -> None:
        """Let the drift wander: a first-order autoregression in GPU time."""
        kept = math.exp(-passed_us / self._noise.drift_us)
        self._drift = kept * self._drift + math.sqrt(1 - kept * kept) * self._random.gauss()
        self.spent_us += passed_us
