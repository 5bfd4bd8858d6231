"""The cache under many processes, kills and failing calls; for long in the profile ``thorough``."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from examples import profile, stressed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT / "tests" / "cache", ROOT)))}


def scenes_of(program):
    names = re.findall(r"^def (\w+)", (HERE / program).read_text(), re.MULTILINE)
    return [name for name in names if name.startswith(("a_", "an_", "no_"))]


needs_layer = pytest.mark.skipif(faults.why_not() is not None, reason=faults.why_not() or "")


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """Return the environment of a process that runs on top of the fault layer."""
    return {**ENVIRONMENT, **faults.build(tmp_path_factory.mktemp("layer"))}


def said(environment, *command, before=()):
    command = [*before, sys.executable, *map(str, command)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


def judged(found):
    assert found["faults"] == []
    return found["counts"]


def may_mount():
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a disk of our own takes the right to mount one")
@pytest.mark.parametrize("scene", scenes_of("cache_disks.py"))
@pytest.mark.processes
def test_disk(tmp_path, scene):
    said(ENVIRONMENT, HERE / "cache_disks.py", scene, tmp_path, before=["unshare", "--mount"])


@needs_layer
@pytest.mark.parametrize("scene", scenes_of("cache_faulty.py"))
@pytest.mark.processes
def test_scene(layer, tmp_path, scene):
    said(layer, HERE / "cache_faulty.py", scene, tmp_path)


@pytest.mark.stress
def test_many_processes_tune_read_prune_and_clear_one_cache(tmp_path):
    counts = judged(said(ENVIRONMENT, HERE / "load.py", tmp_path, stressed(30, 2), 64 if profile == "thorough" else 24))
    assert min(counts[what] for what in ("hits", "misses", "records written", "records removed", "blobs removed")) > 0


@pytest.mark.stress
@pytest.mark.nightly
@needs_layer
def test_locks_that_are_always_granted_change_nothing(layer, tmp_path):
    """The cache relies on none: a network file system may grant one lock to two nodes."""
    assert judged(said(layer, HERE / "load.py", tmp_path, 3, 32))["hits"] > 0


@pytest.mark.stress
@needs_layer
def test_killed_processes_leave_only_whole_records_and_lose_none(layer, tmp_path):
    kills = stressed(500)
    counts = judged(said(layer, HERE / "kills.py", tmp_path, kills))
    assert sum(count for what, count in counts.items() if what.startswith("killed in")) == kills
    assert counts["records seen whole"] > kills


@pytest.mark.stress
@needs_layer
def test_what_a_disk_that_does_not_sync_tears_is_never_taken_for_a_record(layer, tmp_path):
    """And the kills do tear: there is less to be seen than on a disk that syncs."""
    torn, sound = (
        judged(said(layer, HERE / "kills.py", tmp_path / kind, stressed(300, 12), kind))["records seen whole"]
        for kind in ("lying-sync", "sync")
    )
    assert torn < sound


@pytest.mark.stress
@needs_layer
def test_every_call_may_fail_with_every_error(layer, tmp_path):
    """All of them in ``thorough``; elsewhere one in 499."""
    counts = judged(said(layer, HERE / "errors.py", tmp_path, 1 if profile == "thorough" else 499))
    assert min(counts["survived"], counts["CacheError"]) > 3
