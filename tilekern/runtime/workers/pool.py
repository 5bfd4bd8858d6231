"""Run compile workers: disposable processes with one candidate at a time, so that a crash has one culprit.

Workers are forked from a server that has loaded the front end (:mod:`tilekern.runtime.workers.forked`), so another one
costs milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tilekern.compile.cutile import is_starved, processor_s
from tilekern.errors import InputError
from tilekern.kernels import VARIABLE, users_modules
from tilekern.runtime.workers import disposable
from tilekern.runtime.workers.server import Server


class Item(Protocol):
    """A candidate to compile; it is pickled."""

    @property
    def artifact(self) -> str:
        """The key of its artifact."""


class Order(Protocol):
    """Hands out candidates.

    Attributes:
        is_over: set to stop; candidates at work are given up.
    """

    is_over: threading.Event

    def take(self, before: Any) -> Any:
        """Return the next candidate for a worker whose last one was ``before``, or None if there are no more."""

    def take_in(self, most: int) -> int:
        """List more candidates while workers are busy; return how many."""

    def put_back(self, item: Any) -> None:
        """Have a candidate taken again."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer on a candidate.

    Attributes:
        line: the journal's line.
        cubin: the compiled code, if any.
        worn: this worker takes no further candidate.
        doubtful: something else may have caused the failure, so the candidate is tried once more.
    """

    line: dict[str, Any]
    cubin: bytes | None = None
    worn: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class Lost:
    """A candidate without an answer, and the reason.

    ``timed_out`` says that more time may help, ``passing`` that the state of the machine may be the cause.
    """

    item: Any
    reason: str
    timed_out: bool
    passing: bool = False


# How long to wait for the exit code of a worker that died.
_PATIENCE_S = 1.0
# Give up after this many workers of one slot died at their start.
_MOST_STILLBORN = 3
# How often to look whether the work is given up, in seconds.
_LOOK_EVERY_S = 0.2
# How many candidates to list before looking for a waiting worker.
_LISTED_AT_ONCE = 16
# Address space of one compiler; a usual compile takes 0.2 GiB.
MEMORY_BYTES = min(16 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
# Python's time for a candidate, on top of the compiler's.
FRONTEND_TIMEOUT_S = 30.0
# The function that workers run; it is pickled by its name.
Compile = Callable[[Any], Answer]


def compile_in_order(
    server: Server, order: Order, compile_one: Compile, jobs: int, limit_s: float, memory_bytes: int
) -> Iterator[Answer | Lost]:
    """Compile candidates, and yield the result of each when it is known, until the order is over.

    Args:
        server: forks the workers.
        order: the candidates.
        compile_one: what a worker runs.
        jobs: number of workers.
        limit_s: seconds that a worker may take for a candidate.
        memory_bytes: address space of a worker, and of each process that it starts.

    Raises:
        InputError: workers die before they can take a candidate.
    """
    server.start()
    workers = [_Worker(server, compile_one, limit_s, memory_bytes) for _ in range(jobs)]
    doubtful: set[str] = set()
    try:
        for worker in workers:
            worker.begin(order.take(None))
        while (busy := [worker for worker in workers if worker.item]) and not order.is_over.is_set():
            found = []
            for worker in _ready(busy, order):
                item = worker.item
                assert item is not None
                answer = worker.answer()
                if answer is None:
                    continue
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
    """Return workers that answered, died or are late; while all are busy, list more candidates."""
    pipes = [worker.connection for worker in busy]
    while not connections.wait(pipes, 0.0) and order.take_in(_LISTED_AT_ONCE):  # type: ignore[arg-type]
        pass
    said = connections.wait(pipes, max(0.0, min(_LOOK_EVERY_S, *(w.left_s for w in busy))))  # type: ignore[arg-type]
    return [worker for worker in busy if worker.connection in said or worker.left_s <= 0]


class _Worker:
    """One slot of the pool: a process, replaced after a loss, and its current candidate."""

    def __init__(self, server: Server, compile_one: Compile, limit_s: float, memory_bytes: int) -> None:
        self._server = server
        self._compile_one, self._limit_s, self._memory_bytes = compile_one, limit_s, memory_bytes
        self.item: Item | None = None
        self.connection: Connection | None = None
        self.process: Any = None
        self._since, self._stillborn, self._is_ready = 0.0, 0, False

    def begin(self, item: Item | None) -> None:
        """Take a candidate, or none."""
        self.item, self._since = item, time.monotonic()
        if item is None:
            return
        if self.connection is None:
            self._obituary = disposable.Obituary()
            self.connection, theirs = Pipe()
            arguments = (theirs, self._compile_one, self._memory_bytes, os.environ.get(VARIABLE, ""))
            self.process = self._server.process(_serve, *arguments)
            self.process.start()
            self._is_ready = False
            theirs.close()
        with contextlib.suppress(OSError):  # one that is dead shows when it is waited for
            self.connection.send(item)

    @property
    def left_s(self) -> float:
        """Return how long it may still work on its candidate."""
        return self._since + self._limit_s - time.monotonic()

    def answer(self) -> Answer | Lost | None:
        """Return its answer without waiting, None if it has only just started. End it if it is dead or late."""
        assert self.connection is not None
        assert self.item is not None
        if not self.connection.poll():
            # Its compiler is not in its process group. A worker that is not ready has not taken the candidate.
            is_busy = not self._is_ready or is_starved(processor_s(self.process.pid), self._limit_s)
            self.end()
            late = f"the compile worker gave no answer within {self._limit_s:g} s"
            reason = f"{late}, as the machine is busy" if is_busy else late
            return Lost(self.item, reason, timed_out=True, passing=is_busy)
        try:
            said: Answer | None = self.connection.recv()
        except (EOFError, OSError):
            how = self.end(_PATIENCE_S)
            if self._is_ready:
                passing = how.startswith(disposable.KILLED)
                return Lost(self.item, f"the compile worker died ({how})", timed_out=False, passing=passing)
            # It died before it took the candidate, which is not to blame.
            self._stillborn += 1
            if self._stillborn >= _MOST_STILLBORN:
                raise InputError(f"compile workers die before they can take a candidate ({how})") from None
            self.begin(self.item)
            return None
        self._is_ready = True
        if said is not None and said.worn:
            self.end()
        return said

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the process, if any, and describe how it ended."""
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
