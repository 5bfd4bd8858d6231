"""In bfloat16 on the GPU small models learn by each loss and with experts as unpatched ones do, within their spread."""

import itertools

import experts_trainings
import loss_trainings
import pytest
import torch
from curve_spread import rank_of_division
from gpu_tolerances import TOLD_APART

import tilekern

SIZES = {
    "vocabulary": 2003, "hidden": 256, "sequences": 8, "tokens": 128, "learning_rate": 0.05, "device": "cuda",
    "dtype": torch.bfloat16,
}  # fmt: skip
OF_LOSSES = loss_trainings.Sizes(**SIZES, steps=100)
OF_EXPERTS = experts_trainings.Sizes(**SIZES, steps=200)
# The same sums, taken in another order and rounded otherwise. For losses sequences of each half change places, so that
# the pairs of preferences are kept.
ORDERS = [(*order, *(at + 4 for at in order)) for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 4)]
ANY_ORDERS = [torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(6)]
# Of the head's input: rows in another order have the same logits, which one product rounds otherwise than another. That
# difference is in all curves of a group, however small, and told the groups of losses apart that follow it for long.
FEATURES = [torch.randperm(256, generator=torch.Generator().manual_seed(seed)) for seed in range(len(ORDERS))]
# The roundings of the unpatched model with experts are those of its own implementations.
UNPATCHED = ("grouped_mm", "eager")
WINDOW = 10


def curves(name, fused):
    places = zip(ORDERS, FEATURES, strict=True)
    found = [loss_trainings.curve(name, fused=fused, sizes=OF_LOSSES, order=order, features=at) for order, at in places]
    return torch.stack(found)


@pytest.mark.parametrize("name", loss_trainings.LOSSES)
def test_the_curve_of_a_loss_is_torch_s_within_its_spread(name):
    kernel = loss_trainings.LOSSES[name][1]
    before = tilekern.stats()[kernel]["launches"]
    losses = curves(name, fused=True)
    assert tilekern.stats()[kernel]["launches"] == before + losses.numel()
    assert rank_of_division(losses, curves(name, fused=False), WINDOW) > TOLD_APART


@pytest.mark.parametrize("family", experts_trainings.FAMILIES)
def test_the_curve_with_experts_is_the_unpatched_one_s_within_its_spread(family):
    curve = experts_trainings.curve
    before = tilekern.stats()["experts_gate_backward"]["launches"]
    ours = torch.stack([curve(family, "tilekern", OF_EXPERTS, "tilekern", order) for order in ANY_ORDERS])
    launched = tilekern.stats()["experts_gate_backward"]["launches"] - before
    assert launched == experts_trainings.LAYERS * ours.numel()
    theirs = [curve(family, UNPATCHED[n % 2], OF_EXPERTS, "eager", order) for n, order in enumerate(ANY_ORDERS)]
    assert ours[:, -WINDOW:].mean() < 0.8 * ours[:, 0].mean(), "the training lowers the loss"
    assert rank_of_division(ours, torch.stack(theirs), WINDOW) > TOLD_APART
