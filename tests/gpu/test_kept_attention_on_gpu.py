"""Checkpoints that keep attention's results, on a small Qwen3: bits, launches and memory."""

import functools

import gpu_training
import pytest
import torch

import tilekern
from tilekern.runtime.dispatch import counters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]
# Of each token and layer 8 heads of 128 numbers of two bytes, and a float32 for each head.
KEPT = gpu_training.ROWS * gpu_training.TOKENS * 4 * (8 * 128 * 2 + 8 * 4)
PLAIN = {"use_reentrant": False}
KEEP = {"use_reentrant": False, "context_fn": tilekern.keep_attention}


@pytest.fixture
def model():
    tilekern.apply()
    yield gpu_training.make("tilekern")
    tilekern.reset()


def step(model):
    """The loss and each gradient, how often attention's forward ran, and the bytes that the forward left."""
    ids = gpu_training.batches(1)[0]
    model.zero_grad()
    before, held = counters("attention_forward").launches, torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    held = torch.cuda.memory_allocated() - held
    loss.backward()
    found = [loss.detach(), *(x.grad.clone() for x in model.parameters())]
    return found, counters("attention_forward").launches - before, held


def check(found, wanted):
    assert all(map(torch.equal, found, wanted))


def test_gradients_keep_their_bits_and_attention_runs_once(model):
    step(model)
    wanted, once, all_kept = step(model)
    model.gradient_checkpointing_enable(PLAIN)
    found, twice, inputs_kept = step(model)
    check(found, wanted)
    model.gradient_checkpointing_enable(KEEP)
    found, number, held = step(model)
    check(found, wanted)
    assert (number, twice) == (once, 2 * once)
    assert inputs_kept + 0.9 * KEPT < held < inputs_kept + 1.2 * KEPT < all_kept


def test_with_inputs_of_layers_on_the_host(model):
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers does not offload what checkpoints keep")
    step(model)
    wanted, once, _ = step(model)
    held = []
    for keep in (tilekern.keep_attention, functools.partial(tilekern.keep_attention, offload=True)):
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep}, offload=True)
        found, number, left = step(model)
        check(found, wanted)
        assert number == once
        held.append(left)
    assert held[0] - held[1] > 0.9 * KEPT


def test_a_captured_step_has_the_same_bits(model):
    step(model)
    wanted, _, _ = step(model)
    model.gradient_checkpointing_enable(KEEP)
    tilekern.graphed(model)
    for _ in range(4):
        check(step(model)[0], wanted)
