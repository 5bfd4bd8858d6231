"""A patched Qwen3 computes what an unpatched one does."""

import functools
import inspect
import warnings

import pytest
import torch
from tiny_qwen3 import FORWARD, IDS, KERNELS, SINGLE, apply, launched, launches, make, same, step, worst
from torch.nn.modules import module as modules
from transformers.models.qwen3 import modeling_qwen3

import tilekern
from tilekern.errors import TilekernWarning
from tilekern.patch import registry

# Launches of one step of the two-layer model: 3 norms by themselves (2 of layers' inputs and the last).
FUSED = {
    "rms_norm_forward": 3, "rms_norm_backward": 3, "column_sum": 7, "swiglu_forward": 2,
    "fused_add_rms_norm_forward": 2, "fused_add_rms_norm_backward": 2,
    "qk_norm_rope_forward": 2, "qk_norm_rope_backward": 2, "rope": 0,
}  # fmt: skip
# The same with nothing fused: 9 norms (4 a layer and the last), 2 MLPs, 2 rotations there and back.
STEP = {"rms_norm_forward": 9, "rms_norm_backward": 9, "column_sum": 9, "swiglu_forward": 2, "rope": 4}
HOOKS = [
    modules.register_module_forward_hook,
    modules.register_module_forward_pre_hook,
    modules.register_module_full_backward_hook,
    modules.register_module_full_backward_pre_hook,
]
ways = pytest.mark.parametrize("way", [lambda _, **ops: apply(**ops), tilekern.apply_to_model], ids=["class", "model"])


@pytest.mark.usefixtures("interpreted")
@ways
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_loss_and_gradients_agree_and_reset_is_exact(way, attention, kv_heads, fused):
    model = make(kv_heads, attention)
    reference = step(model)
    before = launches()
    patched = way(model, **({} if fused else SINGLE))
    assert worst(step(model), reference) < 1e-5
    counted = launched(before)
    expected = FUSED if fused else STEP
    assert {kernel: counted.get(kernel, 0) for kernel in expected} == expected
    assert tilekern.reset() == patched
    before = launches()
    assert same(step(model), reference)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("whole", [True, False], ids=["class", "model"])
def test_one_op_alone(op, whole):
    model = make()
    reference, before = step(model), launches()
    switches = {name: name == op for name in registry.known_ops()}
    assert (apply(**switches) if whole else tilekern.apply_to_model(model, **switches)) == [op]
    assert worst(step(model), reference) < 1e-5
    assert {kernel for kernel in launched(before) if kernel != "column_sum"} == KERNELS[op]


@pytest.mark.usefixtures("interpreted")
@ways
def test_padding_on_the_left_is_masked(way):
    model = make().eval()
    given = torch.ones_like(IDS)
    given[0, :3] = 0
    settings = {"input_ids": IDS, "attention_mask": given, "labels": IDS.masked_fill(given == 0, -100)}

    def run():
        model.zero_grad()
        out = model(**settings)
        out.loss.backward()
        return [out.loss.detach(), out.logits[given.bool()].detach(), *(p.grad.clone() for p in model.parameters())]

    reference = run()
    way(model)
    before = launches()
    assert worst(run(), reference) < 1e-5
    assert launched(before)["qk_norm_rope_backward"] == 2


@pytest.mark.usefixtures("interpreted")
def test_layers_with_a_sliding_window():
    model = make(use_sliding_window=True, sliding_window=3, max_window_layers=1)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 3]
    reference = step(model)
    apply()
    assert worst(step(model), reference) < 1e-5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("place", ["hook", "class", "forward", "weight"])
@ways
def test_norms_that_do_more_than_their_class_are_called(way, place):
    """The fused ops would pass over them."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    class Doubled(Qwen3RMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class Marked(torch.nn.Parameter):
        pass

    model = make()
    layer = model.model.layers[0]
    for norm in (layer.self_attn.k_norm, layer.post_attention_layernorm):
        if place == "hook":
            norm.register_forward_hook(lambda *given: 2 * given[-1])
        elif place == "class":
            norm.__class__ = Doubled
        elif place == "forward":
            norm.forward = lambda x, norm=norm: 2 * Qwen3RMSNorm.forward(norm, x)
        else:
            norm.weight = Marked(2 * norm.weight.detach())
    reference = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        way(model)
    before = launches()
    assert worst(step(model), reference) < 1e-5
    assert launched(before)["fused_add_rms_norm_forward"] == launched(before)["qk_norm_rope_forward"] == 1


@ways
def test_the_forwards_take_the_same_arguments(way):
    """By their signatures: whoever wraps a layer reads the names there."""

    def signatures():
        return {type(m).__name__: [*inspect.signature(m.forward).parameters] for m in model.modules()}

    model = make()
    reference = signatures()
    way(model)
    # The head's has one more.
    names = reference["Qwen3ForCausalLM"]
    names.insert(names.index("kwargs"), "skip_logits")
    assert signatures() == reference


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("place", ["norm", "linear", "rotation"])
@ways
def test_what_was_replaced_after_patching_is_called(way, place, monkeypatch):
    """By somebody who wraps a forward for all models: only who replaced it knows what it computes."""
    owner, name, *fused = {
        "norm": (modeling_qwen3.Qwen3RMSNorm, "forward", "qk_norm_rope_forward", "fused_add_rms_norm_forward"),
        "linear": (torch.nn.Linear, "forward", "swiglu_backward_remake", "fused_linear_cross_entropy"),
        "rotation": (modeling_qwen3, "apply_rotary_pos_emb", "qk_norm_rope_forward"),
    }[place]
    original, model = getattr(owner, name), make().train()

    @functools.wraps(original)
    def other(*args, **kwargs):
        results = original(*args, **kwargs)
        return tuple(2 * x for x in results) if isinstance(results, tuple) else 2 * results

    with monkeypatch.context() as patching:
        patching.setattr(owner, name, other)
        reference = step(model)
    way(model, rms_norm=False, rope=False)
    before = launches()
    with monkeypatch.context() as patching:
        patching.setattr(owner, name, other)
        assert worst(step(model), reference) < 1e-5
    assert not set(fused) & set(launched(before))
    step(model)
    assert set(fused) <= set(launched(before))


@pytest.mark.filterwarnings("ignore:(For|Full) backward hook")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("register", HOOKS, ids=lambda register: register.__name__)
@ways
def test_hooks_on_every_module_run_as_often_as_without_patches(way, register):
    model = make().train()
    core = [m for m in model.modules() if not isinstance(m, torch.nn.ModuleList)]

    def hooked():
        seen = []
        handle = register(lambda module, *_: seen.append(id(module)))
        try:
            return step(model), {id(m): seen.count(id(m)) for m in core}
        finally:
            handle.remove()

    reference, wanted = hooked()
    way(model)
    got, seen = hooked()
    assert seen == wanted
    assert worst(got, reference) < 1e-5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_is_as_exact_as_torch(attention):
    """Judged by the error of the same model in bfloat16 without patches, both against float32.

    The two round different intermediate values, so that neither is closer by rule: a quarter more is allowed, and 4e-3,
    one unit in the last place of a bfloat16.
    """
    exact = step(make(attention=attention))
    model = make(attention=attention).bfloat16()
    plain = step(model)
    apply()
    patched = step(model)
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


def test_on_a_cpu_without_the_interpreter_the_models_own_ops_run(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    monkeypatch.setattr("tilekern.warning._said", set())
    model = make()
    reference = step(model)
    apply(**SINGLE)
    before = {kernel: counts["fallbacks"] for kernel, counts in tilekern.stats().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(step(model), reference)
        assert same(step(model), reference)
    said = [str(w.message) for w in caught if issubclass(w.category, TilekernWarning)]
    assert len(said) == len(set(said)) >= 3, "one for each kernel, however often it runs"
    assert all("TILEKERN_INTERPRET=1" in text and "the model's own op runs instead" in text for text in said)
    counted = {k: c["fallbacks"] - before.get(k, 0) for k, c in tilekern.stats().items()}
    assert {k: n for k, n in counted.items() if n} == {"rms_norm_forward": 18, "swiglu_forward": 4, "rope": 4}


def test_fused_ops_on_a_cpu_without_the_interpreter_run_the_models_own_formulas(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    model = make()
    reference = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply(**{op: op in ("qk_norm_rope", "fused_add_rms_norm") for op in registry.known_ops()})
        before = tilekern.stats()
        assert worst(step(model), reference) < 1e-6
    for kernel, number in {"fused_add_rms_norm_forward": 2, "qk_norm_rope_forward": 2}.items():
        assert tilekern.stats()[kernel]["fallbacks"] == before.get(kernel, {}).get("fallbacks", 0) + number


@pytest.mark.usefixtures("interpreted")
def test_an_mlp_with_another_activation_keeps_its_own_forward():
    model = make(hidden_act="relu")
    reference, before = step(model), launches()
    apply(**{op: op == "swiglu" for op in registry.known_ops()})
    assert same(step(model), reference)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_gates_by_gelu(activation):
    model = make(hidden_act=activation)
    reference, before = step(model), launches()
    apply(**{op: op == "swiglu" for op in registry.known_ops()})
    assert worst(step(model), reference) < 1e-5
    assert launched(before) == {"geglu_forward": 2, "geglu_backward": 2}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_both_names_of_silu_are_known(activation):
    model = make(hidden_act=activation)
    before = launches()
    apply(**{op: op == "swiglu" for op in registry.known_ops()})
    step(model)
    assert launched(before) == {"swiglu_forward": 2, "swiglu_backward_remake": 2}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("angles", [1, 2])
def test_rope_takes_both_layouts(unsqueeze_dim, angles):
    from transformers.models.qwen3 import modeling_qwen3

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 16), torch.randn(2, 1, 7, 16)
    half = torch.randn(angles, 7, 8)
    cos, sin = torch.cat((half, half), -1).cos(), torch.cat((half, half), -1).sin()
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    wanted = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    apply()
    before = launches()
    found = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert launched(before) == {"rope": 1}
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert worst(found, wanted) < 1e-6


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("q_shape", "angle_shape", "unsqueeze_dim"),
    [((2, 3, 7, 16), (2, 1, 16), 1), ((2, 3, 7, 16), (2, 7, 1), 1), ((7, 16), (7, 16), 0)],
)
def test_rope_leaves_unusual_shapes_to_the_model(q_shape, angle_shape, unsqueeze_dim):
    from transformers.models.qwen3 import modeling_qwen3

    q, angle = torch.randn(q_shape), torch.randn(angle_shape)
    wanted = modeling_qwen3.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim)
    apply()
    before = launches()
    assert same(modeling_qwen3.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim), wanted)
    assert not launched(before)


@pytest.mark.usefixtures("interpreted")
def test_generation_with_a_cache_gives_the_same_tokens():
    model = make().eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(IDS, **settings)
    apply()
    before = launches()
    assert torch.equal(model.generate(IDS, **settings), wanted)
    assert set(launched(before)) == FORWARD
