"""Layers of transformers' static caches write and count new tokens by a kernel, while tilekern is applied."""

import contextlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

import tilekern

pytestmark = pytest.mark.usefixtures("interpreted_llama")
LAYERS, NEW, ROOM = 2, 4, 16
IDS = torch.arange(10).view(2, 5)
STATIC = {
    "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None,
    "cache_implementation": "static",
}  # fmt: skip
OWN = StaticLayer.update


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def launches():
    return tilekern.stats().get("cache_rows", {}).get("launches", 0)


def lengths(cache):
    return [int(layer.cumulative_length) for layer in cache.layers]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, tilekern.invariant])
def test_each_step_of_generate_launches_once_a_layer_and_gives_transformers_tokens(mode):
    model = make()
    before = launches()
    with mode():
        found = model.generate(IDS, **STATIC)
    # The prompt makes the caches.
    assert launches() == before + LAYERS * (NEW - 1)
    tilekern.reset()
    assert torch.equal(found, model.generate(IDS, **STATIC))


def test_a_loop_of_one_s_own_counts_crops_and_begins_again():
    model, caches = make(), []
    for _ in range(2):
        cache, before = StaticCache(config=model.config, max_cache_len=ROOM), launches()
        model(input_ids=IDS, cache=cache)
        for place in (0, 1):
            model(input_ids=IDS[:, place : place + 1], cache=cache)
            assert lengths(cache) == [6 + place] * LAYERS
        cache.crop(-1)
        model(input_ids=IDS[:, 2:4], cache=cache)
        assert lengths(cache) == [8] * LAYERS
        caches.append([x.clone() for layer in cache.layers for x in (layer.keys, layer.values)])
        cache.reset()
        model(input_ids=IDS[:, :1], cache=cache)
        assert lengths(cache) == [1] * LAYERS
        caches.append([x.clone() for layer in cache.layers for x in (layer.keys, layer.values)])
        assert launches() - before == 4 * LAYERS * (StaticLayer.update is not OWN)
        tilekern.reset()
    assert StaticLayer.update is OWN
    for ours, own in zip(caches[0] + caches[1], caches[2] + caches[3], strict=True):
        torch.testing.assert_close(ours, own)


def rows(tokens):
    return torch.ones(1, 2, tokens, 16), torch.ones(1, 2, tokens, 16)


def test_other_layers_and_long_prompts_run_transformers_code():
    layer, window = StaticLayer(ROOM * 8), StaticSlidingWindowLayer(ROOM, sliding_window=4)
    before = launches()
    for tokens in (1, 2):
        window.update(*rows(tokens))
    for tokens in (1, 65):
        layer.update(*rows(tokens))
    assert launches() == before
    layer.update(*rows(64))
    assert launches() == before + 1
    assert (layer.cumulative_length, window.cumulative_length_int) == (130, 3)


def test_compiled_code_sees_torch_s_operations():
    layer = StaticLayer(ROOM)
    layer.update(*rows(1))
    before = launches()
    torch.compile(lambda: layer.update(*rows(2)), backend="eager", fullgraph=True)()
    assert launches() == before
    assert layer.cumulative_length == 3


def test_it_is_exchanged_once_and_a_release_that_counts_otherwise_keeps_its_own(monkeypatch):
    tilekern.apply(model_type="llama")
    assert StaticLayer.update.tilekern_original is OWN
    tilekern.reset()
    assert StaticLayer.update is OWN

    def update(self, key_states, value_states):
        pass

    monkeypatch.setattr(StaticLayer, "update", update)
    tilekern.apply(model_type="llama")
    assert StaticLayer.update is update
