"""The measure stage: what is to be measured becomes tasks, an executor has them measured, the journals take it in."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import spec_named
from tilekern.spec import LibraryCall, Problem
from tilekern.targets import Target
from tuning.executors import FINISHED, Executor
from tuning.predicting import ranking
from tuning.sweep import LIBRARY_LINE, Candidate, Sweep, candidates
from tuning.tasks import Entrant, Task
from tuning.verifying import Check


@dataclass(frozen=True)
class MeasureSummary:
    """What the measure stage did."""

    timed: int
    wrong: int
    quarantined: int
    seconds: float


def measure_all(
    sweep: Sweep, executor: Executor, keep_winners: Callable[[Sweep], None], strategy: str = "race",
    progress: Callable[[int, int], None] | None = None,
) -> MeasureSummary:  # fmt: skip
    """Check and time what the sweep lacks; each result is journalled as it comes.

    Composites come last, when ``keep_winners`` has put the winners of their parts into the sweep's own cache.

    Raises:
        InputError: the executor has no GPU that is the sweep's target.
    """
    target = sweep.target
    sweep.note("gpu", executor.describe_gpu(target))
    started = time.perf_counter()
    named = sweep.problems()
    parts = [pair for pair in named if not is_composite(*pair, target)]
    composites = [pair for pair in named if is_composite(*pair, target)]
    done = 0
    for group in (parts, composites):
        if group is composites and composites:
            keep_winners(sweep)
        done = _measure_group(sweep, executor, group, strategy, lambda count: progress and progress(count, len(named)),
                              done)  # fmt: skip
    lines = sweep.measured().values()
    return MeasureSummary(
        timed=sum("timing" in line for line in lines),
        wrong=sum(not line.get("check", {}).get("passed", True) for line in lines),
        quarantined=len(sweep.quarantined()),
        seconds=time.perf_counter() - started,
    )


def _measure_group(
    sweep: Sweep, executor: Executor, named: list[tuple[str, Problem]], strategy: str, progress: Callable[[int], Any],
    done: int,
) -> int:  # fmt: skip
    """Measure the problems of a group; how many are done after it."""
    todo = list(tasks(sweep, named, strategy))
    done += len(named) - len(todo)
    for journal, line in executor.run(todo):
        if journal == FINISHED:
            done += 1
            progress(done)
        else:
            sweep.note(journal, line)
    return done


def is_composite(kernel: str, problem: Problem, target: Target) -> bool:
    """Whether a problem's default config launches kernels of other specs, whose winners must be known first."""
    spec = spec_named(kernel)
    found = spec.implement(problem, spec.default(problem, target))
    return isinstance(found, LibraryCall) and found.composite


def tasks(sweep: Sweep, named: list[tuple[str, Problem]], strategy: str) -> Iterator[Task]:
    """A task for each problem of which something is still to be measured, its entrants in the predicted order."""
    target, compiled, measured, quarantined = sweep.target, sweep.compiled(), sweep.measured(), sweep.quarantined()
    for kernel, problem in named:
        running = entrants(kernel, problem, target, compiled, quarantined)
        todo = [entrant for entrant in running if not _is_measured(entrant, measured.get(entrant.key))]
        if not any(entrant.is_aligned for entrant in todo):
            continue
        checks = {e.key: Check(**measured[e.key]["check"]) for e in todo if e.key in measured}
        hashes = {e.compiled["sha256"] for e in todo if "sha256" in e.compiled}
        order = {item.key: place for place, (item, _) in enumerate(ranking(sweep, kernel, problem, target))}
        stay = todo[0].key
        todo.sort(key=lambda entrant: order.get(entrant.key, len(order)))
        yield Task(kernel, problem, target, tuple(todo), {name: sweep.cubin(name) for name in hashes}, stay, checks,
                   strategy)  # fmt: skip


def _is_measured(entrant: Entrant, line: dict[str, Any] | None) -> bool:
    """Whether nothing more is to be learnt: timed, found wrong, or checked where no timing is wanted."""
    return line is not None and ("timing" in line or not entrant.is_aligned or not line["check"]["passed"])


def entrants(
    kernel: str, problem: Problem, target: Target, compiled: Mapping[str, dict[str, Any]], quarantined: Container[str]
) -> list[Entrant]:
    """The candidates to run: compiled, not in quarantine, and of each identical code and grid only the first."""
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
