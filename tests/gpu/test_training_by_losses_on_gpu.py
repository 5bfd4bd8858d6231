"""In bfloat16 on the GPU a small Llama learns by each loss as it does by torch's formula, within their own spread."""

import itertools

import pytest
import torch
from curve_spread import rank_of_division
from loss_trainings import LOSSES, Sizes, curve

import tilekern

SIZES = Sizes(
    vocabulary=2003, hidden=256, sequences=8, tokens=128, steps=100, learning_rate=0.05, device="cuda",
    dtype=torch.bfloat16,
)  # fmt: skip
# Sequences of each half in another order: the same sums, rounded otherwise, and the pairs of preferences are kept.
ORDERS = [(*order, *(at + 4 for at in order)) for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 4)]
WINDOW = 10
# Of the head's input: rows in another order have the same logits, which one product rounds otherwise than another. That
# difference is in all curves of a group, however small, and told the groups of losses apart that follow it for long.
FEATURES = [torch.randperm(SIZES.hidden, generator=torch.Generator().manual_seed(seed)) for seed in range(len(ORDERS))]
# Groups that the rank of a division tells apart by chance once in 462 times.
TOLD_APART = 1 / 400


def curves(name, fused):
    places = zip(ORDERS, FEATURES, strict=True)
    return torch.stack([curve(name, fused=fused, sizes=SIZES, order=order, features=at) for order, at in places])


@pytest.mark.parametrize("name", LOSSES)
def test_the_curve_is_torch_s_within_its_spread(name):
    kernel = LOSSES[name][1]
    before = tilekern.stats()[kernel]["launches"]
    losses = curves(name, fused=True)
    assert tilekern.stats()[kernel]["launches"] == before + losses.numel()
    assert rank_of_division(losses, curves(name, fused=False), WINDOW) > TOLD_APART
