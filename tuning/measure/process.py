"""Run measuring processes from the parent: hand tasks to a process, take its answers, and survive its death.

The loss of a process costs only the candidate that caused it:

- Each step is announced before it begins (:mod:`tilekern.tuning.measure.tasks`), and a candidate's launches end before
  the next candidate launches. So the step of a process that dies or stalls names the candidate.
- In a race launches are queued. A launch that stalls is still known, unless it fills the queue; one that faults may not
  be. Then the race runs again with one launch at a time.
- If something else may be the cause, such as the host's out-of-memory killer or memory that an earlier candidate kept,
  the step is tried once more in a new process.
- Timings of an interrupted race are dropped: the other candidates race again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.errors import InputError
from tilekern.runtime.workers import disposable
from tilekern.tuning.measure.tasks import CUDA, QUEUE, START, Steps, Task
from tilekern.tuning.measure.worker import CHECKED, DONE, DOUBT, FAULT, RACING, READY, TIMED, serve
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.sweep.lines import COPY, copy_key
from tilekern.tuning.verify.check import Check

# Time limits to load modules or start CUDA, and to make inputs or a reference, in seconds.
START_TIMEOUT_S, STEP_TIMEOUT_S = 300.0, 120.0
# Time limit for the launches of one candidate: seconds in which a library may load its code, plus this many times the
# least time by the GPU's bandwidth and arithmetic.
LAUNCH_TIMEOUT_S, SLOWEST = 10.0, 300.0
# Give up a step that belongs to no candidate after this many tries.
TRIES = 2
_POLL_S = 0.05
# How long to wait for the exit code of a process that died.
_PATIENCE_S = 5.0
# A line with the name of its journal, or with one of these words.
TOOK = "took"
OPEN = "open"
Noted = tuple[str, dict[str, Any]]


class _Process:
    """One measuring process."""

    def __init__(self, cache: str, device: str | None) -> None:
        context = get_context("spawn")
        self._obituary = disposable.Obituary()
        self.steps = Steps(context)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        arguments = (theirs, self.steps, cache, device)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.is_ready = False

    def end(self, patience_s: float = 0.0) -> str:
        """Kill it, wait until it and its GPU context are gone, and describe how it ended."""
        self.connection.close()
        self._process.join(patience_s)
        disposable.end(self._process)
        return self._obituary.of(self._process)


class Worker:
    """A measuring process, replaced after each loss by one that was started in advance.

    Args:
        cache: the folder of the cache in which composites look up kernels.
        device: the GPU to use, as ``CUDA_VISIBLE_DEVICES`` names it; None for the first.
        launch_timeout_s: the least time limit for the launches of a candidate.
    """

    def __init__(self, cache: Path, device: str | None = None, launch_timeout_s: float = LAUNCH_TIMEOUT_S) -> None:
        self._cache, self._device, self._launch_timeout_s = str(cache), device, launch_timeout_s
        self._process: _Process | None = None
        self._spare: _Process | None = None

    def process(self) -> _Process:
        """Return the process at work."""
        if self._process is None:
            self._process, self._spare = self._spare or _Process(self._cache, self._device), None
        return self._process

    def prepare(self) -> None:
        """Start the next process, after the one at work has loaded its modules; it does not touch the GPU yet."""
        if self._spare is None:
            self._spare = _Process(self._cache, self._device)

    def lose(self, patience_s: float = 0.0) -> str:
        """End the process at work and describe how it ended."""
        assert self._process is not None
        lost, self._process = self._process, None
        return lost.end(patience_s)

    def limit_s(self, step: str, task: Task) -> float:
        """Return the time limit of a step."""
        if step in (START, CUDA):
            return START_TIMEOUT_S
        if step not in (COPY, QUEUE) and task.entrant(step) is None:
            return STEP_TIMEOUT_S
        return self._launch_timeout_s + SLOWEST * least_s(task)

    def close(self) -> None:
        """End all processes."""
        for process in (self._process, self._spare):
            if process is not None:
                process.end()
        self._process = self._spare = None


def least_s(task: Task) -> float:
    """Return the least time of a task's candidates by the roofline, in seconds."""
    return roofline(task.kernel, task.problem, task.target).seconds


@dataclass(frozen=True)
class _Loss:
    """The loss of a process: its step and its reason.

    ``doubtful``: another candidate may be the cause, or none. ``outside``: another process killed it, such as a host
    that is short of memory. ``queued``: a candidate that was launched shortly before may be the cause.
    """

    step: str
    reason: str
    doubtful: bool = False
    queued: bool = False
    outside: bool = False


def measure_task(worker: Worker, task: Task) -> Iterator[Noted]:
    """Have a task measured, and yield the lines for the journals.

    The journals are ``measured``, ``quarantine`` (a candidate that killed or stalled its process; the others go on) and
    ``skipped`` (a problem that cannot be measured, for example because its inputs do not fit). Two kinds of lines go
    into no journal: :data:`TOOK` has the seconds of each part of the task, and :data:`OPEN` names a candidate that a
    temporary failure kept from being measured; the next run measures it.

    Raises:
        InputError: the GPU cannot be used.
    """
    tries: Counter[str] = Counter()
    while any(entrant.is_aligned for entrant in task.entrants):
        checks = dict(task.checks)
        loss = yield from _attempt(worker, task, checks)
        if loss is None:
            return
        task = replace(task, checks=checks, frugal=task.frugal or loss.doubtful)
        tries[loss.step] += 1
        if loss.queued and not task.careful:
            task = replace(task, careful=True)
        elif task.entrant(loss.step) is not None:
            if loss.doubtful and tries[loss.step] < TRIES:
                continue
            yield OPEN if loss.outside else "quarantine", {"candidate": loss.step, "reason": loss.reason}
            task = task.without(loss.step)
        elif tries[loss.step] >= TRIES:
            reason = f"{loss.step}: {loss.reason}"
            if loss.step in (START, CUDA):
                raise InputError(f"the measuring process failed at its {reason}")
            yield "skipped", {"kernel": task.kernel, "problem": task.problem.key, "reason": reason}
            return


def _attempt(worker: Worker, task: Task, checks: dict[str, Check]) -> Generator[Noted, None, _Loss | None]:
    """Have one process measure a task and yield its lines; return how the process was lost, or None.

    Args:
        worker: owns the process.
        task: the task.
        checks: the entrants' checks by key; new ones are added.
    """
    process = worker.process()
    steps, racing = process.steps, False
    steps.follow(task)
    steps.begin(START)
    begun, since = steps.begun, time.monotonic()
    if process.is_ready:
        _hand(worker, process, task)
    while True:
        if process.connection.poll(_POLL_S):
            try:
                kind, value = process.connection.recv()
            except (EOFError, OSError):
                how = worker.lose(_PATIENCE_S)
                outside = how.startswith(disposable.KILLED)
                return _Loss(steps.name, f"the process died ({how})", outside, racing, outside)
            if kind == READY:
                process.is_ready = True
                _hand(worker, process, task)
            elif kind == CHECKED:
                key, checks[key] = value
                yield "measured", {"candidate": key, "check": checks[key].as_dict()}
            elif kind == RACING:
                racing = value
            elif kind == TIMED:
                yield from _timed(task, value, checks)
            elif kind in (FAULT, DOUBT):
                worker.lose()
                return _Loss(steps.name, value, kind == DOUBT, racing)
            elif kind == DONE:
                yield TOOK, {"kernel": task.kernel, "problem": task.problem.key, "seconds": value}
                return None
        if steps.begun != begun:
            begun, since = steps.begun, time.monotonic()
        elif time.monotonic() - since > (limit := worker.limit_s(steps.name, task)):
            step = steps.name
            worker.lose()
            return _Loss(step, f"no answer within {limit:.3g} s", queued=step == QUEUE)


def _hand(worker: Worker, process: _Process, task: Task) -> None:
    """Hand a task to a process that is ready, and start its successor."""
    worker.prepare()
    with contextlib.suppress(OSError):  # one that is dead shows when it is waited for
        process.connection.send(task)


def _timed(task: Task, timings: dict[str, Any], checks: dict[str, Check]) -> Iterator[Noted]:
    for key, timing in timings.items():
        if key == COPY:
            yield "measured", {"candidate": copy_key(task.kernel, task.problem), "timing": timing.as_dict()}
        else:
            yield "measured", {"candidate": key, "check": checks[key].as_dict(), "timing": timing.as_dict()}
