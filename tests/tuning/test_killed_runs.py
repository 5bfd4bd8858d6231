"""The tuner's command line, killed with all its processes again and again, ends where an undisturbed run does."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from environments import environment, without_kept_cubins

from tilekern.cache import PackLayer
from tilekern.compile.toolchain import toolkit

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
KILLS = 3
KERNEL = "swiglu_forward"
PROBLEM = f"{KERNEL} rows=64,columns=48,dtype=bfloat16"
needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


class Run:
    """A run of the tuner in a process group of its own.

    Args:
        folder: where its sweep and its cache are.
        env: variables for it.
    """

    def __init__(self, folder: Path, **env: str) -> None:
        self.journal = folder / "sweep" / "compiled.jsonl"
        command = ["-m", "tilekern.tune", "--gpu", "H200", "--problem", PROBLEM, "--jobs", "2", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--sweep", str(folder / "sweep"), "--cache-dir", str(folder / "cache")],
            env=environment(TMPDIR=str(folder), **env),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def lines(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def kill_after(self, lines: int, seconds: float) -> None:
        """Kill the group some time after it has appended so many lines."""
        before, deadline = self.lines(), time.monotonic() + 120
        while self.lines() < before + lines and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(seconds)
        assert self.process.poll() is None, self.process.communicate()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def packed(folder: Path) -> dict:
    """The records of a run's pack without their times, by their problems, and the artifacts that they name."""
    layer = PackLayer(folder / "sweep" / "results.pack")
    [target] = layer.targets()
    [tools] = layer.toolkits(target)
    found = {}
    for problem in layer.problems(target, tools, KERNEL):
        record = layer.read_record(target, tools, KERNEL, problem)
        blobs = {artifact.sha256: layer.read_blob(artifact.sha256) for artifact in record.artifacts.values()}
        document = json.loads(record.to_json())
        del document["created"], document["sha256"]
        found[json.dumps(problem)] = (document, blobs)
    return found


@needs_compiler
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    chance = random.Random(7)
    for _ in range(KILLS):
        # Some before the first line, while the tuner starts, the others while it compiles.
        started = chance.random() < 0.2
        # A compiler that keeps nothing, so that it is at work when the run is killed.
        run = Run(killed, PATH=without_kept_cubins())
        run.kill_after(0 if started else chance.randint(1, 3), chance.uniform(0, 2.0 if started else 0.15))
        assert run.process.returncode == -signal.SIGKILL
    for folder in (killed, calm):
        run = Run(folder)
        output, errors = run.process.communicate(timeout=300)
        assert run.process.returncode == 0, errors
    keys = [json.loads(line)["key"] for line in run.journal.read_text().splitlines()]
    tried = (killed / "sweep" / "compiled.jsonl").read_text().splitlines()
    found = Counter(json.loads(line)["key"] for line in tried if line.endswith("}"))
    assert set(found) == set(keys)
    assert found.most_common(1)[0][1] == 1
    assert packed(killed) == packed(calm)
    assert len(packed(calm)) == len(json.loads(output)["problems"]) == 1
