"""The cache under many processes, kills and failing calls; for long in the profile ``thorough``."""

import ast
import json
import os
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
SCENES = [
    node.name for node in ast.parse((HERE / "cache_faulty.py").read_text()).body if isinstance(node, ast.FunctionDef)
]
needs_layer = pytest.mark.skipif(faults.why_not() is not None, reason=faults.why_not() or "")


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """What the environment of a process holds that runs on top of the fault layer."""
    return {**ENVIRONMENT, **faults.build(tmp_path_factory.mktemp("layer"))}


def said(environment, *command):
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
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
@pytest.mark.parametrize("scene", ["a_disk_that_fills_up", "a_disk_that_becomes_read_only"])
def test_disk(tmp_path, scene):
    command = ["unshare", "--mount", sys.executable, HERE / "cache_disks.py", scene, tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_layer
@pytest.mark.parametrize("scene", SCENES)
def test_scene(layer, tmp_path, scene):
    said(layer, HERE / "cache_faulty.py", scene, tmp_path)


@pytest.mark.stress
def test_64_processes_tune_read_prune_and_clear_one_cache(tmp_path):
    counts = judged(said(ENVIRONMENT, HERE / "load.py", tmp_path, stressed(30, 3), 64))
    assert min(counts[what] for what in ("hits", "misses", "records written", "records removed", "blobs removed")) > 0


@pytest.mark.stress
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
        judged(said(layer, HERE / "kills.py", tmp_path / kind, stressed(300, 30), kind))["records seen whole"]
        for kind in ("lying-sync", "sync")
    )
    assert torn < sound


@pytest.mark.stress
@needs_layer
def test_every_call_may_fail_with_every_error(layer, tmp_path):
    """All of them in ``thorough``; elsewhere each of so many."""
    counts = judged(said(layer, HERE / "errors.py", tmp_path, 1 if profile == "thorough" else 83))
    assert min(counts["survived"], counts["CacheError"]) > 30
