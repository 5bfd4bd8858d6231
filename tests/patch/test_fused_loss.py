"""The fused loss in a patched Qwen3: what an unpatched one computes, with logits skipped or made as one asks."""

import copy
import dataclasses
import functools
import importlib
import pickle

import numpy as np
import pytest
import torch
from model_contract import as_exact, both_ways, counted, held, in_one_graph, only
from tiny_qwen3 import IDS, apply, same, step, worst
from tiny_qwen3 import make as make_tiny
from torch.nn.parallel.scatter_gather import gather
from torch.utils._pytree import tree_map
from transformers import DynamicCache, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import tilekern
from tilekern.errors import LogitsSkipped
from tilekern.patch import loss
from tilekern.patch.digests import Table
from tilekern.patch.skipped_logits import SKIPPED
from tilekern.runtime.dispatch import counters

NAME = "fused_linear_cross_entropy"
ALONE = only(NAME)
MASKED = IDS.masked_fill(torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0, 1]], dtype=torch.bool), -100)
SHIFTED = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:].roll(1, 0)
HOW = r"call the model with skip_logits=False"
pytestmark = pytest.mark.usefixtures("interpreted")


def make(**changes):
    return make_tiny(layers=1, **changes).train()


def fused():
    return counters(NAME).launches


@pytest.fixture(params=["cublas", "tuned"])
def products(request, monkeypatch):
    """Multiply in the fused loss with cuBLAS, or with the kernels."""
    module = importlib.import_module("tilekern.ops.fused_linear_cross_entropy")
    spec = module._SPEC

    def default(problem, target):
        return spec.default(problem, target).but(products=request.param)

    monkeypatch.setattr(module, "_SPEC", dataclasses.replace(spec, default=default))
    return request.param


def frozen(part):
    model = make()
    for parameter in (model.lm_head if part == "head" else model.model).parameters():
        parameter.requires_grad_(False)
    return model


def with_bias():
    model = make()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(331, generator=torch.Generator().manual_seed(1)))
    return model


def checkpointed(reentrant):
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def accumulated(model):
    """Gradients of two micro-batches."""
    model.zero_grad()
    for rows in (IDS[:1], IDS[1:]):
        model(input_ids=rows, labels=rows, num_items_in_batch=12).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


ARGUMENTS = [
    {},
    {"labels": MASKED},
    {"num_items_in_batch": 23},
    {"num_items_in_batch": torch.tensor(23)},
    {"labels": MASKED, "num_items_in_batch": torch.tensor(9.0), "factor": 3.0},
    {"shift_labels": SHIFTED},
    {"shift_labels": SHIFTED.flatten(), "num_items_in_batch": 5},
    {"ignore_index": int(IDS[0, 1])},
    {"factor": 0.37},
    {"use_cache": False, "output_hidden_states": True},
    {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)},
]
# The model and what is made of it.
CASES = {
    **{" ".join(more) or "plain": (make, functools.partial(step, **more)) for more in ARGUMENTS},
    "a bias": (with_bias, step),
    "checkpointing, reentrant": (functools.partial(checkpointed, True), step),
    "checkpointing": (functools.partial(checkpointed, False), step),
}
PRODUCTS = {
    "a frozen head": (functools.partial(frozen, "head"), step),
    "a frozen body": (functools.partial(frozen, "body"), step),
    "tied embeddings": (functools.partial(make, tie_word_embeddings=True), step),
    "accumulation": (make, accumulated),
}


@both_ways
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("model", "run"), CASES.values(), ids=CASES)
def test_loss_and_gradients_agree_and_reset_is_exact(way, model, run):
    held(model(), way, run, {NAME: 1}, **ALONE)


@both_ways
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("model", "run"), PRODUCTS.values(), ids=PRODUCTS)
def test_so_they_do_whoever_multiplies(way, model, run):
    held(model(), way, run, {NAME: 2 if run is accumulated else 1}, **ALONE)


def test_together_with_every_other_patch():
    held(make(attention="sdpa"), lambda _: apply(), step, {NAME: 1})


def test_more_tokens_than_a_chunk_and_float32_exactly(products, monkeypatch):
    monkeypatch.setattr(importlib.import_module("tilekern.kernels.composites.head"), "_MOST_CHUNK_BYTES", 128 * 331 * 4)
    ids = torch.randint(0, 331, (3, 100), generator=torch.Generator().manual_seed(2))
    run = functools.partial(step, ids=ids, num_items_in_batch=300)
    held(make(), lambda _: apply(**ALONE), run, {NAME: 1, "matmul": 3 * 3 if products == "tuned" else 0})


def test_a_bias_is_scaled_and_capped_with_the_logits():
    head, hidden, more = torch.nn.Linear(16, 31), torch.randn(2, 5, 16), {"labels": IDS[:, :5] % 31}
    logits = torch.tanh(head(hidden) * 0.6 / 2) * 2
    wanted = ForCausalLMLoss(logits, vocab_size=31, **more)
    found = loss._loss(head, hidden, factor=1.2, divisor=2.0, softcap=2.0, **more)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(x, list(head.parameters())) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_labels_of_another_number_are_refused_as_by_torch():
    model = make()
    for way in (dict, lambda: apply(**ALONE)):
        way()
        with pytest.raises(ValueError, match=r"batch_size \(10\)|each of 14 tokens, got 10"):
            step(model, labels=IDS[:, :5])


def test_labels_that_are_all_left_out():
    model = make()
    labels = torch.full_like(IDS, -100)
    apply(**ALONE)
    loss, *gradients = step(model, labels=labels)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in gradients)
    assert step(model, labels=labels, num_items_in_batch=4)[0] == 0


@both_ways
def test_what_training_returns(way):
    model = make()
    wanted = model(input_ids=IDS, labels=IDS, output_hidden_states=True, use_cache=True)
    way(model, **ALONE)
    found = model(input_ids=IDS, labels=IDS, output_hidden_states=True, use_cache=True)
    assert type(found) is type(wanted)
    assert found.logits is SKIPPED
    assert same(found.hidden_states, wanted.hidden_states)
    assert found.past_key_values.get_seq_length() == 7
    loss, logits = model(input_ids=IDS, labels=IDS, return_dict=False, use_cache=False)
    assert torch.equal(loss, found.loss)
    assert logits is SKIPPED


@both_ways
def test_evaluation_and_calls_without_labels_give_logits_as_before(way):
    model = make()
    calls = [
        functools.partial(model, input_ids=IDS),
        functools.partial(model, input_ids=IDS, skip_logits=False),
        functools.partial(model, input_ids=IDS, labels=IDS, skip_logits=False),
        functools.partial(model, input_ids=IDS, logits_to_keep=2),
        functools.partial(model, input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3),
        lambda: model.eval()(input_ids=IDS, labels=IDS),
        lambda: model.eval()(input_ids=IDS, labels=IDS, return_dict=False),
    ]
    wanted = [call() for call in calls]
    model.train()
    way(model, **ALONE)
    found, ran = counted(lambda: [call() for call in calls])
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        tensors = [[x for x in tuple(out.values() if isinstance(out, dict) else out) if torch.is_tensor(x)]
                   for out in (one, other)]  # fmt: skip
        assert same(*tensors)
        assert tensors[0]
    assert not ran
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        model(input_ids=IDS, skip_logits=True)


@both_ways
def test_a_cache_is_made_where_logits_are_or_it_is_asked_for(way):
    model = make()
    way(model)
    given = {"input_ids": IDS, "labels": IDS}
    assert model(**given).past_key_values is None
    for more in ({"use_cache": True}, {"skip_logits": False}):
        assert model(**given, **more).past_key_values.get_seq_length() == IDS.shape[1]
    assert model.eval()(**given).past_key_values is not None
    own = DynamicCache(config=model.config)
    assert model.train()(**given, past_key_values=own).past_key_values is own
    assert own.get_seq_length() == IDS.shape[1]


@both_ways
@pytest.mark.parametrize("training", [True, False])
def test_true_skips_logits_in_training_and_evaluation(way, training):
    model = make().train(training)
    wanted = model(input_ids=IDS, labels=IDS)
    kept = model(input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3)
    way(model, **ALONE)
    before = fused()
    found = model(input_ids=IDS, labels=IDS, skip_logits=True)
    assert found.logits is SKIPPED
    assert worst([found.loss], [wanted.loss]) < 1e-6
    assert (model(input_ids=IDS, labels=IDS).logits is SKIPPED) == training
    assert fused() == before + 1 + training
    loss, logits = model(input_ids=IDS, labels=IDS, skip_logits=True, return_dict=False, use_cache=False)
    assert torch.equal(loss, found.loss)
    assert logits is SKIPPED
    found = model(input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3, skip_logits=True)
    assert found.logits is SKIPPED
    assert worst([found.loss], [kept.loss]) < 1e-6


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer, self.a, self.b = base, torch.nn.Linear(80, 2), torch.nn.Linear(2, 331)

    @property
    def weight(self):
        return self.base_layer.weight

    bias = None

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def own_forward(model, _):
    head = model.lm_head
    head.forward = lambda x: 2 * torch.nn.Linear.forward(head, x)


# What is done to a model and how it is said; hooks note the shapes that they are given.
OTHERS = {
    "forward hook": (
        lambda model, seen: model.lm_head.register_forward_hook(
            lambda *given: seen.append(given[-1].shape) or 2 * given[-1]
        ),
        "its head has hooks",
    ),
    "pre-hook": (
        lambda model, seen: model.lm_head.register_forward_pre_hook(
            lambda *given: seen.append(given[1][0].shape) or (2 * given[1][0],)
        ),
        "its head has hooks",
    ),
    "backward hook": (
        lambda model, seen: model.lm_head.register_full_backward_hook(
            lambda *given: seen.append(given[2][0].shape) or (2 * given[1][0],)
        ),
        "its head has hooks",
    ),
    "adapter": (lambda model, _: setattr(model, "lm_head", Adapter(model.lm_head)), "its head is Adapter"),
    "own forward": (own_forward, "its head is Linear with a forward of its own"),
    "subclass": (lambda model, _: setattr(model.lm_head, "__class__", Doubled), "its head is Doubled with a forward"),
    "loss": (
        lambda model, _: setattr(model, "loss_function", lambda logits, **_: (logits[..., :5] ** 2).mean()),
        "its loss is not",
    ),
}


@both_ways
@pytest.mark.parametrize(("change", "said"), OTHERS.values(), ids=OTHERS)
def test_heads_and_losses_that_do_more_keep_their_own_way_and_it_is_said_once(way, change, said):
    model, seen = make(), []
    change(model, seen)
    reference, calls = step(model), len(seen)
    held(model, way, step, {}, exactly=True, **ALONE)
    assert len(seen) == 4 * calls
    assert bool(calls) == (said == "its head has hooks")
    wanted = model(input_ids=IDS, labels=IDS)
    way(model, **ALONE)
    with pytest.warns(UserWarning, match=said) as warned:
        found = [model(input_ids=IDS, labels=IDS, skip_logits=True) for _ in range(2)]
    assert len(warned) == 1
    assert all(same([x.loss, x.logits], [wanted.loss, wanted.logits]) for x in found)
    assert torch.equal(found[0].loss, reference[0])


@both_ways
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_two_bytes_are_as_exact_as_torch(way, autocast):
    exact = step(make())
    model = make() if autocast else make().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = step(model)
        way(model, **ALONE)
        patched, ran = counted(lambda: step(model))
    assert ran[NAME] == 1
    assert {x.dtype for x in (patched if autocast else patched[:1])} == {torch.float32}
    as_exact(patched, plain, exact)


# As in eager mode; each is a graph of its own.
COMPILED = {
    "plain": (tilekern.apply, make, {}),
    "masked": (tilekern.apply, make, {"labels": MASKED, "num_items_in_batch": torch.tensor(9.0), "factor": 3.0}),
    "shifted": (tilekern.apply_to_model, make, {"shift_labels": SHIFTED, "num_items_in_batch": 5}),
    "a frozen head": (tilekern.apply, functools.partial(frozen, "head"), {}),
    "a frozen body": (tilekern.apply, functools.partial(frozen, "body"), {}),
    "a bias": (tilekern.apply, with_bias, {}),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("way", "prepared", "more"), COMPILED.values(), ids=COMPILED)
def test_torch_compile_of_the_whole_model_keeps_it_in_one_graph(way, prepared, more):
    model = prepared()
    run = functools.partial(step, **more)
    reference = run(model)
    way(*[model] * (way is tilekern.apply_to_model), **ALONE)
    before, compiled = fused(), in_one_graph(model)
    assert worst(run(compiled), reference) < 1e-5
    assert worst(run(compiled), reference) < 1e-5, "gradients of a second step are its own"
    assert fused() == before + 2
    assert compiled(input_ids=IDS, labels=IDS).logits is SKIPPED
    with torch.no_grad():
        wanted, found = (x(input_ids=IDS, labels=IDS, skip_logits=False) for x in (model, compiled))
    assert worst([found.loss, found.logits], [wanted.loss, wanted.logits]) < 1e-6


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_evaluation_without_logits_and_under_autocast():
    model = make()
    wanted, exact = model.eval()(input_ids=IDS, labels=IDS).loss, step(model.train())
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
    tilekern.apply(**ALONE)
    compiled, before = in_one_graph(model), fused()
    with torch.no_grad():
        assert worst([compiled.eval()(input_ids=IDS, labels=IDS, skip_logits=True).loss], [wanted]) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        patched = step(compiled.train())
    assert fused() == before + 2
    as_exact(patched, plain, exact)


@pytest.mark.parametrize(
    "home", ["torch.distributed.fsdp._fully_shard._fsdp_state", "deepspeed.runtime.zero.parameter_offload"]
)
def test_a_head_whose_weight_is_whole_between_its_hooks_alone(home):
    model = make()
    reference, before = step(model), fused()
    head, weight = model.lm_head, model.lm_head.weight.data

    def gather(*_):
        head.weight.data = weight

    def free(module, given, loss):
        head.weight.data = weight.new_empty(0)
        loss.register_hook(gather)

    gather.__module__ = free.__module__ = home
    apply(**ALONE)
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    assert worst(step(model), reference) < 1e-6
    assert fused() == before + 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_compiled_head_that_fsdp_gathers_has_the_model_s_own_loss_and_a_warning():
    def gathered(*_):
        """As FSDP2's hook, which is traced into the graph."""

    gathered.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    model = make()
    model.lm_head.register_forward_pre_hook(gathered)
    held(model, lambda _: apply(**ALONE), step, {NAME: 1})
    reference, before = step(model), fused()
    apply(**ALONE)
    with pytest.warns(UserWarning, match="hooks gather its head.*compile the layers"):
        assert worst(step(in_one_graph(model)), reference) < 1e-6
    assert fused() == before


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.nightly])], ids=["eager", "compiled"]
)
def test_on_a_cpu_without_the_interpreter_torch_s_operations_run(monkeypatch, compiled):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    model = make()
    reference, before = step(model), counters(NAME).fallbacks
    apply(**ALONE)
    with pytest.warns(UserWarning, match="TILEKERN_INTERPRET=1"):
        found = step(in_one_graph(model) if compiled else model)
    assert worst(found, reference) < 1e-6
    assert counters(NAME).fallbacks == before + 1


def test_another_loss_of_transformers_is_not_replaced(monkeypatch):
    monkeypatch.setattr(loss, "_LOSS", Table("heads", {}))
    model = make()
    reference = step(model)
    with pytest.warns(UserWarning, match="ForCausalLMLoss is another one"):
        apply(**ALONE)
    found, ran = counted(lambda: step(model))
    assert same(found, reference)
    assert not ran


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
        lambda x: x.float() if x.dtype != torch.float32 else x,
    ],
)  # fmt: skip
def test_what_moves_outputs_passes_it_on(pass_on):
    assert pass_on(SKIPPED) is SKIPPED
    assert HOW in repr(SKIPPED)
    assert not hasattr(SKIPPED, "shape")
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
    made = kind(make(), arguments, train_dataset=rows, eval_dataset=rows, **more)
    return made.train().training_loss, made.evaluate()


@pytest.mark.slow
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
