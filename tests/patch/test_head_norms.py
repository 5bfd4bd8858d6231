"""Attentions that normalise the heads of q and k: which kernel runs for each form, and what is left to the modules."""

import pytest
import torch
from tiny_families import IDS, OWN, make
from tiny_qwen3 import launched, launches, worst

import tilekern
from tilekern.patch import registry

pytestmark = pytest.mark.filterwarnings("ignore:.*TILEKERN_INTERPRET=1")
PLAIN, GENERAL = "qk_norm_rope_forward", "qk_norm_rope_general_forward"
# The kernel and the layers that it serves, of two: Gemma 3's weights from 1 on, a part of each head, both; layers
# without a rotation; the norm last, without weights, and of pairs; q and k apart, and a layer of q alone.
CASES = {
    "gemma3": (GENERAL, 2),
    "glm4_moe": (GENERAL, 2),
    "qwen3_next": (GENERAL, 1),
    "exaone4": (PLAIN, 1),
    "flint": (PLAIN, 1),
    "hunyuan_v1_dense": (GENERAL, 2),
    "nanochat": (GENERAL, 2),
    "llama4": (GENERAL, 1),
    "gemma4": (PLAIN, 3),
}
ALONE = {op: op == "qk_norm_rope" for op in registry.known_ops()}


def step(model):
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", CASES)
def test_the_kernel_of_each_form(family):
    model, _, _ = make(family)
    expected = step(model)
    assert tilekern.apply(model_type=family, **ALONE) == ["qk_norm_rope"]
    before = launches()
    # Gemma 4's routers, in this size, make more of the last bits.
    assert worst(step(model), expected) < (5e-4 if family == "gemma4" else 1e-4)
    kernel, number = CASES[family]
    counted = launched(before)
    assert counted[kernel] == counted[kernel.replace("forward", "backward")] == number
    tilekern.reset()
    before = launches()
    assert worst(step(model), expected) == 0
    assert not launched(before)


@pytest.mark.parametrize("family", ["gemma3", "laguna", "hunyuan_v1_dense", "llama4", "gemma4"])
def test_norms_with_hooks_are_called_as_they_were(family):
    model, _, _ = make(family)
    model.eval()
    attention = model.model.layers[0].self_attn
    norm = next(x for name, x in attention.named_children() if "norm" in name)
    seen = []
    norm.register_forward_hook(lambda _, given, made: seen.append((given[0].shape, made.shape)))
    expected, shapes = model(input_ids=IDS).logits, list(seen)
    assert shapes
    seen.clear()
    tilekern.apply(model_type=family)
    assert worst([model(input_ids=IDS).logits], [expected]) < 1e-5
    assert seen == shapes


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("family", "kernel", "layers"), [("glm4_moe", "rope", 2), ("llama4", "llama4_rope", 1)])
def test_models_without_the_norms_run_their_rotation(family, kernel, layers, monkeypatch):
    """Their configurations say so."""
    monkeypatch.setitem(OWN, family, OWN[family] | {"use_qk_norm": False})
    model, _, _ = make(family)
    expected = model.eval()(input_ids=IDS).logits
    assert "qk_norm_rope" in tilekern.apply_to_model(model)
    before = launches()
    assert worst([model(input_ids=IDS).logits], [expected]) < 1e-5
    counted = launched(before)
    assert counted[kernel] == layers
    assert not {PLAIN, GENERAL} & counted.keys()


@pytest.mark.parametrize("family", ["gemma3", "exaone4", "hunyuan_v1_dense", "nanochat", "llama4", "gemma4"])
@pytest.mark.parametrize("mode", ["bfloat16", "autocast", "float32 norms"])
def test_keys_have_the_dtype_that_they_had(family, mode):
    """As the cache holds those of the first layer."""
    model = make(family)[0].eval()
    if mode != "autocast":
        model.bfloat16()
    if mode == "float32 norms":
        for name, module in model.named_modules():
            if "norm" in name.lower():
                module.float()

    def keys():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mode != "bfloat16"):
            return [model(input_ids=IDS, use_cache=True).past_key_values.layers[0].keys]

    expected = keys()
    assert tilekern.apply(model_type=family, **ALONE) == ["qk_norm_rope"]
    found = keys()
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert worst(found, expected) < 2e-2
