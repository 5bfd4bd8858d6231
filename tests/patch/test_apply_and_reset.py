"""What apply and apply_to_model touch, what reset puts back, and what is left alone with a warning or refused."""

import copy
import functools
import gc
import importlib
import inspect
import io
import re
import subprocess
import sys
import threading
import types
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from model_contract import both_ways, counted, held, is_put_back, only, reasons
from tiny_qwen3 import OPS, SINGLE, apply, make, same, step, worst
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import tilekern
from tilekern.errors import InputError
from tilekern.patch import Patch, digest_of, registry, replacements
from tilekern.patch.checkpointing import checkpointed, wraps_around
from tilekern.patch.guards import constant_in_graphs
from tilekern.patch.ledger import Ledger
from tilekern.runtime import dispatch

MODULE = qwen3.__name__
HOLDERS = (qwen3, *(v for v in vars(qwen3).values() if isinstance(v, type)))
pytestmark = pytest.mark.usefixtures("interpreted")


def attributes(*holders):
    """Every attribute of holders, else of the modelling file and of its classes, as it is now."""
    return [dict(vars(holder)) for holder in holders or HOLDERS]


def identical(one, other):
    return all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(one, other, strict=True))


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught]


def without(*names):
    return [op for op in OPS if op not in names]


# One method of a model serves one op: what qk_norm_rope stands in for needs no rope.
MINE = without("rope")


def ops_of(way):
    return MINE if way is tilekern.apply_to_model else OPS


@both_ways
def test_reset_restores_the_very_objects_and_applying_twice_is_harmless(way):
    model, other = make(), make()
    holders = (*HOLDERS, *model.modules())
    before, reference = attributes(*holders), step(other)
    assert way(model) == ops_of(way)
    once = attributes(*holders)
    touched = [holder for holder, a, b in zip(holders, before, once, strict=True) if not identical([a], [b])]
    assert touched
    assert all(isinstance(holder, torch.nn.Module) == (way is tilekern.apply_to_model) for holder in touched)
    assert way(model) == ops_of(way)
    assert identical(attributes(), once[: len(HOLDERS)])
    found, ran = counted(lambda: step(other))
    assert bool(ran) == (way is not tilekern.apply_to_model)
    assert same(found, reference) == (way is tilekern.apply_to_model)
    assert tilekern.reset() == ops_of(way)
    assert identical(attributes(*holders), before)
    assert tilekern.reset() == []


def test_together():
    model = make()
    holders = (*HOLDERS, *model.modules())
    before = attributes(*holders)
    reference = step(model)
    for way in (tilekern.apply_to_model, lambda _: apply(), tilekern.apply_to_model):
        way(model)
    found, ran = counted(lambda: step(model))
    assert worst(found, reference) < 1e-5
    assert ran["swiglu_forward"] == 2
    assert tilekern.reset() == OPS
    assert identical(attributes(*holders), before)


@pytest.mark.parametrize("names", ["swiglu", ["swiglu"], ("rope", "swiglu")])
def test_reset_of_some(names):
    apply()
    gone = [names] if isinstance(names, str) else names
    assert set(tilekern.reset(names)) == set(gone)
    assert list(tilekern.get_patched_ops()) == without(*gone)


@both_ways
def test_an_op_that_is_switched_off_is_not_patched_and_a_second_call_takes_it_back(way):
    model = make()
    holders = (*HOLDERS, *model.modules())
    before = attributes(*holders)
    for off in (("rope", "fused_add_rms_norm"), ("rms_norm", "swiglu"), ("swiglu",)):
        left = [op for op in ops_of(way) if op not in off]
        assert way(model, **dict.fromkeys(off, False)) == left
        assert list(tilekern.get_patched_ops()) == left
    assert way(model, **dict.fromkeys(OPS, False)) == []
    assert identical(attributes(*holders), before)


def test_a_family_s_own_ops_are_taken_back_alone():
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    tilekern.apply()
    assert tilekern.apply(model_type="llama", swiglu=False) == without("swiglu", "qk_norm_rope")
    assert LlamaMLP.forward is original
    patched = tilekern.get_patched_ops()["swiglu"]
    assert f"{MODULE}.Qwen3MLP.forward" in patched
    assert not any(".llama." in name for name in patched)


def test_a_family_that_is_imported_later_is_patched_then():
    name = "transformers.models.llama.modeling_llama"
    known = importlib.import_module(name)
    del sys.modules[name]
    try:
        assert tilekern.apply(model_type="llama", rope=False) == without("rope", "qk_norm_rope")
        assert not tilekern.get_patched_ops()
        module = importlib.import_module(name)
        assert set(tilekern.get_patched_ops()) == set(without("rope", "qk_norm_rope"))
        assert module.__loader__ is module.__spec__.loader
        tilekern.reset()
        del sys.modules[name]
        assert importlib.import_module(name).LlamaMLP.forward.__module__ == name
        assert not tilekern.get_patched_ops()
    finally:
        sys.modules[name] = sys.modules[name.rpartition(".")[0]].modeling_llama = known


def test_patched_ops_name_their_places():
    apply()
    assert tilekern.get_patched_ops() == {patch.op: [patch.target] for patch in registry.patches("qwen3")}
    assert tilekern.get_patched_ops()["qk_norm_rope"] == [f"{MODULE}.Qwen3Attention.forward"]
    tilekern.reset()
    gc.collect()
    model = make()
    tilekern.apply_to_model(model)
    places = {"rms_norm": ("RMSNorm", 9), "swiglu": ("MLP", 2), "qk_norm_rope": ("Attention", 2)}
    places |= {"fused_add_rms_norm": ("DecoderLayer", 2), "fused_linear_cross_entropy": ("ForCausalLM", 1)}
    assert tilekern.get_patched_ops() == {
        op: [f"{MODULE}.Qwen3{kind}.forward of {n} module{'s' * (n > 1)}"] for op, (kind, n) in places.items()
    }
    assert list(tilekern.get_patched_ops()) == MINE


def statuses():
    found = {x.patch.op: x.status for x in tilekern.list_patches() if x.patch.model_type == "qwen3"}
    assert list(found) == OPS
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_the_table_has_a_status(monkeypatch):
    assert set(statuses().values()) == {"available"}
    tilekern.apply(rope=False)
    assert statuses() == {op: "available" if op == "rope" else "applied" for op in OPS}
    tilekern.reset()
    monkeypatch.setattr(qwen3.Qwen3RMSNorm, "forward", lambda _, x: x)
    assert statuses()["rms_norm"] == "changed"


REFUSED = [
    ({"group_norm": True}, "unknown op 'group_norm'; known: rms_norm, layer_norm, swiglu, mlp, qk_norm"),
    ({"group_norm": False}, "unknown op 'group_norm'; known: rms_norm, layer_norm, swiglu, mlp, qk_norm"),
    ({"model_type": "qwen9"}, r"unknown model type 'qwen9'; known: .*qwen3.*; did you mean qwen3.*\?"),
    ({"on_miss": "explode"}, "compile, fallback, error"),
    ({"forms": "all"}, "forms must be one of tested, any, got 'all'"),
]


@pytest.mark.parametrize("call", [tilekern.apply, lambda **more: tilekern.apply_to_model(make(), **more)])
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_not_known_is_named(call, given, message):
    with pytest.raises(InputError, match=message):
        call(**given)
    assert not tilekern.get_patched_ops()


def test_reset_of_an_unknown_op():
    with pytest.raises(InputError, match="unknown op 'norm'"):
        tilekern.reset("norm")


def test_a_family_can_be_chosen_and_a_policy_set():
    assert tilekern.apply(model_type="qwen3", on_miss="error") == OPS
    assert dispatch.miss_policy() == "error"
    tilekern.apply()
    assert dispatch.miss_policy() == "error"


def own_norm(self, hidden_states):
    return hidden_states * self.weight


def timed(original):
    @functools.wraps(original)
    def call(self, x):
        return original(self, x)

    return call


def angles_of_pairs(self, x, position_ids):
    angles = position_ids[..., None] * self.inv_freq.repeat_interleave(2)
    return angles.cos(), angles.sin()


# What another library has put in the place of a class's method or of a name of the module, the ops that are left out,
# and what each of their warnings says: the op's own, and those of the ops that compute the same as well.
CHANGED = {
    "another norm": (
        qwen3.Qwen3RMSNorm, "forward", lambda _: own_norm, ("rms_norm", "qk_norm_rope", "fused_add_rms_norm"),
        rf"Qwen3RMSNorm.forward .*transformers {sys.modules['transformers'].__version__}.*Install a transformers rel",
    ),
    "a wrapper": (qwen3.Qwen3MLP, "forward", timed, ("swiglu",), "something has been wrapped around it"),
    "other angles": (
        qwen3.Qwen3RotaryEmbedding, "forward", lambda _: angles_of_pairs, ("rope", "qk_norm_rope"),
        r"Qwen3RotaryEmbedding\.forward",
    ),
    **{
        name: (qwen3, name, None, ("rope", "qk_norm_rope"), name)
        for name in ("apply_rotary_pos_emb", "rotate_half", "Qwen3RotaryEmbedding", "Qwen3Attention")
    },
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "other", "ops", "said"), CHANGED.values(), ids=CHANGED)
def test_changed_or_missing_code_is_left_alone_with_one_warning_each(monkeypatch, owner, name, other, ops, said):
    model = make()
    if other is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, other(getattr(owner, name)))
    there = vars(owner).get(name)
    mine = without(*ops) if "qk_norm_rope" in ops else without(*ops, "rope")
    for way, expected in ((apply, without(*ops)), (lambda: tilekern.apply_to_model(model), mine)):
        tilekern.reset()
        patched, texts = warned(way)
        assert patched == expected
        assert len(texts) == len(ops)
        assert re.search(said, texts[0])
    assert vars(owner).get(name) is there


def test_what_was_put_over_a_patch_is_taken_away_with_a_warning():
    original = qwen3.Qwen3MLP.forward
    apply()
    qwen3.Qwen3MLP.forward = torch.nn.Identity.forward
    patched, said = warned(apply)
    assert patched == without("swiglu")
    assert "replaced by something else" in said[0]
    _, said = warned(tilekern.reset)
    assert qwen3.Qwen3MLP.forward is original
    assert len(said) == 1


def test_what_is_put_into_the_class_of_a_patched_model_is_named_after_a_step(monkeypatch):
    """As verl's fused losses and tiled MLPs."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    for between in (lambda: None, apply, lambda: apply(swiglu=False)):
        tilekern.apply_to_model(model)
        between()
        assert warned(optimizer.step)[1] == []
    original = qwen3.Qwen3MLP.forward
    for other in (timed(original), torch.nn.Identity.forward):
        tilekern.apply_to_model(model)
        monkeypatch.setattr(qwen3.Qwen3MLP, "forward", other)
        (said,) = warned(optimizer.step)[1]
        assert re.search(r"put into a class .*Qwen3MLP\.forward \(now", said)
        assert warned(optimizer.step)[1] == []
        monkeypatch.undo()


def test_models_of_both_kinds_take_each_others_state():
    plain = make()
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    apply()
    patched = make()
    assert list(patched.state_dict()) == list(state)
    patched.load_state_dict(state, strict=True)
    tilekern.reset()
    plain.load_state_dict(patched.state_dict(), strict=True)
    tilekern.apply_to_model(plain)
    assert list(plain.state_dict()) == list(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_threads():
    before = attributes()

    def work():
        for _ in range(5):
            apply()
            tilekern.get_patched_ops()
            tilekern.reset()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tilekern.reset()
    assert identical(attributes(), before)


@pytest.mark.processes
def test_importing_the_room_does_not_import_transformers_nor_torch_s_compiler():
    code = (
        "import sys, tilekern, tilekern.patch, tilekern.patch.warmup; tilekern.reset()\n"
        "print([name for name in ('transformers', 'torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_constant_in_graphs_is_marked_as_torch_marks_it():
    def ours():
        pass

    def torchs():
        pass

    assert constant_in_graphs(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(torchs))


def test_classes_made_of_a_patched_one_follow_the_patch_and_its_undoing():
    """They hold its forward in transformers' wrapper for checkpoints."""

    class Layer(torch.nn.Module):
        gradient_checkpointing = False

        def forward(self):
            return "its own"

    def ours(self):
        return "ours"

    wrapped = type("Wrapped", (Layer,), {"forward": checkpointed(Layer.forward)})
    original, ledger = Layer.forward, Ledger()
    ledger.put("op", "layer.forward", Layer, "forward", ours)
    assert wraps_around(vars(wrapped)["forward"], ours)
    assert (Layer()(), wrapped()()) == ("ours", "ours")
    ledger.held(Layer, "forward").undo()
    assert wraps_around(vars(wrapped)["forward"], original)
    assert (Layer()(), wrapped()()) == ("its own", "its own")


@pytest.fixture
def aimv2_norm(monkeypatch):
    from transformers.models.aimv2 import modeling_aimv2

    monkeypatch.setattr(registry, "_registered", [])
    return Patch(
        op="rms_norm",
        model_type="aimv2",
        module=modeling_aimv2.__name__,
        attribute="Aimv2RMSNorm.forward",
        replacement=replacements.rms_norm,
        digests=(digest_of(modeling_aimv2.Aimv2RMSNorm.forward),),
    )


@pytest.mark.parametrize("registered", [True, False])
def test_a_registered_patch_is_applied_and_a_family_that_is_not_tested_where_one_asks_for_it(aimv2_norm, registered):
    from transformers.models.aimv2.modeling_aimv2 import Aimv2RMSNorm

    model, x = torch.nn.Sequential(Aimv2RMSNorm(48)), torch.randn(3, 48)
    if registered:
        tilekern.register_patch(aimv2_norm)
        tilekern.register_patch(aimv2_norm)
    else:
        with pytest.raises(InputError, match="no module of a supported family"):
            tilekern.apply_to_model(model)

    def way(model):
        if registered:
            return tilekern.apply(model_type="aimv2")
        return tilekern.apply_to_model(model, forms="any")

    held(model, way, lambda model: [model(x)], {"rms_norm_forward": 1}, 1e-6, exactly=True)


def test_a_registered_patch_whose_code_has_changed_says_what_to_do(aimv2_norm):
    tilekern.register_patch(replace(aimv2_norm, digests=("0" * 64,)))
    patched, said = warned(lambda: tilekern.apply(model_type="aimv2"))
    assert patched == []
    assert "register the patch with its new digest" in said[0]
    assert "Install a transformers release" not in said[0]


def test_a_module_that_is_gone_is_a_warning(aimv2_norm):
    tilekern.register_patch(replace(aimv2_norm, module="transformers.models.gone"))
    patched, said = warned(lambda: tilekern.apply(model_type="aimv2"))
    assert patched == []
    assert len(said) == 1
    assert "transformers.models.gone, for Aimv2RMSNorm.forward, cannot be imported" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "norm of mine"}, "must be a name"),
        ({"attribute": "Aimv2MLP.forward", "digests": ()}, "at least one digest"),
        ({"op": "other"}, "already has a patch"),
    ],
)
def test_a_patch_that_cannot_be_registered(aimv2_norm, changes, message):
    tilekern.register_patch(aimv2_norm)
    with pytest.raises(InputError, match=message):
        tilekern.register_patch(replace(aimv2_norm, **changes))


def test_a_function_without_named_callers_is_for_all_models_or_none(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    own = Patch("halves", "qwen3", qwen3.__name__, "rotate_half", lambda f: f, (digest_of(qwen3.rotate_half),))
    tilekern.register_patch(own)
    patched, said = warned(lambda: tilekern.apply_to_model(make()))
    assert patched == MINE
    assert "a plain function that all models share" in said[0]


def test_what_two_ops_want_goes_to_the_one_that_fuses_more():
    model = make()
    before = attributes(*model.modules())
    assert tilekern.apply_to_model(model, **SINGLE) == without(*SINGLE)
    assert tilekern.apply_to_model(model) == MINE
    ran = counted(lambda: step(model))[1]
    assert ran["qk_norm_rope_forward"] == 2
    assert "rope" not in ran.keys() | tilekern.get_patched_ops().keys()
    assert tilekern.reset("qk_norm_rope") == ["qk_norm_rope"]
    assert "rope" in tilekern.apply_to_model(model, qk_norm_rope=False)
    tilekern.reset()
    assert identical(attributes(*model.modules()), before)


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [Wrapper, lambda m: Wrapper(Wrapper(m)), torch.compile])
def test_wrappers_are_looked_through(wrap):
    held(make(), lambda model: tilekern.apply_to_model(wrap(model)), step, {"fused_add_rms_norm_forward": 2})


def test_a_part_of_a_model():
    assert tilekern.apply_to_model(make().model.layers[0].mlp) == ["swiglu"]


def test_a_model_of_no_supported_family():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = BertLMHeadModel(BertConfig(hidden_size=16, pad_token_id=0, is_decoder=True, **sizes))
    with pytest.raises(InputError, match=r'Bert.* \(model type bert\) .*supported family \(.*qwen3.*\); forms="any"'):
        tilekern.apply_to_model(model)
    with pytest.raises(InputError, match=r"Linear .*\)$"):
        tilekern.apply_to_model(torch.nn.Linear(2, 2), forms="any")


def test_patched_models_can_be_freed():
    model = make()
    tilekern.apply_to_model(model)
    step(model)
    gone = weakref.ref(model.model.layers[0].mlp)
    del model
    gc.collect()
    assert gone() is None
    assert tilekern.get_patched_ops() == {}
    assert tilekern.reset() == []


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


pickled = pytest.mark.skipif(
    not inspect.isfunction(qwen3.apply_rotary_pos_emb), reason="kernels makes models that do not pickle"
)
# How a model is copied that is patched, whether the copy is, and what is done to the copy before reset.
COPIES = {
    "copied": (copy.deepcopy, True, None),
    "copied and patched": (copy.deepcopy, True, tilekern.apply_to_model),
    "copied and patched in part": (copy.deepcopy, True, lambda model: tilekern.apply_to_model(model, **only("swiglu"))),
    **{
        name: pytest.param(way, False, None, marks=pickled, id=name)
        for name, way in {
            "saved": saved_and_loaded,
            "saved and copied": lambda model: copy.deepcopy(saved_and_loaded(model)),
            "saved again": lambda model: saved_and_loaded(saved_and_loaded(model)),
        }.items()
    },
}  # fmt: skip


@pytest.mark.share(3)
@pytest.mark.parametrize("ops", [{}, SINGLE], ids=["", "single"])
@pytest.mark.parametrize(("how", "is_patched", "then"), COPIES.values(), ids=COPIES)
def test_a_copy_is_patched_until_reset_and_a_saved_model_is_not_but_can_be(how, is_patched, then, ops):
    model = make()
    reference, before = step(model), attributes(*model.modules())
    tilekern.apply_to_model(model, **ops)
    copied, norm = how(model), copy.deepcopy(model.model.norm)
    assert bool(counted(lambda: step(copied))[1]) == is_patched
    if is_patched:
        assert tilekern.get_patched_ops()["rms_norm"] == [f"{MODULE}.Qwen3RMSNorm.forward of 19 modules"]
    if then:
        patched, said = warned(lambda: then(copied))
        assert patched in (MINE, ["swiglu"])
        assert not said
        assert tilekern.get_patched_ops()["swiglu"] == [f"{MODULE}.Qwen3MLP.forward of 4 modules"]
    is_put_back(lambda: step(copied), reference)
    assert identical(attributes(*model.modules()), before)
    if is_patched:
        assert not any("forward" in vars(module) for module in (norm, *copied.modules()))
        return
    ran = [held(copied, way, step) for way in (lambda _: apply(), tilekern.apply_to_model)]
    assert ran[0] == ran[1]
    assert not any("forward" in vars(module) for module in copied.modules())


@pickled
def test_a_stand_in_is_like_a_bound_method():
    """Trainer reads the signature, accelerate the function; a traceback points into transformers."""
    model = make()
    attention = model.model.layers[0].self_attn
    original, names = type(attention).forward, list(inspect.signature(model.forward).parameters)
    tilekern.apply_to_model(model)
    assert model.forward.__self__ is model
    assert model.forward.__name__ == "forward"
    assert inspect.isfunction(model.forward.__func__)
    assert list(inspect.signature(saved_and_loaded(model).forward).parameters) == names
    tilekern.apply_to_model(model, **SINGLE)
    code = attention.forward.__func__.__code__
    assert (code.co_filename, code.co_firstlineno) == (original.__code__.co_filename, original.__code__.co_firstlineno)
    assert attention.forward.__func__.__globals__ is original.__globals__


def test_a_module_with_a_hooks_forward_is_left_alone():
    model = make()
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    hooked = mlp.forward = lambda x: type(mlp).forward(mlp, x)
    norm.forward = types.MethodType(type(norm).forward, norm)
    patched, said = warned(lambda: tilekern.apply_to_model(model, **SINGLE))
    assert patched == without(*SINGLE)
    assert len(said) == 1
    assert "1 modules have another forward than" in said[0]
    assert mlp.forward is hooked
    ran = counted(lambda: step(model))[1]
    assert (ran["swiglu_forward"], ran["rms_norm_forward"]) == (1, 9)
    tilekern.reset()
    assert mlp.forward is hooked
    assert norm.forward == types.MethodType(type(norm).forward, norm)


def by_instances(model):
    """Another library's patch of single modules, as Liger makes it of a model that exists."""

    def forward(self, hidden_states):
        return self.weight * torch.nn.functional.rms_norm(hidden_states, self.weight.shape, eps=self.variance_epsilon)

    norms = [module for module in model.modules() if isinstance(module, qwen3.Qwen3RMSNorm)]
    for norm in norms:
        norm.forward = types.MethodType(forward, norm)
    return norms, forward


@pytest.mark.parametrize("first", [True, False], ids=["below", "on top"])
def test_another_library_s_patch_of_modules_runs_and_is_not_called_ours(first):
    model, switches = make(), SINGLE | {"swiglu": False, "rope": False}
    reference = step(model)
    if first:
        norms, theirs = by_instances(model)
        patched, said = warned(lambda: tilekern.apply_to_model(model, **switches))
        assert patched == []
        assert f"{len(norms)} modules have another forward" in said[0]
    else:
        assert tilekern.apply_to_model(model, **switches) == ["rms_norm"]
        norms, theirs = by_instances(model)
    assert tilekern.get_patched_ops() == {}
    assert set(reasons(model, "rms_norm").values()) == {"its forward is its own, a hook's or another patch's"}
    found, ran = counted(lambda: step(model))
    assert worst(found, reference) < 1e-5
    assert not ran
    _, said = warned(tilekern.reset)
    assert bool(said) != first
    assert all((norm.__dict__.get("forward") is not None) == first for norm in norms)
    assert not first or all(norm.forward.__func__ is theirs for norm in norms)


def test_a_class_that_another_library_s_has_replaced_is_said_to_be_that_of_older_models(monkeypatch):
    """Liger replaces classes like this, for models that are made afterwards."""
    kind = qwen3.Qwen3MLP
    older, whole = make(), make()
    reference = step(older)
    apply()
    tilekern.apply_to_model(whole)
    monkeypatch.setattr(qwen3, "Qwen3MLP", type("Theirs", (torch.nn.Module,), {"forward": lambda _, x: x}))
    assert tilekern.get_patched_ops()["swiglu"] == [
        f"{MODULE}.Qwen3MLP.forward of models made before it was replaced",
        f"{MODULE}.Qwen3MLP.forward of 2 modules",
    ]
    assert {reason for model in (older, whole) for reason in reasons(model, "swiglu").values()} == {""}
    found, ran = counted(lambda: step(older))
    assert worst(found, reference) < 1e-5
    assert ran["swiglu_forward"] == 2
    tilekern.reset()
    said = set(reasons(older, "swiglu").values())
    assert said == {"its module has another Qwen3MLP by now, another library's"}
    assert kind.forward(older.model.layers[0].mlp, torch.zeros(1, 80)).shape == (1, 80)
    assert same(step(older), reference)


def optimized(model):
    """What a training step with an optimizer warns of."""
    step(model)
    return [text for text in warned(torch.optim.SGD(model.parameters(), lr=0.0).step)[1] if "other kernels" in text]


@both_ways
def test_the_first_step_names_patches_that_a_trainer_s_option_has_replaced(way, monkeypatch):
    model = make()
    way(model)
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    # As accelerate's, which still calls it.
    norm.forward = functools.wraps(norm.forward)(functools.partial(lambda called, x: called(x), norm.forward))
    assert optimized(model) == []
    way(model)
    if way is tilekern.apply_to_model:  # as Liger does to a model that is there
        theirs = types.MethodType(lambda self, x: self.down_proj(x @ self.up_proj.weight.T), mlp)
        monkeypatch.setattr(mlp, "forward", theirs)
    else:  # as Liger and axolotl do to code
        theirs = type("Theirs", (torch.nn.Module,), {"forward": lambda _, x: x})
        monkeypatch.setattr(qwen3, "Qwen3MLP", theirs)
        monkeypatch.setattr(qwen3.Qwen3DecoderLayer, "forward", lambda _, x, **__: x)
    (text,) = optimized(model)
    assert f"Qwen3MLP.forward (now {theirs.__module__}.{theirs.__qualname__})" in text
    assert text.count("(now ") == (1 if way is tilekern.apply_to_model else 2)
    assert optimized(model) == [], "it is said once"


def test_a_hook_behind_tilekern_s_at_the_end_of_a_step_runs_too():
    model, ran = make(), []
    apply()
    other = register_optimizer_step_post_hook(lambda *_: ran.append(True))
    try:
        assert optimized(model) == []
    finally:
        other.remove()
    assert ran == [True]


def test_users_hooks_run_before_and_after_in_patched_modules():
    model, seen = make(), []
    early = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append("early"))
    reference = step(model)
    tilekern.apply_to_model(model)
    late = model.model.norm.register_forward_pre_hook(lambda *_: seen.append("late"))
    assert worst(step(model), reference) < 1e-5
    assert seen == ["early", "early", "late"]
    tilekern.reset()
    assert same(step(model), reference)
    assert seen[3:] == ["early", "late"]
    early.remove()
    late.remove()
    step(model)
    assert len(seen) == 5


def test_a_subclass_with_its_own_forward_is_left_alone():
    class Twice(qwen3.Qwen3MLP):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make()
    model.model.layers[1].mlp.__class__ = Twice
    held(model, tilekern.apply_to_model, step, {"swiglu_forward": 1}, rms_norm=False, rope=False)
