"""The measure stage: candidates are checked and timed in a worker process that may crash or hang without harm."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, LibraryCall, Problem
from tilekern.targets import Target, here
from tuning.sweep import LIBRARY_LINE, Candidate, Sweep, candidates
from tuning.worker import Entrant, serve

# The longest that a single announced step may take, in seconds.
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class MeasureSummary:
    """What the measure stage did."""

    timed: int
    wrong: int
    quarantined: int
    seconds: float


class Worker:
    """A measuring process, started when first needed and again after each loss."""

    def __init__(self, folder: str, target: Target) -> None:
        self._folder, self._target = folder, target
        self._process: Any = None
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        """The line to a living process."""
        if self._connection is None:
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self._folder, self._target), daemon=True)
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


def check_gpu(target: Target) -> None:
    """Make sure that the GPU at hand is the sweep's target: ``measured`` is written for no other.

    Raises:
        InputError: there is no GPU, or another one.
    """
    at_hand = here()
    if at_hand is None:
        raise InputError("the measure stage needs a GPU and this machine has none; run it with --stages plan,compile")
    if at_hand.key != target.key:
        raise InputError(f"the sweep is for {target.key}, and the GPU here is {at_hand.key}; measure on the target")


def describe_gpu() -> dict[str, str]:
    """The GPU, its driver and torch, as records keep them beside a measurement."""
    import torch

    driver = "unknown"
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", version.read_text(encoding="utf-8"))
        driver = found.group(1) if found else driver
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}


def measure_all(
    sweep: Sweep, keep_winners: Callable[[Sweep], None], progress: Callable[[int, int], None] | None = None
) -> MeasureSummary:
    """Check and time every candidate of the sweep that has not been yet.

    ``keep_winners`` is called once all kernels but composites are timed: it puts the winners so far into the cache of
    the sweep's own, where the composites' parts are looked up.

    Raises:
        InputError: the GPU at hand is not the sweep's target.
    """
    target = sweep.target
    check_gpu(target)
    sweep.note("gpu", describe_gpu())
    started = time.perf_counter()
    problems = sorted(sweep.problems(), key=lambda named: _is_composite(named[0], named[1], target))
    worker = Worker(str(sweep.folder), target)
    kept = False
    try:
        for done, (kernel, problem) in enumerate(problems):
            if not kept and _is_composite(kernel, problem, target):
                keep_winners(sweep)
                kept = True
            _measure_problem(sweep, worker, kernel, problem, target)
            if progress:
                progress(done + 1, len(problems))
    finally:
        worker.close()
    lines = sweep.measured().values()
    return MeasureSummary(
        timed=sum("timing" in line for line in lines),
        wrong=sum(not line.get("check", {}).get("passed", True) for line in lines),
        quarantined=len(sweep.quarantined()),
        seconds=time.perf_counter() - started,
    )


def _is_composite(kernel: str, problem: Problem, target: Target) -> bool:
    """Whether a problem's default config launches kernels of other specs, whose winners must be known first."""
    spec = spec_named(kernel)
    found = spec.implement(problem, spec.default(problem, target))
    return isinstance(found, LibraryCall) and found.composite


def entrants(sweep: Sweep, kernel: str, problem: Problem, target: Target) -> list[Entrant]:
    """The candidates to measure: compiled, not in quarantine, and of each identical code and grid only the first."""
    compiled, quarantined = sweep.compiled(), sweep.quarantined()
    found: dict[Any, Entrant] = {}
    for item in candidates(kernel, problem, target):
        line = LIBRARY_LINE if item.is_library else compiled.get(item.artifact)
        if line is not None and line["status"] == "ok" and item.key not in quarantined:
            found.setdefault(identity(item, line, target), Entrant(item, line))
    return list(found.values())


def identity(item: Candidate, line: dict[str, Any], target: Target) -> tuple[str, str, int]:
    """Equal for candidates that do the same on the GPU."""
    if item.is_library:
        return item.variant, item.config.key, 0
    blocks = item.spec.device(item.problem, item.config).grid(item.problem, target.sm_count)
    return item.variant, line["code_sha256"], blocks


def _measure_problem(sweep: Sweep, worker: Worker, kernel: str, problem: Problem, target: Target) -> None:
    measured = sweep.measured()
    todo = [e for e in entrants(sweep, kernel, problem, target) if e.candidate.key not in measured]
    if not any(e.candidate.variant == ALIGNED for e in todo):
        return
    stay = [todo[0].candidate.key]
    checks: dict[str, Any] = {}
    while True:
        waiting = [e for e in todo if e.candidate.key not in checks]
        ready = [e for e in todo if _may_race(e, checks)]
        timings: dict[str, Any] = {}
        lost = _converse(worker, (kernel, problem, waiting, ready, stay), checks, timings)
        if lost is None:
            break
        step, reason = lost
        culprit = next((e for e in todo if e.candidate.key == step), None)
        if culprit is None:
            raise InputError(f"{kernel} {problem.key}: the measuring process failed at {step}: {reason}")
        sweep.note("quarantine", {"candidate": step, "reason": reason})
        todo.remove(culprit)
    for entrant in todo:
        key = entrant.candidate.key
        line = {"candidate": key, "check": checks[key].as_dict()}
        if key in timings:
            line["timing"] = timings[key].as_dict()
        sweep.note("measured", line)
    if "copy" in timings:
        sweep.note("measured", {"candidate": copy_key(kernel, problem), "timing": timings["copy"].as_dict()})


def copy_key(kernel: str, problem: Problem) -> str:
    """The journal's name for the copy of as many bytes as a problem must move."""
    return f"copy|{kernel}|{problem.key}"


def _may_race(entrant: Entrant, checks: dict[str, Any]) -> bool:
    check = checks.get(entrant.candidate.key)
    return check is not None and check.passed and entrant.candidate.variant == ALIGNED


def _converse(worker: Worker, task: Any, checks: dict[str, Any], timings: dict[str, Any]) -> tuple[str, str] | None:
    """Hand a task to the worker and take its answers; the step at which it was lost and how, or None."""
    connection = worker.connection()
    step, limit = "start", START_TIMEOUT_S
    try:
        connection.send(task)
        while connection.poll(limit):
            kind, value = connection.recv()
            if kind == "begin":
                step, limit = value, START_TIMEOUT_S if value in ("start of CUDA", "race") else STEP_TIMEOUT_S
            elif kind == "checked":
                checks[value[0]] = value[1]
            elif kind == "timed":
                timings.update(value)
            else:
                return None
    except (EOFError, OSError):
        return step, f"the process died ({worker.lose()})"
    worker.lose()
    return step, f"no answer within {limit:g} s"
