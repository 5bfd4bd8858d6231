"""sample and greedy: the same draw wherever a row stands, parameters by rows, and what they refuse."""

import pytest
import torch

from tilekern.ops import greedy, sample

BATCH, VOCABULARY = 5, 100


def logits_of(batch=BATCH, vocabulary=VOCABULARY):
    return 3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(0))


def test_a_row_draws_the_same_in_any_batch():
    logits, positions, seed = logits_of(), torch.arange(BATCH) * 3, torch.arange(BATCH) + 100
    whole = sample(logits, top_k=40, top_p=0.95, seed=seed, positions=positions)
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(1))
    moved = sample(logits[order], top_k=40, top_p=0.95, seed=seed[order], positions=positions[order].int())
    assert torch.equal(moved, whole[order])
    for row in range(BATCH):
        alone = sample(logits[row][None], top_k=40, top_p=0.95, seed=int(seed[row]), positions=positions[row][None])
        assert int(alone) == int(whole[row])
    assert len(whole.unique()) > 1


def test_parameters_of_rows_are_those_of_single_calls():
    logits, positions = logits_of(3), torch.tensor([5, 6, 7])
    tensors = {
        "temperature": torch.tensor([0.5, 1.0, 2.0]), "top_k": torch.tensor([3, 0, 50]),
        "top_p": torch.tensor([1.0, 0.5, 0.9]), "min_p": torch.tensor([0.1, 0.0, 0.0]), "seed": torch.tensor([1, 2, 3]),
    }  # fmt: skip
    mixed = sample(logits, **tensors, positions=positions)
    for row in range(3):
        numbers = {name: x[row].item() for name, x in tensors.items()}
        assert int(sample(logits[row][None], **numbers, positions=positions[row][None])) == int(mixed[row])


def test_greedy_is_argmax():
    logits = logits_of().requires_grad_()
    assert torch.equal(greedy(logits), logits.argmax(1))
    assert torch.equal(greedy(logits.view(1, BATCH, 1, -1)), logits.argmax(1).view(1, BATCH, 1))
    assert torch.equal(torch.func.vmap(greedy)(logits.view(1, BATCH, -1)), logits.argmax(1)[None])
    assert torch.equal(sample(logits, temperature=0, seed=0, positions=torch.zeros(BATCH).int()), logits.argmax(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"positions": torch.arange(3)}, r"positions must have the shape \[5\]"),
        ({"positions": torch.rand(BATCH)}, "positions must be of an integer dtype"),
        ({"seed": torch.arange(BATCH, device="meta")}, "seed is on meta"),
        ({"logits": torch.rand(BATCH, 2, 3)}, r"logits must be \[batch, vocabulary\]"),
        ({"logits": torch.rand(BATCH, 0)}, "the vocabulary of logits must not be empty"),
    ],
)
def test_what_is_refused(changes, message):
    given = {"logits": logits_of(), "seed": 0, "positions": torch.arange(BATCH)} | changes
    with pytest.raises(ValueError, match=message):
        sample(given.pop("logits"), **given)


def test_tracing_keeps_the_op():
    def step(logits, positions):
        return sample(logits, top_k=5, seed=3, positions=positions)

    logits, positions = logits_of(), torch.arange(BATCH)
    traced = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(traced(logits, positions), step(logits, positions))
    assert step(logits.to("meta"), positions.to("meta")).shape == (BATCH,)
    assert step(logits[:0], positions[:0]).shape == (0,)
