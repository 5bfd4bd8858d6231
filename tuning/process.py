"""The parent's side of a measuring process: hand it a task, take its answers, and outlive its death."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.errors import InputError
from tuning.tasks import COPY, Task, copy_key
from tuning.verifying import Check
from tuning.worker import CUDA, RACE, serve

# The longest that a single announced step may take, in seconds.
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0
# A line for one of the sweep's journals, with the journal's name.
Noted = tuple[str, dict[str, Any]]


class Worker:
    """A measuring process, started when first needed and again after each loss."""

    def __init__(self, cache: Path, device: str | None = None) -> None:
        self._cache, self._device = str(cache), device
        self._process: Any = None
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        """The line to a living process."""
        if self._connection is None:
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self._cache, self._device), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def lose(self) -> str:
        """Kill the process; how it ended, for people."""
        self._process.join(2)  # one that died by itself is left to say how
        self._process.kill()
        self._process.join(10)
        code = self._process.exitcode
        self._connection = self._process = None
        return f"exit code {code}"

    def close(self) -> None:
        """Hang up and wait for the process to leave."""
        if self._connection is not None:
            self._connection.close()
            self._process.join(30)
            if self._process.is_alive():
                self._process.kill()


def measure_task(worker: Worker, task: Task) -> Iterator[Noted]:
    """Have a task measured; the lines for the journals ``measured`` and ``quarantine``, as they come to be known.

    An entrant that kills or stalls the process is quarantined, and the rest goes on in a new process.

    Raises:
        InputError: the process failed before it came to an entrant.
    """
    while any(entrant.is_aligned for entrant in task.entrants):
        checks = dict(task.checks)
        step, limit, reason = "start", START_TIMEOUT_S, None
        connection = worker.connection()
        try:
            connection.send(task)
            while connection.poll(limit):
                kind, value = connection.recv()
                if kind == "begin":
                    step, limit = value, START_TIMEOUT_S if value in (CUDA, RACE) else STEP_TIMEOUT_S
                elif kind == "checked":
                    key, checks[key] = value[0], value[1]
                    yield "measured", {"candidate": key, "check": checks[key].as_dict()}
                elif kind == "timed":
                    yield from _timed(task, value, checks)
                else:
                    return
            reason = f"no answer within {limit:g} s"
            worker.lose()
        except (EOFError, OSError):
            reason = f"the process died ({worker.lose()})"
        if task.entrant(step) is None:
            raise InputError(f"{task.kernel} {task.problem.key}: the measuring process failed at {step}: {reason}")
        yield "quarantine", {"candidate": step, "reason": reason}
        task = task.without(step, checks)


def _timed(task: Task, timings: dict[str, Any], checks: dict[str, Check]) -> Iterator[Noted]:
    for key, timing in timings.items():
        if key == COPY:
            yield "measured", {"candidate": copy_key(task.kernel, task.problem), "timing": timing.as_dict()}
        else:
            yield "measured", {"candidate": key, "check": checks[key].as_dict(), "timing": timing.as_dict()}
