"""MLPs without a gate: which modules the op serves, what of them stays, and which run as they are."""

import pytest
import torch
from tiny_families import IDS, make
from tiny_qwen3 import launched, launches, same, worst
from transformers import activations

import tilekern

pytestmark = pytest.mark.usefixtures("interpreted")
FORWARD, BACKWARD, REMAKE = "activation_forward", "activation_backward", "activation_backward_remake"
WAYS = [lambda _: tilekern.apply(model_type="gpt2"), tilekern.apply_to_model]


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def block(family="gpt2"):
    """An MLP of a model in training, the only thing of it that is patched."""
    tilekern.apply(model_type=family)
    model = make(family)[0].train()
    return next(module for name, module in model.named_modules() if name.endswith(".mlp"))


def run(mlp, x=None):
    """An MLP's result and gradients, and the launches of its activation's kernels."""
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1)) if x is None else x
    x.grad = None
    x.requires_grad_()
    before = launches()
    y = mlp(x)
    leaves = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1))
    counted = launched(before)
    return [y, *gradients], {name: counted[name] for name in (FORWARD, BACKWARD, REMAKE) if name in counted}


@pytest.mark.parametrize("way", WAYS, ids=["class", "model"])
def test_those_of_gpt2_are_served_and_put_back(way):
    model = make("gpt2")[0].eval()
    reference = step(model)
    way(model)
    assert "mlp" in tilekern.get_patched_ops()
    rows = [row for row in tilekern.report(model).rows if row.kind == "GPT2MLP"]
    assert [(row.op, row.reason) for row in rows] == [("mlp", "")] * 2
    before = launches()
    assert worst(step(model), reference) < 1e-5
    assert launched(before)[FORWARD] == launched(before)[REMAKE] == 2
    tilekern.reset()
    before = launches()
    assert same(step(model), reference)
    assert launched(before) == {}


def test_it_can_be_left_out():
    assert "mlp" not in tilekern.apply(model_type="gpt2", mlp=False)
    assert tilekern.get_patched_ops().keys() == {"layer_norm", "fused_linear_cross_entropy"}


def test_dropout_of_the_result_stays():
    mlp = block()
    mlp.dropout.p = 0.5
    torch.manual_seed(0)
    (y, *_), launched_there = run(mlp)
    assert launched_there == {FORWARD: 1, REMAKE: 1}
    assert 0.2 < (y == 0).float().mean() < 0.8


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gelu_new", "gpt2"), ("gelu_fast", "gpt2"), ("gelu_accurate", "gpt2"), ("gelu_python_tanh", "gpt2"),
        ("gelu", "falcon"), ("gelu_python", "falcon"), ("quick_gelu", "gpt_neox"), ("silu", "phi"), ("swish", "phi"),
        ("relu", "phi"), ("relu2", "nemotron"),
    ],
)  # fmt: skip
def test_activations_give_what_they_did(name, family):
    mlp = block(family)
    holder = next(attribute for attribute in ("act", "act_fn", "activation_fn") if hasattr(mlp, attribute))
    setattr(mlp, holder, activations.ACT2FN[name])
    found, served = run(mlp)
    assert served == {FORWARD: 1, REMAKE: 1}
    tilekern.reset()
    assert worst(found, run(mlp)[0]) < 1e-5


def with_hook(module):
    module.register_forward_hook(lambda *told: told[-1] * 2)
    return module


class Half(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def other_linear(_):
    torch.manual_seed(0)
    return Half(24, 96)


OTHERS = {
    "activation": ("act", lambda _: torch.nn.Mish(), {}),
    "hook on the activation": ("act", with_hook, {}),
    "hook on a layer": ("c_fc", with_hook, {FORWARD: 1, BACKWARD: 1}),
    "another layer": ("c_fc", other_linear, {FORWARD: 1, BACKWARD: 1}),
}


@pytest.mark.parametrize(("name", "other", "served"), OTHERS.values(), ids=OTHERS)
def test_what_a_module_has_else_runs_as_it_is(name, other, served):
    mlp = block()
    setattr(mlp, name, other(getattr(mlp, name)))
    found, counted = run(mlp)
    assert counted == served
    tilekern.reset()
    assert worst(found, run(mlp)[0]) < 1e-5


def test_another_activation_is_told():
    model = make("gpt2")[0]
    tilekern.apply(model_type="gpt2")
    model.transformer.h[0].mlp.act = torch.nn.Mish()
    assert {row.module: row.reason for row in tilekern.report(model).rows if row.op == "mlp"} == {
        "transformer.h.0.mlp": "no op has its activation, Mish", "transformer.h.1.mlp": "",
    }  # fmt: skip


def test_bloom_s_activation_is_served():
    found, counted = run(block("bloom").gelu_impl)
    assert counted == {FORWARD: 1, BACKWARD: 1}
    tilekern.reset()
    assert worst(found, run(block("bloom").gelu_impl)[0]) < 1e-5


def test_autocast_gives_what_it_did():
    mlp = block()
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(mlp(torch.ones(1, 3, 24).cumsum(-1)))
        tilekern.reset()
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    assert worst(results[:1], results[1:]) < 2e-2
