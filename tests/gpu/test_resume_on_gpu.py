"""On the GPU: a measure stage that is killed goes on, and old winners are timed again after an upgrade."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from gpu_processes import clean_environment

from tilekern.cache import Store
from tilekern.compile.toolchain import toolkit
from tilekern.tuning.sweep.folder import Sweep

KILLS = 5
OLD = {"key": "tileiras-13.1.1-cuda_tile-1.5.0", "tileiras": "13.1.1", "cuda_tile": "1.5.0"}
pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """The tuner in a process group of its own, with the folder's cache."""
    env = clean_environment()
    command = [sys.executable, "-m", "tilekern.tune", *arguments, "--cache-dir", str(folder / "cache"), "--json"]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(run: subprocess.Popen) -> dict:
    output, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors
    return json.loads(output)


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder with a sweep whose measure stage was killed some times and then came to its end."""
    folder = tmp_path_factory.mktemp("killed")
    sweep, chance = folder / "sweep", random.Random(3)
    finish(start(folder, "qwen3-0.6b", "--ops", "rope", "--tokens", "2048", "--stages", "plan,compile",
                 "--sweep", str(sweep)))  # fmt: skip
    journal = sweep / "measured.jsonl"
    for _ in range(KILLS):
        run = start(folder, "--stages", "measure", "--sweep", str(sweep))
        before, wanted = lines(journal), chance.randint(1, 12)
        while lines(journal) < before + wanted and run.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
    finish(start(folder, "--stages", "measure", "--sweep", str(sweep)))
    return folder


def test_a_kill_costs_the_candidate_in_flight_alone(killed: Path):
    sweep = Sweep(killed / "sweep")
    text = (sweep.folder / "measured.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in text if line.endswith("}")]
    # A winner is checked a second time, on adversarial inputs.
    checks = Counter((line["candidate"], "cases" in line["check"]) for line in found if "race" not in line)
    assert checks.most_common(1)[0][1] == 1
    assert {line["problem"] for line in sweep.races().values()} == {problem.key for _, problem in sweep.problems()}
    assert sweep.quarantined() == {}
    assert [run["ended"] for run in sweep.runs() if run["stage"] == "measure"].count(False) >= 1
    records = [entry.record for entry in Store(killed / "cache").entries()]
    assert len(records) == len(sweep.problems())
    assert {record.provenance for record in records} == {"measured"}


def test_an_older_toolkit_s_winners_are_timed_again(killed: Path, tmp_path: Path):
    store, old = Store(tmp_path / "cache"), {}
    for entry in Store(killed / "cache").entries():
        blobs = {digest: Store(killed / "cache").read_blob(digest) for digest in entry.record.digests}
        old[entry.address.problem_key] = entry.record
        store.write(msgspec.structs.replace(entry.record, toolkit=OLD), blobs)
    said = finish(start(tmp_path, "refresh"))
    assert len(said["changes"]) == len(old)
    for change in said["changes"]:
        assert change["before"]["toolkit"] == OLD["key"]
        assert change["after"]["toolkit"] == toolkit().key
        # The same compiler on the same GPU: the old winner is as fast as it was, and what beats it does so by little.
        assert change["same_config_us"] == pytest.approx(change["before"]["median_us"], rel=0.15)
        assert change["after"]["median_us"] <= 1.02 * change["same_config_us"]
    keys = sorted(entry.record.toolkit["key"] for entry in store.entries())
    assert keys == sorted([OLD["key"], toolkit().key] * len(old))
    assert finish(start(tmp_path, "refresh"))["changes"] == []
