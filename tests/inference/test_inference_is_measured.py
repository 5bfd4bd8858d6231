"""The benchmark of the engine on the driver's stub: its figures, its peers on the CPU, and what is left out and why."""

import json

import pytest
from emulated import tensor_of

from benchmarks import first_logits, inference, inference_fresh, inference_kernels, inference_parts
from benchmarks.inference import INT8, Job
from benchmarks.inference_models import architecture_named, random_tensors, write_checkpoint
from benchmarks.results import Row

SIZES = {"n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": 256, "vocab_size": 97, "tie_word_embeddings": False}
LLAMA = {
    "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
    "vocab_size": 97, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(params=["gpt2", "qwen3"])
def tiny(request, tmp_path):
    folder = tmp_path / f"tiny-{request.param}"
    folder.mkdir()
    fields = LLAMA if request.param == "qwen3" else {"model_type": "gpt2", **SIZES}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.fixture(autouse=True)
def on_the_stub(gpu, monkeypatch):
    """The stub's memory is the host's."""
    monkeypatch.setattr(inference_parts, "as_tensor", tensor_of)


def rows_of(job):
    """A job's rows by provider without its version, case and metric; and its notes."""
    found = list(inference.run(job))
    rows = {(x.provider.split(" ")[0], x.case.split(" ", 1)[1], x.metric): x for x in found if isinstance(x, Row)}
    return rows, [x for x in found if isinstance(x, str)]


def test_whole_sequences_by_the_engine_and_its_peers(tiny):
    ways = ("tilekern", INT8, "torch", "torch-graph", "mingpt")
    job = Job(tiny, "forward", ways, ("2x7",), samples=8, seconds=0.1, device="cpu", dtype="float32")
    rows, notes = rows_of(job)
    for who in ways[: 5 if "gpt2" in tiny else 4]:
        times = [
            rows[who, "forward, 2 x 7", f"forward_ms{more}"].value for more in ("_min", "", "_p95", "_p99", "_max")
        ]
        assert times == sorted(times)
        assert times[0] > 0
    assert rows["tilekern", "forward, 2 x 7", "logits_distance"].value < 1e-5
    assert 1e-4 < rows[INT8, "forward, 2 x 7", "logits_distance"].value < 0.1
    left_out = [note for note in notes if "left out" in note]
    assert len(left_out) == (0 if "gpt2" in tiny else 1), left_out


def test_generated_tokens_by_the_engine_and_its_peers(tiny, monkeypatch):
    monkeypatch.setattr(inference_parts, "GENERATED", 6)
    monkeypatch.setattr(inference_parts, "STEPS", 8)
    monkeypatch.setattr(inference_parts, "COMPARED", (2, 5))
    ways = ("tilekern", INT8, "torch-graph", "hf-compiled")
    job = Job(tiny, "decode", ways, (), (2,), (40, 20, 300), seconds=0.1, device="cpu", dtype="float32")
    rows, notes = rows_of(job)
    case = "decode, batch 2, context 40"
    for who in ("tilekern", INT8, "hf-compiled"):
        assert rows[who, case, "token_ms_samples"].value == 5
        assert rows[who, case, "tokens_per_s"].value > 0
        assert rows[who, case, "first_token_ms"].value > 0
    for who in ("tilekern", INT8, *(["torch-graph"] if "gpt2" in tiny else [])):
        assert rows[who, case, "step_ms_samples"].value == 8
    assert rows["tilekern", "forward, 2 x 5", "logits_distance"].value < 1e-5
    left_out = [note for note in notes if "left out" in note]
    assert len([note for note in left_out if "the model has 256 positions" in note]) == len(ways)
    assert len([note for note in left_out if "a context must have more than 33 tokens" in note]) == len(ways)
    assert len(left_out) == 2 * len(ways) + ("qwen3" in tiny), left_out


def test_wrong_logits_are_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(inference_parts, "as_tensor", lambda array: 1.2 * tensor_of(array))
    job = Job(tiny, "forward", ("tilekern", "torch"), ("2x7",), samples=8, seconds=0.1, device="cpu", dtype="float32")
    rows, notes = rows_of(job)
    assert not [key for key in rows if key[0] == "tilekern"]
    assert ("torch", "forward, 2 x 7", "forward_ms") in rows
    assert "tilekern left out: ArithmeticError: wrong: its logits are 0.2 of their norm away" in " ".join(notes)


@pytest.mark.parametrize("what", ["logits", "token"])
def test_the_program_of_a_fresh_process_says_when_each_step_was_done(tiny, tmp_path, capsys, what):
    write_checkpoint(tmp_path, tiny, random_tensors(architecture_named(tiny), "bfloat16"))
    first_logits.main(str(tmp_path), "9", what, repr(first_logits._BEGUN - 0.5))
    found = json.loads(capsys.readouterr().out)
    assert list(found["seconds"]) == list(inference_fresh.STEPS)
    assert found["seconds"]["interpreter"] == pytest.approx(0.5)
    assert found["seconds"]["first"] > 0


def test_fresh_processes(tiny, monkeypatch):
    """Medians are of all processes but the first, which compiles; the artifacts of both kinds are summed once."""
    started = []

    def process(folder, what):
        started.append(what)
        first = 9.0 if started.count(what) == 1 else 0.1
        seconds = dict.fromkeys(inference_fresh.STEPS, 0.02) | {"load": 5.0, "first": first}
        return {"seconds": seconds, "artifacts": {"a": 1000, what: 2000}, "kernels": ["matmul"], "imported": []}

    monkeypatch.setattr(inference_fresh, "_process", process)
    monkeypatch.setattr(inference_fresh, "_said", lambda _: "2.5")
    rows, notes = rows_of(Job(tiny, "start", ("tilekern", "torch")))
    assert not [note for note in notes if "left out" in note]
    for what in ("logits", "token"):
        assert rows["tilekern", f"start, first {what}", "without_load_s"].value == pytest.approx(0.16)
        assert rows["tilekern", f"start, first {what}", "load_s"].value == 5
        assert list(rows["tilekern", f"start, first {what}", "first_s"].sources) == ["matmul"]
    assert rows["torch", "start, import alone", "import_s"].value == 2.5
    assert rows["tilekern", "installed", "artifacts_mb"].value == 0.005
    parts = [rows["tilekern", "installed", f"{name}_mb"].value for name in ("tilekern", "dependencies", "artifacts")]
    assert rows["tilekern", "installed", "all_mb"].value == pytest.approx(sum(parts), abs=1e-3)
    assert 2 < parts[0] < 10
    assert 2 < parts[1] < 10


def test_a_fresh_process_that_imports_torch_or_fails_is_an_error(monkeypatch, tiny):
    said = json.dumps({"seconds": {}, "artifacts": {}, "kernels": [], "imported": ["torch"]})
    monkeypatch.setattr(inference_fresh, "_said", lambda _: said)
    with pytest.raises(ChildProcessError, match="has imported torch"):
        inference_fresh._process("nowhere", "logits")
    monkeypatch.undo()
    with pytest.raises(ChildProcessError, match="ValueError: no"):
        inference_fresh._said([inference_fresh.sys.executable, "-c", "raise ValueError('no')"])


def traced(launches, *, short=0):
    """Events of replays, as the profiler tells them: kernels of 2, 3, … us with gaps of 1 us, and a copy between."""
    events, now = [{"cat": "gpu_memcpy", "ts": 5, "dur": 1}], 10.0
    for _ in range(inference_kernels.REPLAYS):
        for number in range(len(launches) - short):
            events.append({"cat": "kernel", "name": f"k{number}", "ts": now, "dur": 2.0 + number})
            now += 3 + number
        now += 100
    return events[::-1]


def test_kernels_of_graphs_have_their_sizes_and_times(tiny, monkeypatch):
    real = inference_kernels.rows_of

    def noting(case, who, launches, events):
        return real(case, who, launches, traced(launches))

    monkeypatch.setattr(inference_kernels, "events_of", lambda run: run() or [])
    monkeypatch.setattr(inference_kernels, "rows_of", noting)
    rows, notes = rows_of(Job(tiny, "kernels", ("tilekern",), ("1x30",), (2,), (40,)))
    assert not [note for note in notes if "left out" in note]
    for graph in ("forward, 1 x 30", "decode, batch 2, context 40"):
        mine = {case.partition(", kernel ")[2]: metric for _, case, metric in rows if case.startswith(graph)}
        one = {case: row for (_, case, metric), row in rows.items() if case.startswith(graph) and metric == "step_us"}
        whole = one.pop(f"{graph}, kernel all kernels")
        assert whole.value == pytest.approx(sum(row.value for row in one.values()), abs=0.01)
        assert any(name.startswith("embedding: rows ") for name in mine)
        count = rows["tilekern", f"{graph}, kernel all kernels", "launches"].value
        assert rows["tilekern", f"{graph}, kernel all kernels", "gaps_us"].value == pytest.approx(count - 1)
        assert rows["tilekern", f"{graph}, kernel all kernels", "step_us"].value == 2 * count + sum(range(int(count)))
    of_a_step = [case for _, case, _ in rows if case.startswith("decode")]
    assert any("kernel advance: rows 2" in case for case in of_a_step)
    assert not any("kernel attention_forward" in case for case in of_a_step), "a prompt is no part of the graph"


def test_a_trace_with_other_kernels_is_refused():
    launches = [inference_kernels.Launch("matmul", "rows 1"), inference_kernels.Launch("advance", "rows 1")]
    with pytest.raises(RuntimeError, match="saw 10 kernels in 10 replays of 2 launches"):
        list(inference_kernels.rows_of("a case", "tilekern", launches, traced(launches, short=1)))
    with pytest.raises(RuntimeError, match="saw 0 kernels"):
        list(inference_kernels.rows_of("a case", "tilekern", [], []))
