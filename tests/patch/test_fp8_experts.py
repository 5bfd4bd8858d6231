"""Models whose experts run 8-bit floats: which modules, how near to bfloat16 they train, and back."""

import copy
import pickle

import pytest
import torch
import transformers
from fp8_losses import gradients_made_again, ids_of, losses

import tilekern
import tilekern.fp8
from tilekern.errors import InputError
from tilekern.patch import experts
from tilekern.runtime import dispatch
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps

COMMON = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 256, "tie_word_embeddings": False, "num_experts_per_tok": 2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def qwen3(**changes):
    own = {"intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
    return transformers.Qwen3MoeConfig(**COMMON | own | changes)


def gpt_oss(**changes):
    return transformers.GptOssConfig(**COMMON | {"intermediate_size": 128, "num_local_experts": 4} | changes)


both = pytest.mark.parametrize("config", [qwen3, gpt_oss], ids=["qwen3_moe", "gpt_oss"])
EXPERTS = [f"model.layers.{n}.mlp.experts" for n in range(2)]


def of_experts(name, _):
    return name.endswith("experts")


def convert_all(model):
    """Experts too, which no model gets unless they are chosen."""
    return tilekern.fp8.convert(model, lambda *_: True)


def model_of(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


@pytest.fixture(autouse=True)
def patched():
    tilekern.apply(experts=True)
    yield
    tilekern.reset()


@both
def test_experts_are_converted_beside_the_linear_layers(config):
    model = model_of(config())
    found = convert_all(model)
    assert [name for name in found if of_experts(name, None)] == EXPERTS
    assert len(found) == 10
    assert convert_all(model) == found
    assert tilekern.fp8.restore(model) == found
    assert tilekern.fp8.restore(model) == []


@both
def test_a_model_trains_as_in_bfloat16(config):
    plain = losses(model_of(config()), 30)
    model = model_of(config())
    convert_all(model)
    found = losses(model, 30)
    assert plain[-1] < 0.6 * plain[0]
    assert ((found - plain).abs() / plain).mean() < 0.03
    assert not torch.equal(found, plain)


@both
def test_gradients_of_the_first_step_point_where_those_of_bfloat16_do(config):
    """Of one layer, whose routing is the same, since the router reads what it did before."""
    found = []
    for is_on in (False, True):
        model = model_of(config(num_hidden_layers=1), torch.float32)
        if is_on:
            assert tilekern.fp8.convert(model, of_experts) == EXPERTS[:1]
        model(input_ids=ids_of(), labels=ids_of()).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in found[0].items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), found[1][name].flatten(), 0)
        assert cosine > 0.98, name


@both
def test_a_layer_launches_six_products_and_two_gradients_among_them(config, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    model = model_of(config(num_hidden_layers=1))
    tilekern.fp8.convert(model, of_experts)
    before = {name: counts["launches"] for name, counts in tilekern.stats().items()}
    model(input_ids=ids_of(1, 40), labels=ids_of(1, 40)).loss.backward()
    now = {name: counts["launches"] - before.get(name, 0) for name, counts in tilekern.stats().items()}
    assert now["fp8_grouped_matmul"] == 4
    assert now["fp8_grouped_weight_gradient"] == 2
    # Both weights once: in the gradient, or in the forward of those that are stored the other way round.
    assert now["fp8_expert_weights_turned"] == 2
    assert not now.get("grouped_linear")
    assert not now.get("grouped_weight_gradient")
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    dispatch.forget()


@both
def test_restore_gives_the_results_of_before(config):
    model, ids = model_of(config()), ids_of()
    before = model(input_ids=ids).logits
    tilekern.fp8.convert(model, of_experts)
    assert not torch.equal(model(input_ids=ids).logits, before)
    tilekern.fp8.restore(model)
    assert torch.equal(model(input_ids=ids).logits, before)


@both
def test_a_checkpoint_is_the_models_of_before_and_copies_are_converted(config, tmp_path):
    model = model_of(config())
    state = {name: x.clone() for name, x in model.state_dict().items()}
    converted = convert_all(model)
    assert list(model.state_dict()) == list(state)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(x, state[name]) for name, x in loaded.state_dict().items())
    assert tilekern.fp8.restore(loaded) == []
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert tilekern.fp8.restore(twin) == converted


def test_activations_that_are_made_again_give_the_same_bits():
    model = model_of(qwen3())
    convert_all(model)
    assert all(map(torch.equal, *gradients_made_again(model)))


def reasons(model):
    return {row.module: row.reason for row in tilekern.report(model).rows if row.op == "fp8"}


def test_the_report_names_the_format_of_experts_and_why_others_have_none():
    model = model_of(qwen3())
    tilekern.fp8.convert(model, lambda name, _: name != EXPERTS[1])
    rows = {row.module: row for row in tilekern.report(model).rows if row.op == "fp8"}
    assert rows[EXPERTS[0]].reason == ""
    assert rows[EXPERTS[0]].kind == "Qwen3MoeExperts, rowwise"
    assert "were slower" in rows[EXPERTS[1]].reason
    tilekern.fp8.restore(model)
    assert EXPERTS[0] not in tilekern.fp8.convert(model, lambda *_: True, format="blockwise")
    assert reasons(model)[EXPERTS[0]] == "experts have the format 'rowwise' alone"


def test_experts_that_run_transformers_code_stay_as_they_are():
    tilekern.apply(fp8="rowwise")
    model = model_of(qwen3())
    assert "chooses the op" in reasons(model)[EXPERTS[0]]
    assert not set(EXPERTS) & set(convert_all(model))


@both
def test_a_model_gets_8_bit_experts_only_where_they_are_chosen(config):
    tilekern.apply(experts=True, fp8="rowwise")
    model = model_of(config())
    assert "were slower" in reasons(model)[EXPERTS[0]]
    assert not set(EXPERTS) & set(tilekern.fp8.convert(model))
    assert set(EXPERTS) <= set(convert_all(model))
    assert reasons(model)[EXPERTS[0]] == ""


def test_converted_experts_of_a_model_whose_op_is_switched_off_are_reported():
    model = model_of(qwen3())
    convert_all(model)
    tilekern.apply()
    assert "chooses the op" in reasons(model)[EXPERTS[0]]


def test_sides_that_8_bit_products_do_not_take_stay_as_they_are():
    model = model_of(qwen3(moe_intermediate_size=72))
    assert not set(EXPERTS) & set(convert_all(model))
    assert reasons(model)[EXPERTS[0]].startswith("stays in its dtype: a head")
    with pytest.raises(InputError, match="has no linear layer for 8-bit floats"):
        tilekern.fp8.convert(model, of_experts)


def test_compiled_experts_run_in_their_dtype_and_are_counted():
    module = model_of(qwen3()).model.layers[0].mlp.experts
    x, weights = torch.randn(90, 128).bfloat16(), torch.rand(90, 2).bfloat16()
    ids = torch.rand(90, 4).topk(2).indices
    plain = experts.run_experts(module, x, ids, weights)
    setattr(module, experts.FORMAT, "rowwise")
    before = dispatch.reasons().get("fp8_grouped_matmul", {}).get("torch.compile", 0)
    found = torch.compile(experts.run_experts, backend="eager")(module, x, ids, weights)
    assert torch.equal(found, plain)
    assert dispatch.reasons()["fp8_grouped_matmul"]["torch.compile"] == before + 1
    assert not torch.equal(experts.run_experts(module, x, ids, weights), plain)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_tuner_plans_the_kernels_of_a_step(model):
    steps = Steps([4096], fp8=True, experts=True)
    found = {problem[0] for problem in plan_of_model(model, steps, resolve("H200")).problems}
    assert {"fp8_matmul", "grouped_linear", "grouped_weight_gradient"} <= found
    assert not any(name.startswith(("fp8_grouped", "fp8_expert")) for name in found)
