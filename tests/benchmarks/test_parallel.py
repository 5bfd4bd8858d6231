"""Models that several processes share in training: a tiny one on the CPU, and what becomes of the figures."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import parallel, sharing
from benchmarks.environment import facts
from benchmarks.models import make_model
from benchmarks.results import Results, Row
from benchmarks.train import label, measure_jobs
from benchmarks.trainers import TRAINERS
from benchmarks.training import Job, Loop, prepare, run, train

SIZES = {
    "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "qwen3_moe", **SIZES}))
    return Job("hf-sdpa", str(path), 0, (32,), (1,), 1, "cpu", sequence=16)


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def losses_of(job):
    prepare(job)
    return [line["loss"] for line in run(job) if line["kind"] == "length"]


@pytest.mark.processes
@pytest.mark.nightly
def test_two_processes_share_tensors_and_experts_and_have_the_loss_of_one(tiny):
    job = Job(**vars(tiny) | {"provider": "tilekern", "way": "ep", "ranks": 2})
    results = measure_jobs([job], facts(), "parallel", lambda *_: None, lambda _: None)[0]
    case = "tiny 2 x 16 tokens, tensor and expert parallel on 2 GPUs"
    assert results.cases() == [case], results.run["notes"]
    assert results.row(case, "tilekern", "loss").value == pytest.approx(losses_of(tiny)[0], rel=0.01)
    assert results.row(case, "tilekern", "tokens_per_s").value > 0


@pytest.mark.processes
@pytest.mark.nightly
def test_two_processes_share_sequences_and_have_the_loss_of_one(tiny):
    job = Job(**vars(tiny) | {"provider": "tilekern", "way": "cp", "ranks": 2})
    results = measure_jobs([job], facts(), "parallel", lambda *_: None, lambda _: None)[0]
    case = "tiny 2 x 16 tokens, context parallel and FSDP2 on 2 GPUs"
    assert results.cases() == [case], results.run["notes"]
    assert results.row(case, "tilekern", "loss").value == pytest.approx(losses_of(tiny)[0], rel=0.01)


@pytest.mark.usefixtures("alone")
def test_layers_that_fsdp_shards_train_as_they_are(tiny):
    expected, (tokens,) = losses_of(tiny), tiny.tokens
    trainer, config = TRAINERS[tiny.provider], parallel.config_named(tiny.model)[1]
    model = sharing.shared(make_model(config, device="cpu"), "fsdp", 1, "cpu")
    loop = Loop(trainer, model, trainer.optimizer(model, 1e-5), "cpu")
    assert all(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    assert train(loop, loop.tokens(tokens, tiny.sequence), 1, 1)["loss"] == pytest.approx(expected[0], rel=0.01)


def test_each_rank_of_fsdp_has_its_own_sequences(tiny, monkeypatch):
    model = make_model(parallel.config_named(tiny.model)[1], device="meta")
    whole = Loop(None, model, None, "cpu").tokens(32, 16)
    monkeypatch.setenv("RANK", "1")
    assert torch.equal(Loop(None, model, None, "cpu").tokens(32, 16), whole)
    assert torch.equal(Loop(None, model, None, "cpu", 2).tokens(32, 16), whole[1:])


def test_each_figure_is_beside_that_of_one_gpu(tiny):
    ways = [tiny, *(Job(**vars(tiny) | {"way": way, "ranks": 2}) for way in ("fsdp", "tp"))]
    figures = ((10.0, 4.0), (18.0, 4.01), (12.0, 5.0))
    results = Results({"notes": []})
    for job, (rate, loss) in zip(ways, figures, strict=True):
        case = label(job, 32)
        results.rows.append(Row("parallel", case, "hf-sdpa 5", "tokens_per_s", rate, "tok/s", 0.5))
        results.rows.append(Row("parallel", case, "hf-sdpa 5", "loss", loss, "nat"))
    found = {(row.case, row.metric): row.value for row in parallel.beside_one(results, ways)}
    two, three = (label(job, 32) for job in ways[1:])
    assert found == {
        (two, "loss_on_one"): 4.0, (two, "speedup"): 1.8, (three, "loss_on_one"): 4.0, (three, "speedup"): 1.2,
    }  # fmt: skip
    assert results.run["notes"] == [f"{three}: hf-sdpa has a loss of 5, and of 4 on one"]


def test_experts_are_shared_where_a_model_has_some():
    assert parallel._possible("qwen3-8b", ["fsdp", "tp", "ep"]) == ["fsdp", "tp"]
    assert parallel._possible("qwen3-30b-a3b", ["fsdp", "ep"]) == ["fsdp", "ep"]
