"""Every way in which a user may change a patched model is seen at the next call, and what looking for it costs."""

import copy
import functools
import pickle
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from model_contract import both_ways, counted
from tiny_families import make as make_family
from tiny_qwen3 import IDS, make, step, worst
from torch.nn.utils import parametrizations, parametrize, weight_norm

import tilekern
import tilekern.patch

pytestmark = pytest.mark.filterwarnings("ignore:.*another forward than", "ignore:.*was replaced by something else")
interpreted = pytest.mark.usefixtures("interpreted")
# Modules of a layer, each with a kernel that does not run if calling it is more than its class's forward.
TARGETS = {
    "mlp.gate_proj": "swiglu_backward_remake",
    "mlp.act_fn": "swiglu_forward",
    "self_attn.k_proj": None,
    "self_attn.k_norm": "qk_norm_rope_forward",
    "post_attention_layernorm": "fused_add_rms_norm_forward",
}
LINEAR = [name for name in TARGETS if name.endswith("proj")]
WEIGHTED = [name for name in TARGETS if name != "mlp.act_fn"]
FUSED = {kernel for kernel in TARGETS.values() if kernel}


class Doubling(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class Marked(torch.nn.Parameter):
    pass


def hook(kind, function, module):
    return getattr(module, f"register_{kind}")(function).remove


def own_forward(module):
    own, before = vars(module), vars(module).get("forward")
    called = module.forward
    module.forward = lambda x: 2 * called(x)

    def undo():
        del module.forward
        if before is not None:
            own["forward"] = before

    return undo


def class_forward(module):
    kind = type(module)
    original = kind.forward

    @functools.wraps(original)
    def doubled(self, x):
        return 2 * original(self, x)

    kind.forward = doubled
    return lambda: setattr(kind, "forward", original)


def another_class(module):
    before = type(module)
    module.__class__ = type("Mine", (before,), {"forward": lambda self, x: 2 * before.forward(self, x)})
    return lambda: setattr(module, "__class__", before)


def marked_weight(module):
    before = module.weight
    module.weight = Marked(2 * before.detach())
    return lambda: setattr(module, "weight", before)


def bias(module):
    module.bias = torch.nn.Parameter(torch.linspace(-1, 1, module.out_features))
    return lambda: setattr(module, "bias", None)


def parametrized(module):
    parametrize.register_parametrization(module, "weight", Doubling())
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def spectral(module):
    parametrizations.spectral_norm(module, "weight")


def old_weight_norm(module):
    with pytest.warns(FutureWarning):
        weight_norm(module, "weight")


# Changes of a module that its kernel must not pass over, with the modules that can have them.
CHANGES = {
    "forward hook": (functools.partial(hook, "forward_hook", lambda *given: 2 * given[-1]), TARGETS),
    "forward pre-hook": (functools.partial(hook, "forward_pre_hook", lambda _, given: (2 * given[0],)), TARGETS),
    "backward hook": (
        functools.partial(hook, "full_backward_hook", lambda _, given, __: (2 * given[0],)), TARGETS,
    ),
    "backward pre-hook": (
        functools.partial(hook, "full_backward_pre_hook", lambda _, given: (2 * given[0],)), TARGETS,
    ),
    "own forward": (own_forward, TARGETS),
    "forward of the class": (class_forward, TARGETS),
    "another class": (another_class, TARGETS),
    "subclass of Parameter": (marked_weight, WEIGHTED),
    "bias": (bias, LINEAR),
    "parametrization": (parametrized, LINEAR),
    "spectral norm": (spectral, LINEAR),
    "weight norm": (old_weight_norm, LINEAR),
}  # fmt: skip
ROWS = [(name, change, target) for name, (change, targets) in CHANGES.items() for target in targets]


def in_layer(model, target):
    return model.model.layers[0].get_submodule(target)


def made():
    """A model whose activation is no other module's, since transformers may share one."""
    model = make(layers=1).train()
    model.model.layers[0].mlp.act_fn = copy.deepcopy(model.model.layers[0].mlp.act_fn)
    return model


def changed_step(model, change, target):
    """A step of a model of which a module is changed, the launches in it, and the launches in one after the change."""
    torch.manual_seed(3)  # spectral norm draws
    undo = change(in_layer(model, target))
    try:
        found, ran = counted(lambda: step(model))
    finally:
        if undo:
            undo()
    return found, ran, counted(lambda: step(model))[1] if undo else None


@interpreted
@both_ways
@pytest.mark.parametrize(("name", "change", "target"), ROWS, ids=[f"{name} of {target}" for name, _, target in ROWS])
def test_a_change_after_patching_is_seen_and_so_is_its_end(way, name, change, target):
    reference, *_ = changed_step(made(), change, target)
    model = made()
    # Norms that are patched by themselves have methods of their own, and do not call those of any class.
    way(model, rms_norm="class" not in name.split())
    assert counted(lambda: step(model))[1].keys() >= FUSED
    found, ran, after = changed_step(model, change, target)
    assert worst(found, reference) < 1e-5
    assert TARGETS[target] not in ran
    assert after is None or after.keys() >= FUSED


def scaled(weight):
    """Other values, which no norm evens out."""
    return weight.detach() * torch.linspace(0.5, 2, len(weight)).view(-1, *(1,) * (weight.dim() - 1))


def new_parameter(module):
    module.weight = torch.nn.Parameter(scaled(module.weight))


def in_place(module):
    module.weight.data.copy_(scaled(module.weight))


def assigned(module):
    module.load_state_dict({name: scaled(x) for name, x in module.state_dict().items()}, assign=True)


def plain_attribute(module):
    """As FSDP1 does to its views of a flat parameter."""
    weight = module._parameters.pop("weight")
    module.__dict__["weight"] = scaled(weight)


def shadowed(module):
    module.__dict__["weight"] = scaled(module.weight)


def swapped_parameter(module):
    """As FSDP2 does."""
    module._parameters["weight"] = torch.nn.Parameter(scaled(module.weight))


# Changes of a module that its kernel takes over.
SERVED = {
    "new parameter": new_parameter, "values": in_place, "assigned state": assigned, "plain attribute": plain_attribute,
    "attribute before a parameter": shadowed, "swapped parameter": swapped_parameter,
}  # fmt: skip


@interpreted
@both_ways
@pytest.mark.parametrize("target", WEIGHTED)
@pytest.mark.parametrize("change", SERVED.values(), ids=SERVED)
def test_new_weights_are_used_at_the_next_call(way, change, target):
    def loss(model):
        return [model(input_ids=IDS, labels=IDS).loss]

    model = made()
    change(in_layer(model, target))
    reference = loss(model)
    model = made()
    way(model)
    before = loss(model)
    change(in_layer(model, target))
    found, ran = counted(lambda: loss(model))
    assert worst(found, reference) < 1e-5 < worst(found, before)
    assert ran.keys() >= FUSED - {"swiglu_backward_remake"}


def replaced(model):
    layer = model.model.layers[0]
    layer.mlp.gate_proj = torch.nn.Sequential(layer.mlp.gate_proj, Doubling())
    layer.self_attn.k_proj = torch.nn.Sequential(layer.self_attn.k_proj, Doubling())
    layer.post_attention_layernorm = torch.nn.Sequential(layer.post_attention_layernorm, Doubling())
    norm = layer.self_attn.k_norm
    del layer.self_attn.k_norm
    layer.self_attn.k_norm = lambda x: 2 * norm(x)


def tied(model):
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight


def as_bfloat16(model):
    model.to(torch.bfloat16)


class Change(NamedTuple):
    """A change of a model.

    Attributes:
        make: changes it in place.
        unfused: kernels that do not run afterwards.
        tolerance: of the relative error.
    """

    make: Any
    unfused: set[str] = set()  # noqa: RUF012
    tolerance: float = 1e-5


MODELS = {
    "modules replaced": Change(
        replaced, {"swiglu_backward_remake", "fused_add_rms_norm_forward", "qk_norm_rope_forward"}
    ),
    "weights tied": Change(tied),
    "another dtype": Change(as_bfloat16, tolerance=5e-2),
}


@interpreted
@both_ways
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_a_changed_model_is_served_where_it_can_be(way, change):
    model = made()
    change.make(model)
    reference = step(model)
    model = made()
    way(model)
    step(model)
    change.make(model)
    found, ran = counted(lambda: step(model))
    assert worst(found, reference) < change.tolerance
    assert ran.keys() & FUSED == FUSED - change.unfused


def swapped_in_a_call(model):
    """By ``functional_call``, with other parameters for this call alone."""
    others = {name: (1.5 * x.detach()).requires_grad_() for name, x in model.named_parameters()}
    loss = torch.func.functional_call(model, others, kwargs={"input_ids": IDS, "labels": IDS}).loss
    own = [others[name] for name, _ in model.named_parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)]


def of_a_copy(model):
    return step(copy.deepcopy(model))


def of_a_pickle(model):
    return step(pickle.loads(pickle.dumps(model)))


def in_threads(model):
    """A forward in each of four threads at once."""
    found = []

    def run():
        with torch.no_grad():
            found.append(model(input_ids=IDS, labels=IDS).loss)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    return found


@interpreted
@both_ways
@pytest.mark.parametrize("run", [swapped_in_a_call, of_a_copy, of_a_pickle, in_threads], ids=lambda x: x.__name__)
def test_other_ways_to_call_a_model(way, run):
    model = made()
    reference = run(model)
    way(model)
    step(model)
    found, ran = counted(lambda: run(model))
    assert worst(found, reference) < 1e-5
    # A pickle of a model that was patched by itself is not patched.
    is_patched = run is not of_a_pickle or way is not tilekern.apply_to_model
    assert ("fused_add_rms_norm_forward" in ran) == is_patched
    assert counted(lambda: step(model))[1].keys() >= FUSED


# Families by the order of the norms of q and k, the transpose of heads and tokens, and the rotation.
ORDERS = {
    "norms first": "qwen3", "transpose first": "gemma3", "transpose first, some layers rotated": "exaone4",
    "rotation before norms": "hunyuan_v1_dense",
}  # fmt: skip


@interpreted
@both_ways
@pytest.mark.parametrize("family", ORDERS.values(), ids=ORDERS)
def test_hooks_of_norms_of_heads_see_the_layout_that_they_saw(way, family):
    def hooked():
        model, ids, _ = make_family(family)
        norm = next(x for name, x in model.named_modules() if name.endswith(("k_norm", "key_layernorm")))

        def scale(_, __, out):
            return out * torch.linspace(1, 2, out.shape[1]).view(-1, 1, 1)

        norm.register_forward_hook(scale)
        return model.train(), ids

    def loss(model, ids):
        return [model(input_ids=ids, labels=ids).loss]

    reference = loss(*hooked())
    model, ids = hooked()
    way(model)
    found, ran = counted(lambda: loss(model, ids))
    assert worst(found, reference) < 1e-5
    kernels = {name: number for name, number in ran.items() if name.startswith("qk_norm_rope")}
    assert sum(kernels.values()) < model.config.num_hidden_layers


# Python functions of tilekern.patch that run in the forward of one layer, by family, around the ops that it calls.
CALLS = {"qwen3": 12, "llama": 11, "gemma2": 13, "gemma3": 12, "gpt2": 39, "gpt_oss": 23}


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize(("family", "calls"), CALLS.items())
@pytest.mark.usefixtures("interpreted")
def test_a_layer_calls_few_functions_around_its_ops(family, calls):
    model, ids, _ = make_family(family)
    model.set_attn_implementation("tilekern")
    tilekern.apply(model_type=family)
    layers = getattr(model, "model", None) or model.transformer
    layer, given = (layers.layers if hasattr(layers, "layers") else layers.h)[-1], {}
    layer.register_forward_pre_hook(lambda _, args, kwargs: given.update(call=(args, kwargs)), with_kwargs=True)
    model.train()(input_ids=ids, use_cache=False)
    layer._forward_pre_hooks.clear()
    args, kwargs = given["call"]
    home, seen = str(Path(tilekern.patch.__file__).parent), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        layer(*args, **kwargs)
    finally:
        sys.setprofile(None)
    assert len(seen) == calls, seen


def test_a_bias_that_is_a_buffer_is_added():
    mlp = make(layers=1).model.layers[0].mlp
    x = torch.randn(3, 80)
    del mlp.down_proj.bias
    mlp.down_proj.register_buffer("bias", torch.ones(80))
    expected = mlp(x)
    tilekern.apply(model_type="qwen3")
    assert worst([mlp(x)], [expected]) < 1e-5
