"""Compile workers: disposable processes, each at one candidate at a time, so that it is known whose a crash is.

Workers are forked from a server that has the front end loaded (:mod:`tilekern.tuning.compile.forked`): one more costs
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection as connections
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.connection import Connection
from typing import Any

from tilekern.compile.cutile import is_starved, processor_s
from tilekern.errors import InputError
from tilekern.kernels import VARIABLE, users_modules
from tilekern.tuning import disposable
from tilekern.tuning.compile.order import Order
from tilekern.tuning.sweep.candidates import Candidate


@dataclass(frozen=True)
class Answer:
    """A worker's answer on a candidate.

    Attributes:
        line: for the journal.
        cubin: what it compiled to, if it did.
        worn: this worker takes no further candidate.
        doubtful: the failure may be another's doing; the candidate is tried once more.
    """

    line: dict[str, Any]
    cubin: bytes | None = None
    worn: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class Lost:
    """A candidate that no worker answered for, and why.

    ``timed_out`` says that it may be a matter of time, ``passing`` that it may be the machine's doing.
    """

    item: Candidate
    reason: str
    timed_out: bool
    passing: bool = False


# A worker that died by itself is left this long to say how.
_PATIENCE_S = 1.0
# How often a place of the pool may get a worker that dies at its start.
_MOST_STILLBORN = 3
# What multiprocessing puts behind a temporary folder's path takes 35 bytes.
_MOST_FOLDER_BYTES = 70
# How often it is looked whether the work is to be given up, in seconds.
_LOOK_EVERY_S = 0.2
# How many candidates are listed before it is looked whether a worker waits.
_LISTED_AT_ONCE = 16
# What workers run; they find it by its name.
Compile = Callable[[Candidate], Answer]


def start_server() -> None:
    """Start the process that workers are forked from, unless it runs; it loads its modules while others work."""
    get_context("forkserver").set_forkserver_preload(["tilekern.tuning.compile.forked"])
    _settle_where_a_socket_fits()
    resource_tracker.ensure_running()  # the server's start would start it, and it would let the signal through again
    # Ctrl-C is the parent's to handle. The server ignores it once its modules are loaded; until then it is held off.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle_where_a_socket_fits() -> None:
    """Have multiprocessing choose its temporary folder, where the server listens, not too deep down.

    The path of a socket is cut off at 107 bytes, and ``TMPDIR`` may be longer than that.
    """
    usual = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _MOST_FOLDER_BYTES and os.access("/tmp", os.W_OK):
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def compile_in_order(
    order: Order, compile_one: Compile, jobs: int, limit_s: float, memory_bytes: int
) -> Iterator[Answer | Lost]:
    """Have candidates compiled; what comes of each, as it is known, until the order is over.

    Args:
        order: the candidates.
        compile_one: what a worker runs.
        jobs: how many workers.
        limit_s: how long a worker may be at a candidate, in seconds.
        memory_bytes: how much address space a worker, and each process that it starts, may have.

    Raises:
        InputError: workers die before they can take a candidate.
    """
    start_server()
    workers = [_Worker(compile_one, limit_s, memory_bytes) for _ in range(jobs)]
    doubtful: set[str] = set()
    try:
        for worker in workers:
            worker.begin(order.take(None))
        while (busy := [worker for worker in workers if worker.item]) and not order.is_over.is_set():
            found = []
            for worker in _ready(busy, order):
                item, seconds = worker.item, worker.seconds
                assert item is not None
                answer = worker.answer()
                if answer is None:
                    continue
                order.learn(item, seconds)
                is_doubtful = answer.doubtful if isinstance(answer, Answer) else not answer.timed_out
                if is_doubtful and item.artifact not in doubtful:
                    doubtful.add(item.artifact)
                    order.put_back(item)
                else:
                    found.append(answer)
                worker.begin(order.take(item))
            yield from found  # when all workers have work: the journal may take its time
    finally:
        disposable.end(*[worker.process for worker in workers if worker.process is not None])


def _ready(busy: list[_Worker], order: Order) -> list[_Worker]:
    """Workers that have something to say, are dead, or are late; while all are at work, more candidates are listed."""
    pipes = [worker.connection for worker in busy]
    while not connections.wait(pipes, 0.0) and order.take_in(_LISTED_AT_ONCE):  # type: ignore[arg-type]
        pass
    said = connections.wait(pipes, max(0.0, min(_LOOK_EVERY_S, *(w.left_s for w in busy))))  # type: ignore[arg-type]
    return [worker for worker in busy if worker.connection in said or worker.left_s <= 0]


class _Worker:
    """One place of the pool: a process, started anew after a loss, and the candidate that it is at."""

    def __init__(self, compile_one: Compile, limit_s: float, memory_bytes: int) -> None:
        self._compile_one, self._limit_s, self._memory_bytes = compile_one, limit_s, memory_bytes
        self.item: Candidate | None = None
        self.connection: Connection | None = None
        self.process: Any = None
        self._since, self._stillborn, self._is_ready = 0.0, 0, False

    def begin(self, item: Candidate | None) -> None:
        """Be at a candidate; at none where it is None."""
        self.item, self._since = item, time.monotonic()
        if item is None:
            return
        if self.connection is None:
            context = get_context("forkserver")
            self._obituary = disposable.Obituary()
            self.connection, theirs = context.Pipe()
            arguments = (theirs, self._compile_one, self._memory_bytes, os.environ.get(VARIABLE, ""))
            self.process = context.Process(target=_serve, args=arguments, daemon=True)
            self.process.start()
            self._is_ready = False
            theirs.close()
        with contextlib.suppress(OSError):  # one that is dead shows when it is waited for
            self.connection.send(item)

    @property
    def seconds(self) -> float:
        """How long it has been at its candidate."""
        return time.monotonic() - self._since

    @property
    def left_s(self) -> float:
        """How long it may still be at its candidate."""
        return self._limit_s - self.seconds

    def answer(self) -> Answer | Lost | None:
        """Its answer, waiting for nothing; None where it is only now ready. One that is dead or late is ended."""
        assert self.connection is not None
        assert self.item is not None
        if not self.connection.poll():
            # The worker leads a group, which its compiler is not of. One that is not ready has not taken the candidate.
            is_busy = not self._is_ready or is_starved(processor_s(self.process.pid), self._limit_s)
            self.end()
            late = f"the compile worker gave no answer within {self._limit_s:g} s"
            reason = f"{late}, as the machine is busy" if is_busy else late
            return Lost(self.item, reason, timed_out=True, passing=is_busy)
        try:
            said: Answer | None = self.connection.recv()
        except (EOFError, OSError):
            return self._mourned(self.item, self.end(_PATIENCE_S))
        self._is_ready = True
        if said is not None and said.worn:
            self.end()
        return said

    def _mourned(self, item: Candidate, how: str) -> Lost | None:
        """Judge a death: it is the candidate's only where the worker had come so far as to take it."""
        if self._is_ready:
            passing = how.startswith(disposable.KILLED)
            return Lost(item, f"the compile worker died ({how})", timed_out=False, passing=passing)
        self._stillborn += 1
        if self._stillborn >= _MOST_STILLBORN:
            raise InputError(f"compile workers die before they can take a candidate ({how})")
        self.begin(item)
        return None

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the process, if there is one; how it ended."""
        if self.connection is None:
            return "never started"
        self.connection.close()
        self.connection = None
        self.process.join(patience_s)
        disposable.end(self.process)
        return self._obituary.of(self.process)


def _serve(connection: Connection, compile_one: Compile, memory_bytes: int, specs: str) -> None:
    disposable.begin(memory_bytes)
    os.environ[VARIABLE] = specs  # the server may have started with other specs
    if users_modules(specs):
        sys.modules.pop("torch", None)  # which the server has hidden, and a user's module may import
    with contextlib.suppress(EOFError, OSError):  # the parent has hung up
        connection.send(None)
        while True:
            connection.send(compile_one(connection.recv()))
