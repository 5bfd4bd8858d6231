"""Candidates by samples taken in rounds: typical times without the clocks' drift, and how certain they are.

The logarithm of a sample is modelled as a candidate's typical time, plus an effect of its round that is common to all
who ran in it (the clocks), plus noise. The first two are fitted by medians and trimmed means in turn (after Tukey's
median polish), so that the heavy right tail of timings moves neither. Where the clocks drift within a round, typical
times come from neighbours in time instead (:mod:`tilekern.tuning.strategies.drift`). The noise is pooled over the
candidates of a problem, as few samples of each say little of it, and shrunk towards what is usual (as in Smyth's
moderated t, 2004, doi:10.2202/1544-6115.1027); quantiles are Student's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilekern.tuning.strategies.drift import DEVIATION, between_neighbours

# The usual noise of a sample on an H200, with the L2 cache flushed: of the records of Qwen3-8B the quartiles lie 0.2
# to 0.8 us from the median whatever the time, and 0.1 to 3 % where that is more. It weighs as so many samples.
USUAL_US, USUAL_SHARE, USUAL_WEIGHT = 0.6, 0.01, 4
# The resolution of CUDA events there.
TICK_US = 0.032
# One sample is taken for an outlier unless it is behind by this factor and so many microseconds, and then it is enough.
HOPELESS_FACTOR, HOPELESS_US = 1.25, 5.0
# The standard error of a trimmed mean of n values is that of a mean times this, for normal noise.
TRIMMED = 1.1
# The clocks drift within rounds where neighbours leave this much less noise; that is looked into where there is more
# noise than so many times the usual.
CALMER, NOISY = 0.9, 1.2
# How often effects and typical times are fitted in turn.
SWEEPS = 3
# The probability that any of a problem's candidates is misjudged.
ERROR = 0.05


@dataclass(frozen=True)
class Standing:
    """The knowledge by now, times as natural logarithms of microseconds.

    Attributes:
        typical: by key, the typical time.
        samples: by key, how many there are.
        noise: standard deviation of one sample.
        freedom: degrees of freedom that ``noise`` was estimated with.
    """

    typical: Mapping[str, float]
    samples: Mapping[str, int]
    noise: float
    freedom: float

    def doubt(self, key: str, leader: str, rivals: int) -> float:
        """By how much a candidate may be faster than the leader at most (a logarithm; below 0 it is slower).

        Args:
            key: the candidate.
            leader: the leader.
            rivals: how many candidates share the probability of an error.
        """
        gap = self.typical[key] - self.typical[leader]
        if self.samples[key] == 1:
            return math.log(HOPELESS_FACTOR + HOPELESS_US / math.exp(self.typical[leader])) - gap
        error = math.sqrt(1 / self.samples[key] + 1 / self.samples[leader]) * TRIMMED * self.noise
        return student_quantile(1 - ERROR / max(1, rivals), self.freedom) * error - gap


def standing(rounds: Sequence[Mapping[str, float]]) -> Standing:
    """Fit the model to rounds of samples in microseconds by key, each in the order of time.

    A round of one says nothing beside larger ones.
    """
    rounds = [times for times in rounds if len(times) > 1] or rounds
    values: dict[str, list[tuple[int, float]]] = {}
    for number, times in enumerate(rounds):
        for key, time_us in times.items():
            values.setdefault(key, []).append((number, math.log(time_us)))
    # Of the first samples most are of one round, so that the effects of the others are seen against that.
    typical = {key: found[0][1] for key, found in values.items()}
    for _ in range(SWEEPS):
        effects = _effects(values, typical, len(rounds))
        typical = {
            key: trimmed_mean([value - effects[number] for number, value in found]) for key, found in values.items()
        }
    residuals = [
        abs(value - effects[number] - typical[key])
        for key, found in values.items()
        if len(found) > 1
        for number, value in found
    ]
    samples = {key: len(found) for key, found in values.items()}
    fitted = sum(n > 1 for n in samples.values()) + len(rounds) - 1
    freedom = max(1, len(residuals) - fitted) if residuals else 0
    seen = DEVIATION * statistics.median(residuals) * math.sqrt(len(residuals) / freedom) if residuals else 0.0
    fastest = min(typical.values())
    if seen > NOISY * _usual(fastest) and (near := between_neighbours(rounds)) and near.noise < CALMER * seen:
        level = statistics.median(typical[key] - near.typical[key] for key in typical)
        typical = {key: level + near.typical[key] for key in typical}
        seen, freedom = near.noise, near.freedom
    return Standing(typical, samples, _shrunk(seen, freedom, fastest), USUAL_WEIGHT + freedom)


def _effects(
    values: Mapping[str, Sequence[tuple[int, float]]], typical: Mapping[str, float], rounds: int
) -> list[float]:
    """The common effect of each round's samples; nothing in rounds of one."""
    left: list[list[float]] = [[] for _ in range(rounds)]
    for key, found in values.items():
        for number, value in found:
            left[number].append(value - typical[key])
    return [statistics.median(common) if len(common) > 1 else 0.0 for common in left]


def _usual(fastest: float) -> float:
    """The usual noise of a sample, where the fastest takes so long (a logarithm of microseconds)."""
    return math.hypot(USUAL_SHARE, USUAL_US / math.exp(fastest))


def _shrunk(seen: float, freedom: float, fastest: float) -> float:
    """The standard deviation of a sample: what was seen, shrunk to the usual, and the clock's resolution."""
    shrunk = (USUAL_WEIGHT * _usual(fastest) ** 2 + freedom * seen**2) / (USUAL_WEIGHT + freedom)
    return math.hypot(math.sqrt(shrunk), TICK_US / math.sqrt(12) / math.exp(fastest))


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean of the middle half; of three values the middle one, of two or one all."""
    cut = 1 if len(values) == 3 else len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def student_quantile(probability: float, freedom: float) -> float:
    """A quantile of Student's distribution, by the first terms of its expansion (Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(probability)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
