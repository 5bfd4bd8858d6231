"""greedy in parts: the tokens of the kernel of one block a row, whatever the stretches, the rows and the grid."""

import pytest
import torch
from spec_samples import both_defaults, configs, launched

from tilekern.kernels.greedy import JOIN, PARTS, STRETCH, stretches_of
from tilekern.kernels.sample import GREEDY

INFINITY, NAN = float("inf"), float("nan")
# One stretch, the edges of two, and several with a short last one.
VOCABULARIES = (1, 97, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH + 5)


def chosen(logits, blocks=None, config=None):
    """The ids by both kernels, by their default configs or on a grid of so many blocks."""
    rows, vocabulary = logits.shape
    dtype = str(logits.dtype).removeprefix("torch.")
    problem = PARTS.problem(rows=rows, vocabulary=vocabulary, dtype=dtype)
    one = config or both_defaults(PARTS, problem)[blocks is not None]
    parts = launched(PARTS, problem, one, {"logits": logits}, blocks)
    problem = JOIN.problem(rows=rows, stretches=stretches_of(vocabulary))
    return launched(JOIN, problem, both_defaults(JOIN, problem)[blocks is not None], parts, blocks)["ids"]


def with_tops(rows, vocabulary, dtype):
    """Logits with many ties, also across stretches, and rows of numbers that have an order of their own."""
    logits = (4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).round()
    logits[1] = -INFINITY
    logits[2] = logits[2].clamp(max=-1)
    logits[3, [vocabulary // 3, vocabulary // 2, -1]] = NAN
    logits[4, [vocabulary // 2, -1]] = INFINITY
    logits[5] = -0.0
    logits[5, vocabulary // 2] = 0.0
    logits[6, -1] = 99.0
    logits[7, 0] = -NAN
    return logits.to(dtype)


def first_of_largest(logits):
    """By torch's argmax on the CPU, which returns the first of equal numbers, and NaN above all."""
    return logits.float().argmax(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_are_those_of_torch_and_of_one_block_a_row(vocabulary, dtype):
    logits = with_tops(9, vocabulary, dtype)
    expected = first_of_largest(logits)
    problem = GREEDY.problem(rows=9, vocabulary=vocabulary, dtype=str(dtype).removeprefix("torch."))
    assert torch.equal(launched(GREEDY, problem, GREEDY.generic(problem), {"logits": logits})["ids"], expected)
    for blocks in (None, 1, 7, 64):
        assert torch.equal(chosen(logits, blocks), expected), blocks


def test_all_configs_and_any_layout_give_the_same():
    logits = with_tops(8, 2 * STRETCH + 3, torch.float32)
    expected = first_of_largest(logits)
    wide = torch.full((8, 3 * STRETCH), INFINITY)
    wide[:, : logits.shape[1]] = logits
    problem = PARTS.problem(rows=8, vocabulary=logits.shape[1], dtype="float32")
    for config in configs(PARTS, problem):
        assert torch.equal(chosen(wide[:, : logits.shape[1]], config=config), expected)


def test_a_row_has_the_same_token_in_any_batch():
    logits = with_tops(9, 2 * STRETCH + 3, torch.bfloat16)
    together = chosen(logits)
    assert torch.equal(torch.cat([chosen(logits[n : n + 1]) for n in range(9)]), together)


@pytest.mark.parametrize("stretches", [1, 25, 75, 128, 129, 300])
def test_a_join_of_any_number_of_parts(stretches):
    """Parts are told from what is read beyond them: all of these are below 0."""
    problem = JOIN.problem(rows=3, stretches=stretches)
    generator = torch.Generator().manual_seed(stretches)
    parts = -torch.randint(1, 1 << 62, (3, stretches), generator=generator)
    expected = 0x7FFFFFFF - (parts.amax(1) & 0xFFFFFFFF)
    for config in configs(JOIN, problem):
        assert torch.equal(launched(JOIN, problem, config, {"parts": parts})["ids"], expected)
