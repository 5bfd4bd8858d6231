"""Batches: a sequence gets what it gets alone, whoever shares the batch and whatever ran before on the engine."""

from dataclasses import replace
from shutil import copyfile

import pytest
import torch
from emulated import read
from safetensors.torch import load_file, save_file
from small_models import END, VOCABULARY, ids_of, save

from tilekern.inference import Sampling, choice, load
from tilekern.runtime import driver

HOT = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with groups of heads, a rotation and a head of its own, of one layer."""
    path = tmp_path_factory.mktemp("llama")
    save("llama, one layer", path)
    return path


@pytest.fixture
def engine(gpu, folder):
    return load(folder, dtype="float32", context=24)


def generated(engine, prompts, new_tokens=4, ways=None, **more):
    """The tokens of each sequence."""
    steps = engine.generate(prompts, new_tokens, ways, **({"ignores_ends": True} | more))
    return [list(tokens) for tokens in zip(*steps, strict=True)]


@pytest.mark.share(2)
@pytest.mark.parametrize("chunk", [3, 2048])
def test_prompts_of_different_lengths_each_get_their_own_tokens(gpu, saved, chunk):
    model, folder = saved
    engine = load(folder, dtype="float32", context=24)
    prompts = ids_of(5, 1, 9, 9, 2)
    found = generated(engine, prompts, chunk=chunk)
    for prompt, tokens in zip(prompts, found, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == wanted[0, len(prompt) :].tolist()
    assert [generated(engine, [prompt])[0] for prompt in prompts[:2]] == found[:2]


def test_a_sequence_has_the_same_bits_of_logits_alone_and_in_a_batch(gpu, saved):
    """Their products have so few rows that they are the same kernels, of the same configs."""
    engine, ids = load(saved[1], dtype="bfloat16"), ids_of(5, 5, 5)
    together = read(engine.forward(ids)).view(3, 5, VOCABULARY)
    for one, logits in zip(ids, together, strict=True):
        assert torch.equal(read(engine.forward([one])), logits)


def test_nothing_of_the_last_call_s_cache_shines_through(engine):
    """Calls of the same batch, whose graph is reused, of others, and of whole sequences between."""
    long, short = ids_of(20, 20), ids_of(3, 2, seed=1)
    fresh, hot = generated(engine, short), [Sampling(seed=1, **HOT), Sampling()]
    drawn = generated(engine, short, ways=hot)
    generated(engine, long)
    assert generated(engine, short) == fresh
    generated(engine, long[:1])
    engine.forward(long)
    assert generated(engine, short, ways=hot) == drawn
    assert generated(engine, short) == fresh


def test_calls_that_take_turns_do_not_share_a_cache(engine):
    first, second = ids_of(4, 6)
    alone = [generated(engine, [prompt]) for prompt in (first, second)]
    running = [engine.generate([prompt], 4, ignores_ends=True) for prompt in (first, second)]
    steps = list(zip(*running, strict=True))
    assert [[[token for (token,) in one]] for one in zip(*steps, strict=True)] == alone


def test_a_call_that_is_left_in_the_middle_hinders_no_other(engine):
    prompts = ids_of(4, 6)
    alone = generated(engine, prompts)
    left = engine.generate(prompts, 4, ignores_ends=True)
    next(left)
    left.close()
    cache = engine._generation
    assert generated(engine, prompts) == alone
    assert engine._generation is cache, "another cache was made"
    for tokens in engine.generate(prompts, 4):
        assert len(tokens) == 2
        break
    assert generated(engine, prompts) == alone


def test_a_prompt_that_changes_after_the_call_does_not_count(engine):
    (prompt,) = ids_of(4)
    alone = generated(engine, [prompt])
    running = engine.generate([prompt], 4, ignores_ends=True)
    prompt[0] = VOCABULARY + 5
    assert [[token for (token,) in running]] == alone


def test_a_sequence_draws_alone_what_it_draws_in_a_batch(engine):
    first, second = ids_of(5, 3)
    hot, other = (Sampling(seed=seed, **HOT) for seed in (7, 8))
    found = generated(engine, [first, second, first, first], 4, [hot, Sampling(), hot, other])
    assert found[0] == found[2] != found[3]
    assert found[0] == generated(engine, [first], 4, hot)[0]
    assert found[1] == generated(engine, [second], 4)[0]


def test_a_sequence_ends_with_an_end_and_others_go_on(engine):
    """All tokens are equally likely."""
    prompts, flat = ids_of(3, 4), [Sampling(temperature=1e6, seed=seed) for seed in (2, 6)]
    engine.architecture = replace(engine.architecture, ends=frozenset(range(0, VOCABULARY, 3)))
    whole = generated(engine, prompts, 8, flat)
    steps = list(engine.generate(prompts, 8, flat))
    lengths = [next(number for number, token in enumerate(tokens) if token % 3 == 0) + 1 for tokens in whole]
    assert lengths[0] != lengths[1]
    assert len(steps) == max(lengths)
    for tokens, length, found in zip(whole, lengths, zip(*steps, strict=True), strict=True):
        assert list(found) == tokens[:length] + [None] * (len(steps) - length)


def test_the_config_says_which_ids_end(engine):
    assert engine.architecture.ends == {END}


def test_a_context_that_is_exactly_full(gpu, folder):
    prompts = ids_of(7, 12)
    wanted = generated(load(folder, dtype="float32", context=24), prompts, 5)
    assert generated(load(folder, dtype="float32", context=16), prompts, 5) == wanted
    assert generated(load(folder, dtype="float32", context=12), prompts, 1) == [tokens[:1] for tokens in wanted]


def test_a_prompt_of_many_rows(gpu, saved):
    """Products of more than 64 rows are another kernel's."""
    model, folder = saved
    engine, prompts = load(folder, dtype="float32", context=75), ids_of(70, 66)
    with torch.no_grad():
        wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    found = read(engine.forward(prompts[:1]))
    assert (found - wanted[0]).norm() < 1e-5 * wanted[0].norm()
    assert next(engine.generate(prompts, 1)) == [logits[-1].argmax() for logits in wanted]


def test_of_many_lengths_the_last_graphs_are_kept(engine):
    lengths = [*range(2, 11), 3]
    kept = [engine.captured_forward(1, length) for length in lengths]
    assert [engine.captured_forward(1, length) is one for length, one in zip(lengths[-8:], kept[-8:], strict=True)] == (
        [True] * 8
    )
    assert engine.captured_forward(1, 2) is not kept[0]


def test_a_batch_of_more_ids_than_are_fetched_at_once(engine, monkeypatch):
    assert choice._FETCHED_IDS * 8 == driver._PAGES
    prompts = ids_of(1, 2, 1, 2, 1)
    wanted = generated(engine, prompts, 2)
    monkeypatch.setattr(choice, "_FETCHED_IDS", 2)
    assert generated(engine, prompts, 2) == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_equal_logits_the_first_is_taken_beside_draws_too(gpu, folder, tmp_path, dtype):
    """As by torch's argmax: rows of the head come twice, so the likeliest token does."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[48:96] = head[:48]
    save_file(tensors, tmp_path / "model.safetensors")
    copyfile(folder / "config.json", tmp_path / "config.json")
    engine, prompts = load(tmp_path, dtype=dtype, context=8), ids_of(3, 4)
    wanted = generated(engine, prompts, 3)
    assert {token // 48 for tokens in wanted for token in tokens} <= {0, 2}
    assert generated(engine, prompts, 3, [Sampling(), Sampling(seed=1, **HOT)])[0] == wanted[0]
