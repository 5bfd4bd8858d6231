"""The benchmark of the engine: its command line, the order of its processes, statistics, and weights that all share."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from benchmark_samples import answering, is_one_line

from benchmarks import cli, inference
from benchmarks.__main__ import main
from benchmarks.inference import SMALL, USUAL, Job, jobs_of, parsed
from benchmarks.inference_models import (
    architecture_named,
    hf_of,
    mingpt_of,
    parameters_of,
    random_tensors,
    write_checkpoint,
)
from benchmarks.latency import Entrant, calls_of, race, rows_of
from benchmarks.mingpt import Decoding
from benchmarks.results import Row, read_results
from tilekern.errors import InputError
from tilekern.inference.checkpoints import open_checkpoint
from tilekern.inference.weights import sources_of

NANO = "mingpt-nano"


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(cli, "require_gpu", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "forward,backward"], ["unknown part 'backward'"]),
        (["--providers", "cupy"], ["unknown provider 'cupy'", "torch-graph"]),
        (["--shapes", "8by128"], ["SEQUENCESxTOKENS", "'8by128'"]),
        (["--shapes", "0x128"], ["'0x128'"]),
        (["--dtype", "int8"], ["unknown dtype 'int8'", "bfloat16"]),
        (["--batch", "0"], ["'0'"]),
        (["--providers", "mingpt", "--parts", "decode"], ["no provider of mingpt has a part of decode"]),
        (["gemma-3-1b"], ["model_type is 'gemma3_text'"]),
        (["no-such-model"], ["unknown model 'no-such-model'"]),
    ],
)
def test_arguments_that_are_refused(arguments, words, capsys, tmp_path, a_gpu):
    is_one_line(capsys, ["inference", "--out", str(tmp_path), *arguments], *words)


def test_compiled_peers_come_last_and_each_part_has_its_models():
    jobs = jobs_of(Job(""), [], inference.PARTS, USUAL)
    assert [job.model for job in jobs if job.part == "forward" and "tilekern" in job.ways] == ["gpt2", *SMALL]
    first = [job.ways in (("torch-compiled",), ("hf-compiled",)) for job in jobs].index(True)
    assert all("tilekern" in job.ways for job in jobs[:first])
    assert all("tilekern" not in job.ways for job in jobs[first:])
    assert [(job.model, job.sizes) for job in jobs[:2]] == [("gpt2", [(8, 128)]), (NANO, [(4, 64)])]
    both = next(job for job in jobs if job.model == "mingpt-tile-medium")
    assert both.sizes == [(4, 64), (8, 128)]


def test_shapes():
    assert parsed(" 8x128") == (8, 128)
    for wrong in ("8", "8x", "x8", "8x-1", "2x3x4"):
        with pytest.raises(InputError, match="a shape is SEQUENCESxTOKENS"):
            parsed(wrong)


def test_a_run_writes_its_rows_after_each_process_and_notes_what_failed(monkeypatch, tmp_path, a_gpu):
    row = Row("inference", "mingpt-nano forward, 4 x 64", "tilekern", "forward_ms", 0.1, "ms", 0.01)
    lines = [{"kind": "row", "row": asdict(row)}, {"kind": "note", "text": "mingpt left out: OSError: no"}]
    written, real = [], cli._write_some
    monkeypatch.setattr(
        cli, "_write_some", lambda results, *more: (written.append(len(results.rows)), real(results, *more))
    )
    jobs = answering(monkeypatch, inference, ("", lines), ("ended with exit code -11", []))
    assert main(["inference", NANO, "--parts", "forward", "--out", str(tmp_path)]) == 0
    assert [job.ways for job in jobs] == [("tilekern", "torch", "torch-graph", "mingpt"), ("torch-compiled",)]
    results = read_results(tmp_path / "inference.json")
    assert results.row("mingpt-nano forward, 4 x 64", "tilekern", "forward_ms") == row
    sizes = {row.metric: row.value for row in results.rows if row.case == "mingpt-nano sizes"}
    assert (sizes["layers"], sizes["width"], sizes["parameters"]) == (3, 48, 4_958_736)
    assert results.run["notes"] == [
        "mingpt left out: OSError: no", "mingpt-nano forward by torch-compiled: ended with exit code -11"
    ]  # fmt: skip


def test_nothing_is_written_where_nothing_was_measured(monkeypatch, tmp_path, capsys, a_gpu):
    answering(monkeypatch, inference, ("ended with exit code 1", []), ("", []))
    assert main(["inference", NANO, "--parts", "forward", "--out", str(tmp_path)]) == 2
    assert "nothing was measured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_statistics_of_times():
    times = [float(number) for number in range(1, 201)]
    rows = {row.metric: row for row in rows_of("inference", "a case", "tilekern", "token_ms", times[::-1])}
    assert {name: row.value for name, row in rows.items()} == {
        "token_ms": 100.5, "token_ms_min": 1, "token_ms_p95": 190, "token_ms_p99": 198, "token_ms_max": 200,
        "token_ms_samples": 200,
    }  # fmt: skip
    assert (rows["token_ms"].unit, rows["token_ms"].spread) == ("ms", 49.75)


def test_entrants_take_turns_and_each_call_has_its_time():
    clock, calls = [0.0], []

    def entrant(name, takes):
        def run():
            calls.append(name)
            clock[0] += takes

        return Entrant(run, lambda: clock[0], lambda first, last: last - first)

    times = race({"a": entrant("a", 1.0), "b": entrant("b", 2.5)}, 20, 60.0)
    assert times == {"a": [1.0] * 24, "b": [2.5] * 24}
    assert calls.count("a") == calls_of(20) == 45
    assert len(set(zip(calls[::9], calls[9::9], strict=False))) > 1


@pytest.mark.parametrize("model", [NANO, "gpt2", "qwen3-0.6b"])
def test_weights_are_a_checkpoint_s_without_a_file(model):
    of = architecture_named(model)
    tensors = random_tensors(of, "bfloat16")
    assert sources_of(of, tensors)
    assert sum(len(tensor.data) for tensor in tensors.values()) == 2 * parameters_of(of)
    ends = ("ln_1.weight", "c_proj.weight") if of.kind == "gpt2" else ("input_layernorm.weight", "o_proj.weight")
    chosen = [next(x.data for name, x in tensors.items() if name.endswith(end)) for end in ends]
    norm, weight = (torch.frombuffer(data, dtype=torch.bfloat16) for data in chosen)
    assert norm.float().mean() == pytest.approx(1, abs=0.1)
    assert weight.float().mean() == pytest.approx(0, abs=0.01)
    assert weight.float().std() == pytest.approx(0.02, rel=0.1)


def test_all_models_of_torch_have_the_same_weights():
    """minGPT with either attention, transformers' GPT-2, and minGPT one token after the other."""
    of = architecture_named(NANO)
    tensors, ids = random_tensors(of, "float32"), torch.randint(0, of.vocabulary, (2, 9))
    with torch.no_grad():
        model = mingpt_of(of, tensors, "cpu", "sdpa")
        wanted = mingpt_of(of, tensors, "cpu", "eager")(ids)
        assert torch.allclose(model(ids), wanted, atol=1e-5)
        assert torch.allclose(hf_of(NANO, of, tensors, "cpu")(input_ids=ids).logits, wanted, atol=1e-5)
        decoding = Decoding(model, 2, 16)
        for token in ids.T:
            decoding.ids.copy_(token[:, None])
            decoding.step()
        assert torch.equal(decoding.ids[:, 0], wanted[:, -1].argmax(-1))
        assert decoding.position == 9


def test_a_checkpoint_that_is_written_is_read(tmp_path):
    of = architecture_named(NANO)
    tensors = random_tensors(of, "bfloat16")
    write_checkpoint(tmp_path, NANO, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["model_type"] == "gpt2"
        assert {name: bytes(x.data) for name, x in checkpoint.tensors.items()} == {
            name: bytes(x.data) for name, x in tensors.items()
        }
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 48
