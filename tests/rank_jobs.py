"""Jobs of several ranks in processes of their own, and the caches that these read; nothing in them is launched."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import ROOT, environment
from msgspec.structs import replace
from one_record import H200, PROBLEM, SPEC

from tilekern import cache

PATIENCE_S = 300
DEFAULT, OTHER = SPEC.default(PROBLEM, H200), SPEC.generic(PROBLEM)


def record(compiled, columns=48, config=DEFAULT, **changes):
    """A record and its blobs, made of the one that was compiled; nothing of it is launched here."""
    layer = cache.FolderLayer(compiled, "compiled")
    [tools] = layer.toolkits(H200.key)
    made = layer.read_record(H200.key, tools, SPEC.name, dict(PROBLEM))
    made = replace(made, problem=dict(PROBLEM.but(columns=columns)), config=dict(config), **changes)
    return made, {digest: layer.read_blob(digest) for digest in made.digests}


def fill(root, compiled, *columns, config=DEFAULT, **changes):
    for each in columns:
        cache.Store(root).write(*record(compiled, each, config, **changes))
    root.mkdir(parents=True, exist_ok=True)
    return str(root)


def rank_environment(**more):
    return environment(ROOT, ROOT / "tests", OMP_NUM_THREADS="1", **more)


def start(tmp_path, code_or_file, count, *arguments, meet=None, modules="torch", **env):
    """A job whose ranks are processes of their own; all are forked from one that has imported ``modules``."""
    home = tempfile.mkdtemp(dir=tmp_path)
    command = [sys.executable, ROOT / "tests" / "rank_fork.py", home, count, modules, code_or_file]
    process = subprocess.Popen(
        [*map(str, command), meet or f"file://{tmp_path / 'meet'}", *map(str, arguments)],
        env=rank_environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    return process, Path(home)


def finish(job):
    """Return each rank's output, errors and exit code, in the order of ranks."""
    process, home = job
    try:
        codes, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        return [
            ((home / f"out.{rank}").read_text(), (home / f"err.{rank}").read_text(), code)
            for rank, code in enumerate(json.loads(codes))
        ]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def go_through(home, situations, ranks, timeout_s, meet=None):
    """The outcome of each situation by rank; one job goes through all of them."""
    path = home / "situations.json"
    path.write_text(json.dumps(situations))
    ended = finish(start(home, ROOT / "tests" / "runtime" / "rank_worker.py", ranks, timeout_s, path, meet=meet))
    lines = [[json.loads(line) for line in out.splitlines()] for out, _, _ in ended]
    assert len(lines[0]) == len(situations), ended[0][1]
    return {given["name"]: [line[at] for line in lines if at < len(line)] for at, given in enumerate(situations)}
