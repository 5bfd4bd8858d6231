"""In bfloat16 on the GPU small models with experts learn patched as they do unpatched, within their own spread."""

import pytest
import torch
from curve_spread import rank_of_division
from experts_trainings import FAMILIES, LAYERS, Sizes, curve

import tilekern

SIZES = Sizes(
    vocabulary=2003, hidden=256, sequences=8, tokens=128, steps=200, learning_rate=0.05, device="cuda",
    dtype=torch.bfloat16,
)  # fmt: skip
# The same sums, taken in another order and rounded otherwise.
ORDERS = [torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(6)]
# The roundings of the unpatched model are those of its own implementations.
UNPATCHED = ("grouped_mm", "eager")
WINDOW = 10
# Groups that the rank of a division tells apart by chance once in 462 times.
TOLD_APART = 1 / 400


@pytest.mark.parametrize("family", FAMILIES)
def test_the_curve_is_the_unpatched_one_s_within_its_spread(family):
    before = tilekern.stats()["experts_gate_backward"]["launches"]
    ours = torch.stack([curve(family, "tilekern", SIZES, "tilekern", order) for order in ORDERS])
    assert tilekern.stats()["experts_gate_backward"]["launches"] == before + LAYERS * ours.numel()
    theirs = [curve(family, UNPATCHED[n % 2], SIZES, "eager", order) for n, order in enumerate(ORDERS)]
    assert ours[:, -WINDOW:].mean() < 0.8 * ours[:, 0].mean(), "the training lowers the loss"
    assert rank_of_division(ours, torch.stack(theirs), WINDOW) > TOLD_APART
