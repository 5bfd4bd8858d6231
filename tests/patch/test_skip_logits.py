"""``skip_logits`` of a patched forward, and what stands for logits that were not made."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tiny_qwen3 import IDS, make, same, worst
from torch.nn.parallel.scatter_gather import gather
from torch.utils._pytree import tree_map
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

import tilekern
from tilekern.errors import LogitsSkipped
from tilekern.patch import registry
from tilekern.patch.skipped_logits import SKIPPED
from tilekern.runtime.dispatch import counters

ALONE = {op: op == "fused_linear_cross_entropy" for op in registry.known_ops()}
ways = pytest.mark.parametrize(
    "way", [lambda _: tilekern.apply(**ALONE), lambda m: tilekern.apply_to_model(m, **ALONE)], ids=["class", "model"]
)
HOW = r"call the model with skip_logits=False"


def fused():
    return counters("fused_linear_cross_entropy").launches


@ways
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("training", [True, False])
def test_false_gives_logits_and_true_skips_them_in_training_and_evaluation(way, training):
    model = make(layers=1).train(training)
    wanted = model(input_ids=IDS, labels=IDS)
    way(model)
    before = fused()
    made = model(input_ids=IDS, labels=IDS, skip_logits=False)
    assert same([made.loss, made.logits], [wanted.loss, wanted.logits])
    assert fused() == before
    found = model(input_ids=IDS, labels=IDS, skip_logits=True)
    assert found.logits is SKIPPED
    assert worst([found.loss], [wanted.loss]) < 1e-6
    assert (model(input_ids=IDS, labels=IDS).logits is SKIPPED) == training
    assert fused() == before + 1 + training
    loss, logits = model(input_ids=IDS, labels=IDS, skip_logits=True, return_dict=False, use_cache=False)
    assert torch.equal(loss, found.loss)
    assert logits is SKIPPED


@pytest.mark.usefixtures("interpreted")
def test_without_labels_there_is_nothing_to_skip_logits_for():
    model = make(layers=1).train()
    wanted = model(input_ids=IDS).logits
    tilekern.apply(**ALONE)
    assert torch.equal(model(input_ids=IDS, skip_logits=False).logits, wanted)
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        model(input_ids=IDS, skip_logits=True)


@pytest.mark.usefixtures("interpreted")
def test_true_holds_for_the_kept_tokens_too():
    model = make(layers=1)
    wanted = model(input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3)
    tilekern.apply(**ALONE)
    found = model(input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3, skip_logits=True)
    assert found.logits is SKIPPED
    assert worst([found.loss], [wanted.loss]) < 1e-6


@pytest.mark.parametrize("place", ["hook", "adapter", "loss"])
def test_a_head_or_loss_that_does_more_makes_logits_and_it_is_said_once(place, monkeypatch):
    monkeypatch.setattr("tilekern.warning._said", set())
    model = make(layers=1).train()
    head = model.lm_head
    if place == "hook":
        head.register_forward_hook(lambda *given: 2 * given[-1])
    elif place == "adapter":
        model.lm_head = torch.nn.Sequential(head)
    else:
        model.loss_function = lambda logits, **_: (logits**2).mean()
    wanted = model(input_ids=IDS, labels=IDS)
    tilekern.apply(**ALONE)
    said = {"hook": "its head has hooks", "adapter": "its head is Sequential"}
    with pytest.warns(UserWarning, match=said.get(place, "its loss is not")) as warned:
        found = [model(input_ids=IDS, labels=IDS, skip_logits=True) for _ in range(2)]
    assert len(warned) == 1
    assert all(same([x.loss, x.logits], [wanted.loss, wanted.logits]) for x in found)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape, lambda x: x.argmax(-1), lambda x: x[:, -1], lambda x: x[..., :-1, :], list, len, bool, float,
        lambda x: x + 1, lambda x: 2 * x, lambda x: x / 2, lambda x: x == IDS, lambda x: x > 0, lambda x: -x,
        lambda x: torch.softmax(x, -1), np.asarray, lambda x: torch.nn.functional.cross_entropy(x, IDS),
        lambda x: torch.cat([x, x]), lambda x: torch.ones(2) + x, lambda x: x.detach().float().numpy(),
        lambda x: x.to("cpu").size(), lambda x: zip(x, IDS, strict=True),
    ],
)  # fmt: skip
def test_any_use_says_how_to_get_them(use):
    with pytest.raises(LogitsSkipped, match=HOW):
        use(SKIPPED)


@pytest.mark.parametrize(
    "pass_on",
    [
        copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu", torch.float32),
        lambda x: x.cpu().detach().float().clone(), lambda x: tree_map(lambda leaf: leaf, [x])[0],
        lambda x: gather([{"logits": x}] * 2, 0)["logits"], lambda x: gather([[x]] * 2, 0)[0],
    ],
)  # fmt: skip
def test_what_moves_outputs_passes_it_on(pass_on):
    assert pass_on(SKIPPED) is SKIPPED
    assert HOW in repr(SKIPPED)
    assert not hasattr(SKIPPED, "dtype")
    assert len({SKIPPED, SKIPPED}) == 1


def test_an_output_has_it_where_logits_are():
    output = CausalLMOutputWithPast(loss=torch.ones(()), logits=SKIPPED, hidden_states=(torch.ones(1),))
    again = tree_map(lambda leaf: leaf.to("cpu") if hasattr(leaf, "to") else leaf, output)
    assert type(again) is type(output)
    assert again[1:][0] is again["logits"] is again.logits is SKIPPED
    assert list(pickle.loads(pickle.dumps(output)).keys()) == ["loss", "logits", "hidden_states"]


def test_accelerate_s_conversions_pass_it_on_and_its_gathering_says_how_to_get_them():
    operations = pytest.importorskip("accelerate.utils.operations")
    output = CausalLMOutputWithPast(loss=torch.ones((), dtype=torch.bfloat16), logits=SKIPPED)
    assert operations.convert_to_fp32(output).logits is SKIPPED
    assert operations.convert_to_fp32(output).loss.dtype == torch.float32
    assert operations.send_to_device(output, "cpu").logits is SKIPPED
    with pytest.raises(TypeError, match=HOW):
        operations.pad_across_processes(SKIPPED)


class Skipping(Trainer):
    """Asks for no logits in evaluation."""

    def prediction_step(self, model, inputs, *given, **more):
        return super().prediction_step(model, inputs | {"skip_logits": True}, *given, **more)


def evaluate(folder, kind=Trainer, **more):
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    made = kind(make(layers=1), arguments, train_dataset=rows, eval_dataset=rows, **more)
    return made.train().training_loss, made.evaluate()


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.nightly
def test_a_trainer_evaluates_with_logits_and_without(tmp_path):
    seen = []

    def measured(predictions):
        seen.append(predictions.predictions)
        return {"right": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}

    wanted = evaluate(tmp_path, compute_metrics=measured)
    tilekern.apply(**ALONE)
    before = fused()
    found = evaluate(tmp_path, compute_metrics=measured)
    assert fused() == before + 1
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1]["eval_loss"] == pytest.approx(wanted[1]["eval_loss"], rel=1e-5)
    assert found[1]["eval_right"] == wanted[1]["eval_right"]
    assert np.allclose(seen[0], seen[1], atol=1e-4)
    alone = evaluate(tmp_path, Skipping)[1]
    assert alone["eval_loss"] == pytest.approx(wanted[1]["eval_loss"], rel=1e-5)
    assert fused() == before + 3
    for more in ({}, {"preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1)}):
        with pytest.raises((LogitsSkipped, TypeError), match=HOW):
            evaluate(tmp_path, Skipping, compute_metrics=measured, **more)
