"""Two GPUs of one host measure a sweep in little more than half of one GPU's time."""

import os
import sys

import pytest
import torch

from benchmarks.several_gpus import measure
from tilekern.compile.toolchain import toolkit
from tilekern.tuning.measure.gpu import devices
from tilekern.tuning.sweep.folder import Sweep

# Large enough that the start of the workers, which two GPUs do not halve, is a small part of one GPU's time.
TOKENS = "2048,4096,8192,16384,32768"
MOST = 0.6
pytestmark = [
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
    pytest.mark.skipif(torch.cuda.is_available() and len(devices()) < 2, reason="there are not two GPUs alike here"),
]


def raced(sweep: Sweep) -> set[tuple[str, str]]:
    return {(race["kernel"], race["problem"]) for race in sweep.races().values()}


def test_two_gpus_take_little_more_than_half_the_time_of_one(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("TILEKERN_")]:
        monkeypatch.delenv(name)
    results = measure("qwen3-8b", TOKENS, tmp_path)
    found = {row.metric: row.value for row in results.rows}
    sys.stdout.write(f"{found}\n")
    sweeps = [Sweep(tmp_path / name) for name in ("1", "2")]
    named = {(kernel, problem.key) for kernel, problem in sweeps[0].problems()}
    assert raced(sweeps[0]) == raced(sweeps[1]) == named
    timed = [{key for key, line in sweep.measured().items() if "check" in line} for sweep in sweeps]
    assert timed[0] == timed[1]
    assert found["share_of_one"] <= MOST
