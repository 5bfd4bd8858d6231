"""The cost model on facts of real cubins and on times that an H200 measured."""

import gzip
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_samples import SMALL

from tilekern.cubin import Resources
from tilekern.spec import Config, Problem
from tilekern.targets import KNOWN, resolve
from tuning.predicting import predict, predict_best, ranking, resident_blocks
from tuning.sweep import Candidate

RECORDED = Path(__file__).with_name("data") / "qwen3-8b-h200.json.gz"
LEAN = Resources(registers=32, stack_bytes=0, shared_bytes=0, threads=128, code_bytes=4096)


def recorded():
    """(problem's name, [(candidate, resources, measured us)]) of a sweep on an H200."""
    problems = defaultdict(list)
    for row in json.loads(gzip.decompress(RECORDED.read_bytes()))["rows"]:
        item = Candidate(row["kernel"], Problem(row["problem"]), Config(row["config"]), "aligned", "")
        facts = (item, Resources(**row["resources"]), row["median_us"])
        problems[f"{row['kernel']} {item.problem.key}"].append(facts)
    return problems


@pytest.mark.parametrize(
    ("resources", "blocks"),
    [
        (LEAN, 16),  # 2048 threads
        (replace(LEAN, registers=255), 2),  # 256 registers x 32 x 4 warps, of 65536
        (replace(LEAN, shared_bytes=100_000), 2),
        (replace(LEAN, threads=32), 32),
        (replace(LEAN, shared_bytes=300_000), 0),
    ],
)
def test_blocks_that_fit_on_an_sm_of_the_h200(resources, blocks):
    assert resident_blocks(resources, resolve("H200")) == blocks


def test_the_recorded_winners_regret():
    regrets = []
    target = resolve("H200")
    for rows in recorded().values():
        _, _, chosen = min(rows, key=lambda row: predict(row[0], row[1], target).rank)
        regrets.append(chosen / min(us for _, _, us in rows))
    assert len(regrets) >= 40
    assert statistics.median(regrets) <= 1.15
    assert statistics.quantiles(regrets, n=10)[-1] <= 1.30


def test_a_spilling_candidate_never_beats_one_that_does_not():
    target = resolve("B200")
    for rows in recorded().values():
        ranked = sorted(rows, key=lambda row: predict(row[0], row[1], target).rank)
        if any(resources.stack_bytes == 0 for _, resources, _ in rows):
            assert ranked[0][1].stack_bytes == 0


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_a_starved_candidate_ranks_last_on_every_target(target):
    item, resources, _ = next(iter(recorded().values()))[0]
    starved = predict(item, replace(resources, shared_bytes=300_000), target)
    assert starved.resident_blocks == 0
    assert starved.seconds == float("inf")
    assert predict(item, LEAN, target).rank < starved.rank


def test_predictions_are_times_that_the_gpu_could_reach():
    target = resolve("H200")
    for rows in recorded().values():
        for item, resources, _ in rows:
            seconds = predict(item, resources, target).seconds
            assert seconds * target.memory_gbs * 1e9 > 0.8 * item.spec.bytes_moved(item.problem)


def test_the_best_of_a_compiled_sweep(compiled_sweep, h200):
    ranked = ranking(compiled_sweep, *SMALL, h200)
    best = predict_best(compiled_sweep, *SMALL, h200)
    assert best == ranked[0][0]
    assert [p.rank for _, p in ranked] == sorted(p.rank for _, p in ranked)
    assert all(item.variant == "aligned" for item, _ in ranked)
