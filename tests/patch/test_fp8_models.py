"""Models whose linear layers run 8-bit floats: which layers, how near to bfloat16 they train, and back."""

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

PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS = [*PROJECTIONS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def config_of(**changes):
    sizes = {
        "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.Qwen3Config(**sizes | changes)


def model_of(config=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config or config_of()).to(dtype).train()


@pytest.fixture(autouse=True)
def _reset():
    yield
    tilekern.reset()


def test_layers_of_the_decoder_are_converted_and_nothing_else():
    model = model_of()
    found = tilekern.fp8.convert(model)
    assert found == [f"model.layers.{n}.{name}" for n in range(2) for name in LAYERS]
    assert tilekern.fp8.convert(model) == found
    assert type(model.lm_head) is torch.nn.Linear
    assert "fp8=rowwise" in str(model.model.layers[0].mlp.down_proj)


@pytest.mark.parametrize("patched", [False, True], ids=["transformers", "tilekern"])
def test_a_model_trains_as_in_bfloat16(patched):
    if patched:
        tilekern.apply()
    plain = losses(model_of(), 40)
    model = model_of()
    tilekern.fp8.convert(model)
    found = losses(model, 40)
    assert plain[-1] < 0.5 * plain[0]
    assert ((found - plain).abs() / plain).mean() < 0.02
    assert not torch.equal(found, plain)


def test_gradients_of_the_first_step_point_where_those_of_bfloat16_do():
    found = []
    for is_on in (False, True):
        model = model_of(dtype=torch.float32)
        if is_on:
            tilekern.fp8.convert(model)
        model(input_ids=ids_of(), labels=ids_of()).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in found[0].items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), found[1][name].flatten(), 0)
        assert cosine > 0.98, name


@pytest.fixture
def calls(monkeypatch):
    """The sizes of the ops that a model calls: layers that share their input, and the weights of MLPs."""
    found, linears, mlp = [], tilekern.patch.fp8.fp8_linears, tilekern.patch.fp8.fp8_gated_mlp

    def noted_linears(x, layers):
        found.append(len(layers))
        return linears(x, layers)

    def noted_mlp(x, *weights_and_activation):
        found.append(weights_and_activation[-1])
        return mlp(x, *weights_and_activation)

    monkeypatch.setattr(tilekern.patch.fp8.Linear, "results", staticmethod(noted_linears))
    monkeypatch.setattr("tilekern.patch.fp8.fp8_gated_mlp", noted_mlp)
    return found


SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (transformers.Qwen3Config(**SIZES), [3, "silu"]),
        (transformers.LlamaConfig(**SIZES, mlp_bias=True), [3, 2]),
        (transformers.GemmaConfig(**SIZES), [3, "gelu_tanh"]),
        (transformers.Phi3Config(**SIZES, pad_token_id=0), ["silu"]),
    ],
    ids=lambda case: getattr(case, "model_type", ""),
)
def test_layers_that_share_their_input_are_one_op_and_an_mlp_is_one(calls, config, wanted):
    tilekern.apply()
    model = model_of(config)
    before = model(input_ids=ids_of(), labels=ids_of()).loss
    tilekern.fp8.convert(model)
    loss = model(input_ids=ids_of(), labels=ids_of()).loss
    loss.backward()
    assert calls == wanted
    assert abs(loss - before) < 0.02 * before
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def kept_by(run):
    """Return the tensors that are kept for the backward, each memory once."""
    found = {}

    def pack(x):
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return list(found.values())


def test_layers_keep_a_byte_a_number_of_their_inputs(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    tilekern.apply(attention=True)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = model_of(transformers.Qwen3Config(**SIZES | sizes, attn_implementation="tilekern"))
    parameters, ids = {x.untyped_storage().data_ptr() for x in model.parameters()}, ids_of(1, 70)

    def kept():
        found = kept_by(lambda: model(input_ids=ids, labels=ids))
        found = [x for x in found if x.untyped_storage().data_ptr() not in parameters]
        return sorted((x.nbytes, str(x.dtype)) for x in found if x.numel() >= 70 * 128)

    before = kept()
    tilekern.fp8.convert(model)
    after = kept()
    # What q, k and v read, and what gate and up read; while hooks pack tensors, what o_proj reads too. And
    # the rotated q and k, which are as large here.
    for _ in range(4):
        before.remove((2 * 70 * 128, "torch.bfloat16"))
    assert after == sorted(before + [(70 * 128, "torch.float8_e4m3fn")] * 3)


def test_a_norm_that_is_changed_before_the_layers_read_it_gives_their_gradients(monkeypatch):
    """In place, and by a write that torch does not count, as a collective's."""
    tilekern.apply()
    for change in (lambda y: y.mul_(1.5), lambda y: y.data.mul_(1.5)):
        found = []
        for is_on in (False, True):
            model = model_of()
            if is_on:
                tilekern.fp8.convert(model)
            layer = model.model.layers[0]
            x = torch.linspace(-2, 2, 80 * 256).view(1, 80, 256).bfloat16().requires_grad_()
            y = layer.post_attention_layernorm(x.sin())
            with torch.no_grad():
                change(y)
            layer.mlp(y).float().square().sum().backward()
            found.append(layer.mlp.gate_proj.weight.grad.double().flatten())
        assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99


def test_a_joined_layer_decodes_by_one_product(calls):
    tilekern.apply()
    model = model_of(transformers.Phi3Config(**SIZES, pad_token_id=0))
    tilekern.fp8.convert(model)
    with torch.no_grad():
        model(input_ids=ids_of(1, 8))
    assert calls == []


def test_apply_converts_models_that_are_made_later_until_reset():
    before = model_of()
    assert "fp8" in tilekern.apply(fp8="rowwise")
    assert "fp8" in tilekern.get_patched_ops()
    model = model_of()
    assert tilekern.fp8.restore(before) == []
    assert len(tilekern.fp8.restore(model)) == 14
    tilekern.apply()
    assert tilekern.fp8.restore(model_of()) == []
    tilekern.apply(fp8=True)
    tilekern.reset()
    assert tilekern.fp8.restore(model_of()) == []
    with pytest.raises(
        InputError, match="fp8 must be 'rowwise', 'blockwise', 'mxfp8', True for 'rowwise', or False, got 'mxfp4'"
    ):
        tilekern.apply(fp8="mxfp4")


def test_restore_gives_the_results_of_before():
    model, ids = model_of(), ids_of()
    before = model(input_ids=ids).logits
    tilekern.fp8.convert(model)
    during = model(input_ids=ids).logits
    assert not torch.equal(before, during)
    assert len(tilekern.fp8.restore(model)) == 14
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_checkpoint_is_the_models_of_before(tmp_path):
    model = model_of()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    tilekern.fp8.convert(model)
    assert list(model.state_dict()) == list(state)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(x, state[name]) for name, x in loaded.state_dict().items())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(tilekern.fp8.restore(twin)) == 14


def test_activations_that_are_made_again_give_the_same_bits():
    model = model_of()
    tilekern.fp8.convert(model)
    assert all(map(torch.equal, *gradients_made_again(model)))


def test_a_frozen_base_below_adapters_runs_8_bit_floats():
    peft = pytest.importorskip("peft")
    how = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(), how, autocast_adapter_dtype=False)
    found = tilekern.fp8.convert(model)
    assert len(found) == 14
    assert all(name.endswith("base_layer") for name in found)
    model(input_ids=ids_of(), labels=ids_of()).loss.backward()
    graded = {name for name, x in model.named_parameters() if x.grad is not None}
    assert all("lora_" in name for name in graded)
    assert len(graded) == 28


def test_the_report_names_each_layers_format_and_why_others_have_none():
    tilekern.apply()
    model = model_of()
    assert not any(row.op == "fp8" for row in tilekern.report(model).rows)
    tilekern.fp8.convert(model, lambda name, _: "k_proj" not in name)
    rows = {row.module: row.reason for row in tilekern.report(model).rows if row.op == "fp8"}
    assert rows["model.layers.1.mlp.up_proj"] == ""
    assert rows["model.layers.1.self_attn.k_proj"] == "not converted"
    assert rows["lm_head"].startswith("stays in its dtype")


def test_a_layer_with_a_hook_is_called_by_itself():
    tilekern.apply()
    model, seen = model_of(), []
    tilekern.fp8.convert(model)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    model(input_ids=ids_of(), labels=ids_of()).loss.backward()
    assert seen == [1]


def test_sizes_that_8_bit_products_do_not_take_stay_as_they_are():
    with pytest.raises(InputError, match="has no linear layer for 8-bit floats"):
        tilekern.fp8.convert(model_of(config_of(hidden_size=72, intermediate_size=72, head_dim=18)))
    odd = model_of(config_of(intermediate_size=392))
    assert not any("mlp" in name for name in tilekern.fp8.convert(odd))


def test_a_gpu_that_is_older_than_hopper_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA L4")
    with pytest.raises(InputError, match="8-bit floats need a GPU of sm_90 or newer; NVIDIA L4 is sm_89"):
        tilekern.patch.fp8._check(torch.device("cuda", 0))


def test_the_tuner_plans_the_kernels_of_a_step():
    steps = Steps([4096], fp8=True)
    found = {problem[0] for problem in plan_of_model("qwen3-0.6b", steps, resolve("H200")).problems}
    assert {"fp8_rows", "fp8_turned", "fp8_matmul", "fp8_gated_forward", "fp8_gated_backward"} <= found
    assert not found & {"swiglu_forward", "swiglu_backward", "swiglu_backward_remake"}
    plain = {problem[0] for problem in plan_of_model("qwen3-0.6b", Steps([4096]), resolve("H200")).problems}
    assert not any(kernel.startswith("fp8") for kernel in plain)
