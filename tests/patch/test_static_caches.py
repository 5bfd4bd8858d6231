"""One new token after a static cache: the number of keys that its mask shows is read on the device alone."""

import contextlib
import sys

import pytest
import torch
from model_contract import only
from tiny_qwen3 import worst
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Qwen3Config,
    StaticCache,
)

import tilekern
from tilekern.patch import decoding

pytestmark = pytest.mark.usefixtures("interpreted")
LAYERS, ROOM, FORWARDS = 2, 16, ("attention_forward", "decode_attention")
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = {"sliding_window": 5}
FAMILIES = {
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, WINDOW),
    "gemma3": (Gemma3TextConfig, WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": (GptOssConfig, WINDOW | {"num_local_experts": 4}),
}
IDS = torch.randint(1, 61, (2, 8), generator=torch.Generator().manual_seed(1))
PROMPT, NEW = 4, 4


@pytest.fixture(autouse=True)
def known():
    tilekern.apply(**only())


def make(family, **changes):
    torch.manual_seed(0)
    config, more = FAMILIES[family]
    made = config(**SIZES | more | changes, attn_implementation="tilekern")
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def static(model):
    return StaticCache(config=model.config, max_cache_len=ROOM)


@torch.no_grad()
def told(model, cache, call=None, new=NEW, padding=None):
    """The logits of a prompt and of tokens one by one, with masks that ``generate`` makes beforehand."""
    rows = [model(input_ids=IDS[:, :PROMPT], past_key_values=cache).logits]
    for place in range(PROMPT, PROMPT + new):
        made = model.prepare_inputs_for_generation(
            IDS[:, place : place + 1],
            past_key_values=cache,
            next_sequence_length=1,
            attention_mask=None if padding is None else padding[:, : place + 1],
        )
        rows.append((model if call is None else call)(**made).logits)
    return torch.cat(rows, 1)


@contextlib.contextmanager
def ran(*expected):
    """Hold the launches of attention's kernels, and the fallbacks, to those that are expected."""
    before = tilekern.stats()
    yield
    after = tilekern.stats()
    launches = [after[name]["launches"] - before[name]["launches"] for name in FORWARDS]
    fallbacks = after[FORWARDS[0]]["fallbacks"] - before[FORWARDS[0]]["fallbacks"]
    assert (*launches, fallbacks) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_gives_the_logits_of_a_dynamic_one(family):
    model = make(family)
    wanted = told(model, DynamicCache(config=model.config))
    with ran(LAYERS, LAYERS * NEW, 0):
        found = told(model, static(model), padding=torch.ones_like(IDS))
    assert worst([found], [wanted]) < 1e-5


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager")


@pytest.mark.parametrize("masks", ["of generate", "of generate, padded", "of the graph"])
@pytest.mark.share(2)
def test_compiled_as_a_whole(masks):
    model = make("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    padding = torch.ones_like(IDS)
    if masks.endswith("padded"):
        padding[0, :3] = 0
    wanted = told(model, DynamicCache(config=model.config), padding=padding)[:, : PROMPT + 1]
    cache = static(model)
    with torch.no_grad(), ran(1, 1, 0):
        if masks != "of the graph":
            found = told(model, cache, compiled(model), new=1, padding=padding)
        else:
            model(input_ids=IDS[:, :PROMPT], past_key_values=cache)
            found = compiled(model)(input_ids=IDS[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
    assert worst([found[:, -1]], [wanted[:, -1]]) < 1e-5


@pytest.mark.parametrize("is_compiled", [False, True])
def test_without_a_record_torch_attends_by_the_mask(is_compiled, monkeypatch):
    model = make("qwen3", num_hidden_layers=1)
    wanted = told(model, DynamicCache(config=model.config), new=1)
    monkeypatch.setattr(sys.modules["tilekern.ops.decode_attention"], "tuned_plan_for", lambda *_: None)
    with ran(1, 0, 1):
        found = told(model, static(model), compiled(model) if is_compiled else None, new=1)
    assert worst([found], [wanted]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [static, lambda model: DynamicCache(config=model.config)], ids=["static", "dynamic"])
def test_padding_before_a_prompt_is_told_by_its_end(family, kind):
    """The kernel begins behind it; where the mask has holes, torch reads it."""
    model = make(family)
    for holes in (False, True):
        padding = torch.ones_like(IDS)
        padding[1, :2] = 0
        padding[0, 1] = 1 - holes
        whole = model(input_ids=IDS, attention_mask=padding).logits
        cache, rows = kind(model), []
        before = tilekern.stats()["decode_attention"]["launches"]
        rows.append(model(input_ids=IDS[:, :PROMPT], attention_mask=padding[:, :PROMPT], past_key_values=cache).logits)
        for place in range(PROMPT, PROMPT + NEW):
            given = {"attention_mask": padding[:, : place + 1], "past_key_values": cache}
            rows.append(model(input_ids=IDS[:, place : place + 1], **given).logits)
        launched = tilekern.stats()["decode_attention"]["launches"] - before
        # A window may have left the hole behind.
        assert launched <= (family != "qwen3") * (LAYERS - 1) * NEW if holes else launched == LAYERS * NEW
        # Positions are counted without padding here in neither, so that the logits agree.
        assert worst([torch.cat(rows, 1)[:, PROMPT:]], [whole[:, PROMPT:]]) < 1e-5


def test_the_kernel_for_decoding_never_runs_in_the_invariant_mode():
    model = make("qwen3")
    with tilekern.invariant(), ran(LAYERS * (1 + NEW * len(IDS)), 0, 0):
        told(model, static(model))


def test_a_window_s_cache_has_no_more_keys_than_room():
    model = make("gemma2")
    cache = static(model)
    told(model, cache)
    given = {"past_key_values": cache, "attention_mask": None, "next_sequence_length": 1}
    masks = model.prepare_inputs_for_generation(IDS[:, :1], **given)["attention_mask"]
    numbers = {name: decoding.keys_of(mask).lengths.tolist() for name, mask in masks.items()}
    assert numbers == {"full_attention": [PROMPT + NEW + 1] * 2, "sliding_attention": [5] * 2}


def test_a_copy_of_the_mask_is_a_mask():
    """What a model's own code has changed in it may hide more than the keys behind the last one."""
    model = make("qwen3")
    cache = static(model)
    with torch.no_grad():
        model(input_ids=IDS[:, :PROMPT], past_key_values=cache)
    given = {"past_key_values": cache, "attention_mask": None, "next_sequence_length": 1}
    mask = model.prepare_inputs_for_generation(IDS[:, :1], **given)["attention_mask"]
    mask = mask["full_attention"] if isinstance(mask, dict) else mask
    assert decoding.keys_of(mask).lengths.tolist() == [PROMPT + 1] * len(IDS)
    assert mask[:, 0, 0].sum(-1).tolist() == [PROMPT + 1] * len(IDS)
    assert all(decoding.keys_of(change(mask)) is None for change in (torch.clone, torch.logical_not))
    assert decoding.keys_of(mask & mask) is None
    assert decoding.keys_of(None) is None
