"""The measure stage: make tasks of open problems, have an executor measure them, and journal the lines.

Problems may come while the compile stage works on others. Compilers do not disturb timings: these are GPU time between
two CUDA events, of launches that were queued ahead, and a launch that the host queued too late is timed again
(:mod:`tilekern.tuning.measure.timing`). The host launches the parts of composites one by one, so composites wait for
the end of the compile stage.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilekern.kernels import spec_named
from tilekern.spec import Config, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.executors import FINISHED, Executor
from tilekern.tuning.measure.followers import followers
from tilekern.tuning.measure.gpu import LIBRARIES
from tilekern.tuning.measure.process import OPEN, TOOK
from tilekern.tuning.measure.tasks import Entrant, Task
from tilekern.tuning.predict.ranking import ranking
from tilekern.tuning.strategies.lineup import ranked
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, Candidate, candidates
from tilekern.tuning.sweep.folder import ArtifactLost, Sweep
from tilekern.tuning.sweep.holding import Run
from tilekern.tuning.sweep.journal import Line
from tilekern.tuning.sweep.lines import copy_key, is_copy
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.verify.check import Check

# How many of the earlier timed candidates race again with new ones, so that one clock judges them.
LEADERS = 4


@dataclass(frozen=True)
class MeasureSummary:
    """The outcome of the measure stage."""

    timed: int
    wrong: int
    quarantined: int
    seconds: float


def measure_all(
    sweep: Sweep, executor: Executor, keep_winners: Callable[[Sweep], None], strategy: str = "race",
    progress: Callable[[int, int], None] | None = None, coming: Iterable[Sequence[Named]] | None = None,
    turns: Mapping[Named, int] | None = None, is_over: threading.Event | None = None,
) -> MeasureSummary:  # fmt: skip
    """Check and time the sweep's open candidates; journal each check when it comes, and each race when it is over.

    Composites come last, after ``keep_winners`` has put the winners of their parts into the sweep's own cache.

    Args:
        sweep: the sweep.
        executor: measures the tasks.
        keep_winners: puts the winners so far into the sweep's own cache.
        strategy: how candidates are timed.
        progress: called with the numbers of finished and of all problems.
        coming: batches of problems as they are compiled; by default all are.
        turns: the turn of each problem: it begins when a GPU is free, lower turns first. By default the executor
            chooses the order.
        is_over: set to begin no more problems; those at work are finished. Needs ``turns``.

    Raises:
        InputError: the executor has no GPU that is the sweep's target, or another run holds the sweep.
    """
    gpu = executor.describe_gpu(sweep.target)
    started = time.perf_counter()
    with sweep.running("measure") as run:
        sweep.note("gpu", gpu)
        named, target = sweep.problems(), sweep.target
        composites = [pair for pair in named if is_composite(*pair, (x.config for x in sweep.candidates(*pair)))]
        width = None if turns is None else executor.width(target)
        is_over = is_over or threading.Event()
        work = _Work(sweep, strategy, gpu, run, turns or {}, width, is_over)

        def tell() -> None:
            if progress:
                progress(work.done, len(named))

        singles = [pair for pair in named if pair not in composites]
        if coming is not None:
            parts = ([pair for pair in some if pair not in composites] for some in coming)
            _measure(executor, work, work.coming(parts), tell)
        elif turns is not None:
            _measure(executor, work, work.coming([singles]), tell)
        else:
            # First kernels without a follower, then kernels that are timed together with theirs.
            followed = [pair for pair in singles if spec_named(pair[0]).follower is not None]
            for some in filter(None, ([pair for pair in singles if pair not in followed], followed)):
                _measure(executor, work, list(work.coming([some])), tell)
        if composites and not work.is_over.is_set():
            keep_winners(sweep)
            todo = work.coming([composites])
            _measure(executor, work, list(todo) if turns is None else todo, tell)
    measured = sweep.measured()
    return MeasureSummary(
        timed=sum("timing" in line for key, line in measured.items() if not is_copy(key)),
        wrong=sum(not _passed(line) for line in measured.values()),
        quarantined=len(sweep.quarantined()),
        seconds=time.perf_counter() - started,
    )


def confirm(sweep: Sweep, executor: Executor, wanted: Iterable[Candidate]) -> None:
    """Run the whole battery on candidates that were timed; journal each check.

    Raises:
        InputError: the executor has no GPU that is the sweep's target, or another run holds the sweep.
    """
    gpu = executor.describe_gpu(sweep.target)
    with sweep.running("measure") as run:
        sweep.note("gpu", gpu)
        work = _Work(sweep, "race", gpu, run, {}, None, threading.Event())
        todo = list(_confirming(sweep, wanted))
        work.begin(todo)
        _measure(executor, work, todo, lambda: None)


def _confirming(sweep: Sweep, wanted: Iterable[Candidate]) -> Iterator[Task]:
    compiled, measured = sweep.compiled(), sweep.measured()
    by_problem: dict[Named, list[Entrant]] = {}
    for item in wanted:
        by_problem.setdefault((item.kernel, item.problem), []).append(Entrant(item, compiled[item.artifact]))
    for (kernel, problem), found in by_problem.items():
        cubins = {entrant.compiled["sha256"]: sweep.cubin(entrant.compiled["sha256"]) for entrant in found}
        checks = {entrant.key: Check(**measured[entrant.key]["check"]) for entrant in found}
        yield Task(kernel, problem, sweep.target, tuple(found), cubins, found[0].key, checks, confirms=True)


def _measure(executor: Executor, work: _Work, todo: Iterable[Task], tell: Callable[[], None]) -> None:
    try:
        for line in executor.run(todo):
            if work.take(*line):
                tell()
    except BaseException:
        work.give_up()
        raise


class _Work:
    """Hands out tasks and journals the lines about them.

    Args:
        sweep: the sweep.
        strategy: how candidates are timed.
        gpu: the GPU, as records keep it.
        run: the run of the stage; it pauses while it waits for more problems.
        turns: the turn of each problem.
        width: how many tasks may be at work at once; None if the executor takes all of them and chooses.
        is_over: set to begin no more tasks.
    """

    def __init__(
        self, sweep: Sweep, strategy: str, gpu: Mapping[str, str], run: Run, turns: Mapping[Named, int],
        width: int | None, is_over: threading.Event,
    ) -> None:  # fmt: skip
        self._sweep, self._strategy, self._gpu, self._run = sweep, strategy, gpu, run
        self._turns, self._width, self.is_over = turns, width, is_over
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._owners: dict[str, _Entry] = {}
        # The tasks may be taken in a thread of the executor.
        self._changed = threading.Condition()
        self._at_work, self._comes, self._given_up = 0, False, False
        # The number of finished problems.
        self.done = 0

    def coming(self, problems: Iterable[Sequence[Named]]) -> Iterator[Task]:
        """Yield the tasks of batches of problems."""
        self._count(comes=True)
        for some in problems:
            if self._width is None:
                todo = list(self._tasks(some))
                self._count(done=len(some) - len(todo), begun=len(todo))
                for task in todo:
                    self._begin(task)
                    yield task
            else:
                yield from self._in_turn(some, self._width)
        self._count(comes=False)

    def _in_turn(self, problems: Sequence[Named], width: int) -> Iterator[Task]:
        """Yield the tasks of problems, lower turns first, each when a GPU is free for it."""
        for named in sorted(problems, key=lambda pair: self._turns.get(pair, 0)):
            todo = [] if self.is_over.is_set() else list(self._tasks([named]))
            with self._changed:
                self._changed.wait_for(lambda: self._given_up or self._at_work < width)
            if self._given_up or self.is_over.is_set():
                return
            self._count(done=1 - len(todo), begun=len(todo))
            for task in todo:
                self._begin(task)
                yield task

    def _tasks(self, named: Sequence[Named]) -> Iterator[Task]:
        return tasks(self._sweep, named, self._strategy)

    def give_up(self) -> None:
        """Hand out no more tasks, since those at work failed."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _count(self, done: int = 0, begun: int = 0, *, comes: bool | None = None) -> None:
        """Count finished problems and begun tasks (ended ones are negative), and note whether more come."""
        with self._changed:
            self.done += done
            self._at_work += begun
            self._comes = self._comes if comes is None else comes
            if self._comes and not self._at_work:
                self._run.pause()
            else:
                self._run.go_on()
            self._changed.notify_all()

    def begin(self, todo: Sequence[Task]) -> None:
        """Take in tasks that are handed out elsewhere."""
        self._count(begun=len(todo))
        for task in todo:
            self._begin(task)

    def _begin(self, task: Task) -> None:
        entry = _Entry(task, self._gpu)
        self._entries[task.kernel, task.problem.key] = entry
        self._owners |= dict.fromkeys(entry.compiled, entry)

    def take(self, journal: str, line: Line) -> bool:
        """Journal a line about a task; return whether the task is finished."""
        if journal == FINISHED:
            self._entries[line["kernel"], line["problem"]].finish(self._sweep)
            self._count(done=1, begun=-1)
            return True
        if journal == TOOK:
            self._entries[line["kernel"], line["problem"]].seconds = line["seconds"]
        elif journal == OPEN:
            self._owners[line["candidate"]].leave_out(line["candidate"])
        elif journal == "skipped":
            self._sweep.note(journal, line | {"skipped": f"{line['kernel']}|{line['problem']}"})
        else:
            self._owners[line["candidate"]].take(self._sweep, journal, line)
        return False


class _Entry:
    """A task at work; its timings are kept until the race is complete, since half a race has no winner."""

    def __init__(self, task: Task, gpu: Mapping[str, str]) -> None:
        self.task, self._gpu = task, gpu
        # The seconds of the measuring process by part of the task.
        self.seconds: Mapping[str, float] = {}
        # The compiled lines of all measured candidates; the copy has none.
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
            libraries = {name: self._gpu[name] for name in LIBRARIES if name in self._gpu}
            made_by: Line = {"libraries": libraries} if key in self._of_libraries else {}
            made_by |= {"toolkit": compiled.get("toolkit"), "driver": self._gpu.get("driver")}
            sweep.note(journal, made_by | line)
            self.leave_out(key)
            return
        line = line | {"code_sha256": code} if (code := compiled.get("code_sha256")) else line
        if "timing" in line:
            self._timed[key] = line
        else:
            sweep.note(journal, line)
            # Winners are checked again after they are timed.
            self._checks[key] = line["check"]

    def leave_out(self, key: str) -> None:
        """Leave a candidate out of this race."""
        self._out.add(key)
        self._timed.clear()  # the others race again

    def finish(self, sweep: Sweep) -> None:
        """Journal the timings, and last the line of the race, from which on they count."""
        if not self._timed:
            return
        name = secrets.token_hex(8)
        checks = {key: {"check": self._checks[key]} for key in self._timed if key in self._checks}
        sweep.note("measured", *(line | checks.get(key, {}) | {"race": name} for key, line in self._timed.items()))
        race = {"race": name, "kernel": self.task.kernel, "problem": self.task.problem.key, "gpu": dict(self._gpu)}
        aligned = {entrant.key for entrant in self.task.entrants if entrant.is_aligned}
        untimed = sorted(aligned - self._timed.keys() - self._out)
        race["untimed"] = {key: self.compiled[key].get("code_sha256") for key in untimed}
        if behind := self.task.followers:
            race["followers"] = {str(blocks): entrant.key for blocks, entrant in sorted(behind.items())}
        classes = {"invariant": True} if self.task.invariant else {}
        sweep.note("races", race | classes | {"strategy": self.task.strategy, "seconds": dict(self.seconds)})


def is_composite(kernel: str, problem: Problem, configs: Iterable[Config]) -> bool:
    """Return whether one of some configs of a problem launches kernels of other specs, which must be tuned first."""
    spec = spec_named(kernel)
    return any(spec.implement(problem, config).composite for config in configs)


def tasks(sweep: Sweep, named: Sequence[tuple[str, Problem]], strategy: str) -> Iterator[Task]:
    """Yield a task for each problem with something to measure, its entrants in the predicted order.

    Of the candidates timed before, only the fastest and the first race again, for comparison with new ones. A problem
    one of whose artifacts is lost is journaled as skipped; the next run tries it again.
    """
    settled = Settled(sweep, strategy)
    target = settled.target
    for kernel, problem in named:
        racing = settled.racing(settled.entrants(kernel, problem))
        if not racing:
            continue
        checks = {e.key: Check(**settled.measured[e.key]["check"]) for e in racing if e.key in settled.measured}
        behind = followers(settled, racing)
        hashes = {e.compiled["sha256"] for e in (*racing, *behind.values()) if "sha256" in e.compiled}
        try:
            cubins = {name: sweep.cubin(name) for name in hashes}
        except ArtifactLost as error:
            sweep.note("skipped", {"skipped": f"{kernel}|{problem.key}", "reason": str(error)})
            continue
        ranked_items = ranking(sweep, kernel, problem, target)
        order = {item.key: place for place, (item, _) in enumerate(ranked_items)}
        predicted = {item.key: prediction.seconds for item, prediction in ranked_items}
        stay = racing[0].key
        racing.sort(key=lambda entrant: order.get(entrant.key, len(order)))
        yield Task(
            kernel, problem, target, tuple(racing), cubins, stay, checks, strategy, predicted,
            timed=spec_named(kernel).timed, followers=behind, invariant=(kernel, problem) in sweep.invariant,
        )  # fmt: skip


class Settled:
    """The checks and timings of the journals, which need not be measured again.

    Args:
        sweep: the sweep, whose journals are read once.
        strategy: how candidates are timed; races by another strategy do not count. Of a problem that needs a kernel of
            one bit class, races count only if the fastest of each class stood the battery.
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
        """Return the candidates of a problem that can run (:func:`entrants`)."""
        among = self._sweep.candidates(kernel, problem)
        return entrants(kernel, problem, self.target, self._compiled, self._quarantined, among)

    @property
    def target(self) -> Target:
        """Return the sweep's GPU."""
        return self._sweep.target

    def problems(self, kernel: str) -> list[Problem]:
        """Return the sweep's problems of a kernel."""
        return [problem for name, problem in self._sweep.problems() if name == kernel]

    def right(self, keys: Iterable[str]) -> dict[str, Line]:
        """Return the lines of right candidates by their keys."""
        lines = {key: self.measured[key] for key in keys if key in self.measured}
        return {key: line for key, line in lines.items() if _passed(line)}

    def racing(self, running: Sequence[Entrant]) -> list[Entrant]:
        """Return the entrants to measure and those to compare them with; none if nothing is open or none can win."""
        todo = self.unsettled(running)
        todo |= self.leaders(running) if todo else set()
        found = [entrant for entrant in running if entrant.key in todo]
        return found if any(entrant.is_aligned for entrant in found) else []

    def unsettled(self, running: Sequence[Entrant]) -> set[str]:
        """Return the keys of entrants that are not settled."""
        return {entrant.key for entrant in running if not self._is_settled(entrant)}

    def _is_settled(self, entrant: Entrant) -> bool:
        """Return whether it was timed, found wrong, left out by a complete race, or checked if it cannot win."""
        line = self.measured.get(entrant.key)
        if (entrant.key, entrant.compiled.get("code_sha256")) in self._untimed:
            return True
        if line is None:
            return False
        race = self._races.get(line.get("race", ""))
        is_timed = "timing" in line and (race is None or race["strategy"] == self._strategy)
        needs_class = (entrant.candidate.kernel, entrant.candidate.problem) in self._sweep.invariant
        is_timed &= not needs_class or bool(race and race.get("invariant"))
        return not entrant.is_aligned or not _passed(line) or is_timed

    def leaders(self, running: Sequence[Entrant]) -> set[str]:
        """Return the keys of the first right candidate that was timed, and of the fastest ones."""
        lines = self.right(entrant.key for entrant in running)
        timings = {key: line["timing"] for key, line in lines.items() if "timing" in line}
        return {*list(timings)[:1], *ranked(timings)[:LEADERS]}


def entrants(
    kernel: str, problem: Problem, target: Target, compiled: Mapping[str, Line], quarantined: Container[str],
    among: Sequence[Candidate] | None = None,
) -> list[Entrant]:  # fmt: skip
    """Return the candidates to run: compiled, not quarantined, and of identical code and grid only the first.

    Args:
        kernel: the spec's name.
        problem: the problem.
        target: the GPU.
        compiled: the journal's lines by artifact key.
        quarantined: keys of candidates that crashed or hung; their twins are left out too.
        among: the candidates to choose from; by default all of the problem.
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
    """Return a key that is equal for candidates that do the same on the GPU."""
    if item.is_library:
        return item.variant, item.config.key, 0
    return item.variant, line["code_sha256"], item.blocks(target.sm_count)


def _passed(line: Line) -> bool:
    return bool(line.get("check", {}).get("passed", True))
