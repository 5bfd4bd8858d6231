"""Norms, MLPs, rotations and layers of other forms than Qwen3's: which kernels serve them, and what runs as it is."""

import functools
import inspect

import pytest
import torch
from model_contract import WAYS, both_ways, counted, held, only, reasons
from tiny_families import IDS, OWN, make
from tiny_qwen3 import same, worst
from tiny_qwen3 import step as any_step
from transformers import GPT2Config, activations
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.nemotron import modeling_nemotron as nemotron
from transformers.models.olmo import modeling_olmo as olmo
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.stablelm import modeling_stablelm as stablelm

import tilekern
from tilekern.patch.matching import Module, patches_of

pytestmark = pytest.mark.usefixtures("interpreted")
NORM, SUM, ACTIVATION = "layer_norm_forward", "fused_add_layer_norm_forward", "activation_forward"
BACKWARD, REMAKE = "activation_backward", "activation_backward_remake"
PLAIN, GENERAL = "qk_norm_rope_forward", "qk_norm_rope_general_forward"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
QK = only("qk_norm_rope")


def step(model):
    """The loss and the gradients, but for those of keys' biases, which are what rounding leaves."""
    torch.manual_seed(1)
    loss, *gradients = any_step(model, IDS)
    names = [name for name, x in model.named_parameters() if x.grad is not None]
    kept = [x for name, x in zip(names, gradients, strict=True) if not name.endswith("k_proj.bias")]
    return [loss, *kept]


def logits(model):
    with torch.no_grad():
        return [model.eval()(input_ids=IDS).logits]


def graded(function, *leaves, **options):
    """Return a function's results on some leaves, and their gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    return results(lambda: function(*leaves, **options), leaves)


def results(call, leaves):
    made = call()
    made = made if isinstance(made, tuple) else (made,)
    return [*made, *torch.autograd.grad(made, leaves, [torch.ones_like(x).cumsum(-1) for x in made])]


def patching(family, **ops):
    """Patch a family, whatever is held."""
    return lambda _: tilekern.apply(model_type=family, **ops)


def both(kernel, number):
    return {f"{kernel}_forward": number, f"{kernel}_backward": number}


def checkpointed(family):
    """A model whose layers' forward runs twice; by its older name, which all releases have."""
    model = make(family)[0].train()
    model.gradient_checkpointing_enable()
    return model


def made(family):
    return make(family)[0]


def eval_of(family):
    return made(family).eval()


# A model, what is made of it, its launches, and the ops; norms, sums with them, MLPs.
MODELS = {
    "gpt2": (eval_of, step, both("layer_norm", 3) | both("fused_add_layer_norm", 2) | {ACTIVATION: 2, REMAKE: 2}, {}),
    "gpt2, again": (checkpointed, step, {NORM: 5, SUM: 4}, {}),
    "biogpt, again": (checkpointed, step, {NORM: 5, SUM: 4, ACTIVATION: 4}, {}),
    "qwen3_5": (eval_of, logits, {"swiglu_forward": 3}, {}),
    # Gemma 3's weights from 1 on, a part of each head, both; layers without a rotation; the norm last, without weights,
    # and of pairs; q and k apart, and a layer of q alone.
    **{
        family: (made, step, dict.fromkeys((kernel, kernel.replace("forward", "backward")), n), QK)
        for family, (kernel, n) in {
            "gemma3": (GENERAL, 2), "glm4_moe": (GENERAL, 2), "qwen3_next": (GENERAL, 1), "exaone4": (PLAIN, 1),
            "flint": (PLAIN, 1), "hunyuan_v1_dense": (GENERAL, 2), "nanochat": (GENERAL, 2), "llama4": (GENERAL, 1),
            "gemma4": (PLAIN, 3),
        }.items()
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@both_ways
@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_these_kernels_and_is_put_back(way, name):
    prepared, run, kernels, ops = MODELS[name]
    # Gemma 4's routers, in this size, make more of the last bits.
    held(
        prepared(name.partition(",")[0]), way, run, kernels, 5e-4 if name == "gemma4" else 1e-4 if ops else 1e-5, **ops
    )


@pytest.mark.parametrize(
    ("family", "changes", "kernels"),
    [
        ("glm4_moe", {"use_qk_norm": False}, {"rope": 2, PLAIN: 0, GENERAL: 0}),
        ("llama4", {"use_qk_norm": False}, {"llama4_rope": 1, PLAIN: 0, GENERAL: 0}),
        ("deepseek_v3", {"rope_interleave": True}, {"rope": 2}),
        ("deepseek_v3", {"rope_interleave": False}, {"rope": 2}),
    ],
)
def test_a_model_runs_the_rotation_that_its_configuration_says(family, changes, kernels, monkeypatch):
    monkeypatch.setitem(OWN, family, OWN[family] | changes)
    model = eval_of(family)
    held(model, tilekern.apply_to_model, logits, kernels)
    tilekern.apply_to_model(model)
    assert set(reasons(model, "rope").values()) <= {""}


@pytest.mark.parametrize(("way", "number"), zip(WAYS.values(), (7, 3), strict=True), ids=WAYS)
def test_norms_of_heads_are_served_where_the_rotation_is_not_the_method_s_own_stand_in(way, number):
    """One method of a model has one stand-in: the rotation's."""
    model = eval_of("phi")
    held(model, way, logits, {NORM: number, "rope": 2})
    way(model)
    told = {row.reason for row in tilekern.report(model).rows if (row.kind, row.op) == ("PhiAttention", "layer_norm")}
    assert told == {"" if number == 7 else "rope has its forward"}


@both_ways
def test_captured_states_stay(way):
    held(eval_of("gpt2"), way, lambda model: model(input_ids=IDS, output_hidden_states=True).hidden_states)


@both_ways
@pytest.mark.share(4)
@pytest.mark.parametrize("family", ["biogpt", "opt", "xglm", "gpt2"])
def test_each_op_can_be_left_out_and_taken_back(family, way):
    """One stand-in serves layers' norms and their MLP, or one of the two."""
    model = make(family)[0].train()
    expected = step(model)
    names = {type(module).__name__ for module in model.modules()}
    (layer,) = (name for name in names if name.endswith(("DecoderLayer", "Block")))

    def ran():
        found, counts = counted(lambda: step(model))
        assert worst(found, expected) < 1e-5
        norms = sum(n for name, n in counts.items() if "layer_norm" in name and name.endswith("_forward"))
        return norms, counts.get(ACTIVATION, 0)

    # Norms of two layers, two of each, and the one behind them.
    for switches in ((True, True), (True, False), (False, True), (True, True)):
        way(model, **dict(zip(("layer_norm", "mlp"), switches, strict=True)))
        assert ran() == (5 * switches[0], 2 * switches[1])
        told = {(row.kind, row.op): row.reason for row in tilekern.report(model).rows}
        assert [told[layer, "layer_norm"] == "", told[layer if family != "gpt2" else "GPT2MLP", "mlp"] == ""] == [
            *switches
        ]
        assert [op in tilekern.get_patched_ops() for op in ("layer_norm", "mlp")] == [*switches]
    for op, left in (("layer_norm", (0, 2)), ("mlp", (5, 0))):
        way(model)
        assert tilekern.reset(op) == [op]
        assert ran() == left
    tilekern.reset()
    assert same(step(model), expected)


def test_one_model_may_have_other_ops_than_its_class():
    model, other = (make("opt")[0].train() for _ in range(2))
    tilekern.apply(model_type="opt", mlp=False)
    tilekern.apply_to_model(model)
    numbers = [counted(lambda: step(x))[1].get(ACTIVATION, 0) for x in (model, other)]  # noqa: B023 (called here)
    tilekern.reset("mlp")
    assert [*numbers, counted(lambda: step(model))[1].get(ACTIVATION, 0)] == [2, 0, 0]


@both_ways
def test_dropout_between_the_activation_and_the_last_layer_stays(way, monkeypatch):
    """The activation alone runs its op."""
    monkeypatch.setitem(OWN, "xglm", OWN["xglm"] | {"activation_dropout": 0.5})
    held(make("xglm")[0].train(), way, step, {ACTIVATION: 2, BACKWARD: 2})


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
def test_the_forms_of_a_layer_with_an_mlp(old, new, ops):
    assert [patch.op for patch in patches_of(Module("mine", LAYER.replace(old, new)), "mine")] == ops


# Modules of a model in which something else than its class's own forward runs.


class Own(torch.nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) * 2


class Half(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def with_hook(module):
    module.register_forward_hook(lambda *told: told[-1] * 2)
    return module


def with_forward(module):
    inner = module.forward
    module.forward = lambda x: inner(x) * 2
    return module


def with_parametrization(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    return module


def with_eps(module):
    module.eps = 0.1
    return module


ALL = {NORM: 3, SUM: 2, ACTIVATION: 2}
# RMS norms around sums, both, those before alone, and those behind alone.
BOTH, BEFORE, BEHIND = (
    f"{name}_forward" for name in ("fused_rms_norm_add_rms_norm", "fused_rms_norm_add", "fused_add_rms_norm_offset")
)
ATTENTION, MLP, MLPS = "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
# By family: the module of its first layer, what is in its place, and the launches.
OTHERS = {
    "gpt2": [
        *(("ln_1", other, ALL | {NORM: 2}) for other in (
            lambda _: Own(24), lambda _: torch.nn.Identity(), with_hook, with_forward, with_parametrization,
            lambda _: torch.nn.LayerNorm((7, 24)),
        )),
        ("ln_1", lambda _: torch.nn.LayerNorm(24, bias=False), ALL),
        ("ln_1", lambda _: torch.nn.LayerNorm(24, elementwise_affine=False), ALL),
        ("mlp.act", lambda _: torch.nn.Mish(), ALL | {ACTIVATION: 1, REMAKE: 1}),
        ("mlp.act", with_hook, ALL | {ACTIVATION: 1, REMAKE: 1}),
        ("mlp.c_fc", with_hook, ALL | {REMAKE: 1, BACKWARD: 1}),
        ("mlp.c_fc", lambda _: Half(24, 96), ALL | {REMAKE: 1, BACKWARD: 1}),
    ],
    "gemma2": [
        (ATTENTION, lambda norm: norm, {BOTH: 2, BEFORE: 2, BEHIND: 0}),
        (ATTENTION, with_eps, {BOTH: 1, BEFORE: 2, BEHIND: 1}),
        (MLP, with_eps, {BOTH: 1, BEFORE: 2, BEHIND: 1}),
        (ATTENTION, with_hook, {BOTH: 1, BEFORE: 2, BEHIND: 1}),
        (MLP, with_hook, {BOTH: 1, BEFORE: 2, BEHIND: 0}),
        (MLPS, with_forward, {BOTH: 2, BEFORE: 1, BEHIND: 0}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "place", "other", "kernels"), [(family, *row) for family, rows in OTHERS.items() for row in rows]
)
def test_what_else_a_module_has_runs_as_it_is(family, place, other, kernels):
    torch.manual_seed(0)
    model = eval_of(family)
    layer = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
    outer, _, name = place.rpartition(".")
    owner = layer.get_submodule(outer)
    setattr(owner, name, other(getattr(owner, name)))
    held(model, patching(family, fused_linear_cross_entropy=False), step, kernels)


def test_another_activation_is_reported():
    model = make("gpt2")[0]
    tilekern.apply(model_type="gpt2")
    model.transformer.h[0].mlp.act = torch.nn.Mish()
    assert reasons(model, "mlp") == {
        ("transformer.h.0.mlp", "mlp"): "no op has its activation, Mish", ("transformer.h.1.mlp", "mlp"): "",
    }  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3", "laguna", "hunyuan_v1_dense", "llama4", "gemma4"])
def test_norms_of_heads_with_hooks_are_called_as_they_were(family):
    model, seen = eval_of(family), []
    norm = next(x for name, x in model.model.layers[0].self_attn.named_children() if "norm" in name)
    norm.register_forward_hook(lambda _, given, made: seen.append((given[0].shape, made.shape)))
    held(model, patching(family), logits)
    assert len(seen) % 3 == 0 < len(seen)
    assert seen[: len(seen) // 3] * 3 == seen


@pytest.mark.parametrize("family", ["gemma3", "exaone4", "hunyuan_v1_dense", "nanochat", "llama4", "gemma4"])
@pytest.mark.parametrize("mode", ["bfloat16", "autocast", "float32 norms"])
def test_keys_have_the_dtype_that_they_had(family, mode, monkeypatch):
    """As the cache holds those of the first layer."""
    monkeypatch.delenv("TILEKERN_INTERPRET")
    model = eval_of(family)
    if mode != "autocast":
        model.bfloat16()
    if mode == "float32 norms":
        for name, module in model.named_modules():
            if "norm" in name.lower():
                module.float()

    def keys(model):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mode != "bfloat16"):
            return [model(input_ids=IDS, use_cache=True).past_key_values.layers[0].keys]

    held(model, patching(family, **QK), keys, tolerance=2e-2)


@pytest.mark.parametrize("module", ["block", "mlp"])
def test_autocast_gives_what_it_did(module):
    block = eval_of("gpt2").transformer.h[0]
    module = block if module == "block" else block.mlp

    def run(module):
        with torch.autocast("cpu", torch.bfloat16):
            return [module(torch.ones(1, 3, 24, dtype=dtype).cumsum(-1)) for dtype in (torch.bfloat16, torch.float32)]

    held(module, patching("gpt2"), run, tolerance=2e-2)


def test_dropout_of_an_mlp_s_result_stays():
    tilekern.apply(model_type="gpt2")
    mlp = make("gpt2")[0].train().transformer.h[0].mlp
    mlp.dropout.p = 0.5
    torch.manual_seed(0)
    y, ran = counted(lambda: mlp(torch.randn(2, 5, 24)))
    assert ran[ACTIVATION] == 1
    assert 0.2 < (y == 0).float().mean() < 0.8


# GPT-2's layer has an ``if`` with cross-attention between a sum and its norm; a sum's terms may be of two dtypes or
# shapes. Such a sum runs as it is, and the norms by themselves.
@pytest.mark.parametrize("changed", ["dtype", "shape", "cross-attention"])
def test_a_sum_of_other_shapes_and_one_whose_norm_comes_later_run_by_themselves(changed):
    block = eval_of("gpt2").transformer.h[0]
    more = {}
    if changed == "cross-attention":
        torch.manual_seed(0)
        block = GPT2Block(GPT2Config(n_embd=24, n_head=3, add_cross_attention=True), layer_idx=0).eval()
        more = {"encoder_hidden_states": torch.randn(2, 4, 24)}
    else:
        attend = block.attn.forward

        def other(*given, **named):
            y, *rest = attend(*given, **named)
            return (y.bfloat16() if changed == "dtype" else y[:, :1], *rest)

        block.attn.forward = other
    x = torch.randn(2, 3, 24)
    # Terms of two dtypes are added in the wider one.
    ran = {NORM: 1, SUM: 1} if changed == "dtype" else {NORM: 3 if more else 2, SUM: 0}
    held(block, patching("gpt2"), lambda block: [block(x, **more)], {**ran, ACTIVATION: 1})


def test_terms_of_two_dtypes_are_added_up_as_they_are():
    model = eval_of("olmo2")
    layer = model.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda *given: given[-1].double())
    layer.post_attention_layernorm.register_forward_hook(lambda *given: given[-1].float())
    held(model, patching("olmo2"), logits, {BOTH: 0, BEFORE: 3, BEHIND: 0}, 1e-4)


# Modules and functions by themselves.


def gated(dtype, gate_dtype=None, size=10, activation="silu"):
    norm = Qwen3NextRMSNormGated(10).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    norm.activation = activation
    return norm, torch.randn(7, 10).to(dtype), torch.randn(7, size).to(gate_dtype or dtype)


SERVED = {"rms_norm_forward": 1, "swiglu_forward": 1}
NOT_SERVED = dict.fromkeys(SERVED, 0)


@pytest.mark.parametrize(
    ("made", "kernels", "tolerance"),
    [
        (lambda: gated(torch.float32), SERVED, 1e-5),
        (lambda: gated(torch.bfloat16), SERVED, 2e-2),
        (lambda: gated(torch.float32, torch.bfloat16), NOT_SERVED, 1e-5),
        (lambda: gated(torch.float32, size=1), NOT_SERVED, 1e-5),
        (lambda: gated(torch.float32, activation="sigmoid"), NOT_SERVED, 1e-5),
    ],
    ids=["float32", "bfloat16", "a gate of another dtype", "a gate for all columns", "sigmoid"],
)
def test_norms_whose_result_a_gate_multiplies(made, kernels, tolerance):
    norm, x, gate = made()
    leaves = [x.requires_grad_(), gate.requires_grad_(), norm.weight]
    held(norm, patching("qwen3_next"), lambda norm: results(lambda: norm(x, gate), leaves), kernels, tolerance)


class Tripled(gemma4.Gemma4RMSNorm):
    def _norm(self, hidden_states):
        return 3 * super()._norm(hidden_states)


@both_ways
def test_a_subclass_of_a_norm_that_overrides_its_helper_runs_its_own_code(way):
    model = eval_of("gemma4")
    norm = next(x for x in model.modules() if type(x) is gemma4.Gemma4RMSNorm)
    norm.__class__ = Tripled
    others = sum(type(x) is gemma4.Gemma4RMSNorm for x in model.modules())
    assert 0 < sum(held(model, way, logits, **only("rms_norm")).values()) <= others
    way(model)
    assert {row.reason for row in tilekern.report(model).rows if row.op == "rms_norm" and row.kind == "Tripled"} == {
        "Tripled has a _norm of its own"
    }


class DividedNorm(torch.nn.Module):
    """Gemma 3n's norm in transformers 5.0.0; other modules with this code may have no flag."""

    def __init__(self, weight, **flags):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight), 1e-6
        vars(self).update(flags)

    def _norm(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()) * self.weight.float()
        return output.type_as(x)


@DTYPES
@pytest.mark.parametrize(
    ("shape", "flags"), [((24,), {}), ((24,), {"with_scale": True}), ((), {"with_scale": False})], ids=str
)
def test_a_norm_that_divides_by_the_root_gives_what_it_did(shape, flags, dtype):
    weight = torch.rand(shape, dtype=dtype) + 0.5 if shape else torch.ones(shape, dtype=dtype)
    model, x = torch.nn.Sequential(DividedNorm(weight, **flags)), torch.randn(5, 24, dtype=dtype, requires_grad=True)
    leaves = [x, *model.parameters()] if shape else [x]
    way = functools.partial(tilekern.apply_to_model, forms="any")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    ran = held(model, way, lambda model: results(lambda: model(x), leaves), tolerance=tolerance)
    assert {name.replace("_offset", "") for name in ran} - {"column_sum"} == {"rms_norm_backward", "rms_norm_forward"}


@both_ways
def test_the_report_lists_a_gated_norm_under_rms_norm(way):
    model = eval_of("qwen3_5")
    way(model)
    rows = [row for row in tilekern.report(model).rows if row.kind == "Qwen3_5RMSNormGated"]
    assert [(row.op, row.reason) for row in rows] == [("rms_norm", "")]


# Norms and their arguments; the last two have weights for each of five heads.
NORMS = [
    (cohere.CohereLayerNorm, {"hidden_size": 24}),
    (nemotron.NemotronLayerNorm1P, {"normalized_shape": 24}),
    (olmo.OlmoLayerNorm, {"hidden_size": 24}),
    (cohere.CohereLayerNorm, {"hidden_size": (5, 24)}),
    (stablelm.StableLmLayerNormPerHead, {"dim": 24, "num_heads": 5}),
]


@DTYPES
@pytest.mark.parametrize(("kind", "arguments"), NORMS, ids=lambda x: getattr(x, "__name__", ""))
def test_norms_of_families_own_give_what_they_did(kind, arguments, dtype):
    norm = kind(**arguments).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 5, 24, dtype=dtype)
    x = (x[:, :, None] if kind is stablelm.StableLmLayerNormPerHead else x).requires_grad_()
    way = patching(kind.__module__.split(".")[-2])
    leaves = [x, *norm.parameters()]
    held(norm, way, lambda norm: results(lambda: norm(x), leaves), {NORM: 1}, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("change", [lambda norms: with_eps(norms[1]), lambda norms: with_hook(norms[2])])
def test_norms_of_heads_that_differ_run_as_they_are(change):
    norm, x = stablelm.StableLmLayerNormPerHead(8, 3), torch.randn(2, 3, 5, 8)
    change(norm.norms)
    held(norm, patching("stablelm"), lambda norm: [norm(x)], {}, exactly=True)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gelu_new", "gpt2"), ("gelu_fast", "gpt2"), ("gelu_accurate", "gpt2"), ("gelu_python_tanh", "gpt2"),
        ("gelu", "falcon"), ("gelu_python", "falcon"), ("quick_gelu", "gpt_neox"), ("silu", "phi"), ("swish", "phi"),
        ("relu", "phi"), ("relu2", "nemotron"), ("", "bloom"),
    ],
)  # fmt: skip
def test_activations_of_mlps_without_a_gate_give_what_they_did(name, family):
    """Of BLOOM's the activation alone is exchanged."""
    mlp = next(x for path, x in make(family)[0].train().named_modules() if path.endswith(".mlp"))
    if name:
        holder = next(attribute for attribute in ("act", "act_fn", "activation_fn") if hasattr(mlp, attribute))
        setattr(mlp, holder, activations.ACT2FN[name])
    mlp = mlp if name else mlp.gelu_impl
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    leaves = [x, *mlp.parameters()]
    kernels = {ACTIVATION: 1, REMAKE: 1 if name else 0, BACKWARD: 0 if name else 1}
    held(mlp, patching(family), lambda mlp: results(lambda: mlp(x), leaves), kernels)


SIZE = 12


def angles(width, twice, dtype=torch.float32, batch=1):
    made = torch.rand(batch, 5, width // 2 if twice else width) * 6
    made = torch.cat((made, made), -1) if twice else made
    return made.cos().to(dtype), made.sin().to(dtype)


def polar(*shape):
    return torch.polar(torch.ones(*shape, SIZE // 2), torch.rand(*shape, SIZE // 2) * 6)


def turned(module, name, leaves, *more, ran, tolerance=1e-5, **options):
    """Hold a module's function, that is called anew by its name, to what it was."""
    original = getattr(module, name)

    def run(_):
        return graded(lambda *given: getattr(module, name)(*given, *more, **options), *leaves)

    def way(_):
        done = tilekern.apply(model_type=module.__name__.split(".")[-2])
        ours = getattr(module, name)
        assert ours is not original
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(original).parameters)
        return done

    held(None, way, run, {} if ran is None else {ran: 2}, tolerance, exactly=True)


def q_and_k(*shape, dtype=torch.float32, heads_first=False):
    """Three heads of q and one of k."""
    made = [torch.randn(*shape, heads, SIZE).to(dtype) for heads in (3, 1)]
    return [x.transpose(1, 2) for x in made] if heads_first else made


# The function, how many angles there are for a head, and whether they are stored twice.
ROTATIONS = {
    "deepseek_v3": (deepseek_v3, "apply_rotary_pos_emb_interleave", SIZE, True),
    "phi3": (phi3, "apply_rotary_pos_emb", 8, True),
    "nanochat": (nanochat, "apply_rotary_pos_emb", SIZE, True),
    "nemotron": (nemotron, "apply_rotary_pos_emb", 8, True),
    "gpt_oss": (gpt_oss, "apply_rotary_pos_emb", SIZE // 2, False),
}


@DTYPES
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("case", ROTATIONS.values(), ids=ROTATIONS)
def test_rotations_give_what_they_did(case, heads_first, dtype):
    module, name, width, twice = case
    turned(
        module, name, q_and_k(2, 5, dtype=dtype, heads_first=heads_first), *angles(width, twice, dtype, batch=2),
        ran="rope", tolerance=1e-5 if dtype == torch.float32 else 2e-2, unsqueeze_dim=1 if heads_first else 2,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("twice", [True, False])
def test_rotations_of_forms_of_their_own_give_what_they_did(twice, dtype):
    """Complex angles; those of towers, without a batch: Llama 4's for one head, Qwen2-VL's of a product, in float32."""
    tolerance = {"tolerance": 1e-5 if dtype == torch.float32 else 1e-2}
    if twice:
        q, k = q_and_k(2, 5, dtype=dtype, heads_first=True)
        turned(deepseek_v2, "apply_rotary_emb", (q, k), polar(2, 5), ran="llama4_rope", **tolerance)
        q, k = torch.randn(2, 2, 5, 3, SIZE).to(dtype)
        freqs = {"freqs_ci": polar(5, 1)}
        turned(llama4, "vision_apply_rotary_emb", (q, k), ran="llama4_rope", **tolerance, **freqs)
    (cos,), (sin,) = angles(SIZE, twice)
    q, k = torch.randn(5, 2, 3, SIZE).to(dtype).unbind(1)
    turned(qwen2_vl, "apply_rotary_pos_emb_vision", (q, k), cos, sin, ran="rope", **tolerance)


def test_a_rotation_of_one_sequence_of_all_images_patches():
    (cos,), (sin,) = angles(SIZE, True)
    q, k = torch.randn(2, 1, 3, 5, SIZE)
    turned(pixtral, "apply_rotary_pos_emb", (q, k), cos, sin, ran="rope", unsqueeze_dim=0)


@pytest.mark.parametrize(
    ("module", "options"), [(gemma4, {"unsqueeze_dim": 1}), (gemma4, {"unsqueeze_dim": 2}), (gptj, {})]
)
def test_rotations_of_one_tensor_turn_the_halves_of_its_heads(module, options):
    """GPT-J's, in pairs, by sines and then cosines that are stored once; of one head it is the function as it was."""
    pairs = module is gptj
    given = [x[..., : SIZE // 2] for x in angles(SIZE, True)[::-1]] if pairs else angles(SIZE, True)
    q, k = q_and_k(2, 5, heads_first=options.get("unsqueeze_dim") == 1)
    kernel = "llama4_rope" if pairs else "rope"
    turned(module, "apply_rotary_pos_emb", (q,), *given, ran=kernel, **options)
    turned(module, "apply_rotary_pos_emb", (k,), *given, ran=None, tolerance=1e-30, **options)


def test_what_only_broadcasting_makes_fit_is_left():
    """And a batch where there is none."""
    same_bits = {"ran": None, "tolerance": 1e-30}
    cos, sin = angles(SIZE, True)
    q, k = q_and_k(2, 5, heads_first=True)
    turned(deepseek_v2, "apply_rotary_emb", (q, k), polar(2, 5)[:, :1], **same_bits)
    v3 = functools.partial(turned, deepseek_v3, "apply_rotary_pos_emb_interleave", (q, k))
    v3(cos[:, :1], sin[:, :1], **same_bits)
    v3(cos, sin, None, 1, ran="rope")
    (cos,), (sin,) = angles(SIZE, True)
    q, k = torch.randn(5, 2, 3, SIZE).unbind(1)
    vision = functools.partial(turned, qwen2_vl, "apply_rotary_pos_emb_vision")
    vision((q[None], k[None]), cos, sin, **same_bits)
    vision((q, k), cos[:1], sin[:1], **same_bits)
