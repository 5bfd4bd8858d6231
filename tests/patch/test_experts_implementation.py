"""``experts_implementation="tilekern"``: models with experts compute what they do by transformers' own functions."""

import json

import pytest
import torch
from model_contract import alike, trained
from peft import LoraConfig, get_peft_model
from tiny_families import IDS, make
from transformers import AutoModelForCausalLM
from transformers.activations import GELUTanh
from transformers.integrations import moe
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import tilekern
from tilekern import ops
from tilekern.integrations import names
from tilekern.kernels import experts as kernels
from tilekern.patch import experts
from tilekern.runtime.dispatch import counters
from tilekern.runtime.switches import OPS

FAMILIES = (
    "gpt_oss", "qwen3_moe", "mixtral", "granitemoe", "olmoe", "deepseek_v3", "qwen2_moe", "glm4_moe"
)  # fmt: skip
NONE = dict.fromkeys(OPS, False)
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def registered():
    experts.register()


def step(model, name=None):
    """A step by transformers' or our experts, or by those that there are."""
    if name is not None:
        model.set_experts_implementation(name)
    return trained(model, IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_are_those_of_the_model_as_it_is(family):
    model, _, _ = make(family)
    expected, before = step(model, "eager"), counters("experts_gate").launches
    found = step(model, "tilekern")
    layers = sum(hasattr(type(module), "_apply_gate") for module in model.modules())
    assert counters("experts_gate").launches == before + layers > before
    alike(found, expected)


def module_of(**changes):
    """The experts of a tiny model, with some attributes changed."""
    model, _, _ = make("qwen3_moe")
    module = next(x for x in model.modules() if type(x) is Qwen3MoeExperts)
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def routed(module, tokens=5, choices=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, module.gate_up_proj.shape[2], generator=generator)
    ids = torch.rand(tokens, module.num_experts, generator=generator).topk(choices).indices
    return x, ids, torch.rand(tokens, choices, generator=generator)


class Squared(torch.nn.Module):
    def forward(self, x):
        return x * x


@pytest.mark.filterwarnings("ignore:.*transformers' own grouped products run")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"act_fn": Squared()}, "no op has its activation, Squared"),
        ({"has_post_expert_norm": True, "post_expert_norm": torch.nn.Identity()}, "a norm follows"),
        ({"_apply_gate": lambda x: x.chunk(2, -1)[0]}, "its gate has no form that is known"),
    ],
)
def test_what_no_op_serves_runs_transformers_own_and_is_counted(changes, reason):
    module = module_of(**changes)
    given, before = routed(module), counters("experts_gate").fallbacks
    expected = moe.grouped_mm_experts_forward(module, *given)
    assert torch.equal(experts.run_experts(module, *given), expected)
    assert counters("experts_gate").fallbacks == before + 1
    assert reason in experts.unserved(module)


def test_ids_of_other_ranks_add_nothing():
    module = module_of()
    x, ids, weights = routed(module)
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[1], kept[3, 0] = False, False
    found = experts.run_experts(module, x, ids.where(kept, module.num_experts), weights)
    expected = moe.grouped_mm_experts_forward(module, x, ids, weights * kept)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found[1].any()


def test_weights_of_all_experts_are_read_where_they_were_chosen():
    """PhiMoE's router returns them like this in transformers 5.0."""
    module = module_of()
    x, ids, weights = routed(module)
    of_all = torch.zeros(len(x), module.num_experts).scatter(1, ids, weights)
    assert torch.equal(experts.run_experts(module, x, ids, of_all), experts.run_experts(module, x, ids, weights))


def test_gelu_by_tanh_is_served():
    module = module_of(act_fn=GELUTanh())
    given, before = routed(module), counters("experts_gate").launches
    expected = moe.grouped_mm_experts_forward(module, *given)
    torch.testing.assert_close(experts.run_experts(module, *given), expected, rtol=1e-4, atol=1e-5)
    assert counters("experts_gate").launches == before + 1


def test_the_gate_of_most_classes_is_known_by_its_shape():
    assert experts.form_of(moe._default_apply_gate) == experts.GateForm()


def test_apply_and_reset_choose_the_experts_of_all_models():
    assert tilekern.apply(experts=True, model_type="qwen3")[-1] == "experts"
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is experts.run_experts
    tilekern.apply(model_type="qwen3")
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is moe.grouped_mm_experts_forward
    tilekern.apply(experts=True, model_type="qwen3")
    tilekern.reset()
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is moe.grouped_mm_experts_forward


def test_apply_to_model_and_reset_choose_the_experts_of_one_model():
    model, other = (make("qwen3_moe")[0] for _ in range(2))
    assert tilekern.apply_to_model(model, experts=True)[-1] == "experts"
    assert model.get_experts_implementation()[""] == "tilekern"
    assert other.get_experts_implementation()[""] == "grouped_mm"
    tilekern.apply_to_model(model)
    assert model.get_experts_implementation()[""] == "grouped_mm"
    tilekern.apply_to_model(model, experts=True)
    tilekern.reset()
    assert model.get_experts_implementation()[""] == "grouped_mm"


def test_after_import_tilekern_alone_the_name_is_known():
    moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("tilekern")
    names.register_later()
    module = module_of()
    given = routed(module)
    found = moe.ALL_EXPERTS_FUNCTIONS["tilekern"](module, *given)
    assert torch.equal(found, experts.run_experts(module, *given))


def said(model):
    """Return the report's rows on a model's layers of experts."""
    rows = [row for row in tilekern.report(model).rows if row.kind.endswith(("Experts", "Moe"))]
    return {row.reason for row in rows if row.op == "experts"}


def test_the_report_says_whether_experts_run_the_op():
    model, _, _ = make("qwen3_moe")
    assert said(model) == {"experts_implementation is 'grouped_mm'; \"tilekern\" chooses the op"}
    tilekern.apply_to_model(model, experts=True)
    assert said(model) == {""}


def test_llama_4_computes_the_chosen_experts_alone(monkeypatch):
    """A patch does this: transformers offers no choice of its experts, which compute all tokens."""
    model, rows, run = make("llama4")[0], [], ops.experts
    monkeypatch.setattr(ops, "experts", lambda x, *more, **how: rows.append(len(x)) or run(x, *more, **how))
    expected = step(model)
    assert said(model) == {"it is not patched; tilekern.apply(experts=True) does so"}
    assert tilekern.apply_to_model(model, experts=True, **NONE) == ["experts"]
    assert said(model) == {""}
    alike(step(model), expected)
    assert rows == [IDS.numel() * model.config.num_experts_per_tok]
    assert tilekern.reset("experts") == ["experts"]
    assert all(torch.equal(x, expected[name]) for name, x in step(model).items())
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda experts: experts.register_forward_hook(lambda *_: None), "its experts are called by hooks"),
        (lambda experts: setattr(experts, "act_fn", Squared()), "no op has its activation, Squared"),
    ],
)
def test_llama_4_s_own_code_runs_where_the_op_would_compute_something_else(change, reason):
    model = make("llama4")[0]
    tilekern.apply(experts=True, model_type="llama4", **NONE)
    change(next(x for x in model.modules() if type(x) is Llama4TextExperts))
    before = counters("experts_gate").launches
    found = step(model)
    assert [line.partition(reason)[:2] for line in said(model)] == [("", reason)]
    assert counters("experts_gate").launches == before
    tilekern.reset()
    alike(found, step(model))


def test_apply_patches_llama_4_where_experts_are_asked_for():
    assert "experts" in tilekern.apply(experts=True, model_type="llama4")
    assert "experts" not in tilekern.apply(model_type="llama4")


def test_a_traced_step_asks_for_the_kernels_of_experts(tmp_path):
    config = make("gpt_oss")[0].config
    with torch.device("meta"):
        kind = {"attn_implementation": "eager", "experts_implementation": "tilekern", "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_config(config, **kind)
    ids, path = IDS.to("meta"), tmp_path / "plan.json"
    with tilekern.trace(path, gpu="H200"):
        model(input_ids=ids, labels=ids).loss.backward()
    asked = {problem["kernel"] for problem in json.loads(path.read_text())["problems"]}
    routers = {spec.name for spec in (*kernels.router.SPECS, *kernels.router_losses.SPECS)}
    own = {spec.name for spec in kernels.SPECS} - routers
    assert own | {"column_sum"} <= asked
    assert not routers & asked, "the name is of experts alone"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "llama4"])
@pytest.mark.slow
def test_torch_compile_traces_a_layer_of_experts_whole(family):
    """The same launches and bits as without it: no break of the graph, and no fallback."""
    torch._dynamo.reset()
    model = make(family)[0]
    if family == "llama4":
        tilekern.apply_to_model(model, experts=True, **NONE)
        module = model.model.layers[1].feed_forward
    else:
        # Without the routers' patch: a traced router is the model's own, and has other bits.
        model.set_experts_implementation("tilekern")
        module = model.model.layers[0].mlp
    x = torch.randn(1, 5, 24, requires_grad=True)
    taken = []
    for function in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        counted = counters("experts_gate"), counters("experts_gate_backward")
        before = [(x.launches, x.fallbacks) for x in counted]
        y = function(x)
        y = y[0] if isinstance(y, tuple) else y
        leaves = [x, *(w for w in module.parameters() if w.requires_grad)]
        gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        taken.append([y.detach(), *gradients])
        assert [(x.launches - n, x.fallbacks - m) for x, (n, m) in zip(counted, before, strict=True)] == [(1, 0)] * 2
    assert all(torch.equal(*pair) for pair in zip(*taken, strict=True))


def adapted(family, **targets):
    torch.manual_seed(1)
    model, config = make(family)[0], LoraConfig(r=2, init_lora_weights=False, **targets)
    return model, get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "llama4"])
def test_adapters_of_the_weights_of_experts_count(family):
    """PEFT adds their product to weights while its wrapper calls the experts; Llama 4's layer would not see that."""
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    _, with_adapters = adapted(family, target_modules=[], target_parameters=targets)
    expected, before = step(with_adapters), counters("experts_gate").launches
    tilekern.apply_to_model(with_adapters, experts=True, **NONE)
    alike(step(with_adapters), expected)
    of_another_forward = "its experts are called by hooks or by another forward than their own"
    assert said(with_adapters) == {of_another_forward if family == "llama4" else ""}
    assert (counters("experts_gate").launches > before) == (family != "llama4")


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_frozen_experts_have_no_gradients_of_weights_and_no_sums():
    model, with_adapters = adapted("gpt_oss", target_modules=["q_proj"])
    names = ("experts_gate_backward", "experts_combine", "grouped_weight_gradient", "grouped_sum", "column_sum")
    before = [counters(name).launches for name in names]
    step(with_adapters.base_model.model, "tilekern")
    layers = model.config.num_hidden_layers
    assert [counters(name).launches - n for name, n in zip(names, before, strict=True)] == [layers, 2 * layers, 0, 0, 0]
