"""Steps of one token after a static cache, captured: on the CPU, where a recording runs again what it recorded."""

import gc

import pytest
import rerunning
import torch
from decoding import let_kernels_of_the_class_decode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    Gemma2Config,
    LogitsProcessor,
    Qwen3Config,
    StaticCache,
    T5Config,
)

import tilekern
from tilekern.patch import captured, generating, graphs
from tilekern.runtime import dispatch

pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning", "ignore::FutureWarning")
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(1))
NEW = 8
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
STATIC = GREEDY | {"cache_implementation": "static"}


class Untouched(rerunning.Rerun):
    """What is recorded changes no cache, as a capture does not run what it records."""

    with_gradient = False

    def record(self, run):
        layers = [layer for x in gc.get_objects() if type(x) is StaticCache for layer in x.layers]
        held = [(x, x.clone()) for layer in layers for x in (layer.keys, layer.values)]
        results = super().record(run)
        for x, value in held:
            x.copy_(value)
        return results


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    rerunning.use(monkeypatch, Untouched)
    # What runs again holds the cache of its step, unlike a graph.
    monkeypatch.setattr(generating, "_REFERENCES", generating._REFERENCES + 1)
    yield
    tilekern.reset()


def make(config=Qwen3Config, attention="tilekern", **changes):
    torch.manual_seed(0)
    made = config(**SIZES | changes, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(made).eval().requires_grad_(False)


def of(model):
    return graphs.graphs_of(model)[""]


@pytest.mark.parametrize("patched", [False, True])
def test_tokens_are_replayed_from_the_third_on(patched):
    """The first is the prompt's; then two run eagerly, and the others are one graph's."""
    if patched:
        tilekern.apply(model_type="qwen3")
    model = make(attention="tilekern" if patched else "sdpa")
    wanted = model.generate(IDS, **GREEDY)
    tilekern.graphed(model)
    for mask in (None, torch.ones_like(IDS)):
        before = of(model).replays
        found = model.generate(IDS, attention_mask=mask, **STATIC)
        assert torch.equal(found, wanted)
        assert of(model).replays - before >= NEW - 1 - graphs.EAGER_STEPS
    assert not of(model).reasons


@pytest.mark.parametrize("by_kernel", [False, True])
def test_padding_before_the_prompt_is_an_input(by_kernel, monkeypatch):
    """A mask that SDPA reads; or, where the kernel for decoding runs, the first key of each sequence."""
    model, paddings = make(), [torch.ones_like(IDS) for _ in range(2)]
    paddings[0][1, :2] = 0
    paddings[1][0, :3] = 0
    wanted = [model.generate(IDS, attention_mask=mask, **GREEDY) for mask in paddings]
    if by_kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "1")
        dispatch.forget()
    tilekern.graphed(model)
    before = tilekern.stats()["decode_attention"]["launches"]
    for mask, right in zip(paddings, wanted, strict=True):
        replays = of(model).replays
        assert torch.equal(model.generate(IDS, attention_mask=mask, **STATIC), right)
        assert of(model).replays - replays >= NEW - 1 - graphs.EAGER_STEPS
    assert (tilekern.stats()["decode_attention"]["launches"] > before) == by_kernel
    monkeypatch.undo()
    dispatch.forget()


@torch.no_grad()
def test_logits_are_the_caller_s_own_and_the_cache_comes_back():
    model, rows = make(), []
    for graphed in (False, True):
        if graphed:
            tilekern.graphed(model)
        cache, held = StaticCache(config=model.config, max_cache_len=16), []
        model(input_ids=IDS, cache=cache)
        for number in range(5):
            made = model(input_ids=IDS[:, number : number + 1], cache=cache)
            assert made.cache is cache
            held.append(made.logits)
        rows.append(torch.cat(held, 1))
    assert torch.equal(*rows)
    assert of(model).replays == 5 - graphs.EAGER_STEPS


@torch.no_grad()
def test_a_captured_step_counts_its_token_in_one_launch(monkeypatch):
    """transformers makes a place and counts in each layer."""
    seen, record = [], Untouched.record

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._overloadpacket.__name__)
            return func(*args, **kwargs or {})

    def recorded(self, run):
        with Seen():
            return record(self, run)

    monkeypatch.setattr(Untouched, "record", recorded)
    model = tilekern.graphed(make())
    cache = StaticCache(config=model.config, max_cache_len=16)
    for number in range(5):
        model(input_ids=IDS[:, number : number + 1], cache=cache)
    assert (seen.count("index_copy_"), seen.count("_foreach_add_"), seen.count("add_")) == (4, 1, 0)
    assert "update" not in vars(cache.layers[0])
    assert [int(layer.cumulative_length) for layer in cache.layers] == [5, 5]


@torch.no_grad()
def test_a_captured_step_writes_and_counts_by_the_kernel(monkeypatch):
    """The first token makes the cache; of the others the eager ones run transformers' code."""
    wanted, cache = make(), StaticCache(config=make().config, max_cache_len=16)
    rows = [wanted(input_ids=IDS[:, number : number + 1], cache=cache).logits for number in range(5)]
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    model, cache = tilekern.graphed(make()), StaticCache(config=wanted.config, max_cache_len=16)
    before = tilekern.stats().get("cache_rows", {}).get("launches", 0)
    found = [model(input_ids=IDS[:, number : number + 1], cache=cache).logits for number in range(5)]
    torch.testing.assert_close(found, rows)
    # What is recorded has run once.
    runs = 1 + of(model).replays
    assert tilekern.stats()["cache_rows"]["launches"] - before == runs * len(cache.layers)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [5, 5]
    monkeypatch.undo()
    dispatch.forget()


def test_a_window_s_cache_rolls_when_it_is_full():
    """A full layer makes another form."""
    model = make(Gemma2Config, sliding_window=9)
    wanted = model.generate(IDS, **GREEDY | {"max_new_tokens": 12})
    tilekern.graphed(model)
    assert torch.equal(model.generate(IDS, **STATIC | {"max_new_tokens": 12}), wanted)
    assert of(model).captured == 2


@torch.no_grad()
def test_what_is_not_a_step_of_one_token_runs_as_it_is():
    model = tilekern.graphed(make())
    growing, cache = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)
    for number in range(5):
        model(input_ids=IDS[:, number : number + 1], cache=growing)
    assert (of(model).replays, of(model).first) == (0, 0)
    for number in range(4):
        mask = torch.ones(2, number + 1, dtype=torch.long)
        model(input_ids=IDS[:, number : number + 1], cache=cache, attention_mask=mask)
    assert of(model).replays == 0
    assert next(iter(of(model).reasons)).startswith("a mask of padding, which grows")


@torch.no_grad()
def test_captured_tokens_have_the_bits_of_training_in_the_invariant_mode(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    tilekern.apply(model_type="qwen3", invariant=True)
    model = make().bfloat16()
    whole = model(input_ids=IDS, use_cache=False).logits
    tilekern.graphed(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    rows = [model(input_ids=IDS[:, number : number + 1], cache=cache).logits for number in range(5)]
    assert torch.equal(torch.cat(rows, 1), whole)
    # The first token makes the cache.
    assert of(model).replays == 5 - 1 - graphs.EAGER_STEPS
    tilekern.reset()
    dispatch.forget()


@pytest.mark.parametrize("by_own", [False, True])
def test_padding_before_the_prompt_in_the_invariant_mode(by_own, monkeypatch):
    """A graph reads where each sequence begins, if the kernel for decoding does; else the steps run eagerly."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    tilekern.apply(model_type="qwen3", invariant=True)
    if by_own:
        let_kernels_of_the_class_decode(monkeypatch)
    model, logits = make().bfloat16(), []
    for graphed in (False, True):
        if graphed:
            tilekern.graphed(model)
        for row in (0, 1):
            mask = torch.ones_like(IDS)
            mask[row, : 2 + row] = 0
            found = model.generate(IDS, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **STATIC)
            logits.append(torch.stack(found.logits))
    assert torch.equal(torch.stack(logits[:2]), torch.stack(logits[2:]))
    assert of(model).replays == by_own * 2 * (NEW - 1 - graphs.EAGER_STEPS)
    assert ["padding whose" in why for why in of(model).reasons] == [True] * (not by_own)
    tilekern.reset()
    dispatch.forget()


class Empty:
    """Does nothing again, and so keeps nothing."""

    def record(self, run):
        return run()

    def replay(self):
        pass


@torch.no_grad()
def test_graphs_go_with_their_cache(monkeypatch):
    monkeypatch.setattr(captured.Room, "recording", lambda *_: Empty())
    model = tilekern.graphed(make())
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(input_ids=IDS, cache=cache)
    for number in range(4):
        model(input_ids=IDS[:, number : number + 1], cache=cache)
    assert of(model).captured == 1
    del cache
    assert of(model).captured == 0


def test_calls_of_the_same_sizes_share_a_cache_and_its_graph():
    """transformers makes a cache for each call, to whose memory no graph of another one writes."""
    tilekern.apply(model_type="qwen3")
    model = make()
    prompts = [torch.randint(1, 61, (2, 5)) for _ in range(3)]
    wanted = [model.generate(ids, **GREEDY) for ids in prompts]
    tilekern.graphed(model)
    for number, (ids, right) in enumerate(zip(prompts, wanted, strict=True)):
        assert torch.equal(model.generate(ids, **STATIC), right)
        assert of(model).replays == (number + 1) * (NEW - 1) - graphs.EAGER_STEPS
    assert of(model).captured == 1
    cache = of(model).cache
    # Others need memory of their own, and a training step that of all.
    model.generate(prompts[0][:1], **STATIC)
    assert of(model).cache is not cache
    model.generate(prompts[0], **STATIC | {"max_new_tokens": NEW + 8})
    assert of(model).cache.layers[0].keys.shape[0] == 2
    model.train()(input_ids=IDS, labels=IDS)
    assert of(model).cache is None
    assert of(model).captured == 0


def test_a_cache_that_is_returned_is_the_caller_s():
    tilekern.apply(model_type="qwen3")
    model = tilekern.graphed(make())
    found = model.generate(IDS, return_dict_in_generate=True, **STATIC)
    held = [x.clone() for x in (found.sequences, found.past_key_values.layers[0].keys)]
    model.generate(IDS.flip(1), **STATIC)
    assert all(map(torch.equal, held, (found.sequences, found.past_key_values.layers[0].keys)))
    assert of(model).cache is not found.past_key_values


def test_a_decoder_behind_an_encoder_gets_a_cache_for_each_call():
    """Such a cache has no layers of its own that would tell its sizes."""
    make()  # imports the family
    tilekern.apply(model_type="qwen3")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 61}
    config = T5Config(**sizes, decoder_start_token_id=0, eos_token_id=60, pad_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    wanted = [model.generate(ids, **how) for ids in (IDS, IDS[:1])]
    tilekern.graphed(model)
    assert all(map(torch.equal, wanted, [model.generate(ids, **how) for ids in (IDS, IDS[:1])]))


def test_a_cache_that_a_hook_holds_is_not_given_to_the_next_call():
    tilekern.apply(model_type="qwen3")
    model, held = tilekern.graphed(make()), []
    hook = model.model.register_forward_pre_hook(lambda *given: held.append(given[-1]["cache"]), with_kwargs=True)
    model.generate(IDS, **STATIC)
    hook.remove()
    keys = held[0].layers[0].keys.clone()
    model.generate(IDS.flip(1), **STATIC)
    assert torch.equal(held[0].layers[0].keys, keys)


def test_autocast_makes_a_cache_of_its_own():
    tilekern.apply(model_type="qwen3")
    model = make()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.generate(IDS, **GREEDY)
    tilekern.graphed(model)
    model.generate(IDS, **STATIC)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.generate(IDS, **STATIC), wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["keys", "values", "cumulative_length"])
def test_a_cache_whose_memory_is_elsewhere_is_another_form(name):
    """Beam search puts new tensors into a cache for each token."""
    model = tilekern.graphed(make())
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(input_ids=IDS, cache=cache)
    for number in range(4):
        model(input_ids=IDS[:, number : number + 1], cache=cache)
    replays = of(model).replays
    setattr(cache.layers[1], name, getattr(cache.layers[1], name).clone())
    model(input_ids=IDS[:, :1], cache=cache)
    assert of(model).replays == replays > 0


def test_a_call_inside_of_another_has_a_cache_of_its_own():
    class Inner(LogitsProcessor):
        found = None

        def __call__(self, input_ids, scores):
            if self.found is None and input_ids.shape[1] == IDS.shape[1] + 4:
                self.found = model.generate(IDS.flip(1), **STATIC)
            return scores

    tilekern.apply(model_type="qwen3")
    model, inner = tilekern.graphed(make()), Inner()
    wanted = [model.generate(ids, **GREEDY) for ids in (IDS, IDS.flip(1))]
    model.generate(IDS, **STATIC)
    outer = model.generate(IDS, logits_processor=[inner], **STATIC)
    assert all(map(torch.equal, wanted, (outer, inner.found)))


def test_a_pool_of_graphs_that_are_gone_is_not_named_again(monkeypatch):
    """torch refuses to capture into a pool whose last graph is gone, if a workspace of cuBLAS is still in it."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(captured, "_spare", {})
    pool, first, second = captured.Pool(torch.device("cuda", 0)), Empty(), Empty()
    name = pool.name()
    pool.add(first)
    assert pool.name() is name
    pool.add(second)
    del first
    assert pool.name() is name
    del second
    assert pool.name() is not name
    # Pools that live have streams of their own; that of one that is gone is the next one's.
    other = captured.Pool(torch.device("cuda", 0))
    stream = other.stream
    assert stream is not pool.stream
    del other
    assert captured.Pool(torch.device("cuda", 0)).stream is stream


def test_all_models_of_a_job_may_have_them():
    tilekern.apply(model_type="qwen3", graphs=True)
    model = make()
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **STATIC), wanted)
    assert of(model).replays == NEW - 1 - graphs.EAGER_STEPS
