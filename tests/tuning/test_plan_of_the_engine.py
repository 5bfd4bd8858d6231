"""``--engine`` plans what :mod:`tilekern.inference` launches, by its own steps."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tilekern
from tilekern.errors import InputError
from tilekern.inference.architectures import architecture_of
from tilekern.inference.engine import CHUNK
from tilekern.inference.planning import DryRun
from tilekern.runtime.recorder import Trace
from tilekern.runtime.rows import has_rows
from tilekern.spec import bucket
from tilekern.spec.targets import resolve
from tilekern.tuning.options import PLAN_OPTIONS, PlanRequest
from tilekern.tuning.plan.choosing import plan_of
from tilekern.tuning.plan.engine import plan_of_engine
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.steps import OF_ENGINE, Steps

H200 = resolve("H200")
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def planned(tmp_path):
    """Plan a model as the command line does."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3))

    def plan(*models, **options):
        given = dict.fromkeys(PLAN_OPTIONS) | {"plans": (), "problems": (), "engine": True} | options
        return plan_of(PlanRequest.of(given | {"models": models or (str(config),)}), H200, tmp_path)

    return plan


def rows_of(plan, kernel):
    return {problem["rows"] for name, problem in plan.problems if name == kernel}


def test_its_options_say_what_the_engine_runs(planned):
    found = Trace(H200)
    for dtype in ("bfloat16", "float16"):
        dry = DryRun(found, architecture_of(QWEN3), dtype)
        dry.forward(4, 8)
        for chunk in (CHUNK, 16):
            for batch, tokens in ((4, 8), (1, 31), (2, 31), (1, 127), (2, 127)):
                dry.prompt(batch, tokens, chunk)
        for batch in (1, 2):
            for context in (32, 128):
                dry.token(batch, context)
        for stored in ("float32", "bfloat16"):
            dry.load(stored)
    plan = planned(decode="1,2", context="32,128,256", tokens="32", sequence="8", chunk="16", dtype="bf16,fp16")
    assert set(plan.problems) == set(found.problems)
    assert plan.launches == found.launches
    assert plan.name.endswith("config.json-engine")


def test_a_plan_has_the_steps_of_its_tokens(planned):
    plan = planned(decode="1,8", context="32,4096", dtype="bf16,fp16", paged=True)
    found = [(step.dtype, step.cache, step.batch, step.context) for step in plan.tokens]
    assert found == [
        (dtype, cache, batch, room)
        for dtype in ("bfloat16", "float16")
        for cache in ("static", "paged")
        for batch in (1, 8)
        for room in (32, 128)  # as many as the model was made for
    ]
    assert {step.architecture for step in plan.tokens} == {architecture_of(QWEN3)}
    assert [step.int8 for step in planned(weight_dtype="int8").tokens] == [True]


def test_tokens_of_several_gpus_have_no_step_and_a_note_says_so(planned):
    plan = planned(tp=2)
    assert plan.tokens == ()
    assert plan.notes == ("--tp 2: the step of a token on several GPUs is not timed; the fastest in a row win",)
    assert planned(tp=2, decode="8").notes == plan.notes


def test_some_kernels_of_a_plan(planned):
    plan, whole = planned(kernels="advance, skinny_linear"), planned()
    assert plan.problems == tuple(p for p in whole.problems if p[0] in ("advance", "skinny_linear"))
    assert plan.tokens == whole.tokens
    with pytest.raises(InputError, match="--kernels 'skinny': nothing of it is planned; planned: advance, append"):
        planned(kernels="skinny")
    with pytest.raises(InputError, match="--kernels is empty"):
        planned(kernels=",")


def test_paged_adds_the_steps_of_the_paged_cache(planned):
    usual, plan = (planned(decode="1,2", tokens="32", paged=paged) for paged in (False, True))
    found = Trace(H200)
    dry = DryRun(found, architecture_of(QWEN3), "bfloat16")
    for batch, tokens in ((1, 32), (1, 127), (2, 127)):
        dry.prompt(batch, tokens, CHUNK, cache="paged")
    for batch in (1, 2):
        dry.token(batch, 128, cache="paged")
    assert set(plan.problems) == set(usual.problems) | set(found.problems)
    added = set(plan.problems) - set(usual.problems)
    assert {name for name, _ in added} == {"append_to_cache", "token_attention", "embedding"}
    assert {problem["page_size"] for name, problem in added if name == "token_attention"} == {256}


def test_by_default_it_generates_one_sequence(planned):
    plan = planned()
    assert rows_of(plan, "skinny_linear") == {1}
    assert rows_of(plan, "narrow_block") == {128}, "a prompt fills the context but for a token"
    assert not plan.invariant


def test_gpus_that_share_a_model_have_problems_of_their_parts(planned):
    whole, plan = planned(), planned(tp=2)
    assert plan.name == f"{whole.name}-tp2"
    for found, sizes in ((whole, (4, 2)), (plan, (2, 1))):
        assert {(p["heads"], p["kv_heads"]) for name, p in found.problems if name == "append_to_cache"} == {sizes}
    # One GPU has a narrow model's MLP in a launch, and several add up before it.
    assert {p["hidden"] for name, p in whole.problems if name == "narrow_block"} == {80}
    assert {p["columns"] for name, p in plan.problems if name == "swiglu_forward"} == {40}
    with pytest.raises(InputError, match=r"--tp 4: .*config\.json: 4 GPUs cannot share 2 key heads and an inner size"):
        planned(tp=4)


def test_the_invariant_mode_needs_a_class_of_the_problems_that_it_asks_for(planned):
    usual, plan = planned(decode="1,8", tokens="1"), planned(decode="1,8", tokens="1", invariant=True)
    assert set(usual.problems) < set(plan.problems)
    # In the mode a norm and the product behind it are two launches.
    more = {kernel for kernel, _ in set(plan.problems) - set(usual.problems)}
    assert {"rms_norm_forward", "skinny_linear"} <= more
    assert plan.invariant == {named for named in plan.problems if has_rows(*named)}
    assert not {"skinny_held_linear", "token_attention"} & {kernel for kernel, _ in plan.invariant}
    assert {"append_to_cache", "decode_attention"} <= more
    assert {1, 8} == rows_of(usual, "skinny_held_linear") == rows_of(plan, "skinny_held_linear")


def test_int8_weights_are_planned(planned):
    found = Trace(H200)
    dry = DryRun(found, architecture_of(QWEN3), "bfloat16", int8=True)
    dry.forward(4, 32)
    for batch, tokens in ((4, 32), (1, 127)):
        dry.prompt(batch, tokens, CHUNK)
    dry.token(1, 128)
    for stored in ("float32", "bfloat16"):
        dry.load(stored)
    plan = planned(tokens="128", sequence="32", weight_dtype="int8")
    assert set(plan.problems) == set(found.problems)
    assert rows_of(plan, "skinny_linear_int8") == {1, 4}
    assert not rows_of(plan, "skinny_linear")
    assert {problem["dtype"] for kernel, problem in plan.problems if kernel == "quantize_rows"} == {
        "float32", "bfloat16"
    }  # fmt: skip
    assert plan.name.endswith("config.json-engine-int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weight_dtype": "int8", "engine": False},
            "--weight-dtype int8 describes the engine's weights; pass --engine",
        ),
        ({"weight_dtype": "int4"}, "--weight-dtype 'int4': expected int8; leave it out for weights in --dtype"),
        ({"weight_dtype": "bfloat16"}, "--weight-dtype 'bfloat16': expected int8"),
        ({"weight_dtype": ""}, "--weight-dtype '': expected int8"),
        ({"weight_dtype": "int8", "invariant": True}, "--invariant promises nothing for int8 weights"),
        ({"weight_dtype": "int8", "dtype": "int8"}, "unknown dtype 'int8'; known: bfloat16"),
    ],
    ids=str,
)
def test_weights_that_are_not_planned_are_refused(planned, options, message):
    with pytest.raises(InputError, match=message):
        planned(**options)


@pytest.mark.parametrize("options", [{"plans": ("plan.json",)}, {"problems": ("greedy rows=1,columns=97",)}], ids=str)
@pytest.mark.parametrize(
    ("asked", "option"), [({"engine": True}, "--engine"), ({"engine": None, "weight_dtype": "int8"}, "--weight-dtype")]
)
def test_a_plan_has_no_engine(options, asked, option):
    given = dict.fromkeys(PLAN_OPTIONS) | {"models": (), "plans": (), "problems": ()} | options | asked
    with pytest.raises(InputError, match=f"{option} describes the steps of a model, and a plan has its own sizes"):
        PlanRequest.of(given)


def test_from_python_it_is_the_plan_of_the_command_line(planned, tmp_path):
    plan = planned(decode="1,4", context="64", weight_dtype="int8")
    asked = {"engine": True, "weight_dtype": "int8", "decode": [1, 4], "context": 64, "gpu": "H200"}
    for model in (str(tmp_path / "config.json"), QWEN3, Qwen3Config(**QWEN3)):
        needs = tilekern.preflight(model, **asked, cache_dir=tmp_path / "cache").needs
        assert {(need.kernel, need.problem) for need in needs} == set(plan.problems)
    usual = tilekern.preflight(QWEN3, engine=True, gpu="H200", cache_dir=tmp_path / "cache").needs
    assert {(need.kernel, need.problem) for need in usual} == set(planned().problems)


@pytest.mark.parametrize("call", [tilekern.tune, tilekern.preflight])
def test_from_python_other_models_and_steps_are_refused(call, tmp_path):
    with pytest.raises(InputError, match=r"engine=True plans a model by its config; .* not a Trace"):
        call(Trace(H200), engine=True, gpu="H200", cache_dir=tmp_path)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    with pytest.raises(InputError, match=r"engine=True plans a model by its config; .* not a Qwen3ForCausalLM"):
        call(model, engine=True, gpu="H200", cache_dir=tmp_path)
    with pytest.raises(InputError, match="a model is a name, a path, a configuration"):
        call(3, engine=True, gpu="H200", cache_dir=tmp_path)
    with pytest.raises(InputError, match="--weight-dtype int8 describes the engine's weights; pass --engine too"):
        call(QWEN3, weight_dtype="int8", gpu="H200", cache_dir=tmp_path)
    with pytest.raises(InputError, match="--packed describes a step of transformers' model"):
        call(QWEN3, packed=True, engine=True, gpu="H200", cache_dir=tmp_path)


def test_a_batch_is_none_of_the_engine(tmp_path):
    with pytest.raises(InputError, match="a batch describes a step of transformers' model; leave it out with --eng"):
        tilekern.tune(QWEN3, {"input_ids": torch.zeros(1, 8)}, engine=True, gpu="H200", cache_dir=tmp_path)


@pytest.mark.parametrize("options", [{"packed": True}, {"op": "rope"}], ids=str)
def test_options_of_other_steps_are_refused(planned, options):
    (name,) = options
    with pytest.raises(InputError, match=f"--{name} describes a step of transformers' model; leave it out with --eng"):
        planned(**({"ops": "rope"} if name == "op" else options))


def test_a_sequence_must_fit(planned):
    with pytest.raises(InputError, match="--sequence 8,16: pass --tokens too, the batch times the sequence"):
        planned(sequence="8,16")
    with pytest.raises(InputError, match="a sequence of 129 tokens does not fit a context of 128; pass --sequence"):
        planned(tokens="129")


def test_a_model_that_it_does_not_run_is_named(planned):
    with pytest.raises(InputError, match=r"mistral-7b: config\.json: model_type is 'mistral'; the engine runs gpt2"):
        planned("mistral-7b")


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if config["model_type"] == "gpt2"])
def test_sizes_of_gpt2_are_presets(name):
    plan = plan_of_engine(name, Steps(**OF_ENGINE), H200)
    (attended,) = (problem for kernel, problem in plan.problems if kernel == "token_attention")
    width, heads = (PRESETS[name][field] for field in ("hidden_size", "num_attention_heads"))
    assert attended["kv_heads"] == bucket(heads)
    assert (attended["head_dim"], attended["keys"]) == (width // heads, 1024)
