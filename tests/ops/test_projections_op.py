"""Linear layers that share their input: which tensors are kept for the backward, and which gradients come of it."""

import itertools

import pytest
import torch

from tilekern.ops.gated_mlp import gated_mlp
from tilekern.ops.projections import projections

ROWS, INNER, OUT = 6, 10, (8, 4, 4)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("learns", list(itertools.product([False, True], repeat=4))[1:])
def test_inputs_of_frozen_weights_are_not_kept_and_gradients_are_those_of_layers(learns, biased):
    """As in torch's layers: under adapters elsewhere, q, k and v are frozen and their input is free."""
    torch.manual_seed(0)
    x, *weights = (
        torch.randn(rows, INNER, requires_grad=flag) for rows, flag in zip((ROWS, *OUT), learns, strict=True)
    )
    # One layer has none, and biases learn where their weights are frozen.
    biases = [torch.randn(n, requires_grad=not flag) for n, flag in zip(OUT[:2], learns[1:], strict=False)]
    biases = [*biases, None] if biased else []
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape[0]) or t, lambda t: t):
        results = projections(x, *weights, biases=biases)
    assert kept == [*[ROWS] * any(learns[1:]), *OUT * learns[0]]
    learning = [leaf for leaf in (x, *weights, *biases) if leaf is not None and leaf.requires_grad]
    given = biases or [None] * len(weights)
    apart = [torch.nn.functional.linear(x, *layer) for layer in zip(weights, given, strict=True)]
    torch.testing.assert_close(list(results), apart)
    slopes = [torch.randn_like(y) for y in results]
    ours = torch.autograd.grad(results, learning, slopes)
    read = [(z, slope) for z, slope in zip(apart, slopes, strict=True) if z.requires_grad]
    theirs = torch.autograd.grad([z for z, _ in read], learning, [slope for _, slope in read])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("call", [projections, gated_mlp], ids=lambda call: call.__name__)
def test_one_launch_casts_all_under_autocast(call):
    x, *weights = (torch.randn(rows, INNER, requires_grad=True) for rows in (ROWS, INNER, INNER, INNER))
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as profile:
        call(x, *weights)
    assert [event.name for event in profile.events()].count("aten::_foreach_copy_") == 1
