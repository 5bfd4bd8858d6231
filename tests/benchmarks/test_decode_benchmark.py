"""The benchmark of generation: a tiny model on the CPU, from the command line to its page."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from benchmark_samples import Standing

import tilekern
from benchmarks import decode, decode_models, decode_ops, jobs
from benchmarks.__main__ import main
from benchmarks.clock import HostClock
from benchmarks.decode import PARTS, Job
from benchmarks.decode_models import WAYS, Decoder, made
from benchmarks.decode_ops import INVARIANT, products_of
from benchmarks.kernels import Effort
from benchmarks.pages import decoding
from benchmarks.results import Results, Row, read_results
from tilekern.errors import InputError
from tilekern.runtime import dispatch
from tilekern.tuning.plan.configs import config_named, config_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WAY_OF_STEPS = "tilekern-graph"
OF_A_LAYER = ("q, k, v", "o", "gate, up, activation", "down")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CONFIG = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 61, "tie_word_embeddings": False, **SIZES}


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def done_here(job):
    """The lines of a job that is done in this process."""
    decode.prepare(job)
    try:
        for found in decode.run(job):
            yield {"kind": "row", "row": asdict(found)} if isinstance(found, Row) else {"kind": "note", "text": found}
    finally:
        tilekern.reset()


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run the command on the tiny model with jobs in this process; give its results."""

    def command(*arguments):
        monkeypatch.setattr(decode, "_start", lambda job: Standing(job, done_here))
        given = ["decode", tiny, "--device", "cpu", "--out", str(tmp_path), "--batch", "1,3", "--samples", "2"]
        assert main([*given, "--seconds", "0.1", *arguments]) == 0
        return read_results(tmp_path / "decode.json")

    return command


def providers(results, case, metric):
    return {row.provider.split(" ")[0] for row in results.figures(case, metric)}


def test_ops_of_a_token_race_and_products_add_up(run):
    results = run("--parts", "products,attention", "--contexts", "20")
    who = {"tilekern", INVARIANT, "torch"}
    for rows in (1, 3):
        begin = f"tiny products, {rows} rows: "
        assert providers(results, f"{begin}2 layers and the head", "time") == who
        for one in who:
            parts = [
                results.row(begin + part, one, "time").value
                for part in ("q, k, v", "o", "gate, up, activation", "down")
            ]
            total = 2 * sum(parts) + results.row(f"{begin}head", one, "time").value
            assert results.row(f"{begin}2 layers and the head", one, "time").value == pytest.approx(total, abs=0.1)
    for case in ("batch 1, context 20", "batch 3, context 20"):
        found = providers(results, f"tiny decode attention, {case}", "time")
        assert {"tilekern", INVARIANT} <= found
        left_out = f"tiny decode attention, {case}: sdpa-cudnn"
        assert any(note.startswith(left_out) for note in results.run["notes"]), "the CPU has no cuDNN"


def test_a_wrong_call_is_left_out(monkeypatch):
    wide = torch.ones(2, 3, dtype=torch.float64)
    calls = {"tilekern": lambda x: x, "torch 2": lambda x: 1.1 * x}
    found = list(
        decode_ops._raced(
            "a case", calls, [(wide.bfloat16(),)], wide, lambda y: y, Effort(2, 0.1), HostClock()
        )
    )  # fmt: skip
    assert [who for who, _ in found] == ["torch 2", "tilekern"]
    assert found[0][1].startswith("a case: torch 2 left out: AssertionError: wrong: relative error 1")


def test_the_products_of_qwen3_8b_are_all_its_weights_but_the_embedding():
    """Weights of one layer 192,937,984, and a head of 151936 x 4096: 15.1 GB in bfloat16."""
    found = products_of(config_named("qwen3-8b")[1], 36)
    assert [(one.name, one.count, one.inner, sum(one.columns)) for one in found] == [
        ("q, k, v", 36, 4096, 6144), ("o", 36, 4096, 4096), ("gate, up, activation", 36, 4096, 24576),
        ("down", 36, 12288, 4096), ("head", 1, 4096, 151936),
    ]  # fmt: skip
    assert 2 * sum(one.count * one.inner * sum(one.columns) for one in found) == 15_136_194_560


def test_the_plan_has_the_problems_of_both_modes(tiny, tmp_path):
    """Each count of rows has its products: q, k and v, of few rows in one launch; o, gate and up, down, the head."""
    path = tmp_path / "plan.json"
    arguments = ["decode", tiny, "--batch", "1,8", "--contexts", "64", "--plan", str(path), "--gpu", "H100"]
    assert main(arguments) == 0
    tilekern.reset()
    found = [(one["kernel"], one["problem"]) for one in json.loads(path.read_text())["problems"]]
    counts = {"skinny_projections": 1, "skinny_linear": 4, "matmul": 5}
    rows = {name: Counter(problem["rows"] for kernel, problem in found if kernel == name) for name in counts}
    assert rows == {name: {1: count, 8: count} for name, count in counts.items()}
    heads = {problem["kv_heads"] for kernel, problem in found if kernel == "decode_attention"}
    batches = {problem["batch"] for kernel, problem in found if kernel == "attention_forward"}
    assert (heads, batches) == ({2, 16}, {1, 8})


@pytest.mark.parametrize("model", ["gpt2", "qwen3-30b-a3b"])
def test_layers_of_another_kind_are_refused(model):
    with pytest.raises(InputError, match="no MLP with a gate"):
        products_of(config_named(model)[1], 2)


@pytest.fixture
def patched():
    tilekern.apply()
    yield
    tilekern.reset()


@pytest.mark.parametrize("way", ["hf", "tilekern", "tilekern-graph", f"{INVARIANT}-graph"])
def test_a_decoder_ends_at_its_context_and_gives_each_sequence_its_next_token(way, tiny, patched):
    """By a dynamic cache and by a static one; what is greedy over the same tokens at once is the right value."""
    model = made(way, config_named(tiny)[1], 0, "cpu").float()
    with torch.no_grad(), WAYS[way].mode():
        decoder = Decoder(model, WAYS[way], 3, 9, 9 + decode_models.WARM_UP)
        prompt, tokens = decode_models._drawn(model, 1, 9), [decoder.ids.clone()]
        for _ in range(decode_models.WARM_UP):
            decoder.step()
            tokens.append(decoder.ids.clone())
        given = torch.cat(tokens[:-1], 1)
        logits = model(input_ids=torch.cat((prompt.expand(3, 9), given), 1), use_cache=False).logits
    assert torch.equal(torch.cat(tokens[1:], 1), logits[:, 9:].argmax(-1))
    assert int(decoder.cache.get_seq_length()) == 9 + decode_models.WARM_UP
    cached = 2 * 2 * 3 * 2 * (9 + decode_models.WARM_UP) * 16
    weights = sum(x.numel() for x in model.parameters()) - 61 * 64
    assert decoder.bytes_read() == 4 * (weights + cached)


@pytest.mark.parametrize(("model_type", "attention"), [("qwen3", "sdpa"), ("gemma2", "eager")])
def test_an_unpatched_model_has_sdpa_if_transformers_has_it(model_type, attention):
    config = config_of(CONFIG | {"model_type": model_type}, "tiny")
    assert made("hf", config, 0, "cpu").config._attn_implementation == attention


def test_steps_prompts_and_generate_have_their_figures(run):
    ways = f"tilekern,{INVARIANT}-graph,hf"
    results = run(
        "--parts", "prompt,step,generate", "--providers", ways, "--context", "13", "--prompt", "5", "--new", "3",
        "--tokens", "11",
    )  # fmt: skip
    assert providers(results, "tiny prompt of 11 tokens", "prompt_ms") == {"tilekern", INVARIANT, "hf"}
    for batch in (1, 3):
        step = f"tiny decode, batch {batch}, context 13"
        assert providers(results, step, "token_ms") == {"tilekern", f"{INVARIANT}-graph", "hf"}
        ours = {name: results.row(step, "tilekern", name).value for name in ("token_ms", "limit_ms", "share_of_limit")}
        assert ours["share_of_limit"] == pytest.approx(ours["limit_ms"] / ours["token_ms"], abs=2e-4)
        rate = results.row(step, "tilekern", "tokens_per_s").value
        assert rate == pytest.approx(1000 * batch / ours["token_ms"], rel=0.01)
        generated = f"tiny generate, batch {batch}, 5 + 3 tokens"
        assert providers(results, generated, "tokens_per_s") == {"tilekern", f"{INVARIANT}-graph", "hf"}
    text = decoding.page([Results(results.run | {"gpu": "H200"}, results.rows)])[decoding.NAME]
    assert f"| of | tilekern | {INVARIANT}-graph | hf | source | data |" in text


def test_bits_are_equal_inside_the_mode_alone(tiny, monkeypatch, run):
    """By the interpreter, whose default kernels are of one class at all sizes of this model."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    results = run("--parts", "bits", "--context", "4", "--batch", "2")
    dispatch.forget()
    ways = ("a training step of one sequence", "a prompt", "a prompt in chunks of 2", "one by one from the first token")
    cases = [f"tiny, 2 layers, logits, {way}" for way in (*ways, "one by one, batch 2")]
    assert results.cases() == cases
    assert [results.row(case, INVARIANT, "differing_logits").value for case in cases] == [0] * 5
    assert all(results.row(case, "tilekern", "differing_logits").value for case in cases[1:])
    assert [results.row(case, INVARIANT, "logits").value for case in cases] == [4 * 61] * 4 + [2 * 3 * 61]
    text = decoding.page([Results(results.run | {"gpu": "H200"}, results.rows)])[decoding.NAME]
    assert f"| {cases[0]} | 244 | 0 |" in text


def test_what_a_process_leaves_is_kept_and_none_begins_without_time(monkeypatch):
    row = {"kind": "row", "row": asdict(Row("decode", "a case", "tilekern", "time", 1.0, "us"))}
    clock = iter([0.0, 1.0, 95.0, 390.0])
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    answers, limits, kept = iter([("not done after 240 s", [row]), ("", [])]), [], []

    class Limited(Standing):
        def done(self):
            limits.append(self.limit_s)
            return next(answers)

    monkeypatch.setattr(decode, "_start", lambda job: Limited(job, None))
    parts = ["products", "attention", "bits"]
    results = decode.measure(Job("qwen3-8b"), parts, list(WAYS), 299.0, kept.append, lambda _: None)
    assert limits == [240.0, 204.0]
    assert [one.metric for one in results.rows] == ["time"]
    notes = results.run["notes"]
    assert notes == ["products by tilekern: not done after 240 s", "bits by tilekern: no time was left"]
    assert len(kept) == 2


def test_where_nothing_is_measured_that_is_an_error():
    with pytest.raises(InputError, match="nothing was measured"):
        decode.measure(Job("qwen3-8b"), ["prompt"], [WAY_OF_STEPS], 1e9, lambda _: None, lambda _: None)


def test_every_way_has_a_part_and_every_job_survives_its_way_to_the_process():
    assert set(WAYS) == {way for ways in PARTS.values() for way in ways}
    job = Job("qwen3-8b", "bits", "tilekern")
    assert asdict(Job(**json.loads(json.dumps(asdict(job))))) == asdict(job) | {
        "batches": [1, 8, 64], "contexts": [1024, 4096, 32768],
    }  # fmt: skip
    assert job.label == "qwen3-8b, 4 layers,"
