"""The paged cache: the bits of the static one, and pages that are taken, given back and used again.

Pages are of 16 tokens here, which whole tiles of 16 float32 keys fill.
"""

from dataclasses import replace

import pytest
from emulated import read
from small_models import VOCABULARY, ids_of, save

from tilekern.errors import InputError
from tilekern.inference import Sampling, caches, load
from tilekern.inference import engine as engines

PAGE, CONTEXT = 16, 96
HOT = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(caches, "PAGE", PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of one layer, whose page has 2 x 2 key heads of 16 float32 for each token."""
    path = tmp_path_factory.mktemp("llama")
    save("llama, one layer", path)
    return path


@pytest.fixture
def of_pages(gpu, folder):
    """Return an engine whose cache has some pages, or as many as each call needs."""

    def loaded(pages=None, **more):
        size = None if pages is None else pages * PAGE * 2 * 2 * 16 * 4
        return load(folder, **({"dtype": "float32", "context": CONTEXT, "cache": "paged", "cache_bytes": size} | more))

    return loaded


@pytest.fixture
def static(gpu, folder):
    return load(folder, dtype="float32", context=CONTEXT)


@pytest.fixture
def held(monkeypatch):
    """The pages that each sequence has, whenever some are taken or given back."""
    found, hold = [], caches.PagedCache.hold

    def noted(cache, counts):
        room = hold(cache, counts)
        found.append([len(pages) for pages in cache._held])
        owners = [page for pages in cache._held for page in pages]
        assert sorted(owners + cache._pool.free) == list(range(cache._pool.pages)) or cache._pool.is_shared
        assert len({*owners, *cache._pool.free}) == len(owners) + len(cache._pool.free), "a page has two owners"
        return room

    monkeypatch.setattr(caches.PagedCache, "hold", noted)
    return found


def generated(engine, prompts, new_tokens=4, ways=None, **more):
    """The tokens of each sequence."""
    steps = engine.generate(prompts, new_tokens, ways, **({"ignores_ends": True} | more))
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def free(engine):
    return len(engine._pool.free)


def bits_of(monkeypatch, engine, prompts, **more):
    """The tokens and the logits of each step."""
    logits, found, add = [], [], engines.Choice.add

    def noted(choice, launches, of, positions, *, greedy):
        add(choice, launches, of, positions, greedy=greedy)
        logits.append(of)

    monkeypatch.setattr(engines.Choice, "add", noted)
    for tokens in engine.generate(prompts, 4, ignores_ends=True, **more):
        width = logits[-1].strides[0]
        whole = read(logits[-1].view((len(prompts), width)))
        found.append((tokens, whole[:, :VOCABULARY]))
    monkeypatch.setattr(engines.Choice, "add", add)
    return found


@pytest.mark.share(2)
def test_logits_have_the_bits_of_the_static_cache(gpu, saved, monkeypatch):
    """Prompts end before, at and behind the end of a page; chunks cross one; pages begin while tokens come."""
    prompts, given = ids_of(15, 16, 17, 40, 40, 1), {"dtype": "float32", "context": CONTEXT}
    one, other = (
        bits_of(monkeypatch, load(saved[1], **given, cache=cache), prompts, chunk=12) for cache in caches.KINDS
    )
    for (tokens, logits), (others, other_logits) in zip(one, other, strict=True):
        assert tokens == others
        assert logits.equal(other_logits)


def test_so_they_have_in_bfloat16_where_pages_hold_whole_tiles(gpu, folder, monkeypatch):
    """Of 128 keys."""
    monkeypatch.setattr(caches, "PAGE", 128)
    prompts = ids_of(126, 3)
    one, other = (bits_of(monkeypatch, load(folder, context=256, cache=cache), prompts) for cache in caches.KINDS)
    for (tokens, logits), (others, other_logits) in zip(one, other, strict=True):
        assert tokens == others
        assert logits.equal(other_logits)


def test_a_call_reserves_what_its_prompts_and_tokens_need_and_takes_it_as_they_grow(of_pages, static, held):
    engine, prompts = of_pages(), ids_of(30, 3, 14)
    assert generated(engine, prompts) == generated(static, prompts)
    pool = engine._generation.cache._pool
    assert pool.keys[0].shape == (3 + 1 + 2, PAGE, 2, 16)
    assert held == [[2, 1, 1], [3, 1, 2]]
    fewer, more = ids_of(2, 40, 15), ids_of(40, 30, 14)
    assert generated(engine, fewer) == generated(static, fewer)
    assert engine._generation.cache._pool is pool, "its pages suffice"
    assert generated(engine, more) == generated(static, more)
    assert engine._generation.cache._pool.pages == 3 + 3 + 2
    assert generated(engine, prompts[:1]) == generated(static, prompts[:1])
    assert engine._generation.cache._pool.pages == 3


@pytest.mark.parametrize(("prompt", "new_tokens", "pages"), [(16, 1, 1), (16, 2, 2), (12, 5, 1), (12, 6, 2)])
def test_a_page_is_filled_to_its_end_and_the_next_is_taken_for_the_next_key(
    of_pages, static, prompt, new_tokens, pages
):  # fmt: skip
    """The last token has no key."""
    prompts = ids_of(prompt)
    wanted = generated(static, prompts, new_tokens)
    assert generated(of_pages(pages), prompts, new_tokens) == wanted
    assert generated(of_pages(), prompts, new_tokens) == wanted


def test_a_context_that_is_exactly_full(of_pages, static):
    prompts = ids_of(30)
    wanted = generated(static, prompts, 4)
    for context in (33, 48):
        assert generated(of_pages(3, context=context), prompts, 4) == wanted


def test_pages_come_back_and_are_used_again(of_pages, static):
    engine = of_pages(8)
    for number, lengths in enumerate([(40, 20), (20, 40), (60,), (3, 3, 33, 9), (40, 20)]):
        prompts = ids_of(*lengths, seed=number)
        ways = [Sampling(seed=seed, **HOT) for seed in range(len(prompts))]
        assert generated(engine, prompts, 8, ways) == generated(static, prompts, 8, ways)
        assert free(engine) == 8


def test_a_sequence_that_ends_gives_its_pages_to_those_that_go_on(of_pages, static, held):
    """Draws are of all tokens. In the end the first sequence has pages that were the second one's."""
    prompts, flat = ids_of(30, 18), [Sampling(temperature=1e6, seed=seed) for seed in (2, 6)]
    engine, (first, second) = of_pages(5), generated(static, prompts, 50, flat)
    over = next(number for number, token in enumerate(second) if number > 2 and token not in first + second[:number])
    assert over < 10
    engine.architecture = replace(engine.architecture, ends=frozenset({second[over]}))
    steps, left = [], []
    for tokens in engine.generate(prompts, 50, flat):
        steps.append(tokens)
        left.append(free(engine))
    assert left[over - 1 : over + 1] == [0, 2], "they come back before the next step"
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == [first, second[: over + 1] + [None] * (49 - over)]
    assert held == [[2, 2], [3, 2], [3, 0], [4, 0], [5, 0]]
    assert free(engine) == 5


def test_pages_that_do_not_suffice_for_prompts_are_told_before_anything_runs(of_pages, static, monkeypatch):
    engine, prompts = of_pages(4), ids_of(33, 17)
    assert generated(engine, prompts[:1]) == generated(static, prompts[:1])
    stepped = []
    with monkeypatch.context() as patch:
        patch.setattr(engines, "Step", lambda *arguments, **_: stepped.append(arguments))
        with pytest.raises(InputError) as caught:
            next(engine.generate(prompts, 4))
    assert str(caught.value) == (
        "the cache has 4 pages of 16 tokens, 4 of them free, and 5 more are wanted; "
        "load with more cache_bytes, or give fewer or shorter prompts"
    )
    assert not stepped
    assert free(engine) == 4
    assert generated(engine, prompts[1:]) == generated(static, prompts[1:])


def test_pages_that_do_not_suffice_for_a_step_are_told_behind_the_tokens_before_it(of_pages, static, monkeypatch):
    engine, prompts = of_pages(3), ids_of(14, 30, 1)[:2]
    wanted = generated(static, prompts, 8)
    launched, graph = [], engines.Generation.step
    monkeypatch.setattr(engines.Generation, "step", lambda *given: (graph(*given), launched.append(given)))
    came, running = [], engine.generate(prompts, 8, ignores_ends=True)
    with pytest.raises(InputError, match="has 3 pages of 16 tokens, 0 of them free, and 2 more are wanted;"):
        came.extend(running)
    # Keys 15 and 16, and 31 and 32, fill their pages.
    assert [list(tokens) for tokens in zip(*came, strict=True)] == [tokens[:3] for tokens in wanted]
    assert len(launched) == 2
    assert list(running) == []
    assert free(engine) == 3
    assert generated(engine, prompts, 3) == [tokens[:3] for tokens in wanted]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_call_that_is_left_gives_its_pages_back(of_pages, static, after):
    engine, prompts = of_pages(6), ids_of(14, 40)
    running = engine.generate(prompts, 8, ignores_ends=True)
    for _ in range(after):
        next(running)
    assert (free(engine) == 6) == (after == 0)
    running.close()
    assert free(engine) == 6
    assert generated(engine, prompts, 4) == generated(static, prompts, 4)


@pytest.mark.parametrize("pages", [None, 10])
def test_calls_take_turns(of_pages, static, pages):
    """Pages are shared if they are of all calls."""
    engine, batches = of_pages(pages), [ids_of(14, 30), ids_of(20, 3, seed=1), ids_of(15, seed=2)]
    wanted = [generated(static, prompts, 6) for prompts in batches]
    running = [engine.generate(prompts, 6, ignores_ends=True) for prompts in batches]
    steps = list(zip(*running, strict=True))
    assert [[list(tokens) for tokens in zip(*one, strict=True)] for one in zip(*steps, strict=True)] == wanted
    if pages is None:
        return
    assert free(engine) == 10
    first, second = (engine.generate(prompts, 6, ignores_ends=True) for prompts in (ids_of(90), ids_of(70)))
    next(first)
    with pytest.raises(InputError, match="has 10 pages of 16 tokens, 4 of them free, and 5 more are wanted"):
        next(second)
    first.close()
    assert generated(engine, batches[0], 6) == wanted[0]


def test_whole_sequences_need_no_pages(of_pages, static):
    ids = ids_of(20, 20)
    assert read(of_pages(1).forward(ids)).equal(read(static.forward(ids)))


def test_sizes_that_are_wrong(of_pages, folder, gpu, monkeypatch):
    for size in (0, -1, 1.0, True, "8", 4095):
        with pytest.raises(InputError, match=r"cache_bytes must be a whole number from 4096 on, which is a page of 16"):
            of_pages(cache_bytes=size)
    assert free(of_pages(cache_bytes=2 * 4096 - 1)) == 1
    with pytest.raises(InputError, match="cache must be one of static, paged, got 'page'"):
        of_pages(cache="page")
    with pytest.raises(InputError, match="cache_bytes is the size of a paged cache; pass cache='paged' too, or leave"):
        of_pages(1, cache="static")
    monkeypatch.setattr(caches, "_MOST_ELEMENTS", 7 * PAGE * 2 * 16)
    assert free(of_pages(7)) == 7
    with pytest.raises(InputError, match="8 pages of 16 tokens are wanted, and kernels index 7 of this model's"):
        of_pages(8)
