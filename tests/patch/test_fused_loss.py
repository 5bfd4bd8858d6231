"""The fused loss in a patched Qwen3: what an unpatched one computes, and where the model's own forward runs."""

import dataclasses
import functools
import importlib

import pytest
import torch
from tiny_qwen3 import IDS, apply, launched, launches, same, worst
from tiny_qwen3 import make as make_tiny
from transformers.loss.loss_utils import ForCausalLMLoss

import tilekern
from tilekern.patch import loss, registry
from tilekern.patch.skipped_logits import SKIPPED
from tilekern.runtime.dispatch import counters

NAME = "fused_linear_cross_entropy"
make = functools.partial(make_tiny, layers=1)
ALONE = {op: op == "fused_linear_cross_entropy" for op in registry.known_ops()}
MASKED = IDS.masked_fill(torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0, 1]], dtype=torch.bool), -100)
SHIFTED = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:].roll(1, 0)

pytestmark = pytest.mark.usefixtures("interpreted")
ways = pytest.mark.parametrize(
    "way", [lambda _: apply(**ALONE), lambda m: tilekern.apply_to_model(m, **ALONE)], ids=["class", "model"]
)


@pytest.fixture(params=["cublas", "tuned"])
def products(request, monkeypatch):
    """Who multiplies in the fused loss."""
    module = importlib.import_module("tilekern.ops.fused_linear_cross_entropy")
    spec = module._SPEC

    def default(problem, target):
        return spec.default(problem, target).but(products=request.param)

    monkeypatch.setattr(module, "_SPEC", dataclasses.replace(spec, default=default))
    return request.param


def step(model, factor=1.0, labels=IDS, **more):
    """The loss and the gradient of every parameter that takes one."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=labels, **more).loss
    (loss * factor).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def fused():
    return counters(NAME).launches


def check(model, way=lambda _: apply(**ALONE), tolerance=1e-5, run=step):
    """``run`` of the model agrees with that of the unpatched one, through the fused loss."""
    reference, before = run(model), fused()
    way(model)
    assert worst(run(model), reference) < tolerance
    assert fused() > before, "the fused loss did not run"


@ways
@pytest.mark.parametrize(
    "more",
    [
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
    ],
    ids=lambda more: " ".join(more) or "plain",
)
def test_loss_and_gradients_agree_and_reset_is_exact(way, more):
    model = make().train()
    run = functools.partial(step, **more)
    reference = run(model)
    check(model, way, run=run)
    assert tilekern.reset() == ["fused_linear_cross_entropy"]
    before = launches()
    assert same(run(model), reference)
    assert not launched(before)


def test_together_with_every_other_patch():
    check(make(attention="sdpa").train(), lambda _: apply())


def test_more_tokens_than_a_chunk_and_float32_exactly(products, monkeypatch):
    model, multiplied = make().train(), counters("matmul").launches
    monkeypatch.setattr(importlib.import_module("tilekern.kernels.composites.head"), "_MOST_CHUNK_BYTES", 128 * 331 * 4)
    ids = torch.randint(0, 331, (3, 100), generator=torch.Generator().manual_seed(2))

    def run(model):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=300).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    check(model, run=run)
    assert counters("matmul").launches == multiplied + (3 * 3 if products == "tuned" else 0)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parameters(frozen):
    model = make().train()
    for parameter in (model.lm_head if frozen == "head" else model.model).parameters():
        parameter.requires_grad_(False)
    check(model)
    assert (model.lm_head.weight.grad is None) == (frozen == "head")


@pytest.mark.usefixtures("products")
def test_tied_embeddings_get_both_gradients():
    model = make(tie_word_embeddings=True).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check(model)


@ways
def test_a_head_with_a_bias(way):
    model = make().train()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(331, generator=torch.Generator().manual_seed(1)))
    check(model, way)


def test_a_bias_is_scaled_and_capped_with_the_logits():
    head, hidden, more = torch.nn.Linear(16, 31), torch.randn(2, 5, 16), {"labels": IDS[:, :5] % 31}
    logits = torch.tanh(head(hidden) * 0.6 / 2) * 2
    wanted = ForCausalLMLoss(logits, vocab_size=31, **more)
    found = loss._loss(head, hidden, factor=1.2, divisor=2.0, softcap=2.0, **more)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(x, list(head.parameters())) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_labels_of_another_number_are_refused_as_by_torch():
    model = make().train()
    for way in (dict, lambda: apply(**ALONE)):
        way()
        with pytest.raises(ValueError, match=r"batch_size \(10\)|each of 14 tokens, got 10"):
            step(model, labels=IDS[:, :5])


def test_labels_that_are_all_left_out():
    model = make().train()
    labels = torch.full_like(IDS, -100)
    apply(**ALONE)
    loss, *gradients = step(model, labels=labels)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in gradients)
    assert step(model, labels=labels, num_items_in_batch=4)[0] == 0


@ways
@pytest.mark.usefixtures("products")
def test_gradient_accumulation_adds_up(way):
    model = make().train()

    def run(model):
        model.zero_grad()
        for rows in (IDS[:1], IDS[1:]):
            model(input_ids=rows, labels=rows, num_items_in_batch=12).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    check(model, way, run=run)


@ways
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing(way, reentrant):
    model = make().train()
    reference = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = fused()
    way(model)
    assert worst(step(model), reference) < 1e-5
    assert fused() == before + 1


@ways
def test_what_training_returns(way):
    model = make().train()
    wanted = model(input_ids=IDS, labels=IDS, output_hidden_states=True, use_cache=True)
    way(model)
    found = model(input_ids=IDS, labels=IDS, output_hidden_states=True, use_cache=True)
    assert type(found) is type(wanted)
    assert found.logits is SKIPPED
    assert same(found.hidden_states, wanted.hidden_states)
    assert found.past_key_values.get_seq_length() == 7
    loss, logits = model(input_ids=IDS, labels=IDS, return_dict=False, use_cache=False)
    assert torch.equal(loss, found.loss)
    assert logits is SKIPPED


@ways
def test_evaluation_and_calls_without_labels_give_logits_as_before(way):
    model = make().train()
    calls = [
        functools.partial(model, input_ids=IDS),
        functools.partial(model, input_ids=IDS, logits_to_keep=2),
        functools.partial(model, input_ids=IDS, labels=IDS[:, 4:], logits_to_keep=3),
        lambda: model.eval()(input_ids=IDS, labels=IDS),
        lambda: model.eval()(input_ids=IDS, labels=IDS, return_dict=False),
    ]
    wanted = [call() for call in calls]
    model.train()
    way(model)
    before = launches()
    for call, expected in zip(calls, wanted, strict=True):
        found = call()
        if isinstance(expected, tuple):
            assert isinstance(found, tuple)
            assert same(found[:2], expected[:2])
            continue
        assert torch.equal(found.logits, expected.logits)
        assert (found.loss is None) == (expected.loss is None)
        assert expected.loss is None or torch.equal(found.loss, expected.loss)
    assert not launched(before)


@ways
@pytest.mark.parametrize(
    "place", ["forward hook", "pre-hook", "backward hook", "adapter", "own forward", "subclass", "loss"]
)
def test_heads_and_losses_that_do_more_keep_their_own_way(way, place):
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

    model, seen = make().train(), []
    head = model.lm_head
    if place == "forward hook":
        head.register_forward_hook(lambda *given: seen.append(given[-1].shape) or 2 * given[-1])
    elif place == "pre-hook":
        head.register_forward_pre_hook(lambda *given: seen.append(given[1][0].shape) or (2 * given[1][0],))
    elif place == "backward hook":
        head.register_full_backward_hook(lambda *given: seen.append(given[2][0].shape) or (2 * given[1][0],))
    elif place == "adapter":
        model.lm_head = Adapter(head)
    elif place == "own forward":
        head.forward = lambda x: 2 * torch.nn.Linear.forward(head, x)
    elif place == "subclass":
        head.__class__ = Doubled
    else:
        model.loss_function = lambda logits, **_: (logits[..., :5] ** 2).mean()
    reference, calls, before = step(model), len(seen), launches()
    way(model)
    assert same(step(model), reference)
    assert not launched(before)
    assert len(seen) == 2 * calls
    assert bool(calls) == ("hook" in place)


@ways
def test_autocast(way):
    model = make().train()
    exact = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
        way(model)
        before = fused()
        patched = step(model)
    assert fused() == before + 1
    assert all(tensor.dtype == torch.float32 for tensor in patched)
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


def test_bfloat16_is_as_exact_as_torch():
    exact = step(make().train())
    model = make().bfloat16().train()
    plain = step(model)
    apply(**ALONE)
    before = fused()
    patched = step(model)
    assert fused() == before + 1
    assert patched[0].dtype == torch.float32
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


@pytest.mark.share(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        (tilekern.apply, {}),
        (tilekern.apply, {"labels": MASKED, "num_items_in_batch": torch.tensor(9.0), "factor": 3.0}),
        (tilekern.apply_to_model, {"shift_labels": SHIFTED, "num_items_in_batch": 5}),
    ],
    ids=["plain", "masked", "shifted"],
)
def test_torch_compile_of_the_whole_model_keeps_it_in_one_graph(way, more):
    torch._dynamo.reset()
    model = make().train()
    run = functools.partial(step, **more)
    reference = run(model)
    way(*[model] * (way is tilekern.apply_to_model), **ALONE)
    before = fused()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
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
    torch._dynamo.reset()
    model = make()
    wanted, exact = model(input_ids=IDS, labels=IDS).loss, step(model.train())
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
    tilekern.apply(**ALONE)
    compiled, before = torch.compile(model, fullgraph=True, backend="aot_eager"), fused()
    with torch.no_grad():
        assert worst([compiled.eval()(input_ids=IDS, labels=IDS, skip_logits=True).loss], [wanted]) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        patched = step(compiled.train())
    assert fused() == before + 2
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["head", "body"])
@pytest.mark.share(2)
def test_compiled_with_frozen_parameters(frozen):
    torch._dynamo.reset()
    model = make().train()
    for parameter in (model.lm_head if frozen == "head" else model.model).parameters():
        parameter.requires_grad_(False)
    reference, before = step(model), fused()
    tilekern.apply(**ALONE)
    assert worst(step(torch.compile(model, fullgraph=True, backend="aot_eager")), reference) < 1e-5
    assert fused() == before + 1


@pytest.mark.slow
def test_a_compiled_head_with_a_bias_has_the_fused_loss():
    torch._dynamo.reset()
    model = make().train()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(331))
    reference = step(model)
    tilekern.apply(**ALONE)
    before = fused()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert worst(step(compiled, skip_logits=True), reference) < 1e-5
    assert fused() == before + 1


@pytest.mark.slow
def test_a_compiled_head_that_fsdp_gathers_has_the_model_s_own_loss_and_a_warning(monkeypatch):
    def gathered(*_):
        """As FSDP2's hook, which is traced into the graph."""

    gathered.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    torch._dynamo.reset()
    monkeypatch.setattr("tilekern.warning._said", set())
    model = make().train()
    model.lm_head.register_forward_pre_hook(gathered)
    reference = step(model)
    apply(**ALONE)
    before = fused()
    assert worst(step(model), reference) < 1e-5
    assert fused() == before + 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="FSDP gathers its head.*compile the layers"):
        assert worst(step(compiled), reference) < 1e-6
    assert fused() == before + 1


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_on_a_cpu_without_the_interpreter_torch_s_operations_make_the_gradients(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    monkeypatch.setattr("tilekern.warning._said", set())
    model = make().train()
    reference, before = step(model), counters(NAME).fallbacks
    tilekern.apply(**ALONE)
    with pytest.warns(UserWarning, match="TILEKERN_INTERPRET=1"):
        found = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert worst(found, reference) < 1e-6
    assert counters(NAME).fallbacks == before + 1


def test_another_loss_of_transformers_is_not_replaced(monkeypatch):
    from tilekern.patch import loss

    monkeypatch.setattr(loss, "_LOSS", "another")
    model = make().train()
    reference = step(model)
    with pytest.warns(UserWarning, match="ForCausalLMLoss is another one"):
        apply(**ALONE)
    assert same(step(model), reference)


def test_on_a_cpu_without_the_interpreter_torch_s_operations_run(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    model = make().train()
    reference = step(model)
    apply(**ALONE)
    before = counters(NAME).fallbacks
    monkeypatch.setattr("tilekern.warning._said", set())
    with pytest.warns(UserWarning, match="TILEKERN_INTERPRET=1"):
        found = step(model)
    assert worst(found, reference) < 1e-6
    assert counters(NAME).fallbacks == before + 1
