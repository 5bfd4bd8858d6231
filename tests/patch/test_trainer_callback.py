"""``tilekern.TrainerCallback``: what it patches, what it says, and what it leaves behind."""

from types import SimpleNamespace

import pytest
import torch
from tiny_qwen3 import IDS, OPS, launched, launches, make
from transformers import Trainer, TrainingArguments

import tilekern
from tilekern.errors import InputError

ROWS = [{"input_ids": row, "labels": row} for row in IDS]
ALONE = SimpleNamespace(n_gpu=0)
FIRST = SimpleNamespace(is_local_process_zero=True)
# One method of a model serves one op: what qk_norm_rope stands in for needs no rope.
SERVED = [op for op in OPS if op != "rope"]


def trainer(folder, *callbacks, **options):
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(make(), arguments, train_dataset=ROWS, callbacks=list(callbacks))


# The fixture takes back what accelerate has wrapped for mixed precision.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["float32", "mixed"])
def test_a_step_of_a_trainer_is_patched_and_told(tmp_path, capsys, bf16):
    expected = trainer(tmp_path, bf16=bf16).train().training_loss
    callback = tilekern.TrainerCallback(reset=not bf16)
    ours = trainer(tmp_path, callback, bf16=bf16)
    assert list(tilekern.get_patched_ops()) == SERVED
    before = launches()
    assert ours.train().training_loss == pytest.approx(expected, rel=2e-2 if bf16 else 1e-5)
    assert launched(before)["swiglu_forward"] == 2
    assert launched(before)["qk_norm_rope_backward"] == 2
    said = capsys.readouterr().err.splitlines()
    told = [line.split()[1].rstrip(":") for line in said if line.startswith("tilekern: ") and ": patched; " in line]
    assert sorted(told) == sorted(SERVED)
    assert len([line for line in said if "Qwen3MLP" in line]) == 1
    assert said[-1] == "tilekern: no kernel fell back to torch"
    assert list(tilekern.get_patched_ops()) == (SERVED if bf16 else [])


def test_fallbacks_meanwhile_are_reported(capsys, monkeypatch):
    from tilekern.runtime import dispatch

    monkeypatch.setattr(dispatch._state, "counters", {})
    dispatch.counters("rope").fallbacks = 3
    callback, model = tilekern.TrainerCallback(), make()
    callback.on_train_begin(ALONE, FIRST, None, model=model)
    dispatch.counters("rope").fallbacks += 2
    capsys.readouterr()
    callback.on_train_end(ALONE, FIRST, None, model=model)
    assert capsys.readouterr().err == "tilekern: rope fell back to torch 2 times\n"
    dispatch.count_fallback("rope", "dropout")
    callback.on_train_end(ALONE, FIRST, None, model=model)
    assert capsys.readouterr().err == "tilekern: rope fell back to torch 3 times (dropout)\n"
    callback.on_train_end(ALONE, SimpleNamespace(is_local_process_zero=False), None, model=model)
    assert capsys.readouterr().err == ""


def test_what_is_patched_already_stays(capsys):
    tilekern.apply(swiglu=False)
    places, model = tilekern.get_patched_ops(), make()
    callback = tilekern.TrainerCallback(reset=True)
    callback.on_init_end(ALONE, FIRST, None, model=model)
    callback.on_train_begin(ALONE, FIRST, None, model=model)
    assert tilekern.get_patched_ops() == places
    assert capsys.readouterr().err.count("tilekern.apply(swiglu=True) does so") == 1
    callback.on_train_end(ALONE, FIRST, None, model=model)
    assert tilekern.get_patched_ops() == places


def test_options_are_those_of_apply_to_model_and_a_new_model_is_patched_too():
    callback, first, second = tilekern.TrainerCallback(swiglu=False), make(), make()
    callback.on_init_end(ALONE, FIRST, None)
    callback.on_init_end(ALONE, FIRST, None, model=first)
    callback.on_train_begin(ALONE, FIRST, None, model=second)
    places = tilekern.get_patched_ops()
    assert "swiglu" not in places
    assert [place.partition(" of ")[2] for place in places["fused_add_rms_norm"]] == ["4 modules"]


def test_a_model_that_nothing_serves_is_refused():
    with pytest.raises(InputError, match=r"Linear .* has no module of a supported family"):
        tilekern.TrainerCallback().on_init_end(ALONE, FIRST, None, model=torch.nn.Linear(2, 2))


def test_data_parallel_is_refused_unless_classes_are_patched():
    several = SimpleNamespace(n_gpu=2)
    with pytest.raises(InputError, match=r"DataParallel on 2 GPUs.* call tilekern.apply\(\) before"):
        tilekern.TrainerCallback().on_init_end(several, FIRST, None, model=make())
    tilekern.apply()
    tilekern.TrainerCallback().on_init_end(several, FIRST, None, model=make())
