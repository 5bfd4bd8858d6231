"""While a model generates, its linear layers of few rows run kernels."""

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, cache_utils
from transformers.generation import utils

import tilekern
from tilekern.ops import few_rows, linear_layers
from tilekern.runtime import dispatch

pytestmark = pytest.mark.usefixtures("interpreted_llama")
LAYERS, NEW = 2, 4
IDS = torch.arange(10).view(2, 5)
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="tilekern",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def launches():
    counts = tilekern.stats()
    return sum(counts.get(name, {}).get("launches", 0) for name in ("skinny_linear", "skinny_projections"))


def test_all_linear_layers_of_a_step_run_the_kernel_and_give_torch_s_tokens():
    model = make()
    before = launches()
    found = model.generate(IDS, **GREEDY)
    # q, k and v; o; the gate with both products; down. The head once a step.
    assert launches() == before + NEW * (LAYERS * (1 + 1 + 1 + 1) + 1)
    tilekern.reset()
    assert torch.equal(found, model.generate(IDS, **GREEDY))


def test_the_function_is_torch_s_outside_and_after_an_error():
    own, method = torch.nn.functional.linear, GenerationMixin.generate
    model = make()
    model.lm_head.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("inside")))
    with pytest.raises(RuntimeError, match="inside"):
        model.generate(IDS, **GREEDY)
    assert torch.nn.functional.linear is own
    before = launches()
    torch.nn.Linear(8, 8)(torch.zeros(1, 8))
    assert launches() == before
    tilekern.reset()
    assert GenerationMixin.generate is method.tilekern_original
    tilekern.apply(model_type="llama")
    assert GenerationMixin.generate.tilekern_original is method.tilekern_original, "never one around another"


def test_the_end_is_read_a_step_late_on_a_gpu_where_steps_are_replayed():
    def is_late(device, is_returned=False):
        return utils.DeferredStopCheck.is_supported(torch.device(device), None, is_returned, is_assistant=False)

    model, seen = make(), []
    model.lm_head.register_forward_hook(
        lambda *_: seen.append((is_late("cuda"), is_late("cuda", is_returned=True), is_late("cpu")))
    )
    model.generate(IDS, **GREEDY)
    assert set(seen) == {(False, False, False)}
    seen.clear()
    tilekern.graphed(model)
    model.generate(IDS, **GREEDY)
    assert set(seen) == {(True, False, False)}
    # What draws, or has code of the user's, would notice a token more.
    for more in ({"do_sample": True}, {"logits_processor": [lambda _, scores: scores]}):
        seen.clear()
        model.generate(IDS, **GREEDY | more)
        assert set(seen) == {(False, False, False)}
    assert not is_late("cuda")
    ours = utils.DeferredStopCheck.is_supported
    tilekern.reset()
    assert vars(utils.DeferredStopCheck)["is_supported"] is ours.tilekern_original


def test_a_layer_that_trains_meanwhile_keeps_torch_s_product():
    layer = torch.nn.Linear(8, 8)
    with linear_layers.exchanged():
        before = launches()
        layer(torch.zeros(1, 8)).sum().backward()
        assert launches() == before
        with torch.no_grad():
            layer(torch.zeros(1, 8))
        assert launches() == before + 1
        with torch.no_grad():
            layer(torch.zeros(65, 8))
        assert launches() == before + 1


def test_a_kind_of_call_without_a_record_is_looked_up_once(monkeypatch):
    """Decoding calls each linear layer for each token: what torch computes must cost the host next to nothing."""
    asked = []
    monkeypatch.setattr(few_rows, "tuned_plan_for", lambda *given: asked.append(given))
    layer = torch.nn.Linear(8, 24)
    dispatch.forget()
    with linear_layers.exchanged(), torch.no_grad():
        before = launches()
        for rows in (1, 1, 2, 1, 65):
            layer(torch.ones(rows, 8))
    assert len(asked) == 2
    assert launches() == before


def test_reset_puts_the_tables_of_caches_back():
    tilekern.apply()
    tables = [cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING]
    window = {"sliding_window": 4}
    with tilekern.invariant():
        assert type(tables[0]["sliding_attention"](**window)) is cache_utils.DynamicLayer
        assert type(tables[1]["sliding_attention"](max_cache_len=8, **window)) is cache_utils.StaticLayer
    assert type(tables[0]["sliding_attention"](**window)) is cache_utils.DynamicSlidingWindowLayer
    tilekern.reset()
    assert tables[0]["sliding_attention"] is cache_utils.DynamicSlidingWindowLayer
    assert tables[1]["sliding_attention"] is cache_utils.StaticSlidingWindowLayer
