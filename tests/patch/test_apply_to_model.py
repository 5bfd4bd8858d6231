"""Patching one model that exists."""

import copy
import gc
import inspect
import io
import types
import weakref

import pytest
import torch
from test_apply_and_reset import MODULE, everything, identical, warned, without
from tiny_qwen3 import SINGLE, apply, launched, launches, make, same, step, worst
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import tilekern
from tilekern.errors import InputError
from tilekern.patch.registry import known_ops

# One method of a model serves one op: what qk_norm_rope stands in for needs no rope.
OPS = without("rope")
pytestmark = pytest.mark.usefixtures("interpreted")


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


pickled = pytest.mark.skipif(
    not inspect.isfunction(qwen3.apply_rotary_pos_emb), reason="kernels makes models that do not pickle"
)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def own_attributes(model):
    return [dict(vars(module)) for module in model.modules()]


def test_other_models_and_the_classes_stay_as_they_are():
    model, other = make(), make()
    classes, reference = everything(), step(other)
    assert tilekern.apply_to_model(model) == OPS
    assert identical(everything(), classes)
    before = launches()
    assert same(step(other), reference)
    assert not launched(before)
    step(model)
    assert launched(before)["qk_norm_rope_backward"] == 2


def test_reset_leaves_no_trace():
    model = make()
    before = own_attributes(model)
    tilekern.apply_to_model(model)
    assert not identical(own_attributes(model), before)
    assert tilekern.reset() == OPS
    assert identical(own_attributes(model), before)


def test_twice_and_together_with_apply():
    model = make()
    reference, before, classes = step(model), own_attributes(model), everything()
    assert tilekern.apply_to_model(model) == OPS
    assert set(apply()) == {*OPS, "rope"}
    assert tilekern.apply_to_model(model) == OPS
    counted = launches()
    assert worst(step(model), reference) < 1e-5
    assert launched(counted)["swiglu_forward"] == 2
    assert set(tilekern.reset()) == {*OPS, "rope"}
    assert identical(own_attributes(model), before)
    assert identical(everything(), classes)
    assert same(step(model), reference)


def test_places_are_counted():
    tilekern.apply_to_model(make(), rms_norm=False)
    gc.collect()
    model = make()
    tilekern.apply_to_model(model)
    found = tilekern.get_patched_ops()
    assert list(found) == OPS
    assert found["rms_norm"] == [f"{MODULE}.Qwen3RMSNorm.forward of 9 modules"]
    assert found["swiglu"] == [f"{MODULE}.Qwen3MLP.forward of 2 modules"]
    assert found["qk_norm_rope"] == [f"{MODULE}.Qwen3Attention.forward of 2 modules"]
    assert found["fused_add_rms_norm"] == [f"{MODULE}.Qwen3DecoderLayer.forward of 2 modules"]


def test_what_two_ops_want_goes_to_the_one_that_fuses_more():
    model = make()
    reference, before = step(model), own_attributes(model)
    assert tilekern.apply_to_model(model, **SINGLE) == without(*SINGLE)
    assert tilekern.apply_to_model(model) == OPS
    assert "rope" not in tilekern.get_patched_ops()
    counted = launches()
    assert worst(step(model), reference) < 1e-5
    assert launched(counted)["qk_norm_rope_forward"] == 2
    assert "rope" not in launched(counted)
    assert tilekern.reset("qk_norm_rope") == ["qk_norm_rope"]
    assert "rope" in tilekern.apply_to_model(model, qk_norm_rope=False)
    tilekern.reset()
    assert identical(own_attributes(model), before)


@pytest.mark.parametrize("wrap", [Wrapper, lambda m: Wrapper(Wrapper(m)), torch.compile])
def test_wrappers_are_looked_through(wrap):
    model = make()
    assert tilekern.apply_to_model(wrap(model)) == OPS
    before = launches()
    step(model)
    assert launched(before)["fused_add_rms_norm_forward"] == 2


def test_a_part_of_a_model():
    model = make()
    assert tilekern.apply_to_model(model.model.layers[0].mlp) == ["swiglu"]


def test_a_model_of_no_supported_family():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = BertLMHeadModel(BertConfig(hidden_size=16, pad_token_id=0, is_decoder=True, **sizes))
    with pytest.raises(InputError, match=r'Bert.* \(model type bert\) .*supported family \(.*qwen3.*\); forms="any"'):
        tilekern.apply_to_model(model)
    with pytest.raises(InputError, match=r"Linear .*\)$"):
        tilekern.apply_to_model(torch.nn.Linear(2, 2), forms="any")


def test_a_family_that_is_not_tested_is_patched_where_one_asks_for_it():
    from transformers.models.aimv2.modeling_aimv2 import Aimv2RMSNorm

    norm, x = torch.nn.Sequential(Aimv2RMSNorm(24)), torch.randn(3, 24)
    wanted, before = norm(x), launches()
    with pytest.raises(InputError, match="no module of a supported family"):
        tilekern.apply_to_model(norm)
    assert tilekern.apply_to_model(norm, forms="any") == ["rms_norm"]
    assert worst([norm(x)], [wanted]) < 1e-6
    assert launched(before) == {"rms_norm_forward": 1}


def test_fewer_ops_take_the_others_back():
    model = make()
    tilekern.apply_to_model(model)
    assert tilekern.apply_to_model(model, swiglu=False) == without("rope", "swiglu")
    assert "swiglu" not in tilekern.get_patched_ops()
    assert not any("forward" in vars(layer.mlp) for layer in model.model.layers)


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


def test_a_deep_copy_is_patched_until_reset():
    model = make()
    reference = step(model)
    tilekern.apply_to_model(model)
    copied, norm = copy.deepcopy(model), copy.deepcopy(model.model.norm)
    before = launches()
    step(copied)
    assert launched(before)["qk_norm_rope_forward"] == 2
    assert tilekern.get_patched_ops()["rms_norm"] == [f"{MODULE}.Qwen3RMSNorm.forward of 19 modules"]
    tilekern.reset()
    before = launches()
    assert same(step(copied), reference)
    assert not launched(before)
    assert not any("forward" in vars(module) for module in (norm, *copied.modules()))


@pytest.mark.parametrize("first", [{}, SINGLE])
def test_a_deep_copy_that_is_patched_is_one_of_tilekern_s(first):
    model = make()
    reference, before = step(model), own_attributes(model)
    tilekern.apply_to_model(model, **first)
    copied = copy.deepcopy(model)
    patched, said = warned(lambda: tilekern.apply_to_model(copied))
    assert patched == OPS
    assert not said
    assert tilekern.get_patched_ops()["swiglu"] == [f"{MODULE}.Qwen3MLP.forward of 4 modules"]
    tilekern.reset()
    assert same(step(copied), reference)
    assert identical(own_attributes(model), before)
    assert not any("forward" in vars(module) for module in copied.modules())


def test_one_op_of_a_deep_copy_leaves_reset_the_others():
    model = make()
    tilekern.apply_to_model(model)
    copied = copy.deepcopy(model)
    assert tilekern.apply_to_model(copied, **{op: op == "swiglu" for op in known_ops()}) == ["swiglu"]
    tilekern.reset()
    before = launches()
    step(copied)
    assert not launched(before)


@pickled
def test_a_saved_model_is_not_patched():
    model = make()
    reference = step(model)
    tilekern.apply_to_model(model)
    loaded, before = saved_and_loaded(model), launches()
    assert same(step(loaded), reference)
    assert not launched(before)


@pickled
@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, saved_and_loaded], ids=["", "copied", "again"])
def test_a_saved_model_can_be_patched_in_both_ways(copied):
    model = make()
    reference = step(model)
    tilekern.apply_to_model(model)
    loaded = copied(saved_and_loaded(model))
    tilekern.reset()
    assert set(apply()) == {*OPS, "rope"}
    before = launches()
    assert worst(step(loaded), reference) < 1e-5
    wanted = launched(before)
    tilekern.reset()
    assert tilekern.apply_to_model(loaded) == OPS
    before = launches()
    assert worst(step(loaded), reference) < 1e-5
    assert launched(before) == wanted
    tilekern.reset()
    assert same(step(loaded), reference)
    assert not any("forward" in vars(module) for module in loaded.modules())


@pickled
def test_a_stand_in_is_like_a_bound_method():
    """Trainer reads the signature, accelerate the function."""
    model = make()
    names = list(inspect.signature(model.forward).parameters)
    tilekern.apply_to_model(model)
    assert model.forward.__self__ is model
    assert model.forward.__name__ == "forward"
    assert inspect.isfunction(model.forward.__func__)
    assert list(inspect.signature(saved_and_loaded(model).forward).parameters) == names
    # The one that says whether there are logits is new.
    names.insert(names.index("kwargs"), "skip_logits")
    assert list(inspect.signature(model.forward).parameters) == names


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
    before = launches()
    step(model)
    assert launched(before)["swiglu_forward"] == 1
    assert launched(before)["rms_norm_forward"] == 9
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
    told = [row for row in tilekern.report(model).rows if row.kind == "Qwen3RMSNorm"]
    assert {row.reason for row in told} == {"its forward is its own, a hook's or another patch's"}
    before = launches()
    assert worst(step(model), reference) < 1e-5
    assert not launched(before)
    _, said = warned(tilekern.reset)
    assert bool(said) != first
    assert all((norm.__dict__.get("forward") is not None) == first for norm in norms)
    assert not first or all(norm.forward.__func__ is theirs for norm in norms)


def test_a_class_that_another_library_s_has_replaced_is_said_to_be_that_of_older_models(monkeypatch):
    """As Liger replaces classes, in models that are made afterwards."""
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
    told = [{row.reason for row in tilekern.report(x).rows if row.op == "swiglu"} for x in (older, whole)]
    assert told == [{""}, {""}]
    before = launches()
    assert worst(step(older), reference) < 1e-5
    assert launched(before)["swiglu_forward"] == 2
    tilekern.reset()
    said = {row.reason for row in tilekern.report(older).rows if row.op == "swiglu"}
    assert said == {"its module has another Qwen3MLP by now, another library's"}
    assert kind.forward(older.model.layers[0].mlp, torch.zeros(1, 80)).shape == (1, 80)
    assert same(step(older), reference)


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
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    class Twice(Qwen3MLP):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make()
    model.model.layers[1].mlp.__class__ = Twice
    tilekern.apply_to_model(model, rms_norm=False, rope=False)
    before = launches()
    step(model)
    assert launched(before)["swiglu_forward"] == 1


def test_tracebacks_of_the_patched_attention_point_into_transformers():
    model = make()
    attention = model.model.layers[0].self_attn
    original = type(attention).forward
    tilekern.apply_to_model(model, **SINGLE)
    code = attention.forward.__func__.__code__
    assert (code.co_filename, code.co_firstlineno) == (original.__code__.co_filename, original.__code__.co_firstlineno)
    assert attention.forward.__func__.__globals__ is original.__globals__
