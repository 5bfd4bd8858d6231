"""tilekern in Liger-Kernel's registries and modules. It needs Liger and Triton, but no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Liger-Kernel needs Triton, which is not installed")
pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")

import liger_kernel.backends as dispatcher
import liger_kernel.functional
import liger_kernel.ops
import liger_kernel.transformers
import liger_kernel.transformers.functional
from liger_kernel.ops.backends.registry import IMPL_REGISTRY, select_impl

from tilekern.errors import InputError
from tilekern.integrations import liger
from tilekern.integrations.liger import binding
from tilekern.integrations.liger.__main__ import main
from tilekern.integrations.liger.table import TABLE

ROOT = Path(__file__).parents[2]
X, WEIGHT = torch.randn(3, 8), torch.randn(8)
NORMED = torch.nn.functional.rms_norm(X, (8,), WEIGHT, 1e-6)


@pytest.fixture(autouse=True)
def liger_as_it_was():
    yield
    liger.unregister()
    binding.calls.clear()
    for reasons in binding.kept.values():
        reasons.clear()


def held():
    """Return which function of Liger's each module holds."""
    return {
        (module.__name__, name): value
        for module in binding._holders()
        for name, value in vars(module).items()
        if name.endswith("Function")
    }


def test_register_and_unregister_change_what_they_say_and_nothing_else():
    before = held()
    assert liger.register() == sorted(TABLE)
    after = held()
    changed = {place for place in before if after[place] is not before[place]}
    assert {name for _, name in changed} == set(TABLE)
    assert ("liger_kernel.transformers.functional", "LigerRMSNormFunction") in changed
    # Of the same name, and another function.
    assert ("liger_kernel.chunked_loss.functional", "LigerFusedLinearJSDFunction") not in changed
    assert all(after[place].original is before[place] for place in changed)
    assert liger.register() == sorted(TABLE)
    assert held() == after
    assert liger.unregister() == sorted(TABLE)
    assert held() == before
    assert liger.unregister() == []
    assert "tilekern" not in IMPL_REGISTRY
    assert dispatcher.get_impl() is None
    assert "tilekern" not in dispatcher.all_impls("rms_norm")


def test_every_function_of_liger_is_served_or_left():
    assert set(liger.served()).isdisjoint(liger.left())
    assert sorted([*liger.served(), *liger.left()]) == binding.all_functions()
    assert "LigerFusedMoEFunction" in liger.left()


def test_the_command_prints_every_function_and_its_op(capsys):
    assert main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"liger-kernel {binding.version()}"
    printed = dict(line.split(maxsplit=1) for line in lines)
    assert printed == dict.fromkeys(liger.left(), "Liger's own") | liger.served()


def test_ligers_modules_and_functions_run_the_ops():
    norm = liger_kernel.transformers.LigerRMSNorm(8)
    norm.weight.data.copy_(WEIGHT)
    liger.register()
    for y in (
        norm(X),
        liger_kernel.transformers.functional.liger_rms_norm(X, WEIGHT, 1e-6),
        liger_kernel.functional.rms_norm(X, WEIGHT, 1e-6),
        liger_kernel.functional.rms_norm(X, WEIGHT, 1e-6, impl="tilekern", mode="default"),
    ):
        torch.testing.assert_close(y, NORMED)
    assert liger.calls() == {"LigerRMSNormFunction": {"served": 4, "left": {}}}
    with pytest.raises(ValueError, match="tilekern's rms_norm has the mode default alone, got 'static_persistent'"):
        liger_kernel.functional.rms_norm(X, WEIGHT, 1e-6, mode="static_persistent")


def test_an_implementation_that_was_pinned_is_pinned_again():
    dispatcher.set_impl("nvidia-triton")
    try:
        liger.register()
        assert dispatcher.get_impl() == "tilekern"
        liger.unregister()
        assert dispatcher.get_impl() == "nvidia-triton"
    finally:
        dispatcher.set_impl(None)


def test_offered_it_is_chosen_by_name_alone():
    assert liger.offer()
    assert dispatcher.available_impls("rms_norm")[-1] == "tilekern"
    assert select_impl("cuda") is None
    assert select_impl("cuda", "tilekern").module_path == "tilekern.integrations.liger.implementation"
    assert {op for op, impl in sys.modules["liger_kernel.backends.registry"]._REGISTRY if impl == "tilekern"} == set(
        binding._dispatched_ops()
    )


def test_ops_of_the_dispatcher_that_are_not_served_go_to_the_best_of_the_others(monkeypatch):
    ran = []
    other = dispatcher.register_impl("kl_loss_and_grad", impl_name="theirs", preference_rank=-1)
    other(lambda *given, **more: ran.append((given, more)))
    try:
        liger.register()
        dispatcher.dispatch("kl_loss_and_grad", X, mode=None)
    finally:
        del sys.modules["liger_kernel.backends.registry"]._REGISTRY["kl_loss_and_grad", "theirs"]
        dispatcher.clear_available_cache()
    assert ran == [((X,), {"mode": None})]


def _other(logits):
    """Takes what Liger's softmax does, by another name."""
    return logits.softmax(-1)


def test_functions_with_other_arguments_stay_ligers_and_the_warning_names_the_version(monkeypatch):
    row = TABLE["LigerSoftmaxFunction"]
    monkeypatch.setitem(TABLE, row.name, type(row)(row.name, row.op, _other, None))
    binding.replacements.cache_clear()
    try:
        with pytest.warns(UserWarning, match=rf"liger-kernel {binding.version()} does not fit: LigerSoftmaxFunction"):
            registered = liger.register()
        assert row.name not in registered
        assert row.name in liger.left()
    finally:
        liger.unregister()
        binding.replacements.cache_clear()


def test_a_liger_without_registries_is_left_alone_and_the_warning_names_the_version(monkeypatch):
    before = held()
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.backends.registry", None)
    with pytest.warns(UserWarning, match=f"liger-kernel {binding.version()} does not fit and runs its own kernels"):
        assert liger.register() == []
    assert held() == before


@pytest.mark.parametrize("before", [True, False], ids=["registered before", "registered after"])
def test_a_model_that_liger_patches_runs_the_ops(before):
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    kept = dict(vars(modeling_llama))
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(40, (2, 7))
    plain = modeling_llama.LlamaForCausalLM(config)
    expected = loss_and_gradients(plain, ids)
    forward = modeling_llama.LlamaForCausalLM.forward
    try:
        if before:
            liger.register()
        liger_kernel.transformers.apply_liger_kernel_to_llama()
        model = modeling_llama.LlamaForCausalLM(config)
        model.load_state_dict(plain.state_dict())
        liger.register()
        for got, wanted in zip(loss_and_gradients(model, ids), expected, strict=True):
            torch.testing.assert_close(got, wanted)
    finally:
        modeling_llama.LlamaForCausalLM.forward = forward
        for name, value in kept.items():
            setattr(modeling_llama, name, value)
    # Two layers with two norms and the last one; the rotation is dispatched by another way, to the same row.
    assert {name: found["served"] for name, found in liger.calls().items()} == {
        "LigerFusedLinearCrossEntropyFunction": 1, "LigerRMSNormFunction": 5, "LigerRopeFunction": 2,
        "LigerSiLUMulFunction": 2,
    }  # fmt: skip


def loss_and_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_it_is_not_taken_back_while_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "tilekern")
    liger.register()
    with pytest.raises(InputError, match="LIGER_KERNEL_IMPL asks for tilekern"):
        liger.unregister()
    torch.testing.assert_close(liger_kernel.functional.rms_norm(X, WEIGHT, 1e-6), NORMED)
    monkeypatch.delenv("LIGER_KERNEL_IMPL")
    assert liger.unregister() == sorted(TABLE)


@pytest.mark.processes
@pytest.mark.parametrize("variable", ["LIGER_KERNEL_IMPL", "LIGER_KERNEL_IMPL_RMS_NORM"])
def test_ligers_own_variable_is_enough(variable, tmp_path):
    """An installed tilekern is found by its entry point, here of a distribution that is made for it."""
    here = tmp_path / "tilekern_entry-0.dist-info"
    here.mkdir()
    (here / "METADATA").write_text("Metadata-Version: 2.1\nName: tilekern-entry\nVersion: 0\n")
    (here / "entry_points.txt").write_text("[torch.backends]\ntilekern = tilekern_startup:begin\n")
    code = (
        "import torch, sys; assert 'tilekern.integrations.liger' not in sys.modules\n"
        "from liger_kernel.functional import rms_norm\n"
        "import liger_kernel.transformers\n"
        "from tilekern.integrations import liger\n"
        "rms_norm(torch.ones(2, 8), torch.ones(8))\n"
        "print(liger.calls()['LigerRMSNormFunction']['served'])\n"
        "print('original' in vars(liger_kernel.ops.LigerSiLUMulFunction))\n"
    )
    environment = {**os.environ, variable: "tilekern", "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["1", str(variable == "LIGER_KERNEL_IMPL")]
