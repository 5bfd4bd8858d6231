"""Measuring processes that do what a GPU would make them do, and compilers that fail."""

import dataclasses
import faulthandler
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.compile import cutile
from tilekern.compile.toolchain import toolkit
from tilekern.runtime.workers import disposable
from tilekern.runtime.workers.pool import Answer
from tilekern.tuning.compile.stage import compile_one
from tilekern.tuning.measure.tasks import CUDA, INPUTS, QUEUE, STRATEGY, Steps, Task
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.measure.worker import CHECKED, DONE, DOUBT, FAULT, RACING, READY, TIMED
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.verify.check import Check

RIGHT = Check(passed=True, relative_error=0.0, elementwise_error=0.0)
TIMING = Timing(5.0, 0.1, 20)
# What a process does at a step: it is handed the connection and the task.
Act = Callable[[Connection, Task], object]


def crash(*_: object) -> None:
    os._exit(7)


def segfault(*_: object) -> None:
    faulthandler.disable()  # or pytest's prints its own stack
    os.kill(os.getpid(), signal.SIGSEGV)


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_: object) -> None:
    time.sleep(600)


def illegal_address(connection: Connection, _: Task) -> None:
    connection.send((FAULT, "AcceleratorError: CUDA error: an illegal memory access was encountered"))
    sys.exit()


def memory_is_gone(connection: Connection, _: Task) -> None:
    connection.send((DOUBT, "OutOfMemoryError: CUDA out of memory."))
    sys.exit()


def hang_with_a_child(pid_file: Path) -> Act:
    """A hang in something that the process has started, in a process group of its own."""

    def act(*_: object) -> None:
        child = subprocess.Popen(["sleep", "600"], process_group=0)
        pid_file.write_text(str(child.pid))
        child.wait()

    return act


def once(mark: Path, act: Act) -> Act:
    """Do it at the first time only, whichever process gets there."""

    def first(connection: Connection, task: Task) -> None:
        if not mark.exists():
            mark.touch()
            act(connection, task)

    return first


def process_of(
    checking: Mapping[str, Act], racing: Mapping[str, Act], started: Path
) -> Callable[[Connection, Steps, str, str | None], None]:
    """A measuring process in which something happens at some steps, and all else goes well.

    Args:
        checking: what happens at a step of that name, an entrant's key where it is checked.
        racing: what happens when the entrant of that key is waited for in the race, or when all are queued.
        started: gets a line for each process that is handed a task.
    """

    def serve(connection: Connection, steps: Steps, _cache: str, _device: str | None) -> None:
        disposable.begin()
        connection.send((READY, None))
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            with started.open("a") as file:
                print("careful" if task.careful else "queued", *["frugal"] * task.frugal, sep="+", file=file)
            steps.follow(task)
            for name in (CUDA, INPUTS):
                steps.begin(name)
                checking.get(name, _nothing)(connection, task)
            for key in [entrant.key for entrant in task.entrants if entrant.key not in task.checks]:
                steps.begin(key)
                checking.get(key, _nothing)(connection, task)
                connection.send((CHECKED, (key, RIGHT)))
            _race(connection, steps, task, racing)

    return serve


def _race(connection: Connection, steps: Steps, task: Task, racing: Mapping[str, Act]) -> None:
    keys = [entrant.key for entrant in task.entrants]
    steps.begin(STRATEGY)
    connection.send((RACING, True))
    steps.begin(QUEUE)
    racing.get(QUEUE, _nothing)(connection, task)
    for key in keys:
        steps.begin(key)
        racing.get(key, _nothing)(connection, task)
    connection.send((RACING, False))
    connection.send((TIMED, dict.fromkeys(keys, TIMING)))
    connection.send((DONE, {"race": 1.0}))


def _nothing(*_: object) -> None:
    pass


def faulty_compiler(folder: Path, fault: str, *, again: bool = False) -> Path:
    """A tile compiler that fails once and otherwise is the real one.

    Args:
        folder: where to put it, with a file ``victim``: the bytecode that the failure is for.
        fault: what the shell does in place of compiling.
        again: whether the same bytecode fails whenever it comes.
    """
    real = toolkit()
    assert real is not None
    path, victim, claim = folder / "tileiras", folder / "victim", folder / "claim"
    lines = [
        "#!/bin/sh",
        f"if mkdir {claim} 2>/dev/null; then cp $1 {victim}; {fault}; fi",
        f"if {'cmp -s $1 ' + str(victim) if again else 'false'}; then {fault}; fi",
        f'exec {real.path} "$@"',
    ]
    path.write_text("\n".join([*lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def compile_by(compiler: Path, folder: Path, item: Candidate, **settings: Any) -> Answer:
    """Compile a candidate in a worker with a compiler, and temporary files in a folder."""
    here = toolkit()
    assert here is not None
    cutile.toolkit = lambda: dataclasses.replace(here, path=compiler)  # type: ignore[assignment]
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return compile_one(item, **settings)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def answer(item: Candidate) -> Answer:
    return Answer({"key": item.artifact, "status": "ok"})


def hang_at(victim: str, item: Candidate) -> Answer:
    """Run like a worker whose front end hangs at one artifact."""
    if item.artifact == victim:
        time.sleep(600)
    return answer(item)


def note_at(folder: Path, item: Candidate) -> Answer:
    """A compile that leaves a file of the candidate's key."""
    (folder / item.artifact).touch()
    return answer(item)


def die_at(victim: str, item: Candidate) -> Answer:
    if item.artifact == victim:
        os._exit(11)
    return answer(item)
