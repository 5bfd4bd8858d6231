"""Small models with experts, patched, learn as they do unpatched, step for step."""

import pytest
import torch
from experts_trainings import FAMILIES, LAYERS, Sizes, curve

from tilekern.runtime.dispatch import counters

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.nightly
def test_the_curve_is_the_unpatched_one_s(family):
    sizes = Sizes()
    before = counters("experts_gate_backward").launches
    losses = curve(family, "tilekern", sizes)
    assert counters("experts_gate_backward").launches == before + LAYERS * sizes.steps
    assert losses.std() > 1e-2, "the training moves the loss"
    torch.testing.assert_close(losses, curve(family, "grouped_mm", sizes), rtol=1e-5, atol=1e-5)
