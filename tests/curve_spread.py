"""Test whether two groups of trainings that sum in different orders follow the same curve.

One curve against another tells little: what a rounding changes in a step shows in all the losses after it, and in the
steps where a model learns fastest a small lead or lag is a large gap. A group's mean curve strays less, and how much it
strays is known from the same curves divided otherwise.
"""

from __future__ import annotations

from itertools import combinations

import torch


def rank_of_division(one: torch.Tensor, other: torch.Tensor, window: int) -> float:
    """How many of the ways to divide all curves into groups of these sizes set them as far apart as this one, 0 to 1.

    The exact permutation test of the mean distance between the groups' mean curves (Fisher 1935, "The Design of
    Experiments", section 21): where both are drawn from the same trainings, a rank of r or less turns up with
    probability r. The least that it can be is one over the number of divisions, 1/462 for two groups of six.

    Args:
        one: losses [curves, steps].
        other: losses [curves, steps] to compare with.
        window: steps over which a curve is smoothed.
    """
    curves = torch.cat([one, other]).unflatten(1, (-1, window)).mean(2)
    count, first = len(curves), len(one)
    chosen = [c for c in combinations(range(count), first) if 2 * first != count or 0 in c]
    is_first = torch.zeros(len(chosen), count, dtype=curves.dtype)
    is_first[torch.arange(len(chosen))[:, None], torch.tensor(chosen)] = 1
    sums = is_first @ curves
    gaps = (sums / first - (curves.sum(0) - sums) / (count - first)).abs().mean(1)
    return float((gaps >= gaps[0] * (1 - 1e-9)).double().mean())
