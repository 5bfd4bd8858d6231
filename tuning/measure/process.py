"""The parent's side of measuring processes: hand one a task, take its answers, and outlive its death.

Each loss of a process has a culprit, and nobody but the culprit pays for it:

- A step is announced before it is taken (:mod:`tilekern.tuning.measure.steps`), and what a candidate launches is waited
  for before the next one may launch. So the step of a process that dies or stalls names the candidate.
- Within a race launches are queued behind each other. One that stalls is still known, unless it fills the queue; one
  that faults may not be. Then the race is run again with one launch at a time.
- What may be another's doing, the host's out-of-memory killer or memory that an earlier candidate kept, is tried once
  more in a new process.
- Figures of a race that was broken off are dropped: the others race again without the culprit.
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
from tilekern.tuning import disposable
from tilekern.tuning.measure.steps import CUDA, QUEUE, START, Steps
from tilekern.tuning.measure.tasks import Task
from tilekern.tuning.measure.worker import CHECKED, DONE, DOUBT, FAULT, RACING, READY, TIMED, serve
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.sweep.lines import COPY, copy_key
from tilekern.tuning.verify.check import Check

# How long a process may take to load its modules or to start CUDA, and to make inputs or a reference, in seconds.
START_TIMEOUT_S, STEP_TIMEOUT_S = 300.0, 120.0
# How long the GPU may take for what one candidate launches: so many seconds, in which a library loads what it needs
# when it is first called, and so many times what the GPU's bandwidth and arithmetic allow.
LAUNCH_TIMEOUT_S, SLOWEST = 10.0, 300.0
# How often a step that is no candidate's is taken before it is given up.
TRIES = 2
_POLL_S = 0.05
# A process that fell silent because it died is left this long to say how.
_PATIENCE_S = 5.0
# A line for one of the sweep's journals, with the journal's name, or with one of these words.
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
        """Kill it and wait until it is gone, its context on the GPU too; how it ended."""
        self.connection.close()
        self._process.join(patience_s)
        disposable.end(self._process)
        return self._obituary.of(self._process)


class Worker:
    """A measuring process, replaced after each loss by one that was started in advance.

    Args:
        cache: the folder of the cache that composites look kernels up in.
        device: which of the host's GPUs to use, as ``CUDA_VISIBLE_DEVICES`` names it; None for the first.
        launch_timeout_s: the least time that a candidate is given for what it launches.
    """

    def __init__(self, cache: Path, device: str | None = None, launch_timeout_s: float = LAUNCH_TIMEOUT_S) -> None:
        self._cache, self._device, self._launch_timeout_s = str(cache), device, launch_timeout_s
        self._process: _Process | None = None
        self._spare: _Process | None = None

    def process(self) -> _Process:
        """The process at work."""
        if self._process is None:
            self._process, self._spare = self._spare or _Process(self._cache, self._device), None
        return self._process

    def prepare(self) -> None:
        """Start the next process, now that the one at work has loaded its modules, which takes seconds of a core.

        It loads its own, and leaves the GPU alone.
        """
        if self._spare is None:
            self._spare = _Process(self._cache, self._device)

    def lose(self, patience_s: float = 0.0) -> str:
        """End the process at work; how it ended, for people."""
        assert self._process is not None
        lost, self._process = self._process, None
        return lost.end(patience_s)

    def limit_s(self, step: str, task: Task) -> float:
        """How long a step of a task may take."""
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
    """The time below which no candidate of a task can be, in seconds."""
    return roofline(task.kernel, task.problem, task.target).seconds


@dataclass(frozen=True)
class _Loss:
    """How a process was lost: at which step, why, and what is to be made of it.

    ``doubtful`` says that another candidate, or nobody, may be to blame; ``outside`` that somebody else ended it, as a
    host does that is short of memory; ``queued`` that it may be one that was launched shortly before.
    """

    step: str
    reason: str
    doubtful: bool = False
    queued: bool = False
    outside: bool = False


def measure_task(worker: Worker, task: Task) -> Iterator[Noted]:
    """Have a task measured; the lines for the journals, as they come to be known.

    They are of the journals ``measured``, ``quarantine`` (a candidate that killed or stalled its process; the others
    go on without it) and ``skipped`` (a problem that cannot be measured at all, as when its inputs do not fit). One of
    :data:`TOOK` says how long each part of the way took, and one of :data:`OPEN` that a candidate was kept from being
    measured by what passes; these go into no journal, so that the next run measures it.

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
    """Have one process measure a task and note what it says; how it was lost, None where it came to the end.

    Args:
        worker: whose process.
        task: the task.
        checks: of the entrants, by key; those that come to be known are added.
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
    """Hand a task to a process that is ready, and have its successor started."""
    worker.prepare()
    with contextlib.suppress(OSError):  # one that is dead shows when it is waited for
        process.connection.send(task)


def _timed(task: Task, timings: dict[str, Any], checks: dict[str, Check]) -> Iterator[Noted]:
    for key, timing in timings.items():
        if key == COPY:
            yield "measured", {"candidate": copy_key(task.kernel, task.problem), "timing": timing.as_dict()}
        else:
            yield "measured", {"candidate": key, "check": checks[key].as_dict(), "timing": timing.as_dict()}
