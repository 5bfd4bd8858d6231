"""Training benchmarks: a tiny model on the CPU from the command line to the table, and what becomes of its lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmark_samples import RUN, Standing, answering

from benchmarks import train
from benchmarks.__main__ import main
from benchmarks.results import Results, Row, read_results
from benchmarks.trainers import TRAINERS, USUAL, full_name, trainer_named
from benchmarks.training import Job, begin
from tilekern.errors import InputError

pytestmark = pytest.mark.processes

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# A training that never ends, and says which processes it has.
STUCK = """
import sys, time
from benchmarks import train
from benchmarks.__main__ import main

def wait(process):
    print("waiting", flush=True)
    time.sleep(600)

def start(job):
    process = train.Process([sys.executable, "-c", "import time; time.sleep(600)"], {}, 600)
    print(process.child.pid, flush=True)
    return process

train._start, train.Process.wait_until_ready = start, wait
sys.exit(main(["train", sys.argv[1], "--out", sys.argv[1], "--device", "cpu", "--providers", "tilekern,hf-sdpa-flash"]))
"""
JOB = Job("", "qwen3-8b", 0, (2048, 4096, 8192), (5, 5, 3))


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 128, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sigterm_as_timeout_sends_it_leaves_no_process(tiny):
    """They would hold the GPU's memory, and the next run's figures would be theirs, too."""
    command = [sys.executable, "-c", STUCK, str(tiny)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=train.ROOT, **pipes) as process:
        children = [int(process.stdout.readline()) for _ in range(2)]
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert process.stderr.read().endswith("error: stopped by SIGTERM\n")
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.nightly
def test_a_tiny_model_is_trained_on_the_cpu_from_the_command_line(tiny, tmp_path, capsys):
    arguments = ["--device", "cpu", "--tokens", "12,1,8,12", "--steps", "2", "--turns", "2"]
    arguments += ["--providers", "tilekern,hf-sdpa-flash,tilekern"]
    assert main(["train", str(tiny), "--out", str(tmp_path), *arguments]) == 0
    results = read_results(tmp_path / "train.json")
    assert results.cases() == ["tiny 8 tokens", "tiny 12 tokens"]
    assert results.run["model"] == "tiny"
    assert len(results.rows) == len({(row.case, row.provider, row.metric) for row in results.rows})
    for case in results.cases():
        ours, peer = (results.row(case, name, "loss") for name in ("tilekern", "hf-sdpa-flash"))
        assert ours.value == pytest.approx(peer.value, rel=0.01)
        speed, step = (results.row(case, "tilekern", metric).value for metric in ("tokens_per_s", "step_s"))
        assert speed * step == pytest.approx(int(case.split(" ")[1]), rel=0.02)
        assert results.row(case, "tilekern", "peak_gib") is None
    notes = " ".join(results.run["notes"])
    assert "tilekern: patched rms_norm" in notes
    assert "quack left out" in notes
    assert "not measured" not in notes
    # One token has no label; that length is left out, and the others are kept.
    for name in ("tilekern", full_name("hf-sdpa-flash")):
        assert f"tiny 1 tokens: {name} left out, its loss is nan" in notes
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.nightly
def test_where_every_provider_fails_that_is_an_error_and_nothing_is_written(tiny, tmp_path, monkeypatch, capsys):
    out, broken = tmp_path / "out", tmp_path / "broken"
    broken.mkdir()
    (broken / "transformers.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(broken), prepend=os.pathsep)
    arguments = ["--device", "cpu", "--tokens", "8", "--providers", "tilekern,hf-sdpa-flash"]
    assert main(["train", str(tiny), "--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: nothing was measured, and nothing is written: tilekern: ended with ")
    assert error.count("ImportError: a broken installation; not measured: 8") == 2
    assert not out.exists()


def test_the_longest_of_several_lengths_gets_fewer_steps():
    assert train.timed_steps([2048, 4096, 16384], 5) == (5, 5, 3)
    assert train.timed_steps([8192], 5) == (5,)
    assert train.timed_steps([1, 2], 2) == (2, 2)


def test_a_job_survives_its_way_to_the_process():
    assert Job.read(JOB.written()) == JOB


def length(tokens, seconds=1.0, **more):
    return {"kind": "length", "tokens": tokens, "warm_up": [3.0, 1.25], "timed": [seconds] * 3, "loss": 12.0} | more


def test_rows_of_a_length():
    line = length(2048, 0.5, peak_bytes=3 << 30, reserved_bytes=4 << 30)
    found = {row.metric: (row.value, row.unit) for row in train.rows_of(line, "tilekern", JOB)}
    assert found == {
        "tokens_per_s": (4096.0, "tok/s"), "step_s": (0.5, "s"), "first_step_s": (3.0, "s"),
        "first_step_lag_s": (1.75, "s"), "peak_gib": (3.0, "GiB"), "reserved_gib": (4.0, "GiB"), "loss": (12.0, "nat"),
    }  # fmt: skip
    rows = train.rows_of(line | {"kernels": ["swiglu_forward"]}, "tilekern", JOB)
    assert all(list(row.sources) == ["swiglu_forward"] for row in rows)
    job = Job("", "qwen3-8b", 2, (32768,), (5,), checkpointing="full")
    assert train.label(job, 32768) == "qwen3-8b 32768 tokens, 2 layers, checkpointing"
    job = replace(job, checkpointing="attention")
    assert train.label(job, 32768) == "qwen3-8b 32768 tokens, 2 layers, checkpointing, attention kept"
    assert train.label(Job("", "gpt2", 0, (8192,), (5,), sequence=1024), 8192) == "gpt2 8 x 1024 tokens"


def run_with(monkeypatch, *answers):
    """The lines and notes of a provider whose processes answer so, one after the other, and the lengths of each."""
    jobs, notes = answering(monkeypatch, train, *answers), []
    with contextlib.ExitStack() as held:
        lines, _ = train._first_turn(JOB, notes, train._start(JOB), held)
    return lines, [job.tokens for job in jobs], notes


def test_adapters_train_alone(tiny):
    job = replace(JOB, provider="hf-sdpa", model=str(tiny), tokens=(8,), timed=(1,), device="cpu", lora=4)
    assert train.label(job, 8) == "tiny 8 tokens, LoRA of rank 4"
    loop = begin(job)
    before = {name: x.clone() for name, x in loop.model.named_parameters()}
    for _ in range(2):
        loop.step(loop.tokens(8, 0))
    changed = {name for name, x in loop.model.named_parameters() if not torch.equal(x, before[name])}
    assert len(changed) == 2 * 7 * 2
    assert all("lora_" in name for name in changed)
    assert {x.dtype for x in loop.model.parameters()} == {torch.bfloat16}


def test_weights_of_float32_train_under_autocast(tiny):
    job = replace(JOB, provider="hf-sdpa", model=str(tiny), tokens=(8,), timed=(1,), device="cpu", autocast=True)
    assert train.label(job, 8) == "tiny 8 tokens, float32 weights under autocast"
    loop = begin(job)
    seen = set()
    loop.model.model.layers[0].mlp.register_forward_hook(lambda _, given, y: seen.update((given[0].dtype, y.dtype)))
    loop.step(loop.tokens(8, 0))
    assert seen == {torch.float32, torch.bfloat16}
    assert {x.dtype for x in loop.model.parameters()} == {torch.float32}


def test_torchao_converts_the_layers_of_the_decoder_before_they_are_compiled(tiny, monkeypatch):
    class Rounded(torch.nn.Linear):
        recipe = ""

    def convert(layer, *, module_filter_fn, config):
        assert layer._compiled_call_impl is None
        for name, linear in layer.named_modules():
            if isinstance(linear, torch.nn.Linear) and module_filter_fn(linear, name):
                linear.__class__, linear.recipe = Rounded, config
        return layer

    recipes = SimpleNamespace(from_recipe_name=lambda name: name)
    module = SimpleNamespace(Float8LinearConfig=recipes, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    path = tiny / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 100}))
    for recipe in ("rowwise", "tensorwise"):
        job = replace(JOB, provider=f"torchao-fp8-{recipe}", model=str(tiny), device="cpu")
        model = begin(job).model
        rounded = {name: layer.recipe for name, layer in model.named_modules() if isinstance(layer, Rounded)}
        names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
        assert rounded == dict.fromkeys(names, recipe), "products of 100 columns and the head stay as they are"
        assert all(layer._compiled_call_impl for layer in model.model.layers)


def test_a_length_that_does_not_fit_is_tried_once_more_in_a_fresh_process(monkeypatch):
    full = {"kind": "out_of_memory", "tokens": 8192}
    answers = [("", [length(2048), length(4096), full]), ("", [length(8192)])]
    lines, jobs, notes = run_with(monkeypatch, *answers)
    assert [line["tokens"] for line in lines if line["kind"] == "length"] == [2048, 4096, 8192]
    assert (jobs, notes) == ([(2048, 4096, 8192), (8192,)], [])
    lines, jobs, notes = run_with(monkeypatch, answers[0], ("", [full]))
    assert len(jobs) == 2
    assert notes == ["qwen3-8b 8192 tokens:  is out of memory, so longer ones were not tried"]


def test_a_process_that_ends_early_leaves_its_lines_and_a_note(monkeypatch):
    lines, jobs, notes = run_with(monkeypatch, ("not done after 150 s", [length(2048)]))
    assert len(lines) == len(jobs) == 1
    assert notes == [": not done after 150 s; not measured: 4096, 8192"]


def troubles(code, limit_s):
    return train.Process([sys.executable, "-c", code], dict(os.environ), limit_s).done()[0]


def test_a_process_is_ended_with_all_its_children_when_its_time_is_up():
    assert "not done after 0.5 s" in troubles("import time; time.sleep(60)", 0.5)
    assert troubles("pass", 60) == ""
    assert troubles("raise ValueError('no such thing')", 60) == "ended with ValueError: no such thing"


def test_a_process_waits_for_its_turn_and_ends_with_whoever_started_it(tmp_path):
    code = "import sys; sys.stdin.readline() and open(sys.argv[1], 'a').write('{}\\n')"
    waiting, taken = (train.Process([sys.executable, "-c", code], dict(os.environ), 60) for _ in range(2))
    assert taken.done() == ("", [{}])
    assert waiting.child.poll() is None
    waiting.end()
    assert waiting.child.poll() is not None
    assert not waiting.kept.exists()


def test_a_process_takes_turns_until_it_ends():
    code = "import sys; from benchmarks.training import has_a_turn\n"
    code += "for n in range(2): has_a_turn(sys.argv[1]); open(sys.argv[1], 'a').write(f'{n}\\n')"
    process = train.Process([sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(train.ROOT)}, 60)
    # Also where nobody waits until it is ready.
    assert process.turn() == ("", [0])
    assert process.is_waiting()
    assert process.turn() == ("", [1])
    assert not process.is_waiting()
    process.end()


def test_later_turns_go_back_and_forth_and_add_their_times(monkeypatch):
    """So a host that is slow for a while is slow for all."""
    asked, seconds = [], {"tilekern": iter([1.0, 5.0, 2.0]), "hf-sdpa": iter([4.0, 4.0, 4.0])}

    class Steady(Standing):
        def __init__(self, job):
            self.job = job

        def is_waiting(self):
            return True

        def turn(self):
            asked.append(self.job.provider)
            took = next(seconds[self.job.provider])
            more = {"kind": "again", "tokens": 2048, "timed": [took], "host": [took / 2]}
            return "", [more if asked.count(self.job.provider) > 1 else length(2048) | more | {"kind": "length"}]

    monkeypatch.setattr(train, "_start", Steady)
    jobs = [replace(JOB, provider=name, tokens=(2048,), timed=(1,), turns=3) for name in seconds]
    kept = []
    figures, _ = train.measure_jobs(
        jobs, dict(RUN, notes=[]), "train", lambda found, _: kept.append(len(found.rows)), print
    )
    assert asked == ["tilekern", "hf-sdpa", "hf-sdpa", "tilekern", "tilekern", "hf-sdpa"]
    row = figures.row("qwen3-8b 2048 tokens", "tilekern", "step_s")
    assert (row.value, row.spread) == (2.0, 1.0), "the median of all turns, and half the distance of its quartiles"
    assert figures.row("qwen3-8b 2048 tokens", "tilekern", "host_s").value == 1.0
    assert len(kept) == 4


def test_nobody_has_a_turn_while_another_gets_ready(monkeypatch):
    monkeypatch.setattr(train, "READY_TOGETHER", 2)
    live, ready = set(), set()

    class Watched(Standing):
        def __init__(self, job):
            self.job = job
            live.add(job)

        def wait_until_ready(self):
            ready.add(self.job)

        def end(self):
            live.discard(self.job)

    done = []
    with train.in_turns(["a", "b", "c"], Watched) as started:
        for job, process in started:
            done.append((job, set(live), set(ready)))
            process.end()
    assert done == [("a", {"a", "b"}, {"a", "b"}), ("b", {"b"}, {"a", "b"}), ("c", {"c"}, {"a", "b", "c"})]
    with train.in_turns(["a", "b", "c"], Watched) as started:
        next(started)
        assert live == {"a", "b"}
    assert not live, "a run that ends early leaves no process behind"


def test_a_process_is_ready_when_it_says_so_or_has_ended():
    code = "import json, sys; from benchmarks.training import has_a_turn; has_a_turn(sys.argv[1]); 1 / 0"
    command = [sys.executable, "-c", code]
    process = train.Process(command, os.environ | {"PYTHONPATH": str(train.ROOT)}, 60)
    process.wait_until_ready()
    assert process.child.poll() is None
    trouble, lines = process.done()
    assert "ZeroDivisionError" in trouble
    assert lines == [], "that it is ready is no result"
    ended = train.Process([sys.executable, "-c", "pass"], dict(os.environ), 60)
    ended.wait_until_ready()
    assert ended.child.poll() == 0
    ended.end()


def test_a_loss_that_only_one_has_is_noted():
    rows = [Row("train", "a", name, "loss", value, "nat") for name, value in (("x", 12.0), ("y", 12.1), ("z", 3.0))]
    notes = list(train.odd_losses(Results(RUN, rows)))
    assert len(notes) == 1
    assert "z has a loss of 3 where the median is 12" in notes[0]


def test_profile_rows_add_the_floor():
    parts = {"matmul": 600.0, "attention forward": 50.0, "attention backward": 100.0, "optimizer": 30.0, "idle": 20.0}
    lines = [
        length(8192),
        {"kind": "profile", "tokens": 8192, "parts_ms": parts | {"total": 800.0}},
        {"kind": "floor", "tokens": 8192, "matmuls_ms": 460.0},
    ]
    found = {row.metric: row.value for row in train.profile_rows(lines, "tilekern", JOB)}
    assert (found["matmul ms"], found["matmul share"], found["total ms"]) == (600.0, 0.75, 800.0)
    assert (found["matmuls alone ms"], found["floor ms"], found["floor tokens_per_s"]) == (460.0, 640.0, 12800.0)


def test_trainers_have_names_and_limits():
    assert set(USUAL) < set(TRAINERS)
    assert full_name("tilekern") == "tilekern"
    assert full_name("hf-sdpa-cudnn").startswith("hf-sdpa-cudnn 5.")
    with pytest.raises(InputError, match="nobody"):
        trainer_named("nobody")
