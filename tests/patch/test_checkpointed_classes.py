"""Classes made of a patched one, which hold its forward in transformers' wrapper for checkpoints."""

import torch

from tilekern.patch.checkpointing import checkpointed, wraps_around
from tilekern.patch.ledger import Ledger


def made():
    """A layer, and a class made of it whose wrapper is around the layer's forward."""

    class Layer(torch.nn.Module):
        gradient_checkpointing = False

        def forward(self):
            return "its own"

    return Layer, type("Wrapped", (Layer,), {"forward": checkpointed(Layer.forward)})


def ours(self):
    return "ours"


def test_they_follow_a_patch_and_its_undoing():
    layer, wrapped = made()
    original, ledger = layer.forward, Ledger()
    ledger.put("op", "layer.forward", layer, "forward", ours)
    assert wraps_around(vars(wrapped)["forward"], ours)
    assert (layer()(), wrapped()()) == ("ours", "ours")
    ledger.held(layer, "forward").undo()
    assert wraps_around(vars(wrapped)["forward"], original)
    assert (layer()(), wrapped()()) == ("its own", "its own")
