import pytest
import torch
from spec_samples import both_defaults, launched
from transformers.generation import logits_process as processors

from tilekern.kernels.sample import GREEDY, SAMPLE, power, sample_by_torch, share, uniform

VOCABULARY = 700


def parameters(rows, **given):
    """Return inputs without logits: no filter, and positions that differ."""
    kinds = {"top_k": torch.int32, "seed": torch.int64}
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7} | given
    found = {name: torch.full((1,), value, dtype=kinds.get(name, torch.float32)) for name, value in usual.items()}
    return found | {"positions": torch.arange(rows)}


def kept(logits, **given):
    """Return which tokens the draws of a row of logits give; the first ones also by the kernel."""
    ids = sample_by_torch(logits.expand(300, -1), **parameters(300, **given))
    problem = SAMPLE.problem(rows=2, vocabulary=logits.numel(), dtype="float32")
    inputs = {"logits": logits.expand(2, -1).contiguous(), **parameters(2, **given)}
    assert torch.equal(launched(SAMPLE, problem, SAMPLE.generic(problem), inputs, 1)["ids"], ids[:2])
    return set(ids.tolist())


def test_the_generator_is_philox():
    """The known answers of Salmon et al.: Random123's kat_vectors for philox4x32-10."""
    found = uniform(torch.tensor([0, -1]), torch.tensor([0, 0]))
    assert [int(word[0]) for word in found] == [0x6627E8D5, 0xE169C58D]


def test_powers_are_those_of_two():
    exponents = torch.arange(0, 63 * 2**25, 99991)
    expected = 2.0 ** (43 - exponents.double() / 2**25)
    found = power(exponents).double()
    assert ((found - expected).abs() <= 2e-7 * expected + 1).all()
    assert int(power(torch.tensor(0))) == 2**43


def test_a_share_is_exact():
    most = (1 << 31) - 1
    for total, high, low in ((1 << 62, most, most), (12345678901234567, 987654321, 123456789), (1, most, most)):
        expected = total * ((high << 31) + low) >> 62
        assert int(share(*(torch.tensor(x) for x in (total, high, low)))) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_k": 2}, {0, 1, 2}),  # 1 and 2 are equal
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0, 1, 2}),  # of e^1, e^0.5, e^0.5, 1, e^-1: 0.40 of the mass, then 0.24 each
        ({"top_p": 0.35}, {0}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.85}, {0, 1, 2}),  # without the last the three have 0.86
        ({"temperature": 0.01}, {0}),
        ({"temperature": 0.0}, {0}),
    ],
)
def test_tokens_that_are_kept(given, expected):
    assert kept(torch.tensor([1.0, 0.5, 0.5, 0.0, -1.0]), **given) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_give_the_ids_of_torch(dtype):
    """Not within a tolerance: each id is the same."""
    problem = SAMPLE.problem(rows=12, vocabulary=VOCABULARY, dtype=dtype)
    inputs = SAMPLE.inputs(problem, torch.Generator().manual_seed(1), "cpu")
    expected = sample_by_torch(**inputs)
    assert len(expected.unique()) > 5
    for config in both_defaults(SAMPLE, problem):
        assert torch.equal(launched(SAMPLE, problem, config, inputs)["ids"], expected)


ROWS = torch.tensor([
    [0.0, 3.0, -1.0, 3.0],
    [0.0, float("nan"), float("inf"), float("nan")],
    [float("-inf")] * 4,
    [-0.0, -1.0, 0.0, -2.0],
    [1.0, float("inf"), 2.0, float("inf")],
])  # fmt: skip


def test_greedy_and_rows_that_have_no_distribution():
    problem = GREEDY.problem(rows=5, vocabulary=4, dtype="float32")
    for config in both_defaults(GREEDY, problem):
        assert launched(GREEDY, problem, config, {"logits": ROWS})["ids"].tolist() == [1, 1, 0, 0, 1]
        drawn = launched(SAMPLE, problem, config, {"logits": ROWS, **parameters(5)})["ids"].tolist()
        assert drawn[1:3] == [1, 0]
        assert drawn[4] == 1


@pytest.mark.parametrize(
    ("given", "processor"),
    [
        ({"top_k": 20}, processors.TopKLogitsWarper(20)),
        ({"top_p": 0.8}, processors.TopPLogitsWarper(0.8)),
        ({"min_p": 0.05}, processors.MinPLogitsWarper(0.05)),
    ],
)
def test_the_tokens_kept_are_those_of_transformers(given, processor):
    logits = 3 * torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    expected = processor(None, processors.TemperatureLogitsWarper(2.0)(None, logits.clone())).isfinite()[0]
    ids = sample_by_torch(logits.expand(20000, -1), **parameters(20000, temperature=2.0, **given))
    assert torch.equal(ids.unique(), expected.nonzero()[:, 0])


def test_draws_have_the_distribution():
    """Chi-squared over 64 tokens: below 103 with a probability of 0.999."""
    logits = 1.5 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    draws = 20000
    ids = sample_by_torch(logits.expand(draws, -1), **parameters(draws, temperature=0.9))
    expected = draws * (logits / 0.9).double().softmax(0)
    assert float(((ids.bincount(minlength=64) - expected).square() / expected).sum()) < 103
