"""Inside :func:`tilekern.invariant` a token's logits have the same bits in training, in a prompt and one by one.

By the interpreter: its default kernels add in one order at all sizes of these models, as kernels of one class do.
"""

import itertools
import sys
import types

import pytest
import torch
from decoding import first_to_differ, let_kernels_of_the_class_decode, one_by_one
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

import tilekern
from tilekern.errors import InputError, RowsVary, TilekernWarning
from tilekern.runtime import dispatch

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = 6
IDS = torch.randint(SIZES["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    yield
    tilekern.reset()
    dispatch.forget()


@pytest.fixture(params=["kernels of training", "kernels of their own"])
def decoding(request, monkeypatch):
    """What decodes: as without records, or as with records of the class the kernels for few rows and one token."""
    by_own = request.param == "kernels of their own"
    if by_own:
        let_kernels_of_the_class_decode(monkeypatch)
    before = {name: tilekern.stats()[name]["launches"] for name in ("decode_attention", "skinny_linear")}
    yield
    assert [tilekern.stats()[name]["launches"] > count for name, count in before.items()] == [by_own] * 2


def make(config, dtype, **more):
    # Other tests may have imported other families, which take a second.
    tilekern.apply(model_type=config.model_type, experts=config in EXPERTS)
    torch.manual_seed(0)
    made = config(**SIZES | more, attn_implementation="tilekern")
    return AutoModelForCausalLM.from_config(made, dtype=dtype).eval()


def trained(model, ids, **more):
    logits = model.train()(input_ids=ids, use_cache=False, **more).logits.detach()
    model.eval()
    return logits


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (Qwen3Config, torch.bfloat16),
        (Qwen3Config, torch.float32),
        (LlamaConfig, torch.bfloat16),
        (Qwen2Config, torch.float32),
        (Gemma2Config, torch.bfloat16),
    ],
    ids=lambda of: str(getattr(of, "model_type", of)),
)
def test_a_token_has_the_same_logits_however_it_is_computed(config, dtype):
    model = make(config, dtype)
    with tilekern.invariant():
        whole = trained(model, IDS)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS[1:, :5], use_cache=False).logits, whole[1:, :5])
        assert first_to_differ(model, IDS) == {}
        assert torch.equal(one_by_one(model, IDS), whole)
    if dtype == torch.float32:
        assert first_to_differ(model, IDS), "torch's products and attention decode outside"
        assert not torch.equal(one_by_one(model, IDS), whole)


@pytest.mark.usefixtures("decoding")
def test_a_soft_cap_and_a_window_that_shows_all_are_decoded_with_the_same_bits():
    model = make(Gemma2Config, torch.bfloat16)
    with tilekern.invariant(strict=True):
        assert torch.equal(one_by_one(model, IDS), trained(model, IDS))


@pytest.mark.parametrize(("config", "cache"), [(Gemma2Config, "static"), (GptOssConfig, None)])
def test_generate_keeps_the_keys_that_have_left_a_window(config, cache):
    model = make(config, torch.bfloat16, **EXPERTS.get(config, {}) | {"sliding_window": 4})
    asked = {"do_sample": False, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    asked |= {"pad_token_id": 0, "eos_token_id": None, "cache_implementation": cache}
    with tilekern.invariant(strict=True):
        made = model.generate(IDS, attention_mask=torch.ones_like(IDS), **asked)
        whole = trained(model, made.sequences[:, :-1])
    assert torch.equal(torch.stack(made.logits, 1), whole[:, TOKENS - 1 :].float())
    assert made.sequences.shape[1] > 4 + TOKENS
    windowed = model.generate(IDS, attention_mask=torch.ones_like(IDS), **asked).past_key_values
    assert windowed.is_sliding != made.past_key_values.is_sliding == [False, False]


@pytest.mark.parametrize("config", [Gemma2Config, GptOssConfig])
def test_a_cache_of_the_model_keeps_the_keys_that_have_left_a_window(config):
    model = make(config, torch.bfloat16, **EXPERTS.get(config, {}) | {"sliding_window": 4})
    with tilekern.invariant(strict=True):
        assert torch.equal(one_by_one(model, IDS), trained(model, IDS))
    assert model(input_ids=IDS, use_cache=True).past_key_values.is_sliding == [True, False]


def test_a_cache_that_drops_keys_is_said():
    """The window's first key is at the start of a tile then, and in training wherever it is."""
    model = make(Gemma2Config, torch.bfloat16, sliding_window=4)
    cache = DynamicCache(config=model.config)
    with tilekern.invariant():
        one_by_one(model, IDS[:, :3], cache)
        assert not dispatch.varying()
    with pytest.warns(TilekernWarning, match="a cache that drops keys"), tilekern.invariant():
        one_by_one(model, IDS[:, 3:5], cache)
    assert "rows of attention_forward may depend on others: a cache that drops keys" in str(tilekern.report(model))


def test_a_step_trains_as_outside():
    """Gradients are near those of torch's products, and the loss has a gradient for each weight and bias."""
    model, losses, gradients = make(Qwen2Config, torch.float32).train(), [], []
    for mode in (tilekern.invariant, torch.enable_grad):
        model.zero_grad()
        with mode():
            logits = model(input_ids=IDS, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
            loss.backward()
        losses.append(loss.item())
        gradients.append([x.grad.clone() for x in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for mine, others in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-6)


def test_checkpointed_layers_have_the_same_bits():
    """The layers run again in the backward, in autograd's thread."""
    model = make(Qwen3Config, torch.bfloat16)
    found = []
    with tilekern.invariant():
        for checkpointed in (False, True):
            if checkpointed:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            logits = model.train()(input_ids=IDS, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
            found.append([logits.detach(), *(x.grad.clone() for x in model.parameters())])
    assert all(map(torch.equal, *found))


def test_apply_turns_the_mode_on_and_reset_ends_it():
    own = torch.nn.functional.linear
    tilekern.apply(invariant=True)
    with tilekern.invariant():
        tilekern.apply()
        assert dispatch.is_invariant(), "the context is still open"
    assert not dispatch.is_invariant()
    assert torch.nn.functional.linear is own
    tilekern.apply(invariant="strict")
    tilekern.apply(invariant=True)
    torch.nn.Linear(2, 2)(torch.zeros(1, 2)).mean(-1)
    tilekern.reset()
    assert not dispatch.is_invariant()
    for wrong in ("Strict", 1, None):
        with pytest.raises(InputError, match='invariant must be False, True or "strict"'):
            tilekern.apply(invariant=wrong)


def test_a_patched_model_is_strict_and_trains():
    model = make(LlamaConfig, torch.float32)
    with tilekern.invariant():
        whole = trained(model, IDS)
    with tilekern.invariant(strict=True):
        assert torch.equal(trained(model, IDS), whole)
        assert torch.equal(one_by_one(model, IDS), whole)
        model.gradient_checkpointing_enable()
        model.train()(input_ids=IDS, use_cache=False, labels=IDS).loss.backward()


EXPERTS = {
    Qwen3MoeConfig: {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True},
    GptOssConfig: {"num_local_experts": 8, "sliding_window": 16},
}


@pytest.mark.parametrize("config", list(EXPERTS), ids=lambda of: of.model_type)
@pytest.mark.usefixtures("decoding")
def test_experts_are_strict_too(config):
    """Who else chose its experts changes no bit of a token."""
    model = make(config, torch.bfloat16, num_experts_per_tok=2, **EXPERTS[config])
    with tilekern.invariant(strict=True):
        whole = trained(model, IDS)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS[1:, :5], use_cache=False).logits, whole[1:, :5])
        assert torch.equal(one_by_one(model, IDS), whole)


def test_packed_rows_have_the_bits_of_rows_alone():
    model = make(Qwen3Config, torch.bfloat16)
    positions = torch.cat([torch.arange(TOKENS), torch.arange(TOKENS)])[None]
    with tilekern.invariant(strict=True):
        packed = trained(model, IDS.view(1, -1), position_ids=positions)
        assert torch.equal(packed.view(2, TOKENS, -1), trained(model, IDS))


def test_strict_refuses_what_the_model_s_own_ops_compute():
    model = make(LlamaConfig, torch.float32)
    mask = torch.ones_like(IDS)
    mask[0, 2] = 0
    with pytest.raises(RowsVary, match="attention_forward"), tilekern.invariant(strict=True):
        model(input_ids=IDS, attention_mask=mask)
    tilekern.apply(rms_norm=False, fused_add_rms_norm=False, model_type="llama")
    with pytest.raises(RowsVary, match=r"torch\.mean runs inside"), tilekern.invariant(strict=True):
        model(input_ids=IDS)
    assert model(input_ids=IDS).logits.shape == (2, TOKENS, SIZES["vocab_size"])


def test_strict_lets_a_norm_run_apart_from_its_sum():
    """A norm with a hook runs its own kernel, also between terms of two dtypes, as in an autocast region."""
    model = make(LlamaConfig, torch.float32)
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: None)
    with tilekern.invariant(strict=True), torch.autocast("cpu", dtype=torch.bfloat16):
        before = tilekern.stats()["fused_add_rms_norm_forward"]["fallbacks"]
        whole = trained(model, IDS)
        assert tilekern.stats()["fused_add_rms_norm_forward"]["fallbacks"] > before
        assert torch.equal(one_by_one(model, IDS), whole)


def padded(*padding):
    """A batch of :data:`IDS` with tokens before and behind each row, its mask, and positions that count its tokens."""
    width = TOKENS + max(before + behind for before, behind in padding)
    ids, mask = torch.full((len(padding), width), 7), torch.zeros(len(padding), width, dtype=torch.long)
    for row, (before, _) in enumerate(padding):
        ids[row, before : before + TOKENS], mask[row, before : before + TOKENS] = IDS[row], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("config", [Qwen3Config, Gemma2Config], ids=lambda of: of.model_type)
@pytest.mark.parametrize("padding", [((2, 0), (0, 2)), ((0, 1), (0, 3)), ((3, 0), (1, 1))], ids=str)
def test_padding_changes_no_bit(config, padding):
    """In training, in a prompt, and decoded: tokens stand behind, before, or between padding."""
    model, given = make(config, torch.bfloat16), padded(*padding)
    shown = given["attention_mask"].bool()
    with tilekern.invariant():
        whole = trained(model, IDS)
        before = tilekern.stats()["attention_forward"]["fallbacks"]
        assert torch.equal(trained(model, **given_as(given))[shown], whole.flatten(0, 1))
        with torch.no_grad():
            assert torch.equal(model(**given, use_cache=False).logits[shown], whole.flatten(0, 1))
        assert tilekern.stats()["attention_forward"]["fallbacks"] == before


def test_a_mask_that_was_first_seen_in_inference_mode_trains():
    model, given = make(Qwen3Config, torch.bfloat16), padded((2, 0), (0, 2))
    given["attention_mask"] = given["attention_mask"].bool()  # transformers hands it on itself
    with tilekern.invariant():
        with torch.inference_mode():
            model(**given, use_cache=False)
        model.train()(**given, use_cache=False).logits.float().sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 1])
def test_a_token_behind_no_padding_asks_for_the_kernel_without(monkeypatch, before):
    """A batch of one has no other in the plan, and generation gives a mask of ones too."""
    model, given, asked = make(Qwen3Config, torch.bfloat16), padded((before, 0)), []
    monkeypatch.setattr("tilekern.patch.attention.by_tuned_kernels", lambda *given: asked.append(given[4]))
    with tilekern.invariant():
        prompt = {name: x[:, :-1] for name, x in given.items()}
        held = model(**prompt, use_cache=True).past_key_values
        model(**given | {name: given[name][:, -1:] for name in ("input_ids", "position_ids")}, past_key_values=held)
    assert [starts is not None for starts in asked] == [before > 0] * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("page_size", [16, 64, 96, 192])
def test_the_mode_reads_pages_of_whole_tiles_alone(monkeypatch, page_size):
    """A tile ends with its page. A record of other pages may serve: that of 256 tokens, as the tuner plans them."""
    ops = sys.modules["tilekern.ops.decode_attention"]
    plan = types.SimpleNamespace(config={"tile_n": 64}, blocks=2)
    monkeypatch.setattr(ops, "tuned_plan_for", lambda *_: plan)
    monkeypatch.setattr(ops, "_launch", lambda plans, *_: plans)
    q, pages = torch.zeros(1, 4, 16), torch.zeros(2, page_size, 2, 16)
    given = pages, torch.ones(1, dtype=torch.int32), None, torch.zeros(1, 2, dtype=torch.int32), None, None, None, None
    assert ops.by_tuned_kernels(q, pages, *given) is not None
    with tilekern.invariant():
        assert (ops.by_tuned_kernels(q, pages, *given) is not None) == (page_size % 64 == 0)


def given_as(given):
    return {"ids": given["input_ids"]} | {name: x for name, x in given.items() if name != "input_ids"}


@torch.no_grad()
@pytest.mark.parametrize(("cache", "first"), [*((DynamicCache, first) for first in (3, 5, 6, 7)), (StaticCache, 6)])
@pytest.mark.usefixtures("decoding")
def test_a_padded_prompt_is_continued_with_the_same_bits(cache, first):
    """A prompt with padding on the left, and in one row nothing else at first, then a token or several at a time."""
    model, given = make(Qwen3Config, torch.bfloat16), padded((2, 0), (2, 0))
    given["attention_mask"][0, 2] = 0  # the first row begins a token later
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with tilekern.invariant():
        whole = [trained(model, IDS[:1, 1:]), trained(model, IDS[1:])]
        before = tilekern.stats()["attention_forward"]["fallbacks"]
        held, rows = cache(config=model.config, **({"max_cache_len": 16} if cache is StaticCache else {})), []
        for start, end in itertools.pairwise([0, first, *range(first + 1, TOKENS + 2), TOKENS + 2]):
            some = {name: x[:, start:end] for name, x in given.items()} | {
                "attention_mask": given["attention_mask"][:, :end]
            }
            rows.append(model(**some, past_key_values=held, use_cache=True).logits)
        found = torch.cat(rows, 1)
        assert torch.equal(found[0, 3:], whole[0][0])
        assert torch.equal(found[1, 2:], whole[1][0])
        assert tilekern.stats()["attention_forward"]["fallbacks"] == before


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("decoding")
def test_a_static_cache_gives_the_bits_of_training(masked):
    model = make(Qwen3Config, torch.bfloat16)
    with tilekern.invariant(strict=True):
        whole, cache, rows = trained(model, IDS), StaticCache(config=model.config, max_cache_len=16), []
        for start, end in itertools.pairwise([0, 4, 5, TOKENS]):
            mask = {"attention_mask": torch.ones(2, end, dtype=torch.long)} if masked else {}
            rows.append(model(input_ids=IDS[:, start:end], past_key_values=cache, use_cache=True, **mask).logits)
        assert torch.equal(torch.cat(rows, 1), whole)


@torch.no_grad()
def test_layers_that_are_compiled_by_themselves_get_the_mask_of_padding():
    """In a graph torch attends with a dense mask, of the batch of this call."""
    plain, compiled = (make(Qwen3Config, torch.float32, num_hidden_layers=1) for _ in range(2))
    for layer in compiled.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for padding in (((2, 0), (0, 2)), ((1, 2), (3, 0))):
        given = padded(*padding)
        shown = given["attention_mask"].bool()
        with tilekern.invariant():
            found = compiled(**given, use_cache=False).logits[shown]
        torch.testing.assert_close(found, plain(**given, use_cache=False).logits[shown], rtol=1e-5, atol=1e-5)
