"""Models whose linear layers run other formats of 8-bit floats: beside bfloat16, between formats, and back."""

import copy
import pickle

import pytest
import torch
import transformers
from fp8_losses import gradients_made_again, ids_of, losses

import tilekern
import tilekern.fp8
from tilekern.errors import InputError
from tilekern.spec.targets import resolve
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=256, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


@pytest.fixture(autouse=True)
def _reset():
    yield
    tilekern.reset()


def formats(model):
    return {layer.fp8 for _, layer in tilekern.patch.fp8.converted_layers(model)}


OTHERS = ("blockwise", "mxfp8")


@pytest.mark.parametrize("format", OTHERS)
def test_a_model_trains_as_in_bfloat16(format):
    tilekern.apply()
    plain = losses(model_of(), 40)
    model = model_of()
    assert len(tilekern.fp8.convert(model, format=format)) == 14
    found = losses(model, 40)
    assert plain[-1] < 0.5 * plain[0]
    assert ((found - plain).abs() / plain).mean() < 0.02
    rows = model_of()
    tilekern.fp8.convert(rows)
    assert not torch.equal(found[:5], losses(rows, 5))


@pytest.mark.parametrize("format", OTHERS)
def test_gradients_of_the_first_step_point_where_those_of_float32_do(format):
    found = []
    for is_on in (False, True):
        model = model_of(torch.float32)
        if is_on:
            tilekern.fp8.convert(model, format=format)
        model(input_ids=ids_of(), labels=ids_of()).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in found[0].items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), found[1][name].flatten(), 0)
        assert cosine > 0.98, name


def test_layers_that_share_their_input_are_one_op_if_they_have_one_format(monkeypatch):
    calls = []
    original = tilekern.patch.fp8.BlockwiseLinear.results
    noted = staticmethod(lambda x, layers: calls.append(len(layers)) or original(x, layers))
    monkeypatch.setattr(tilekern.patch.fp8.BlockwiseLinear, "results", noted)
    tilekern.apply()
    model = model_of()
    tilekern.fp8.convert(model, format="blockwise")
    model(input_ids=ids_of(), labels=ids_of())
    assert calls == [3, 2, 3, 2]
    tilekern.fp8.convert(model, lambda name, _: name.endswith("q_proj"))
    calls.clear()
    model(input_ids=ids_of(), labels=ids_of())
    assert calls == [2, 2]


def test_a_format_replaces_the_other_and_both_go_back():
    model, ids = model_of(), ids_of()
    before = model(input_ids=ids).logits
    tilekern.fp8.convert(model)
    assert formats(model) == {"rowwise"}
    assert len(tilekern.fp8.convert(model, format="blockwise")) == 14
    assert formats(model) == {"blockwise"}
    assert "fp8=blockwise" in str(model.model.layers[0].mlp.down_proj)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert formats(twin) == {"blockwise"}
    with tilekern.patch.fp8.converted(model, "rowwise"):
        assert formats(model) == {"rowwise"}
    assert formats(model) == {"blockwise"}
    assert len(tilekern.fp8.restore(model)) == 14
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(
        InputError, match="convert: format must be one of 'rowwise', 'blockwise', 'mxfp8', got 'tensorwise'"
    ):
        tilekern.fp8.convert(model, format="tensorwise")


def test_apply_converts_models_that_are_made_later_in_its_last_format():
    for asked, format in ((True, "rowwise"), *(2 * (name,) for name in ("blockwise", "mxfp8", "rowwise", "blockwise"))):
        assert "fp8" in tilekern.apply(fp8=asked)
        assert formats(model_of()) == {format}
    tilekern.reset()
    assert not formats(model_of())


def test_the_report_names_each_layers_format():
    tilekern.apply()
    model = model_of()
    tilekern.fp8.convert(model, format="blockwise")
    tilekern.fp8.convert(model, lambda name, _: "mlp" in name)
    rows = {row.module: row for row in tilekern.report(model).rows if row.op == "fp8"}
    assert rows["model.layers.1.mlp.up_proj"].kind == "Linear, rowwise"
    assert rows["model.layers.1.self_attn.k_proj"].kind == "Linear, blockwise"
    assert rows["lm_head"].kind == "Linear"
    text = str(tilekern.report(model))
    assert "x model.layers.*.self_attn.q_proj (Linear, blockwise)" in text


def test_the_tuner_plans_the_kernels_of_a_format():
    def kernels(fp8):
        planned = plan_of_model("qwen3-0.6b", Steps([4096], fp8=fp8), resolve("B200"))
        return {kernel for kernel, _ in planned.problems if "fp8_" in kernel}

    assert kernels("blockwise") == {"fp8_blocks", "fp8_weight_blocks", "fp8_block_matmul"}
    assert kernels("mxfp8") == {"mxfp8_blocks", "mxfp8_matmul"}
    assert kernels("rowwise") == kernels(True)
    assert not kernels("rowwise") & kernels("blockwise")
    with pytest.raises(InputError, match="steps: fp8 must be 'rowwise', 'blockwise', 'mxfp8'"):
        Steps([4096], fp8="tensorwise")


def test_a_gpu_without_products_of_mxfp8_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    device = torch.device("cuda", 0)
    tilekern.patch.fp8._check(device, "blockwise")
    with pytest.raises(InputError, match="MXFP8 needs a GPU of sm_100 or newer; NVIDIA H200 is sm_90"):
        tilekern.patch.fp8._check(device, "mxfp8")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (10, 0))
    tilekern.patch.fp8._check(device, "mxfp8")


@pytest.mark.parametrize("format", OTHERS)
def test_activations_that_are_made_again_give_the_same_bits(format):
    model = model_of()
    tilekern.fp8.convert(model, format=format)
    assert all(map(torch.equal, *gradients_made_again(model)))


@pytest.mark.parametrize("format", OTHERS)
def test_a_frozen_base_below_adapters_runs_a_format(format):
    peft = pytest.importorskip("peft")
    how = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(), how, autocast_adapter_dtype=False)
    assert len(tilekern.fp8.convert(model, format=format)) == 14
    model(input_ids=ids_of(), labels=ids_of()).loss.backward()
    graded = {name for name, x in model.named_parameters() if x.grad is not None}
    assert all("lora_" in name for name in graded)
    assert len(graded) == 28
