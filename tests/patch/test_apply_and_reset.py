"""What apply touches, what reset puts back, and what is refused."""

import functools
import importlib
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_qwen3 import OPS, apply, launched, launches, make, step
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import tilekern
from tilekern.errors import InputError
from tilekern.patch import Patch, digest_of, registry, replacements
from tilekern.patch.constant import constant_in_graphs
from tilekern.runtime import dispatch

MODULE = qwen3.__name__
HOLDERS = (qwen3, *(v for v in vars(qwen3).values() if isinstance(v, type)))


def everything():
    """Every attribute of the modelling file and of its classes, as it is now."""
    return [dict(vars(holder)) for holder in HOLDERS]


def identical(one, other):
    return all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(one, other, strict=True))


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught]


def without(*names):
    return [op for op in OPS if op not in names]


def test_reset_restores_the_very_objects():
    before = everything()
    assert apply() == OPS
    assert qwen3.Qwen3RMSNorm.forward is not before[HOLDERS.index(qwen3.Qwen3RMSNorm)]["forward"]
    assert tilekern.reset() == OPS
    assert identical(everything(), before)
    assert tilekern.reset() == []


def test_applying_twice_is_harmless():
    before = everything()
    assert apply() == OPS
    once = everything()
    assert apply() == OPS
    assert identical(everything(), once)
    tilekern.reset()
    assert identical(everything(), before)


@pytest.mark.parametrize("names", ["swiglu", ["swiglu"], ("rope", "swiglu")])
def test_reset_of_some(names):
    apply()
    gone = [names] if isinstance(names, str) else names
    assert set(tilekern.reset(names)) == set(gone)
    assert list(tilekern.get_patched_ops()) == [op for op in OPS if op not in gone]


def test_an_op_that_is_switched_off_is_not_patched_and_a_second_call_takes_it_back():
    before = everything()
    assert apply(rope=False, fused_add_rms_norm=False) == without("rope", "fused_add_rms_norm")
    assert list(tilekern.get_patched_ops()) == without("rope", "fused_add_rms_norm")
    assert apply(rms_norm=False, swiglu=False, qk_norm_rope=False) == without("rms_norm", "swiglu", "qk_norm_rope")
    assert list(tilekern.get_patched_ops()) == without("rms_norm", "swiglu", "qk_norm_rope")
    assert apply(**dict.fromkeys(OPS, False)) == []
    assert identical(everything(), before)


def test_a_family_s_own_ops_are_taken_back_alone():
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    tilekern.apply()
    assert tilekern.apply(model_type="llama", swiglu=False) == [
        op for op in OPS if op not in ("swiglu", "qk_norm_rope")
    ]
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
    assert tilekern.get_patched_ops()["fused_add_rms_norm"] == [f"{MODULE}.Qwen3DecoderLayer.forward"]


def statuses():
    found = {x.patch.op: x.status for x in tilekern.list_patches() if x.patch.model_type == "qwen3"}
    assert list(found) == OPS
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_the_table_has_a_status():
    assert set(statuses().values()) == {"available"}
    tilekern.apply(rope=False)
    assert statuses() == {op: "available" if op == "rope" else "applied" for op in OPS}


@pytest.mark.parametrize("call", [tilekern.apply, lambda **more: tilekern.apply_to_model(make(), **more)])
@pytest.mark.parametrize("given", [True, False])
def test_unknown_ops_are_named(call, given):
    with pytest.raises(InputError, match="unknown op 'group_norm'; known: rms_norm, layer_norm, swiglu, mlp, qk_norm"):
        call(group_norm=given)
    assert not tilekern.get_patched_ops()


@pytest.mark.parametrize("call", [tilekern.apply, lambda **more: tilekern.apply_to_model(make(), **more)])
def test_unknown_families_and_policies_are_named(call):
    with pytest.raises(InputError, match=r"unknown model type 'qwen9'; did you mean qwen3.*; known: .*qwen3"):
        call(model_type="qwen9")
    with pytest.raises(InputError, match="compile, fallback, error"):
        call(on_miss="explode")
    with pytest.raises(InputError, match="forms must be one of tested, any, got 'all'"):
        call(forms="all")
    assert not tilekern.get_patched_ops()


def test_reset_of_an_unknown_op():
    with pytest.raises(InputError, match="unknown op 'norm'"):
        tilekern.reset("norm")


def test_a_family_can_be_chosen_and_a_policy_set():
    assert tilekern.apply(model_type="qwen3", on_miss="error") == OPS
    assert dispatch.miss_policy() == "error"
    tilekern.apply()
    assert dispatch.miss_policy() == "error"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_changed_target_is_left_alone_with_one_warning(monkeypatch):
    def forward(self, hidden_states):
        return hidden_states * self.weight

    monkeypatch.setattr(qwen3.Qwen3RMSNorm, "forward", forward)
    patched, said = warned(apply)
    assert patched == without("rms_norm", "qk_norm_rope", "fused_add_rms_norm")
    assert qwen3.Qwen3RMSNorm.forward is forward
    assert len(said) == 3, "the op's own, and those of the two that compute the norm as well"
    assert "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward" in said[0]
    assert f"transformers {sys.modules['transformers'].__version__}" in said[0]
    assert "Install a transformers release" in said[0]
    assert statuses()["rms_norm"] == "changed"
    patched, said = warned(lambda: tilekern.apply_to_model(make()))
    assert patched == without("rms_norm", "qk_norm_rope", "fused_add_rms_norm")
    assert len(said) == 3


def test_a_wrapped_target_is_left_alone(monkeypatch):
    original = qwen3.Qwen3MLP.forward

    @functools.wraps(original)
    def timed(self, x):
        return original(self, x)

    monkeypatch.setattr(qwen3.Qwen3MLP, "forward", timed)
    patched, said = warned(apply)
    assert patched == without("swiglu")
    assert "something has been wrapped around it" in said[0]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "Qwen3RotaryEmbedding", "Qwen3Attention"])
def test_a_missing_target_or_support_is_left_alone(monkeypatch, name):
    monkeypatch.delattr(qwen3, name)
    patched, said = warned(apply)
    assert patched == without("rope", "qk_norm_rope")
    assert len(said) == 2
    assert all(name in text for text in said)


def test_rope_needs_the_angles_to_be_stored_twice(monkeypatch):
    def forward(self, x, position_ids):
        angles = position_ids[..., None] * self.inv_freq.repeat_interleave(2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(qwen3.Qwen3RotaryEmbedding, "forward", forward)
    patched, said = warned(apply)
    assert patched == without("rope", "qk_norm_rope")
    assert all("Qwen3RotaryEmbedding.forward" in text for text in said)


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
    before = everything()

    def work():
        for _ in range(20):
            apply()
            tilekern.get_patched_ops()
            tilekern.reset()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tilekern.reset()
    assert identical(everything(), before)


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


@pytest.mark.usefixtures("interpreted")
def test_a_registered_patch_is_applied(aimv2_norm):
    from transformers.models.aimv2.modeling_aimv2 import Aimv2RMSNorm

    original, norm, x = Aimv2RMSNorm.forward, Aimv2RMSNorm(48), torch.randn(3, 48)
    wanted = norm(x)
    tilekern.register_patch(aimv2_norm)
    tilekern.register_patch(aimv2_norm)
    assert tilekern.apply(model_type="aimv2") == ["rms_norm"]
    before = launches()
    assert torch.allclose(norm(x), wanted, rtol=1e-6)
    assert launched(before) == {"rms_norm_forward": 1}
    tilekern.reset()
    assert Aimv2RMSNorm.forward is original


def test_a_module_that_is_gone_is_a_warning(aimv2_norm):
    tilekern.register_patch(replace(aimv2_norm, module="transformers.models.gone"))
    patched, said = warned(lambda: tilekern.apply(model_type="aimv2"))
    assert patched == []
    assert len(said) == 1
    assert "transformers.models.gone, for Aimv2RMSNorm.forward, cannot be imported" in said[0]


def test_a_patch_that_cannot_be_registered(aimv2_norm):
    tilekern.register_patch(aimv2_norm)
    for bad, message in [
        (replace(aimv2_norm, op="norm of mine"), "must be a name"),
        (replace(aimv2_norm, attribute="Aimv2MLP.forward", digests=()), "at least one digest"),
        (replace(aimv2_norm, op="other"), "already has a patch"),
    ]:
        with pytest.raises(InputError, match=message):
            tilekern.register_patch(bad)


def test_a_function_without_named_callers_is_for_all_models_or_none(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    own = Patch("halves", "qwen3", qwen3.__name__, "rotate_half", lambda f: f, (digest_of(qwen3.rotate_half),))
    tilekern.register_patch(own)
    patched, said = warned(lambda: tilekern.apply_to_model(make()))
    assert patched == without("rope")
    assert "a plain function that all models share" in said[0]


@pytest.mark.usefixtures("interpreted")
def test_a_model_that_is_older_than_the_patch_is_patched():
    model = make()
    before = launches()
    apply()
    step(model)
    assert launched(before)
