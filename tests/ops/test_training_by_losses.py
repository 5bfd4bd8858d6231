"""A small Llama learns by each loss as it does by torch's formula, step for step."""

import pytest
import torch
from loss_trainings import LOSSES, curve

import tilekern


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.share(4)
@pytest.mark.slow
def test_the_curve_is_torch_s(name):
    kernel = LOSSES[name][1]
    before = tilekern.stats()[kernel]["launches"]
    losses = curve(name, fused=True)
    assert tilekern.stats()[kernel]["launches"] == before + len(losses)
    assert losses.std() > 1e-3, "the training moves the loss"
    torch.testing.assert_close(losses, curve(name, fused=False), rtol=1e-5, atol=1e-5)
