"""A compile in the middle of a job: it says that it takes its time, and can be interrupted."""

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import ROOT, python_path
from interrupts import hear_interrupts
from marks import needs_compiler

from tilekern.compile.toolchain import toolkit
from tilekern.warning import warned_after

PATIENCE_S = 120
pytestmark = [pytest.mark.processes, needs_compiler]
# Two misses of one problem: the first with a compiler that sleeps, which is interrupted; the other when it is told to.
JOB = """
import os, sys
from pathlib import Path
from one_record import H200, PROBLEM, SPEC
from tilekern.compile import cutile
from tilekern.runtime import dispatch

cutile._tileiras = lambda: Path(sys.argv[1])
try:
    dispatch.compile_default(SPEC, PROBLEM, H200)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
Path(sys.argv[1]).with_name("sleeps").unlink()
dispatch.compile_default(SPEC, PROBLEM, H200)
print("compiled", flush=True)
"""
# Else the compiler, which may be slow to start, is what is measured.
SLEEPING = """#!/bin/sh
if [ "$1" != --version ] && [ -e "$(dirname "$0")/sleeps" ]; then sleep 1000; fi
exec {compiler} "$@"
"""


@pytest.fixture
def job(tmp_path):
    """The job; its standard error comes with its output."""
    compiler = tmp_path / "tileiras"
    compiler.write_text(SLEEPING.format(compiler=toolkit().path))
    compiler.chmod(0o755)
    (tmp_path / "sleeps").touch()
    (tmp_path / "tmp").mkdir()
    env = os.environ | {
        "TILEKERN_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", JOB, compiler], env=env, text=True, preexec_fn=hear_interrupts,  # noqa: PLW1509 (one call)
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def line_of(process):
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        assert waiting.select(PATIENCE_S), "it says nothing"
    return process.stdout.readline()


def processes_of(folder):
    """Return the processes with a path of a folder among their arguments, except the job itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in arguments and b"one_record" not in arguments:
            found.append(arguments)
    return found


def test_a_slow_compile_says_so_and_ends_with_ctrl_c(job, tmp_path):
    said = line_of(job)
    assert "compiling swiglu_forward for rows=64,columns=48,dtype=bfloat16, which no cache holds; Ctrl-C" in said
    # The front end may still be at work when the line comes.
    started = time.monotonic()
    while not processes_of(tmp_path) and time.monotonic() - started < PATIENCE_S:
        time.sleep(0.05)
    assert processes_of(tmp_path)
    job.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert line_of(job) == "interrupted\n"
    assert time.monotonic() - started < PATIENCE_S / 2  # the compiler would have slept for longer
    # One that was killed may still be in the list of processes for a moment.
    while processes_of(tmp_path) and time.monotonic() - started < PATIENCE_S / 2:
        time.sleep(0.05)
    assert not processes_of(tmp_path)
    assert not list((tmp_path / "tmp").glob("tilekern-*"))
    *_, last = job.communicate("go on\n", timeout=PATIENCE_S)[0].splitlines()
    assert last == "compiled"
    assert job.returncode == 0
    assert len(list((tmp_path / "cache").rglob("rows=64,*.json"))) == 1


def test_a_fast_compile_says_nothing(recwarn):
    with warned_after(0.5, "it takes its time"):
        pass
    time.sleep(0.7)
    assert not recwarn
    with warned_after(0.05, "it takes its time"):
        deadline = time.monotonic() + PATIENCE_S
        while not recwarn and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "it takes its time" in str(recwarn.pop().message)
