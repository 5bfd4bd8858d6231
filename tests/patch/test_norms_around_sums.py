"""Layers with a norm before each sum, where one of the norms is another one than the kernels compute."""

import pytest
import torch
from tiny_families import IDS, make

import tilekern

pytestmark = pytest.mark.filterwarnings("ignore:.*TILEKERN_INTERPRET=1")
BOTH, BEFORE, BEHIND = (
    f"{name}_forward" for name in ("fused_rms_norm_add_rms_norm", "fused_rms_norm_add", "fused_add_rms_norm_offset")
)


def logits_of(model):
    """What a model gives in evaluation, and how often it asks for each of the three kernels."""
    before = {kernel: counts["fallbacks"] for kernel, counts in tilekern.stats().items()}
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
    return logits, [tilekern.stats()[kernel]["fallbacks"] - before[kernel] for kernel in (BOTH, BEFORE, BEHIND)]


def changed_eps(norm):
    norm.eps = 0.1


def hooked(norm):
    norm.register_forward_hook(lambda *given: 2 * given[-1])


def replaced(norm):
    norm.forward = lambda x: x + 1


@pytest.mark.parametrize(
    ("place", "change", "kernels"),
    [
        ("post_attention_layernorm", None, [2, 2, 0]),
        ("post_attention_layernorm", changed_eps, [1, 2, 1]),
        ("pre_feedforward_layernorm", changed_eps, [1, 2, 1]),
        ("post_attention_layernorm", hooked, [1, 2, 1]),
        ("pre_feedforward_layernorm", hooked, [1, 2, 0]),
        ("post_feedforward_layernorm", replaced, [2, 1, 0]),
    ],
)
def test_a_norm_that_does_more_runs_by_itself(place, change, kernels):
    model, _, _ = make("gemma2")
    if change:
        change(getattr(model.model.layers[0], place))
    expected, _ = logits_of(model)
    tilekern.apply(model_type="gemma2")
    found, ran = logits_of(model)
    assert ran == kernels
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_terms_of_two_dtypes_are_added_up_as_they_are():
    model, _, _ = make("olmo2")
    layer = model.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda *given: given[-1].double())
    layer.post_attention_layernorm.register_forward_hook(lambda *given: given[-1].float())
    expected, _ = logits_of(model)
    tilekern.apply(model_type="olmo2")
    found, ran = logits_of(model)
    assert ran == [0, 3, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
