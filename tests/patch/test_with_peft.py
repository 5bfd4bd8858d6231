"""Adapters of PEFT in patched models: whichever comes first, they count, and what is around them is patched."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_qwen3 import IDS, OPS, apply, launched, launches, make, same, worst

import tilekern

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
]
SERVED = [op for op in OPS if op != "rope"]
CONFIGS = {
    "linear layers and head": LoraConfig(
        target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
    ),
    "directions and magnitudes": LoraConfig(
        target_modules=["q_proj", "o_proj", "gate_proj"], use_dora=True, task_type="CAUSAL_LM", init_lora_weights=False
    ),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def adapted(model, config):
    torch.manual_seed(1)
    return get_peft_model(model, config).train()


def trained(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("first", [True, False], ids=["adapters first", "patched first"])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_count_whichever_comes_first(name, first):
    config = CONFIGS[name]
    reference = trained(adapted(make(layers=1), config))
    model = make(layers=1)
    # One of the two ways each: they differ in nothing that adapters touch.
    if first:
        model = adapted(model, config)
        assert tilekern.apply_to_model(model) == SERVED
    else:
        apply()
        model = adapted(model, config)
    assert not [row for row in tilekern.report(model).rows if row.op in SERVED and row.reason]
    before = launches()
    assert worst(trained(model), reference) < 1e-5
    ran = {"swiglu_forward", "qk_norm_rope_backward", "fused_add_rms_norm_backward", "fused_linear_cross_entropy"}
    assert ran <= set(launched(before))
    tilekern.reset()
    assert same(trained(model), reference)


def test_adapters_are_switched_off_merged_and_taken_out():
    model = make(layers=1).eval()
    plain = model(input_ids=IDS, labels=IDS).loss
    adapters = adapted(model, CONFIGS["linear layers and head"]).eval()
    with torch.no_grad():
        adapters.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        wanted = adapters(input_ids=IDS, labels=IDS).loss
    apply()
    with torch.no_grad():
        skipping = {"input_ids": IDS, "labels": IDS, "skip_logits": True}
        with adapters.disable_adapter():
            torch.testing.assert_close(adapters(**skipping).loss, plain)
        torch.testing.assert_close(adapters(**skipping).loss, wanted)
        adapters.merge_adapter()
        torch.testing.assert_close(adapters(**skipping).loss, wanted)
        adapters.unmerge_adapter()
        whole = adapters.merge_and_unload()
        torch.testing.assert_close(whole(**skipping).loss, wanted)
    # No module of PEFT's is left, so that the MLP is one op again.
    before = launches()
    trained(whole.train().requires_grad_())
    assert "swiglu_backward_remake" in launched(before)


def test_an_adapter_in_the_head_makes_logits_and_the_report_says_so():
    model = adapted(make(layers=1), LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    tilekern.apply_to_model(model)
    (reason,) = [row.reason for row in tilekern.report(model).rows if row.op == "fused_linear_cross_entropy"]
    assert reason == "its head is Linear of peft.tuners.lora.layer"
    assert model(input_ids=IDS, labels=IDS).logits.shape == (2, 7, 331)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_with_adapters_are_made_again_in_the_backward(reentrant):
    def prepared():
        model = adapted(make(layers=1), CONFIGS["linear layers and head"])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    reference = trained(prepared())
    model = prepared()
    tilekern.apply_to_model(model)
    before = launches()
    assert worst(trained(model), reference) < 1e-5
    assert launched(before)["fused_add_rms_norm_forward"] == 2
