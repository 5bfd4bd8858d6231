"""Typical times where the clocks drift within a round: each sample is compared with its neighbours in time.

A GPU at its power limit changes its clocks within tens of milliseconds. On an H200 samples of a matrix product of 4 ms
spread by 2 to 4 %, and the differences of neighbours by 0.3 %. So typical times are fitted to those differences alone,
by least squares with weights that bound what an outlier does (Huber 1964, doi:10.1214/aoms/1177703732).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# What weights make of the differences is settled after so many turns; those beyond so many deviations weigh less.
TURNS, BOUND = 5, 1.5
# 1.4826 times the median of absolute residuals is a standard deviation, where noise is normal.
DEVIATION = 1.4826


class Fit(NamedTuple):
    """Typical times as logarithms, up to a constant, the deviation of one sample, and its degrees of freedom."""

    typical: dict[str, float]
    noise: float
    freedom: int


def between_neighbours(rounds: Sequence[Mapping[str, float]]) -> Fit | None:
    """Fit typical times to the differences of samples that follow one another in a round.

    Args:
        rounds: samples in microseconds by key, each in the order of time.

    Returns:
        The fit; None where the differences do not tie all keys together, or leave nothing to tell the noise by.
    """
    samples = Counter(key for times in rounds for key in times)
    places = {key: place for place, key in enumerate(samples)}
    steps = [step for times in rounds for step in itertools.pairwise(times.items())]
    pairs = [(before, after) for (before, _), (after, _) in steps]
    differences = np.array([math.log(after_us / before_us) for (_, before_us), (_, after_us) in steps])
    design = np.zeros((len(pairs), len(places)))
    for row, (before, after) in enumerate(pairs):
        design[row, places[before]], design[row, places[after]] = -1.0, 1.0
    # A key with one sample is fitted to it whatever the noise.
    telling = np.array([min(samples[before], samples[after]) > 1 for before, after in pairs], dtype=bool)
    freedom = int(telling.sum()) - max(0, sum(n > 1 for n in samples.values()) - 1)
    if freedom < 1 or np.linalg.matrix_rank(design) < len(places) - 1:
        return None
    typical, deviation = _bounded(design, differences, telling, freedom)
    return Fit(dict(zip(places, typical.tolist(), strict=True)), deviation / math.sqrt(2), freedom)


def _bounded(
    design: NDArray[np.float64], values: NDArray[np.float64], telling: NDArray[np.bool_], freedom: int
) -> tuple[NDArray[np.floating[Any]], float]:
    """The fit with bounded influence, and the standard deviation of a value."""
    weights = np.ones(len(values))
    widened = DEVIATION * math.sqrt(int(telling.sum()) / freedom)
    for _ in range(TURNS):
        roots = np.sqrt(weights)
        fitted = np.linalg.lstsq(design * roots[:, None], values * roots, rcond=None)[0]
        residuals = np.abs(values - design @ fitted)
        deviation = widened * float(np.median(residuals[telling]))
        weights = np.minimum(1.0, BOUND * deviation / np.maximum(residuals, 1e-12))
        weights = np.maximum(weights, 1e-6)
    return fitted, deviation
