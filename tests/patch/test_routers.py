"""Routers by ``apply(experts=True)``: a model's choices, loss, logits and gradients are those of the model as it is."""

import pytest
import torch
from model_contract import alike, only, trained
from tiny_families import IDS, make
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

import tilekern
from tilekern.patch import routers
from tilekern.runtime.dispatch import counters

ALONE = only("experts")
SOFTMAX, SIGMOID, LOSS = "router_softmax_forward", "router_sigmoid_forward", "router_losses_forward"
# A family of each form.
FORMS = {
    "qwen3_moe": SOFTMAX, "qwen3_5_moe": SOFTMAX, "mixtral": SOFTMAX, "jamba": SOFTMAX, "gpt_oss": SOFTMAX,
    "granitemoe": SOFTMAX, "deepseek_v3": SIGMOID,
}  # fmt: skip

# Torch's formulas stand for the kernels here, and are counted.
pytestmark = pytest.mark.filterwarnings("ignore:.*TILEKERN_INTERPRET=1")


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def step(model):
    """Return each router's choices in order of ids, then the results of a training step."""
    chosen, found = [], {}
    hooks = [x.register_forward_hook(lambda _, __, out: chosen.append(out[1:])) for x in routers_of(model)]
    made = trained(model, IDS)
    for hook in hooks:
        hook.remove()
    for n, (weights, ids) in enumerate(chosen):
        order = ids.argsort(1)
        found |= {f"{n} ids": ids.gather(1, order), f"{n} weights": weights.detach().gather(1, order)}
    return found | made


# Some always normalise, whatever the attribute says, or never.
CASES = [*((family, True) for family in FORMS), ("qwen3_moe", False), ("deepseek_v3", False)]


@pytest.mark.parametrize(("family", "normalized"), CASES)
def test_a_model_chooses_and_computes_what_it_does_as_it_is(family, normalized):
    model, _, _ = make(family)
    model.config.output_router_logits = True
    for router in routers_of(model):
        router.norm_topk_prob = normalized
        if family == "deepseek_v3":
            router.e_score_correction_bias.copy_(torch.linspace(-0.6, 0.6, 4))
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.1
    expected = step(model)
    assert "experts" in tilekern.apply(**ALONE)
    before, losses = counters(FORMS[family]).fallbacks, counters(LOSS).fallbacks
    alike(step(model), expected)
    has_loss = counters(LOSS).fallbacks - losses
    assert counters(FORMS[family]).fallbacks - before == len(routers_of(model)) + has_loss
    assert has_loss == (family != "deepseek_v3")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FORMS)
def test_dtypes_are_those_of_the_model_s_own_router(family, autocast):
    router = routers_of(make(family)[0])[0]
    router = router if autocast else router.bfloat16()
    x = torch.randn(14, 24, generator=torch.Generator().manual_seed(1)).to(router.weight.dtype)
    found = []
    for apply in (tilekern.reset, lambda: tilekern.apply(**ALONE)):
        apply()
        with torch.autocast("cpu", enabled=autocast):
            logits, weights, _ = router(x)
        # Equal logits may be chosen in any order.
        found.append((logits, weights.sort(-1).values))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_by_kernels_too(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    model, _, _ = make("qwen3_moe")
    expected = step(model)
    tilekern.apply(**ALONE)
    before = {name: counters(name).launches for name in (SOFTMAX, LOSS, "router_softmax_backward")}
    alike(step(model), expected)
    assert {name: counters(name).launches - n for name, n in before.items()} == {
        SOFTMAX: 2, LOSS: 1, "router_softmax_backward": 1
    }  # fmt: skip


def losses(model):
    """How many auxiliary losses a step makes by the op."""
    before = counters(LOSS).fallbacks
    step(model)
    return counters(LOSS).fallbacks - before


def said(model):
    """Return whether the op serves each kind of module."""
    rows = [row for row in tilekern.report(model).rows if row.op == "experts"]
    return {row.kind: not row.reason for row in rows}


def serves_head(model):
    """Return whether a model's loss is made without logits."""
    return not next(row for row in tilekern.report(model).rows if row.op == "fused_linear_cross_entropy").reason


def served(*kinds):
    return {kind: kind in kinds for kind in ("Qwen3MoeForCausalLM", "Qwen3MoeTopKRouter", "Qwen3MoeExperts")}


def test_one_model_is_patched_beside_its_head_and_no_other():
    """Its head and its auxiliary loss are in one method, which either op may have or leave."""
    model, other = (make("qwen3_moe")[0] for _ in range(2))
    expected, every = step(model), ("Qwen3MoeForCausalLM", "Qwen3MoeTopKRouter", "Qwen3MoeExperts")
    for switches in ({}, {"fused_linear_cross_entropy": False}, {}):
        assert "experts" in tilekern.apply_to_model(model, experts=True, **switches)
        assert (losses(model), losses(other)) == (1, 0)
        assert said(model) == served(*every)
        assert serves_head(model) == (not switches)
        tilekern.apply_to_model(model, **switches)
        assert serves_head(model) == (not switches)
        assert losses(model) == 0
        assert said(model) == said(other) == served()
    tilekern.apply_to_model(model, experts=True)
    found = step(model)
    alike({**found, "logits": expected["logits"]}, expected)
    tilekern.reset("experts")
    assert said(model)["Qwen3MoeTopKRouter"] is False
    assert model.get_experts_implementation()[""] == "grouped_mm"


def test_all_models_are_patched_and_put_back():
    model, _, _ = make("qwen3_moe")
    own = modeling_qwen3_moe.load_balancing_loss_func
    tilekern.apply(experts=True)
    assert losses(model) == 1
    assert said(model) == served("Qwen3MoeForCausalLM", "Qwen3MoeTopKRouter", "Qwen3MoeExperts")
    tilekern.apply_to_model(model)
    assert losses(model) == 1
    assert said(model)["Qwen3MoeForCausalLM"]
    tilekern.apply()
    assert "experts" not in tilekern.get_patched_ops()
    tilekern.reset()
    assert modeling_qwen3_moe.load_balancing_loss_func is own


def test_a_router_of_no_known_form_is_said():
    model, _, _ = make("ernie4_5_moe")
    rows = [row for row in tilekern.report(model).rows if row.kind.endswith("Router")]
    assert {(row.op, row.reason) for row in rows} == {("experts", "its code has no form that is known")}


def layers(number=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(14, 6, generator=generator, dtype=dtype).requires_grad_() for _ in range(number))


@pytest.mark.parametrize("mask", [None, torch.arange(14).view(2, 7) % 5 > 0])
def test_the_auxiliary_loss_and_its_gradients_are_transformers(mask):
    gates = layers()
    before = counters(LOSS).fallbacks
    found = routers.balance(load_balancing_loss_func)(gates, 6, 2, mask)
    assert counters(LOSS).fallbacks == before + 1
    expected = load_balancing_loss_func(gates, 6, 2, mask)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(loss, gates) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("given", [None, layers()[0], (), tuple(x[None] for x in layers())])
def test_what_no_model_gives_goes_to_transformers_loss(given):
    assert routers.balance(lambda *given: given)(given, 6) == (given, 6, 2, None)


def router_of(kind, family="qwen3_moe", **changes):
    router = next(x for x in make(family)[0].modules() if type(x) is kind)
    for name, value in changes.items():
        setattr(router, name, value)
    return router


@pytest.mark.parametrize(
    ("kind", "family", "make_it", "changes", "shape"),
    [
        (Qwen3MoeTopKRouter, "qwen3_moe", routers.by_softmax, {}, (2, 7, 24)),
        # A group has fewer experts than a token takes.
        (DeepseekV3TopkRouter, "deepseek_v3", routers.by_sigmoid, {"top_k": 3}, (14, 24)),
    ],
)
def test_what_the_op_does_not_take_goes_to_the_model_s_own_router(kind, family, make_it, changes, shape):
    router = router_of(kind, family, **changes)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(make_it(kind.forward)(router, x), kind.forward(router, x), strict=True):
        assert torch.equal(found, expected)


def test_compiled_and_under_autocast_the_model_s_own_router_runs():
    torch._dynamo.reset()
    router, x = router_of(DeepseekV3TopkRouter, "deepseek_v3"), torch.randn(14, 24)
    forward = routers.by_sigmoid(DeepseekV3TopkRouter.forward)
    before = counters(SIGMOID).fallbacks
    torch.compile(lambda x: forward(router, x), fullgraph=True, backend="eager")(x)
    with torch.autocast("cpu"):
        assert forward(router, x)[1].dtype == torch.bfloat16
    assert counters(SIGMOID).fallbacks == before + 2
    assert {"torch.compile", "autocast"} <= counters(SIGMOID).reasons.keys()
    forward(router, x)
    assert counters(SIGMOID).fallbacks == before + 3
