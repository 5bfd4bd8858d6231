"""``tilekern.report`` on unpatched models, patched ones, and those that other code has changed."""

import itertools

import pytest
import torch
from model_contract import both_ways
from tiny_families import IDS, make
from tiny_qwen3 import apply

import tilekern
from tilekern.kernels import all_specs
from tilekern.patch import families
from tilekern.patch.families import FAMILIES
from tilekern.patch.report import KERNELS, Calls
from tilekern.runtime import dispatch
from tilekern.runtime.switches import OPS

pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")


def reasons(model, op):
    """Return why an op does not serve each module; empty if it does."""
    return {row.module: row.reason for row in tilekern.report(model).rows if row.op == op}


@pytest.fixture
def qwen3():
    return make("qwen3")[0]


@pytest.mark.parametrize("patch", ["apply", "apply_to_model"])
def test_it_says_what_is_patched(qwen3, patch):
    before = tilekern.report(qwen3).rows
    assert not [row for row in before if row.op != "attention" and not row.reason.startswith("it is not patched; ")]
    ops = tilekern.apply() if patch == "apply" else tilekern.apply_to_model(qwen3)
    after = [row for row in tilekern.report(qwen3).rows if row.op != "attention"]
    # The fused op serves the attention in the place of rope.
    assert {row.op for row in after} == {op for op in ops if op in FAMILIES["qwen3"].ops} - {"rope"}
    assert not [row for row in after if row.reason]
    assert {row.op for row in before} - {row.op for row in after} == {"rope", "attention"}
    tilekern.reset()
    assert tilekern.report(qwen3).rows == before


def test_what_is_switched_off_is_named(qwen3):
    apply(swiglu=False)
    assert set(reasons(qwen3, "swiglu").values()) == {"it is not patched; tilekern.apply(swiglu=True) does so"}
    assert set(reasons(qwen3, "rms_norm").values()) == {""}


def test_methods_of_a_module_s_own_and_subclasses_are_seen(qwen3):
    norm, first, second = qwen3.model.norm, *(layer.mlp for layer in qwen3.model.layers)
    norm.forward = lambda x: x
    second.__class__ = type("Mine", (type(second),), {"forward": lambda _, x: x})
    apply()
    assert reasons(qwen3, "rms_norm")["model.norm"] == "its forward is its own, a hook's or another patch's"
    assert reasons(qwen3, "swiglu") == {"model.layers.0.mlp": "", "model.layers.1.mlp": "Mine has a forward of its own"}
    first.act_fn = torch.nn.ReLU()
    assert reasons(qwen3, "swiglu")["model.layers.0.mlp"] == "no op has its activation, ReLU"


def test_a_hook_that_holds_the_patched_method_changes_nothing(qwen3):
    from accelerate import hooks

    apply()
    hooks.add_hook_to_module(qwen3.model.norm, hooks.ModelHook())
    assert reasons(qwen3, "rms_norm")["model.norm"] == ""


def test_hooks_on_a_norm_keep_a_layer_from_being_fused(qwen3):
    apply()
    qwen3.model.layers[1].post_attention_layernorm.register_forward_hook(lambda *_: None)
    assert reasons(qwen3, "fused_add_rms_norm") == {
        "model.layers.0": "",
        "model.layers.1": "hooks on post_attention_layernorm have the steps run one by one",
    }


@both_ways
def test_hooks_on_what_an_op_has_inside_are_seen(way, qwen3):
    way(qwen3)
    first, second = qwen3.model.layers
    first.self_attn.q_norm.register_forward_hook(lambda *_: None)
    second.self_attn.k_norm.forward = lambda x: x
    assert reasons(qwen3, "qk_norm_rope") == {
        "model.layers.0.self_attn": "hooks on q_norm have the steps run one by one",
        "model.layers.1.self_attn": "the op does not know its k_norm",
    }
    assert set(reasons(qwen3, "rope").values()) == {""}
    first.mlp.act_fn.register_forward_hook(lambda *_: None)
    said = "hooks on its activation have the steps run one by one"
    assert reasons(qwen3, "swiglu") == {"model.layers.0.mlp": said, "model.layers.1.mlp": ""}


def test_what_somebody_else_has_replaced_is_said(qwen3, monkeypatch):
    kind = type(qwen3.model.norm)
    monkeypatch.setattr(kind, "forward", lambda _, x: x)
    apply()
    (reason,) = set(reasons(qwen3, "rms_norm").values())
    assert "Qwen3RMSNorm.forward is not the code that the patch was made for" in reason


def test_a_head_or_a_loss_that_does_more_is_said_of_the_model(qwen3):
    apply()
    assert reasons(torch.compile(qwen3), "fused_linear_cross_entropy") == {"_orig_mod": ""}
    qwen3.lm_head.bias = torch.nn.Parameter(torch.zeros(61))
    assert reasons(qwen3, "fused_linear_cross_entropy") == {"": ""}
    qwen3.lm_head.register_forward_hook(lambda *_: None)
    assert reasons(qwen3, "fused_linear_cross_entropy") == {"": "its head has hooks"}
    qwen3.loss_function = lambda **_: 0
    assert reasons(qwen3, "fused_linear_cross_entropy")[""].startswith("its loss is not the one of transformers")


def test_code_of_no_known_form_and_families_that_are_not_tested_are_told_apart(qwen3, monkeypatch):
    assert set(reasons(make("bitnet")[0], "swiglu").values()) == {"its code has no form that is known"}
    monkeypatch.delitem(families._BY_MODULE, FAMILIES["qwen3"].module)
    (reason,) = set(reasons(qwen3, "rms_norm").values())
    assert reason.startswith("it is not patched: qwen3 is not among the families that are tested")


class OwnRMSNorm(torch.nn.Module):
    """Outside transformers, in the form of Llama's."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class StrangeRMSNorm(torch.nn.Module):
    def forward(self, hidden_states):
        return hidden_states.pow(3)


def test_code_outside_transformers_is_told_what_patches_it():
    model = torch.nn.ModuleDict({"known": OwnRMSNorm(), "strange": StrangeRMSNorm()})
    tilekern.apply(forms="any")
    remedy = 'is not of transformers; tilekern.apply_to_model(model, forms="any") patches it'
    found = reasons(model, "rms_norm")
    assert found == {
        "known": f"it is not patched: {__name__} {remedy}",
        "strange": "its code has no form that is known",
    }
    tilekern.apply_to_model(model, forms="any")
    assert reasons(model, "rms_norm") == {"known": "", "strange": "its code has no form that is known"}


@pytest.mark.parametrize(
    ("family", "lacks"),
    [("gpt2", {"rope", "rms_norm", "swiglu", "qk_norm_rope", "fused_add_rms_norm"}), ("bloom", {"rope", "swiglu"}),
     ("opt", {"rope", "rms_norm", "fused_add_rms_norm"}), ("llama", {"layer_norm", "mlp", "qk_norm_rope", "experts"})],
)  # fmt: skip
@pytest.mark.parametrize("patch", [True, False])
def test_of_what_a_model_does_not_have_nothing_is_said(family, lacks, patch):
    if patch:
        tilekern.apply()
    assert not lacks.intersection(row.op for row in tilekern.report(make(family)[0]).rows)


def headings(model):
    """The heading of each op in what is printed."""
    lines = [line for line in str(tilekern.report(model)).splitlines() if not line.startswith(" ")]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.fixture
def uncounted(monkeypatch):
    """Nothing has been called before."""
    monkeypatch.setattr(dispatch._state, "counters", {})


def test_printed_it_has_a_heading_for_each_op_and_a_line_for_modules_that_are_alike(qwen3, uncounted):
    apply(rms_norm=False)
    assert headings(qwen3)["swiglu"] == "patched; not called yet in this process"
    qwen3.eval()(input_ids=IDS)
    report = tilekern.report(qwen3)
    lines = str(report).splitlines()
    assert "swiglu: patched; 2 of 2 calls fell back (tensors on the device cpu)" in lines
    assert "  yes    2 x model.layers.*.mlp (Qwen3MLP)" in lines
    said = "it is not patched; tilekern.apply(rms_norm=True) does so"
    assert "rms_norm: not patched" in lines
    assert f"  no     1 x model.norm (Qwen3RMSNorm): {said}" in lines
    assert not [line for line in lines if line.startswith("swiglu_forward fell back to torch ")]
    assert report == tilekern.report(qwen3)
    assert report.calls["swiglu"] == Calls(0, 2, {"tensors on the device cpu": 2})
    assert report.fallbacks["swiglu_forward"] == 2


def test_calls_with_and_without_kernels_are_counted_apart(qwen3, uncounted, monkeypatch):
    apply()
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    qwen3.eval()(input_ids=IDS)
    assert headings(qwen3)["swiglu"] == "patched; no call fell back, 2 launches"
    monkeypatch.delenv("TILEKERN_INTERPRET")
    qwen3(input_ids=IDS)
    qwen3.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    qwen3(input_ids=IDS)
    said = "5 x tensors on the device cpu"
    why = "an activation without an op, or with hooks"
    assert headings(qwen3)["swiglu"] == (
        f"patched in 1 of 2 modules; 4 of 6 calls fell back ({said.replace('5', '3')}, 1 x {why})"
    )


def test_why_attention_fell_back_is_said(uncounted):
    tilekern.apply()
    model = make("llama")[0].train()
    model.set_attn_implementation("tilekern")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(input_ids=IDS, labels=IDS)
    layers = len(model.model.layers)
    assert headings(model)["attention"] == f"patched; {layers} of {layers} calls fell back (dropout)"
    padded = torch.ones_like(IDS)
    padded[0, :2] = 0
    model.eval()(input_ids=IDS, attention_mask=padded)
    assert headings(model)["attention"] == (
        f"patched; {2 * layers} of {2 * layers} calls fell back ({layers} x dropout, {layers} x a mask, as of padding)"
    )


def test_models_without_values_and_graphs_of_torch_compile_are_counted_too(uncounted):
    apply()
    with torch.device("meta"):
        model = make("qwen3")[0].to("meta")
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert "tensors without values, on meta" in headings(model)["swiglu"]
    dispatch._state.counters.clear()
    mlp = make("qwen3")[0].model.layers[0].mlp
    mlp.act_fn = torch.nn.ReLU()
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.randn(3, mlp.gate_proj.in_features))
    why = "an activation without an op, or with hooks"
    assert dispatch.reasons() == {"swiglu_forward": {why: 1}}, "once for the graph"


def test_kernels_of_ops_are_those_that_there_are():
    # The op of an adapter runs products of torch, and counts by its own name where PEFT's code runs instead.
    assert set(itertools.chain(*KERNELS.values())) <= {*all_specs(), "lora_linear"}
    assert set(KERNELS) == {*OPS, "experts", "attention", "fp8"}
