"""The measure stage: what is to be measured becomes tasks, an executor has them measured, the journals take it in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import spec_named
from tilekern.spec import LibraryCall, Problem
from tilekern.targets import Target
from tuning.executors import FINISHED, Executor
from tuning.measure.libraries import of_gpu
from tuning.measure.process import TOOK
from tuning.measure.tasks import Entrant, Task
from tuning.predict.ranking import ranking
from tuning.strategies.selection import ranked
from tuning.sweep.candidates import LIBRARY_LINE, Candidate, candidates
from tuning.sweep.folder import Sweep
from tuning.sweep.journal import Line
from tuning.sweep.lines import copy_key, is_copy
from tuning.verify.check import Check

# How many that were timed before race again against those that were not, so that one clock judges them.
LEADERS = 4


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
    """Check and time what the sweep lacks; each check is journalled as it comes, a race when it is over.

    Composites come last, when ``keep_winners`` has put the winners of their parts into the sweep's own cache.

    Raises:
        InputError: the executor has no GPU that is the sweep's target, or another run holds the sweep.
    """
    gpu = executor.describe_gpu(sweep.target)
    started = time.perf_counter()
    with sweep.running("measure"):
        sweep.note("gpu", gpu)
        named, target = sweep.problems(), sweep.target
        composites = [pair for pair in named if is_composite(*pair, target)]
        parts = [pair for pair in named if pair not in composites]
        done = 0
        for group in filter(None, (parts, composites)):
            if group is composites:
                keep_winners(sweep)
            todo = list(tasks(sweep, group, strategy))
            done += len(group) - len(todo)
            for _ in _measured(sweep, executor, todo, gpu):
                done += 1
                if progress:
                    progress(done, len(named))
    measured = sweep.measured()
    return MeasureSummary(
        timed=sum("timing" in line for key, line in measured.items() if not is_copy(key)),
        wrong=sum(not _passed(line) for line in measured.values()),
        quarantined=len(sweep.quarantined()),
        seconds=time.perf_counter() - started,
    )


def _measured(sweep: Sweep, executor: Executor, todo: Sequence[Task], gpu: Mapping[str, str]) -> Iterator[Task]:
    """Have tasks measured and journal what comes back; each task when it is over."""
    entries = {(task.kernel, task.problem.key): _Entry(task, gpu) for task in todo}
    owners = {key: entry for entry in entries.values() for key in entry.compiled}
    for journal, line in executor.run(todo):
        if journal == FINISHED:
            entry = entries[line["kernel"], line["problem"]]
            entry.finish(sweep)
            yield entry.task
        elif journal == TOOK:
            entries[line["kernel"], line["problem"]].seconds = line["seconds"]
        elif journal == "skipped":
            sweep.note(journal, line | {"skipped": f"{line['kernel']}|{line['problem']}"})
        else:
            owners[line["candidate"]].take(sweep, journal, line)


class _Entry:
    """A task at work: its timings wait until all are there, since half a race says nothing of who would have won."""

    def __init__(self, task: Task, gpu: Mapping[str, str]) -> None:
        self.task, self._gpu = task, gpu
        # What the measuring process took, by part of the way.
        self.seconds: Mapping[str, float] = {}
        # The compiled line of whatever may be measured; the copy has none.
        self.compiled = {entrant.key: entrant.compiled for entrant in task.entrants}
        self.compiled[copy_key(task.kernel, task.problem)] = {}
        self._of_libraries = {entrant.key for entrant in task.entrants if entrant.candidate.is_library}
        self._timed: dict[str, Line] = {}
        self._checks: dict[str, Line] = {}
        self._out: set[str] = set()

    def take(self, sweep: Sweep, journal: str, line: Line) -> None:
        """Keep a timing; journal anything else at once."""
        key, compiled = line["candidate"], self.compiled[line["candidate"]]
        if journal == "quarantine":
            made_by: Line = {"libraries": of_gpu(self._gpu)} if key in self._of_libraries else {}
            made_by |= {"toolkit": compiled.get("toolkit"), "driver": self._gpu.get("driver")}
            sweep.note(journal, made_by | line)
            self._out.add(key)
            self._timed.clear()  # the others race again
            return
        line = line | {"code_sha256": code} if (code := compiled.get("code_sha256")) else line
        if "timing" in line:
            self._timed[key] = line
        else:
            sweep.note(journal, line)
            # A winner may be checked again after it was timed.
            self._checks[key] = line["check"]

    def finish(self, sweep: Sweep) -> None:
        """Journal the timings; the race's own line comes last, and they count from there on."""
        if not self._timed:
            return
        name = secrets.token_hex(8)
        checks = {key: {"check": self._checks[key]} for key in self._timed if key in self._checks}
        sweep.note("measured", *(line | checks.get(key, {}) | {"race": name} for key, line in self._timed.items()))
        race = {"race": name, "kernel": self.task.kernel, "problem": self.task.problem.key, "gpu": dict(self._gpu)}
        aligned = {entrant.key for entrant in self.task.entrants if entrant.is_aligned}
        untimed = sorted(aligned - self._timed.keys() - self._out)
        race["untimed"] = {key: self.compiled[key].get("code_sha256") for key in untimed}
        sweep.note("races", race | {"strategy": self.task.strategy, "seconds": dict(self.seconds)})


def is_composite(kernel: str, problem: Problem, target: Target) -> bool:
    """Whether a problem's default config launches kernels of other specs, whose winners must be known first."""
    spec = spec_named(kernel)
    found = spec.implement(problem, spec.default(problem, target))
    return isinstance(found, LibraryCall) and found.composite


def tasks(sweep: Sweep, named: Sequence[tuple[str, Problem]], strategy: str) -> Iterator[Task]:
    """A task for each problem of which something is still to be measured, its entrants in the predicted order.

    What was timed before does not race again, but for the fastest and the first: the new ones need their company.
    """
    target, settled = sweep.target, Settled(sweep, strategy)
    for kernel, problem in named:
        racing = settled.racing(settled.entrants(kernel, problem))
        if not racing:
            continue
        checks = {e.key: Check(**settled.measured[e.key]["check"]) for e in racing if e.key in settled.measured}
        hashes = {e.compiled["sha256"] for e in racing if "sha256" in e.compiled}
        ranked_items = ranking(sweep, kernel, problem, target)
        order = {item.key: place for place, (item, _) in enumerate(ranked_items)}
        predicted = {item.key: prediction.seconds for item, prediction in ranked_items}
        stay = racing[0].key
        racing.sort(key=lambda entrant: order.get(entrant.key, len(order)))
        yield Task(kernel, problem, target, tuple(racing), {name: sweep.cubin(name) for name in hashes}, stay, checks,
                   strategy, predicted)  # fmt: skip


class Settled:
    """What the journals say that need not be measured again; they are read once.

    Args:
        sweep: the sweep.
        strategy: how candidates are to be timed; races by another strategy do not count.
    """

    def __init__(self, sweep: Sweep, strategy: str) -> None:
        self._sweep, self._strategy = sweep, strategy
        self._compiled, self.measured, self._races = sweep.compiled(), sweep.measured(), sweep.races()
        self._quarantined = sweep.quarantined()
        self._untimed = {
            (key, code)
            for race in self._races.values()
            if race["strategy"] == strategy
            for key, code in race["untimed"].items()
        }

    def entrants(self, kernel: str, problem: Problem) -> list[Entrant]:
        """The candidates of a problem that can run (:func:`entrants`)."""
        among = self._sweep.candidates(kernel, problem)
        return entrants(kernel, problem, self._sweep.target, self._compiled, self._quarantined, among)

    def racing(self, running: Sequence[Entrant]) -> list[Entrant]:
        """Those to measure, with the company that they need; none where nothing is to be learnt, or nobody can win."""
        todo = self.unsettled(running)
        todo |= self.leaders(running) if todo else set()
        found = [entrant for entrant in running if entrant.key in todo]
        return found if any(entrant.is_aligned for entrant in found) else []

    def unsettled(self, running: Sequence[Entrant]) -> set[str]:
        """The keys of those of which something is still to be learnt."""
        return {entrant.key for entrant in running if not self._is_settled(entrant)}

    def _is_settled(self, entrant: Entrant) -> bool:
        """Whether it was timed, found wrong, left untimed by a whole race, or checked where no timing is wanted."""
        line = self.measured.get(entrant.key)
        if (entrant.key, entrant.compiled.get("code_sha256")) in self._untimed:
            return True
        return line is not None and (not entrant.is_aligned or not _passed(line) or self._is_timed(line))

    def _is_timed(self, line: Line) -> bool:
        race = self._races.get(line.get("race", ""))
        return "timing" in line and (race is None or race["strategy"] == self._strategy)

    def leaders(self, running: Sequence[Entrant]) -> set[str]:
        """The keys of the first that was timed and is right, and of those that come next to winning."""
        lines = {entrant.key: self.measured.get(entrant.key, {}) for entrant in running}
        timings = {key: line["timing"] for key, line in lines.items() if "timing" in line and _passed(line)}
        return {*list(timings)[:1], *ranked(timings)[:LEADERS]}


def entrants(
    kernel: str, problem: Problem, target: Target, compiled: Mapping[str, Line], quarantined: Container[str],
    among: Sequence[Candidate] | None = None,
) -> list[Entrant]:  # fmt: skip
    """The candidates to run: compiled, not in quarantine, and of each identical code and grid only the first.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        compiled: the journal's lines by artifact key.
        quarantined: keys of candidates that crashed or hung; what does the same as one of them is left out too.
        among: the candidates to choose from; all of the problem's where None.
    """
    found: dict[Any, Entrant | None] = {}
    for item in candidates(kernel, problem, target) if among is None else among:
        line = LIBRARY_LINE if item.is_library else compiled.get(item.artifact)
        if line is not None and line["status"] == "ok":
            does = identity(item, line, target)
            if item.key in quarantined:
                found[does] = None
            else:
                found.setdefault(does, Entrant(item, line))
    return [entrant for entrant in found.values() if entrant is not None]


def identity(item: Candidate, line: Line, target: Target) -> tuple[str, str, int]:
    """Equal for candidates that do the same on the GPU."""
    if item.is_library:
        return item.variant, item.config.key, 0
    blocks = item.spec.device(item.problem, item.config).grid(item.problem, target.sm_count)
    return item.variant, line["code_sha256"], blocks


def _passed(line: Line) -> bool:
    return bool(line.get("check", {}).get("passed", True))
