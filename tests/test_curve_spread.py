"""The test by which patched trainings are held against unpatched ones can fail, and does not where nothing differs."""

import pytest
import torch
from curve_spread import rank_of_division

STEPS, WINDOW, CURVES = 200, 10, 6
DIVISIONS = 462


def trainings(count, seed):
    """Losses that fall, each curve off by a slow stray of its own, [count, STEPS]."""
    noise = torch.randn(count, STEPS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    strays = noise.cumsum(1) * 0.01 / STEPS**0.5
    return 5 * torch.exp(-torch.arange(STEPS, dtype=torch.float64) / 60) + 0.5 + strays


def test_the_rank_of_groups_that_do_not_differ_is_any():
    ranks = torch.tensor([rank_of_division(*trainings(2 * CURVES, seed).split(CURVES), WINDOW) for seed in range(400)])
    assert float(ranks.min()) >= 1 / DIVISIONS
    for share in (0.05, 0.5, 0.9):
        # Four standard deviations of a share of 400.
        assert float((ranks <= share).double().mean()) == pytest.approx(
            share, abs=4 * (share * (1 - share) / 400) ** 0.5
        )


@pytest.mark.parametrize("defect", [lambda curves: curves + 0.03, lambda curves: curves.roll(1, 1)])
def test_a_group_that_differs_as_a_whole_is_told_apart(defect):
    one, other = trainings(2 * CURVES, 0).split(CURVES)
    assert rank_of_division(defect(one), other, WINDOW) == pytest.approx(1 / DIVISIONS)


def test_groups_of_two_sizes_are_divided_in_every_way():
    one, other = torch.zeros(1, 2) + 1, torch.zeros(3, 2)
    assert rank_of_division(one, other, 1) == pytest.approx(1 / 4)
    assert rank_of_division(other, one, 1) == pytest.approx(1 / 4)
    assert rank_of_division(other, torch.zeros(2, 2), 2) == pytest.approx(1.0)
