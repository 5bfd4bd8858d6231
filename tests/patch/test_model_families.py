"""A patched model of each family computes what an unpatched one does; torch's formulas stand for the kernels here."""

from importlib import metadata
from pathlib import Path

import models_page
import pytest
import torch
from tiny_families import IDS, OWN, SEEING, make, make_seeing
from tiny_qwen3 import worst

import tilekern
from tilekern.patch.families import FAMILIES, family_of
from tilekern.patch.skipped_logits import SKIPPED

KERNELS = {
    "rms_norm": {"rms_norm_forward", "rms_norm_offset_forward"},
    "layer_norm": {"layer_norm_forward"},
    "swiglu": {"swiglu_forward", "swiglu_scaled_forward", "geglu_forward"},
    "mlp": {"activation_forward"},
    "qk_norm_rope": {"qk_norm_rope_forward", "qk_norm_rope_general_forward"},
    "rope": {"rope", "llama4_rope"},
    "fused_add_rms_norm": {
        "fused_add_rms_norm_forward", "fused_add_rms_norm_offset_forward", "fused_rms_norm_add_forward",
        "fused_rms_norm_add_rms_norm_forward",
    },
    "fused_linear_cross_entropy": {"fused_linear_cross_entropy"},
}  # fmt: skip
# Of layers with norms before their sums: in one kernel with the norm behind the sum where there is one, else in one.
NORM_ADD = {"exaone4", "flex_olmo", "gemma3n", "olmo2", "olmo3", "olmo_hybrid"}
NORM_ADD_NORM = {"afmoe", "gemma2", "gemma3", "gemma4", "gemma4_unified", "glm4", "glm4v", "kolibri1"}
# Whose loss has a part of the router's.
ROUTED = {"gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
# Models that raise without a patch too, by release, and the attribute that their results lack.
BROKEN = {("llama4", "5.24.0"): "image_outputs"}
OLDER = not all(family.is_here for family in FAMILIES.values())

pytestmark = pytest.mark.filterwarnings("ignore:.*TILEKERN_INTERPRET=1")


def run(model, ids=IDS, **inputs):
    """The loss and its gradients by name, logits and loss in evaluation, and tokens that are generated with a cache."""
    model.train().zero_grad()
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids, labels=ids, **inputs)
    return loss.detach(), gradients, (evaluated.logits, evaluated.loss), generated(model, ids, inputs)


def generated(model, ids, inputs):
    """Tokens, without the routers' loss: transformers 5.0.0 computes it there too, and fails at a mask of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        for config in (model.config, model.config.get_text_config()):
            patch.setattr(config, "output_router_logits", False, raising=False)
        return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, **inputs)


def fallbacks():
    return {kernel: counts["fallbacks"] for kernel, counts in tilekern.stats().items()}


def served_here(family):
    """A family's ops; with an older transformers those that have a known form there."""
    found = {patch.op for patch in family.patches() if patch.attribute}
    return found if OLDER else family.ops


def for_images(family):
    """The ops of a family that run for images alone; in older releases the text's rotation may have another form."""
    found = [(patch.op, "vision" in patch.attribute.lower()) for patch in family.patches() if patch.attribute]
    return {*family.seen, *(op for op, _ in found)} - {op for op, seen in found if not seen and op not in family.seen}


def ops_of(families):
    """The ops of some families, in order."""
    found = {op for family in families for op in served_here(family)}
    return [op for op in KERNELS if op in found]


def check(families, ops, run):
    """Hold what a model computes where its families are patched to what it does as it is; some ops must all run.

    Returns logits and loss in evaluation, and the kernels that ran.
    """
    loss, gradients, evaluated, tokens = run()
    before = fallbacks()
    assert set(ops) <= {op for family in families for op in tilekern.apply(model_type=family.model_type, experts=True)}
    patched_loss, patched_gradients, patched_evaluated, patched_tokens = run()
    ran = {kernel for kernel, number in fallbacks().items() if number > before.get(kernel, 0)}
    # Where the norms of q and k are fused with it, rope serves those alone that call it by itself.
    assert [op for op in ops if not KERNELS[op] & ran and (op, "qk_norm_rope" in ops) != ("rope", True)] == []
    types = {family.model_type for family in families}
    assert ("fused_rms_norm_add_rms_norm_forward" in ran) == bool(types & NORM_ADD_NORM)
    assert ("fused_rms_norm_add_forward" in ran) == bool(types & (NORM_ADD | NORM_ADD_NORM))
    assert worst([patched_loss, *patched_evaluated], [loss, *evaluated]) < 1e-5
    assert torch.equal(patched_tokens, tokens)
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # A key's bias adds the same to all scores of a query: its gradient is what rounding leaves of others.
        whole = float(gradients[name.replace("k_proj.bias", "q_proj.bias")].norm())
        assert torch.allclose(patched_gradients[name], gradient, rtol=1e-4, atol=2e-6 * whole), name
    return evaluated, ran


# transformers 5.0.0 asks the tower of Llama 4 for a result that it does not give.
HERE = [name for name in SEEING if FAMILIES[name].is_here and not (OLDER and name == "llama4")]
BLIND = [name for name, family in FAMILIES.items() if family.is_here and (name in OWN or name not in SEEING)]


@pytest.mark.parametrize("family", BLIND)
def test_a_patched_model_computes_what_it_does_as_it_is(family):
    model, ids, inputs = make(family)
    if OLDER and family == "granitemoe":
        # transformers 5.0.0 fails for want of its router's logits.
        model.config.output_router_logits = False
    ops = [op for op in ops_of([FAMILIES[family]]) if op not in for_images(FAMILIES[family])]
    (_, loss), ran = check([FAMILIES[family]], ops, lambda: run(model, ids, **inputs))
    check_alone(family, model, loss, input_ids=ids, **inputs)
    if not OLDER:
        said = models_page.experts_said(family)
        assert models_page.experts_of(FAMILIES[family], model) == said, models_page.OLD
        assert said != "yes" or "experts_gate" in ran


def check_alone(family, model, loss, input_ids, **inputs):
    """Apply again, and hold the loss that is computed without logits to a loss."""
    ops = ops_of([FAMILIES[family]])
    assert tilekern.apply(model_type=family) == ops
    if "fused_linear_cross_entropy" in ops:
        with torch.no_grad():
            alone = model(input_ids=input_ids, labels=input_ids, skip_logits=True, **inputs)
        assert alone.logits is SKIPPED
        assert worst([alone.loss], [loss]) < 1e-5
        assert OLDER or family not in ROUTED or alone.aux_loss > 0


@pytest.mark.parametrize("name", HERE)
def test_a_patched_model_that_sees_computes_what_it_does_as_it_is(name):
    model, ids, inputs = make_seeing(name)
    if lacking := BROKEN.get((name, metadata.version("transformers"))):
        with pytest.raises(AttributeError, match=lacking):
            run(model, ids, **inputs)
        pytest.skip(f"as it is, the model reads {lacking} of results that do not have it")
    families = {family_of(type(module).__module__) for module in model.modules()} - {None}
    # The forwards that see have other forms in older releases.
    ops = [] if OLDER else [op for op in ops_of(families) if op not in SEEING[name].without]
    (_, loss), _ = check(families, ops, lambda: run(model, ids, **inputs))
    if name not in BLIND:
        check_alone(name, model, loss, input_ids=ids, **inputs)


@pytest.mark.skipif(OLDER, reason="an older transformers has other forms of it")
def test_the_tower_of_llama4_computes_what_it_does_as_it_is():
    """By itself: there are releases that cannot run the whole model."""
    tower, pixels = make_seeing("llama4")[0].vision_model, SEEING["llama4"].inputs["pixel_values"]

    def step():
        tower.zero_grad()
        made = tower(pixel_values=pixels).last_hidden_state
        made.square().sum().backward()
        return [made.detach(), *(x.grad for x in tower.parameters())]

    expected, before = step(), fallbacks()
    tilekern.apply(model_type="llama4")
    assert worst(step(), expected) < 1e-5
    ran = {kernel for kernel, number in fallbacks().items() if number > before.get(kernel, 0)}
    assert not [op for op in (*FAMILIES["llama4"].seen, "rope") if not KERNELS[op] & ran]


@pytest.mark.skipif(OLDER, reason="an older transformers has fewer families")
def test_the_page_of_models_says_what_is_tested():
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(models_page.experts_said), models_page.OLD
    assert models_page.README.read_text(encoding="utf-8") == models_page.readme(), models_page.OLD


@pytest.mark.skipif(metadata.version("transformers") != "5.0.0", reason="the page names what transformers 5.0.0 lacks")
def test_the_page_of_versions_says_what_the_lowest_release_lacks():
    here = [family for family in FAMILIES.values() if family.is_here]
    rows = {family.model_type: [op for op in family.ops if op not in served_here(family)] for family in here}
    page = Path(__file__, "../../../docs/versions.md").resolve().read_text(encoding="utf-8")
    _, section = page.split("## transformers 5.0.0")
    assert f"has {len(here)} of the {len(FAMILIES)} families" in section
    assert [row for row in section.splitlines() if row.startswith("| `")] == [
        f"| `{name}` | {', '.join(f'`{op}`' for op in ops)} |" for name, ops in sorted(rows.items()) if ops
    ]
