"""A token's attention is one launch if it has few keys, but in the invariant mode; its tokens are those of three."""

import pytest
import torch
from emulated import tensor_of
from small_models import counts_of, ids_of

from tilekern.inference import load
from tilekern.inference.architectures import architecture_of
from tilekern.inference.caches import KINDS, STATIC
from tilekern.inference.planning import DryRun
from tilekern.inference.steps import Step
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec.targets import resolve

KERNEL, APART = "token_attention", {"append_to_cache", "decode_attention", "decode_join"}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": 97}
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


LENGTHS, NEW = (3, 9, 6), 6


def generated(folder, cache):
    """The tokens, and of a static cache the rows of the first layer, in which nothing is that attention computed."""
    engine = load(folder, dtype="float32", context=300, cache=cache)
    tokens = list(engine.generate(ids_of(*LENGTHS), NEW, ignores_ends=True, chunk=4))
    running = engine._generation
    assert not tensor_of(running._tokens.counters).any()
    caches = running.cache.keys.of_layer(0) if cache == STATIC else {}
    counts = [length + NEW - 1 for length in LENGTHS]
    return tokens, [tensor_of(x)[b, :, :count].clone() for x in caches.values() for b, count in enumerate(counts)]


@pytest.mark.parametrize("cache", KINDS)
def test_tokens_and_caches_are_those_of_three_launches(gpu, saved, launched, monkeypatch, cache):
    """In float32, where sums in another order choose no other token."""
    model, folder = saved
    tokens, rows = generated(folder, cache)
    assert (KERNEL in launched) == (model.config.hidden_size != 15)
    launched.clear()
    monkeypatch.setattr(Step, "_is_joint", lambda _: False)
    wanted, others = generated(folder, cache)
    assert KERNEL not in launched
    assert tokens == wanted
    assert all(torch.equal(x, y) for x, y in zip(rows, others, strict=True))


def launches_of(config, batch=2, keys=512, dtype="bfloat16", **how):
    found = Trace(resolve("H200"))
    DryRun(found, architecture_of(config), dtype).token(batch, keys, **how)
    return counts_of(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("config", [GPT2, QWEN3], ids=lambda config: config["model_type"])
def test_a_layer_of_a_token_has_one_launch_between_its_projections_and_its_output(config, cache, dtype):
    found = launches_of(config, cache=cache, dtype=dtype)
    assert found[KERNEL] == 2
    assert not APART & found.keys()
    # GPT-2 turns no heads, and reads no angles.
    assert found["embedding"] == (1 if config is GPT2 else 2)


@pytest.mark.parametrize("config", [GPT2, QWEN3], ids=lambda config: config["model_type"])
def test_the_invariant_mode_has_the_kernels_of_its_bit_classes(config):
    before = dispatch.set_invariant(on=True)
    try:
        found = launches_of(config)
    finally:
        dispatch.set_invariant(on=before)
    assert KERNEL not in found
    assert {found[kernel] for kernel in APART & found.keys()} == {2}
    assert found["embedding"] == 2


def test_heads_without_halves_have_three_launches():
    found = launches_of(GPT2 | {"n_embd": 30})
    assert KERNEL not in found
    assert found["append_to_cache"] == 2


@pytest.mark.parametrize(
    ("batch", "keys", "is_one"),
    # Each sequence has two key heads.
    [(1, 1024, True), (1, 1025, False), (32, 1024, True), (33, 64, False)],
)
@pytest.mark.parametrize("cache", KINDS)
def test_attention_of_many_keys_or_heads_has_several_launches(batch, keys, is_one, cache):
    found = launches_of(QWEN3 | {"max_position_embeddings": 4096}, batch, keys, cache=cache)
    assert (found.get(KERNEL, 0), found.get("append_to_cache", 0)) == ((2, 0) if is_one else (0, 2))
    # A model that turns no heads still gathers angles for several.
    assert launches_of(GPT2 | {"n_positions": 4096}, batch, keys, cache=cache)["embedding"] == (1 if is_one else 2)
