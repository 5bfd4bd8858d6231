"""A token of few sequences has its norms in the launches of products, which hold their weights."""

import itertools

import pytest
import torch
from emulated import tensor_of
from small_models import counts_of, ids_of

from tilekern.arrays import ArrayPlan
from tilekern.inference import load
from tilekern.inference.architectures import architecture_of
from tilekern.inference.caches import StaticKeys
from tilekern.inference.choice import numbers
from tilekern.inference.launches import Queued
from tilekern.inference.planning import DryRun
from tilekern.inference.steps import Step, Tokens
from tilekern.kernels.skinny.held import MOST_ROWS
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace
from tilekern.spec import ITEM_BYTES, ArrayParameter
from tilekern.spec.targets import resolve

LENGTH = 7
KERNEL = "skinny_held_linear"
NORMS = {"rms_norm_forward", "fused_add_rms_norm_forward", "layer_norm_forward", "fused_add_layer_norm_forward"}
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 97}
EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


def logits_of_last_tokens(engine, ids):
    """The logits of a step of one token of each sequence, which follows a step of those before it."""
    model, launches, batch = engine._model, Queued(engine.stream), len(ids)
    keys = StaticKeys.new(launches, model, batch, LENGTH)
    before = Tokens.new(launches, batch, LENGTH - 1)
    before.ids.write(numbers([token for sequence in ids for token in sequence[:-1]], "int64"))
    before.place(0)
    Step(launches, model, before, keys.of(0, batch, LENGTH - 1), 0, has_logits=False)
    last, lengths = Tokens.new(launches, batch, 1), launches.array((batch,), "int32")
    last.ids.write(numbers([sequence[-1] for sequence in ids], "int64"))
    last.place(LENGTH - 1)
    lengths.write(numbers([LENGTH] * batch, "int32"))
    counters = launches.array((batch * model.architecture.kv_heads,), "int32")
    counters.write(bytes(4 * counters.shape[0]))
    tokens = Tokens(last.ids, last.positions, last.places, lengths, counters)
    return tensor_of(Step(launches, model, tokens, keys).logits).clone().double()


@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_as_near_to_transformers_as_those_of_two_launches(gpu, saved, launched, monkeypatch, rows, dtype):
    model, folder = saved
    engine, ids = load(folder, dtype=dtype), ids_of(*[LENGTH] * rows)
    found = logits_of_last_tokens(engine, ids)
    assert launched.count(KERNEL) >= 2 * len(engine._model.weights.layers)
    launched.clear()
    monkeypatch.setattr(Step, "_is_held", lambda *_: False)
    apart = logits_of_last_tokens(engine, ids)
    assert KERNEL not in launched
    with torch.no_grad():
        wanted = model.double()(input_ids=torch.tensor(ids), use_cache=False).logits[:, -1]
        model.float()
    error, usual = ((x - wanted).norm() / wanted.norm() for x in (found, apart))
    assert error < 1.2 * usual + 1e-3
    assert usual < 0.1


def launches_of(config, dtype="bfloat16", rows=1, **how):
    """How often a token launches each kernel."""
    found = Trace(resolve("H200"))
    DryRun(found, architecture_of(config), dtype, **how).token(rows, 64)
    return counts_of(found)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_a_token_of_one_sequence_launches_no_norm(config):
    found = launches_of(config)
    # Each layer's attention and MLP begin and end with one, and the head is one.
    assert found[KERNEL] == 2 * 4 + 1
    assert not NORMS & found.keys()
    assert "skinny_linear" not in found


@pytest.mark.parametrize(
    ("rows", "inner", "held"), [(1, 4096, 4), (4, 4096, 4), (5, 4096, 3), (8, 1024, 4), (1, 4100, 3)]
)
def test_long_sums_of_which_blocks_do_not_hold_the_weights_are_usual_products(rows, inner, held):
    found = launches_of(LLAMA | {"intermediate_size": inner}, rows=rows)
    # The head's rows have a norm of their own, if they are several.
    assert found[KERNEL] == 2 * held + (rows == 1)
    assert found.get("skinny_linear", 0) == 2 * (4 - held) + (rows > 1)


@pytest.mark.parametrize("width", [1024, 1025])
def test_wide_models_hold_no_weights(width):
    found = launches_of(LLAMA | {"hidden_size": width})
    assert (KERNEL in found) == (width <= 1024) == ("skinny_linear" not in found) == (not NORMS & found.keys())


@pytest.mark.parametrize("rows", [2, MOST_ROWS])
def test_the_head_of_several_sequences_has_a_norm_of_its_own(rows):
    found = launches_of(LLAMA, rows=rows)
    assert found[KERNEL] == 2 * 4
    assert found["fused_add_rms_norm_forward"] == 1


def test_a_router_and_its_experts_share_a_norm():
    found = launches_of(EXPERTS)
    # Each layer's attention begins and ends with one, and the head is one.
    assert found[KERNEL] == 2 * 2 + 1
    assert found["fused_add_rms_norm_forward"] == 2


@pytest.mark.parametrize("how", [{"rows": MOST_ROWS + 1}, {"dtype": "float32"}, {"int8": True}, "invariant"], ids=str)
def test_other_tokens_launch_norms_and_products(how):
    before = dispatch.set_invariant(on=how == "invariant")
    try:
        found = launches_of(LLAMA, **({} if how == "invariant" else how))
    finally:
        dispatch.set_invariant(on=before)
    assert KERNEL not in found
    assert found["fused_add_rms_norm_forward"] == 2 * 2


def test_a_prompt_of_few_tokens_launches_norms():
    found = Trace(resolve("H200"))
    DryRun(found, architecture_of(LLAMA), "bfloat16").prompt(1, 3, 16)
    assert KERNEL not in {kernel for kernel, _ in found.problems}


def span(array):
    """The first address of an array's elements, and that behind the last."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return array.address, array.address + reach * ITEM_BYTES[array.dtype]


def test_no_launch_writes_what_the_next_one_reads_before_it_waits(gpu, saved, monkeypatch):
    """Constants of a kernel are read while the launch before it may still run."""
    launch, launches, absence, absent = ArrayPlan.launch, [], Queued._absence, []

    def noted(plan, stream, *arguments):
        pairs = zip(plan.parameters, arguments, strict=True)
        pairs = [(p, x) for p, x in pairs if isinstance(p, ArrayParameter) and not any(x is other for other in absent)]
        launches.append([(p, span(x)) for p, x in pairs])
        launch(plan, stream, *arguments)

    def noted_absence(queued, parameter):
        """One array stands for all that no flag needs, which are neither read nor written."""
        absent.append(absence(queued, parameter))
        return absent[-1]

    monkeypatch.setattr(ArrayPlan, "launch", noted)
    monkeypatch.setattr(Queued, "_absence", noted_absence)
    engine = load(saved[1], dtype="bfloat16", context=40)
    for _ in engine.generate(ids_of(3), 3, ignores_ends=True):
        pass
    # Graphs of many rows have kernels of their own.
    engine.forward(ids_of(33, 33))
    early = 0
    for before, after in itertools.pairwise(launches):
        written = [place for p, place in before if p.role == "output"]
        constant = [place for p, place in after if p.constant]
        early += len(constant)
        assert not any(a < d and c < b for a, b in written for c, d in constant)
    assert early
