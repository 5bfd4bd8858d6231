"""The benchmark of the engine on the driver's stub: its figures, its peers on the CPU, and what is left out and why."""

import json

import pytest
from emulated import tensor_of

from benchmarks import inference, inference_parts
from benchmarks.inference import INT8, Job
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
