"""Layers whose forward is an MLP, too: one stand-in serves their layer norms and that, or one of the two."""

import pytest
import torch
from tiny_families import IDS, OWN, make
from tiny_qwen3 import launched, launches, same, worst

import tilekern
from tilekern.patch.forms import Module, patches_of

pytestmark = pytest.mark.usefixtures("interpreted")
NORMS, MLPS = "layer_norm_forward", "activation_forward"
WAYS = [lambda model, **ops: tilekern.apply(model_type=model.config.model_type, **ops), tilekern.apply_to_model]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["class", "model"])


def step(model):
    """The loss and the gradients, but for those of keys' biases, which are what rounding leaves."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    graded = [(name, x.grad.clone()) for name, x in model.named_parameters() if x.grad is not None]
    return [loss.detach(), *(gradient for name, gradient in graded if not name.endswith("k_proj.bias"))]


def ran(model, reference):
    """The kernels of norms and of MLPs that ran in a step, which gives what it did; sums with norms have two of one."""
    before = launches()
    assert worst(step(model), reference) < 1e-5
    counted = launched(before)
    norms = sum(number for name, number in counted.items() if "layer_norm" in name and name.endswith("_forward"))
    return norms, counted.get(MLPS, 0)


def reported(model):
    return {row.op: row.reason for row in tilekern.report(model).rows if row.kind.endswith("DecoderLayer")}


@both_ways
@pytest.mark.parametrize("family", ["biogpt", "opt", "xglm"])
def test_each_op_can_be_left_out_and_taken_back(family, way):
    model = make(family)[0].train()
    expected = step(model)
    # Norms of two layers, two of each, and the one behind them.
    found = {}
    for switches in ((True, True), (True, False), (False, True), (True, True)):
        way(model, **dict(zip(("layer_norm", "mlp"), switches, strict=True)))
        found[switches] = ran(model, expected)
        reasons = reported(model)
        assert [reasons["layer_norm"] == "", reasons["mlp"] == ""] == [*switches]
        patched = tilekern.get_patched_ops()
        assert [op in patched for op in ("layer_norm", "mlp")] == [*switches]
    assert found == {(True, True): (5, 2), (True, False): (5, 0), (False, True): (0, 2)}
    assert tilekern.reset("layer_norm") == ["layer_norm"]
    assert ran(model, expected) == (0, 2)
    way(model)
    assert tilekern.reset("mlp") == ["mlp"]
    assert ran(model, expected) == (5, 0)
    tilekern.reset()
    assert same(step(model), expected)


def test_one_model_may_have_other_ops_than_its_class():
    model, other = (make("opt")[0].train() for _ in range(2))
    expected = step(model)
    tilekern.apply(model_type="opt", mlp=False)
    tilekern.apply_to_model(model)
    assert ran(model, expected) == (5, 2)
    assert ran(other, expected) == (5, 0)
    tilekern.reset("mlp")
    assert ran(model, expected) == (5, 0)


@both_ways
def test_dropout_between_the_activation_and_the_last_layer_stays(way, monkeypatch):
    monkeypatch.setitem(OWN, "xglm", OWN["xglm"] | {"activation_dropout": 0.5})
    model = make("xglm")[0].train()
    expected = step(model)
    way(model)
    before = launches()
    assert ran(model, expected) == (5, 2)
    assert launched(before)["activation_backward"] == 2, "the activation alone runs its op"


def test_checkpointing_stays():
    model = make("biogpt")[0].train()
    expected = step(model)
    tilekern.apply(model_type="biogpt")
    # By its older name, which all releases have.
    model.gradient_checkpointing_enable()
    assert ran(model, expected) == (9, 4), "the layers' forward runs twice"


LAYER = """
class MyLayer(nn.Module):
    def __init__(self, config):
        self.norm = nn.LayerNorm(4)
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 4)
        self.act = ACT2FN[config.act]

    def forward(self, x):
        x = self.norm(x)
        x = self.act(self.fc1(x))
        x = nn.functional.dropout(x, p=self.dropout, training=self.training)
        x = self.fc2(x)
        return x
"""


@pytest.mark.parametrize(
    ("old", "new", "ops"),
    [
        ("", "", ["layer_norm", "layer_norm+mlp", "mlp"]),
        ("nn.functional.dropout", "F.dropout", ["layer_norm", "layer_norm+mlp", "mlp"]),
        (", training=self.training", "", ["layer_norm"]),
        ("training=self.training", "training=True", ["layer_norm"]),
        ("x = self.fc2(x)", "x = self.fc2(x, x)", ["layer_norm"]),
        ("x = self.norm(x)", "x = x", ["mlp"]),
    ],
)
def test_the_forms_of_such_a_layer(old, new, ops):
    assert [patch.op for patch in patches_of(Module("mine", LAYER.replace(old, new)), "mine")] == ops
