"""A decoder layer with frozen weights or with adapters is one op while its modules do no more, in each call anew."""

import gc
import itertools
import types
import weakref

import pytest
import rerunning
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as peft_layers
from test_whole_layers import hooked, near, of_its_own, served, small, steps_of  # noqa: F401 (a fixture)
from tiny_qwen3 import IDS, apply, step
from torch.nn.utils import parametrize
from transformers import Trainer, TrainingArguments

import tilekern
from tilekern.ops import decoder_layer
from tilekern.patch import adapters, whole_layers
from tilekern.patch.graphs import graphs_of

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]
LORA = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": "all-linear"}


def adapted(attention="tilekern", dtype=torch.float32, *, cast=False, **options):
    model = small(attention).to(dtype)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{**LORA, **options}), autocast_adapter_dtype=cast).train()


def layer_of(model, number=0):
    return model.base_model.model.model.layers[number]


TARGETS = {
    "all": ({}, 2),
    "q and v": ({"target_modules": ["q_proj", "v_proj"]}, 2),
    "other ranks and scales": ({"rank_pattern": {"q_proj": 2, "up_proj": 7}, "alpha_pattern": {"k_proj": 3}}, 2),
    # Nothing before the second layer's attention learns but the first layer.
    "the last alone": ({"target_modules": ["down_proj"]}, 1),
    "biases and norms too": ({"bias": "all", "modules_to_save": ["embed_tokens"]}, 2),
    "norms, which PEFT wraps": ({"modules_to_save": ["input_layernorm"]}, 0),
    "a direction and a magnitude": ({"use_dora": True}, 0),
    "a bias in adapters": ({"lora_bias": True}, 0),
    "dropout": ({"lora_dropout": 0.3}, 2),
    "dropout of some": ({"target_modules": ["k_proj", "o_proj", "down_proj"], "lora_dropout": 0.3}, 2),
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_served(kind, served):  # noqa: F811
    options, layers = TARGETS[kind]

    def made(attention):
        model = adapted(attention, **options)
        torch.manual_seed(2)
        return steps_of(model, served)

    expected = made("eager")
    tilekern.apply()
    assert near(made("tilekern"), expected)
    assert sum(served) == layers


def test_its_loss_has_the_bits_of_its_parts(served, monkeypatch):  # noqa: F811
    tilekern.apply()
    model = adapted()
    found = steps_of(model, served)
    assert served == [True, True]
    monkeypatch.setattr("tilekern.patch.whole_layers.decoder_layer", lambda *_: None)
    expected = step(model)
    assert torch.equal(found[0], expected[0])
    assert near(found, expected)


def at(name, change, number=0):
    """A change of a module of a layer."""
    return lambda model: change(layer_of(model, number).get_submodule(name))


def inside(change, name):
    """A change that is given the layers' model, as :func:`hooked` and :func:`of_its_own` make it."""
    return lambda model: change(name)(model.base_model.model)


def exchanged(module):
    class Linear(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module.__class__ = Linear


def doubled(module):
    module.weight = torch.nn.Parameter(2 * module.weight.detach(), module.weight.requires_grad)


def biased(module):
    module.bias = torch.nn.Parameter(torch.full((module.out_features,), 0.01))


def plain_attribute(module):
    weight = module._parameters.pop("weight")
    module.weight = 2 * weight.detach()


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        return 2 * made if function is torch.nn.functional.linear else made


def of_a_subclass(module):
    module._parameters["weight"] = module.weight.detach().as_subclass(Subclass)


def second_adapter(model):
    model.add_adapter("other", LoraConfig(**LORA))


def switched(model):
    second_adapter(model)
    model.set_adapter("other")


def several(model):
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def deleted(model):
    switched(model)
    model.delete_adapter("default")


def rescaled(model):
    for module in model.modules():
        if isinstance(module, peft_layers.Linear):
            module.scale_layer(0.5)


def scaled_by_a_tensor(layer):
    layer.scaling["default"] = torch.tensor(3.0)


def varied(layer):
    class Twice:
        @staticmethod
        def forward(module, active_adapter, x, result, **_):
            return 2 * result + 0 * module.lora_B[active_adapter](module.lora_A[active_adapter](x)).sum()

    layer.lora_variant["default"] = Twice()


class OtherDropout(torch.nn.Dropout):
    """As one that draws otherwise."""

    def forward(self, x):
        return 2 * super().forward(x)


def dropped(rate, kind=torch.nn.Dropout):
    def change(layer):
        layer.lora_dropout["default"] = kind(rate)

    return change


def dropped_otherwise(model):
    """Other rates in each layer, none in evaluation, at 0, and where PEFT has no module that drops."""
    rates = iter([0.1, 0.5, 0.0, 0.9, None, 0.3, 0.7] * 2)
    for module in model.modules():
        if isinstance(module, peft_layers.Linear) and (rate := next(rates)) is not None:
            dropped(rate)(module)
    layer_of(model).self_attn.k_proj.lora_dropout.eval()


def dropped_by_itself(layer):
    """As a dropout whose module has a forward of its own."""
    module = layer.lora_dropout["default"]
    module.forward = types.MethodType(lambda self, x: 2 * x, module)  # noqa: ARG005


def twice(module, given, made):
    return 2 * made


def learning(model):
    model.requires_grad_()


def frozen(names):
    def change(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names) and parameter.requires_grad)

    return change


PARTS = ["q_proj", "q_proj.base_layer", "k_proj.lora_A.default", "o_proj.lora_B.default", "v_proj.lora_dropout.default"]
INSIDE = [f"self_attn.{name}" for name in PARTS]
FACTOR = "mlp.up_proj.lora_A.default"
# What changes between two steps, and how many of the two layers are then one op.
LATER = {
    **{f"a hook on {name}": (inside(hooked, name), 1) for name in INSIDE},
    **{f"a forward of {name}'s own": (inside(of_its_own, name), 1) for name in INSIDE},
    **{f"another class of {name}": (at(name, exchanged), 1) for name in (FACTOR, "mlp.up_proj.base_layer")},
    "another weight of a base layer": (at("mlp.down_proj.base_layer", doubled), 2),
    "another factor": (at(FACTOR, doubled), 2),
    "a bias of a base layer": (at("mlp.gate_proj.base_layer", biased), 1),
    "a bias of the base layer of q": (at("self_attn.q_proj.base_layer", biased), 2),
    "a bias of an adapter": (at("self_attn.q_proj.lora_B.default", biased), 1),
    "a factor that is a plain attribute": (at(FACTOR, plain_attribute), 1),
    "a factor of a subclass of Tensor": (at(FACTOR, of_a_subclass), 1),
    "a parametrization of a factor": (
        at(FACTOR, lambda m: parametrize.register_parametrization(m, "weight", Doubled())), 1,
    ),
    "an adapter that is added": (second_adapter, 2),
    "another adapter": (switched, 2),
    "another adapter, and the first is deleted": (deleted, 2),
    "two adapters": (several, 0),
    "adapters that are disabled": (lambda model: model.base_model.disable_adapter_layers(), 0),
    "an adapter that is disabled in one layer": (at("mlp.up_proj", lambda m: m.enable_adapters(False)), 1),
    "adapters that are merged": (lambda model: (model.merge_adapter(), learning(model)), 0),
    "an adapter that is merged in one layer": (at("mlp.up_proj", lambda m: m.merge()), 1),
    "merged and unmerged": (lambda model: (model.merge_adapter(), model.unmerge_adapter()), 2),
    "another scale": (rescaled, 2),
    "a scale that is a tensor": (at("mlp.up_proj", scaled_by_a_tensor), 1),
    "a variant of LoRA": (at("mlp.up_proj", varied), 1),
    "dropouts": (dropped_otherwise, 2),
    "a dropout of all": (at("mlp.up_proj", dropped(1.0)), 1),
    "another dropout": (at("mlp.up_proj", dropped(0.3, OtherDropout)), 1),
    "a dropout with a hook": (
        at("mlp.up_proj", lambda m: (dropped(0.3)(m), m.lora_dropout["default"].register_forward_hook(twice))), 1,
    ),
    "a dropout with a forward of its own": (at("mlp.up_proj", dropped_by_itself), 1),
    "all learns": (learning, 2),
    "factors a are frozen": (frozen(["lora_A"]), 2),
    "factors b are frozen": (frozen(["lora_B"]), 2),
    "the first layer is frozen": (frozen(["layers.0"]), 1),
    "the second layer is frozen": (frozen(["layers.1"]), 2),
    "unloaded": (lambda model: model.unload().requires_grad_(), 2),
}  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", LATER)
def test_what_comes_before_or_between_steps_is_heeded(kind, steps, served):  # noqa: F811
    change, layers = LATER[kind]

    def second_step(attention):
        model = adapted(attention)
        for _ in range(steps):
            step(model)
        torch.manual_seed(3)
        taken = change(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            learning(model)
        return steps_of(model, served), taken

    expected, _ = second_step("sdpa")
    tilekern.apply()
    found, take_back = second_step("tilekern")
    assert near(found, expected)
    assert sum(served) == layers
    if kind.startswith(("a hook", "a forward")):
        assert take_back()


def test_dropout_is_heeded_in_training_alone(served):  # noqa: F811
    model = adapted("sdpa", lora_dropout=0.9).eval()
    expected = step(model)
    tilekern.apply()
    model = adapted(lora_dropout=0.9)
    for mode in (True, False, True):
        found = steps_of(model.train(mode), served)
        assert served == [True, True]
        assert near(found, expected) != mode


def test_the_op_of_adapters_must_be_on(served):  # noqa: F811
    expected = step(adapted("eager"))
    tilekern.apply(lora=False)
    assert near(steps_of(adapted(), served), expected)
    assert not served


def test_an_input_with_a_gradient_and_without(served):  # noqa: F811
    """PEFT's first layer has none, unless gradients of its input are asked for."""
    expected = step(adapted("eager"))
    tilekern.apply()
    model = adapted()
    assert near(steps_of(model, served), expected)
    model.enable_input_require_grads()
    assert near(steps_of(model, served), expected)
    assert served == [True, True]


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_go_on_working(reentrant, rate, served):  # noqa: F811
    def made(attention):
        model = adapted(attention, lora_dropout=rate)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        torch.manual_seed(2)
        return steps_of(model, served)

    expected = made("eager")
    tilekern.apply()
    assert near(made("tilekern"), expected)
    assert served == [True, True]


@pytest.mark.parametrize("is_whole", [True, False])
def test_dropouts_leave_the_numbers_of_the_model_s_own_code(is_whole, served, monkeypatch):  # noqa: F811
    def after(model):
        torch.manual_seed(2)
        step(model)
        return torch.get_rng_state()

    expected = after(adapted("eager", lora_dropout=0.3))
    tilekern.apply()
    model = adapted(lora_dropout=0.3)
    if not is_whole:
        # As without a record.
        monkeypatch.setitem(decoder_layer._ATTENTION, "plans_of", lambda *_: None)
    served.clear()
    assert torch.equal(after(model), expected)
    assert served == [is_whole] * 2


def test_captured_steps_draw_as_eager_ones(served, monkeypatch):  # noqa: F811
    def losses(graphs):
        model = adapted(lora_dropout=0.3)
        model = tilekern.graphed(model) if graphs else model
        torch.manual_seed(2)
        return [step(model)[0].item() for _ in range(4)], model

    tilekern.apply()
    rerunning.use(monkeypatch)
    expected, _ = losses(graphs=False)
    found, model = losses(graphs=True)
    assert found == expected
    assert len(set(found)) == 4
    assert graphs_of(model)[""].replays == 2
    assert set(served) == {True}


APART = {
    "nothing": (lambda _: None, {}),
    "a dropout": (
        at("mlp.up_proj", dropped(0.3, OtherDropout)), {0: f"up_proj: {adapters.DROPOUT}"},
    ),
    "two adapters": (several, dict.fromkeys(range(2), "q_proj: several adapters or a variant of LoRA")),
    "a hook": (inside(hooked, "self_attn"), {0: f"Qwen3Attention: {whole_layers._MORE}"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", APART)
def test_why_layers_are_not_one_op_is_said_until_they_are(kind):
    change, wanted = APART[kind]
    tilekern.apply()
    model = adapted()
    take_back = change(model)
    step(model)
    said = tilekern.report(model)
    path = "base_model.model.model.layers.{}"
    assert said.apart == {path.format(number): why for number, why in wanted.items()}
    assert all(f"layers by their parts: {len(wanted)} ({why})" in str(said) for why in wanted.values())
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    assert tilekern.report(model).apart == said.apart
    if callable(take_back):
        take_back()
        step(model.train())
        assert not tilekern.report(model).apart


def test_gradients_are_accumulated(served):  # noqa: F811
    def grown(model):
        for ids in (IDS[:1], IDS[1:]):
            model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = grown(adapted("eager"))
    tilekern.apply()
    assert near(grown(adapted()), expected)
    assert served == [True] * 4


# The model's dtype, whether its adapters are of float32, whether autocast is on, and how many layers are one op.
DTYPES = {
    "of bfloat16": (torch.bfloat16, False, False, 2),
    "adapters of float32": (torch.bfloat16, True, False, 2),
    "adapters of float32 under autocast": (torch.bfloat16, True, True, 2),
    "of bfloat16 under autocast": (torch.bfloat16, False, True, 2),
    "of float32 under autocast": (torch.float32, True, True, 2),
}


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", DTYPES)
def test_dtypes(kind, rate, served):  # noqa: F811
    dtype, cast, casts, layers = DTYPES[kind]

    def seeded(*given, **options):
        model = adapted(*given, **options, lora_dropout=rate)
        torch.manual_seed(3)
        return steps_of(model, served)

    exact = seeded("eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        theirs = seeded("eager", dtype, cast=cast)
        tilekern.apply()
        found = seeded(dtype=dtype, cast=cast)
    assert sum(served) == layers
    assert [x.dtype for x in found] == [x.dtype for x in theirs]
    for one, other, right in zip(found, theirs, exact, strict=True):
        wrong, usual = ((y.double() - right.double()).norm() for y in (one, other))
        assert wrong <= 2 * usual + 1e-2 * right.norm()


@pytest.mark.parametrize("off", [(), ("fused_add_rms_norm",), ("swiglu", "rope", "qk_norm_rope")])
@pytest.mark.parametrize("kind", DTYPES)
def test_dropouts_draw_in_the_order_and_the_dtypes_of_peft_s_code(kind, off, monkeypatch):
    """On a GPU the numbers depend on the dtype."""
    dtype, cast, casts, _ = DTYPES[kind]
    drawn, theirs, ours = [], torch.nn.functional.dropout, torch.native_dropout
    note = lambda run: lambda x, *given: drawn.append((x.dtype, x.numel(), given[0])) or run(x, *given)  # noqa: E731

    def step_of(attention):
        drawn.clear()
        model, rates = adapted(attention, dtype, cast=cast), itertools.count(1)
        for module in model.modules():
            if isinstance(module, peft_layers.Linear):
                dropped(next(rates) / 20)(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            step(model)
        return [*drawn]

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", note(theirs))
        expected = step_of("sdpa")
    tilekern.apply(**dict.fromkeys(off, False))
    monkeypatch.setattr(torch, "native_dropout", note(ours))
    assert step_of("tilekern") == expected
    assert len(expected) == 14


@pytest.mark.parametrize("is_half", [False, True])
def test_a_trainer_trains_adapters_by_it(is_half, served, tmp_path):  # noqa: F811
    tilekern.apply()
    model = adapted(dtype=torch.bfloat16 if is_half else torch.float32, cast=True)
    options = {"max_steps": 2, "bf16": is_half, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows).train()
    assert served == [True] * 4


FROZEN = {
    "all but the head": (["model."], 0),
    "the embedding": (["embed"], 2),
    "norms": (["norm"], 2),
    "the MLPs": (["mlp"], 2),
    "the first layer, and what is before": (["embed", "layers.0"], 1),
    "all of the first layer up to its attention": (["embed", "layers.0.self_attn", "layers.0.input"], 1),
    "all but one bias": (["norm", "proj", "embed"], 0),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_weights_are_frozen_and_learn_again(kind, served):  # noqa: F811
    names, layers = FROZEN[kind]
    learnt = step(small("eager"))
    model = small("eager")
    frozen(names)(model)
    expected = step(model) if any(p.requires_grad for p in model.parameters()) else None
    apply()
    model = small()
    assert near(steps_of(model, served), learnt)
    frozen(names)(model)
    if expected is not None:
        assert near(steps_of(model, served), expected)
        assert sum(served) == layers
    assert near(steps_of(model.requires_grad_(), served), learnt)
    assert served == [True, True]


def test_an_adapter_that_was_seen_is_free_when_it_goes():
    tilekern.apply()
    model = adapted()
    step(model)
    gone = weakref.ref(layer_of(model).mlp.up_proj.lora_A["default"].weight)
    model.add_adapter("other", LoraConfig(**LORA))
    model.set_adapter("other")
    model.delete_adapter("default")
    gc.collect()
    assert gone() is None
