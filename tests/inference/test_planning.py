"""A dry run of the engine finds the problems that the engine asks for, each of them and no others."""

import pytest
from small_models import counts_of

from tilekern.inference import Engine, Sampling
from tilekern.inference.architectures import architecture_of
from tilekern.inference.choice import Choice
from tilekern.inference.host_tensors import HostTensor, size_bytes
from tilekern.inference.launches import Queued
from tilekern.inference.planning import DryRun, Problems
from tilekern.inference.weights import load, stored_by
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec.targets import INTERPRETED, resolve

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 97}
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
# Few key heads and a long context, so that several blocks share a sequence's keys.
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 1, "max_position_embeddings": 512}
EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip
# A model, the dtype that it runs in, that of its checkpoint, and whether that has products as [in, out].
MODELS = {
    "gpt2 of Hugging Face": (GPT2, "bfloat16", "float32", True),
    "gpt2 of minGPT": (GPT2, "float32", "float32", False),
    "llama": (LLAMA, "bfloat16", "bfloat16", False),
    "qwen3": (QWEN3, "float32", "bfloat16", False),
    "experts": (EXPERTS, "bfloat16", "bfloat16", False),
}
CHUNK = 4
# Sequences and tokens of whole ones; the last have more rows than products of few take.
WHOLE = ((2, 5), (2, 33))


@pytest.fixture
def asked(gpu, monkeypatch):
    """The problems, at their buckets, that the engine asks for."""
    found, interpreted = set(), dispatch.array_plan_for

    def plan(spec, device, target, problem):
        found.add((spec.name, spec.bucketed(problem)))
        return interpreted(spec, device, target, problem)

    monkeypatch.setattr(dispatch, "array_plan_for", plan)
    return found


@pytest.fixture
def invariant():
    before = dispatch.set_invariant(on=True)
    yield
    dispatch.set_invariant(on=before)


def engine_of(gpu, config, dtype, stored, transposed, *, cache="static", int8=False):
    """An engine whose weights are all 0."""
    architecture, stream = architecture_of(config), gpu.stream()
    tensors = {
        name: HostTensor(name, stored, shape, memoryview(bytes(size_bytes(stored, shape))))
        for source in stored_by(architecture, transposed=transposed).values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    weights = load(architecture, tensors, dtype, Queued(stream), int8=int8)
    return Engine(architecture, weights, dtype, stream, cache=cache)


def generate(engine, lengths, **more):
    for _ in engine.generate([[1] * length for length in lengths], 2, ignores_ends=True, chunk=CHUNK, **more):
        pass


@pytest.mark.share(4)
@pytest.mark.parametrize(("cache", "int8"), [("static", False), ("paged", False), ("static", True)])
@pytest.mark.parametrize("name", MODELS)
def test_all_that_the_engine_asks_for_is_found_and_nothing_else(gpu, asked, name, cache, int8):
    config, dtype, stored, transposed = MODELS[name]
    engine = engine_of(gpu, config, dtype, stored, transposed, cache=cache, int8=int8)
    for batch, tokens in WHOLE:
        engine.forward([[1] * tokens] * batch)
    generate(engine, (5, 5, 9))
    generate(engine, (9,), sampling=Sampling(temperature=1.0))

    found = Trace(INTERPRETED)
    dry = DryRun(found, engine.architecture, dtype, int8=int8)
    dry.load(stored, transposed=transposed)
    for batch, tokens in WHOLE:
        dry.forward(batch, tokens)
    for batch, tokens in ((2, 5), (1, 9)):
        dry.prompt(batch, tokens, CHUNK, cache=cache)
    for batch in (3, 1):
        dry.token(batch, engine.context, cache=cache)
    # Here three sequences draw no tokens, and one does not take the likeliest.
    both = {("sample", 4), ("greedy_parts", 1), ("greedy_join", 1)}
    assert both == {(kernel, problem.get("rows")) for kernel, problem in found.asked.keys() - asked} & both
    planned = {named for named in found.asked if (named[0], named[1].get("rows")) not in both}
    assert without_joins(planned) == without_joins(asked)
    assert asked <= set(found.problems)
    of_int8 = {kernel.removesuffix("_tf32") for kernel, _ in found.asked} & {
        "skinny_linear_int8",
        "quantize_rows",
        "dequantize_rows",
    }
    assert len(of_int8) == (3 if int8 else 0)
    assert {kernel for kernel, _ in found.others} <= {"decode_join", "skinny_parts", "skinny_join"}


def without_joins(problems):
    """A join is that of the config which runs."""
    return {named for named in problems if named[0] != "decode_join"}


@pytest.mark.parametrize("splits", [1, 4, 0])
def test_what_other_configs_leave_to_be_joined_in_the_mode_is_found(gpu, asked, invariant, monkeypatch, splits):
    interpreted = dispatch.array_plan_for

    def plan(spec, device, target, problem):
        usual = interpreted(spec, device, target, problem)
        if spec.name != "decode_attention":
            return usual
        config = next(c for c in spec.space.candidates(spec.bucketed(problem), INTERPRETED) if c["splits"] == splits)
        implementation = spec.device(problem, config)
        return type(usual)(implementation, config, implementation.grid(problem, INTERPRETED.sm_count))

    monkeypatch.setattr(dispatch, "array_plan_for", plan)
    generate(engine_of(gpu, QWEN3, "bfloat16", "bfloat16", False), (3,))
    found = Trace(INTERPRETED)
    DryRun(found, architecture_of(QWEN3), "bfloat16").token(1, 512)
    joins = {named for named in asked if named[0] == "decode_join"}
    assert len(joins) == (splits != 1)
    assert joins <= set(found.problems)


def test_int8_weights_count_a_layer_s_products_and_leave_a_tied_head():
    found = Trace(resolve("H200"))
    config = QWEN3 | {"num_hidden_layers": 3, "tie_word_embeddings": True}
    DryRun(found, architecture_of(config), "bfloat16", int8=True).token(2, 512)
    counts = counts_of(found)
    assert counts["skinny_linear_int8"] == 3 * 4
    assert counts["skinny_linear"] == 1


def test_whole_sequences_keep_no_keys_where_projections_are_the_keys():
    """GPT-2 turns and normalises none: attention reads them where the product wrote them."""
    for name, keeps in (("gpt2 of minGPT", False), ("qwen3", True)):
        config, dtype, *_ = MODELS[name]
        found = Trace(INTERPRETED)
        dry = DryRun(found, architecture_of(config), dtype)
        dry.forward(2, 5)
        assert ("append_to_cache" in {kernel for kernel, _ in found.problems}) == keeps
        dry.prompt(2, 5, CHUNK)
        assert "append_to_cache" in {kernel for kernel, _ in found.problems}


def test_a_step_counts_the_launches_of_all_layers_and_loading_none():
    found = Trace(resolve("H200"))
    dry = DryRun(found, architecture_of(QWEN3 | {"num_hidden_layers": 3}), "bfloat16")
    dry.load("float32")
    assert {kernel for kernel, _ in found.problems} == {"lay_out"}
    assert not found.launches
    dry.token(2, 512)
    assert counts_of(found) == {
        "embedding": 2, "skinny_held_linear": 3 * 4, "fused_add_rms_norm_forward": 1, "skinny_linear": 1,
        "token_attention": 3, "advance": 1, "greedy_parts": 1, "greedy_join": 1, "sample": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "kernels"), [(64, ["greedy_parts", "greedy_join"]), (65, ["greedy"])])
def test_the_likeliest_tokens_of_few_rows_are_found_by_many_blocks(rows, kernels):
    found = Trace(resolve("H200"))
    to = Problems(found)
    logits, positions = to.array((rows, 50257), "bfloat16"), to.array((rows,), "int64")
    Choice(rows, to).add(to, logits, positions, greedy=True)
    assert [kernel for kernel, _ in found.problems] == kernels


@pytest.mark.parametrize("kind", [GPT2, LLAMA])
def test_the_parts_of_a_composite_are_those_that_it_asks_for(kind):
    wide = {"n_embd": 2048} if kind is GPT2 else {"hidden_size": 2048, "intermediate_size": 8192}
    config = kind | wide
    found, called = Trace(resolve("H200")), Trace(resolve("H200"))
    DryRun(found, architecture_of(config), "bfloat16").token(8, 64)
    with tracing(called):
        for kernel, problem in found.asked:
            called.take_apart(spec_named(kernel), problem)
    parts = {named for named in found.others if named[0].startswith("skinny")}
    assert parts == set(called.others) != set()
