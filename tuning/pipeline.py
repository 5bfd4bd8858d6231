"""The tuner's pipeline: compiles a planned sweep, measures or predicts, and publishes the winners.

``tune``, ``refresh``, the service, ``preflight --fix`` and :func:`tilekern.tune` are callers of :class:`Pipeline`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilekern.cache import Hit, Store, default_layers
from tilekern.cache.trust.policy import must_be_signed, own_seal
from tilekern.cache.trust.signing import SigningKey
from tilekern.compile.toolchain import backends, toolkit
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.spec.targets import Target, here
from tilekern.tuning.budget import Budget, LeftOut, Worth, is_as_good, served_by, turns_by_gain, worths_of
from tilekern.tuning.compile.pool import compile_in_order, start_server
from tilekern.tuning.compile.stage import (
    TIMEOUT_S,
    Compiling,
    Pool,
    compile_all,
    jobs_of,
    settled,
)
from tilekern.tuning.measure.stage import MeasureSummary, Settled, measure_all
from tilekern.tuning.predict.estimating import earlier_sweeps
from tilekern.tuning.publishing import (
    Known,
    Winner,
    compiled_with,
    invariant_winners,
    keep_winners,
    of_others,
    publish,
    why_not,
    winners,
    with_invariant,
    write_packs,
)
from tilekern.tuning.rehearse.stage import STEP, rehearse, stage_in
from tilekern.tuning.stopping import Stopped
from tilekern.tuning.strategies import strategy_named
from tilekern.tuning.sweep.folder import RESULTS, Sweep, folder_in
from tilekern.tuning.sweep.holding import written
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.sweep.quarantine import shared
from tilekern.tuning.terminal import PUBLISH

if TYPE_CHECKING:
    from tilekern.tuning.executors import Executor
    from tilekern.tuning.executors.cluster import ClusterExecutor
    from tilekern.tuning.plan.steps import Planned

PLAN, COMPILE, MEASURE = STAGES = ("plan", "compile", "measure")
LOCAL, RAY = "local", "ray"
MEASURED = "measured"
NO_TOOLKIT = {"key": "none", "tileiras": "none", "cuda_tile": "none"}
# A winner with the bytes of its artifacts.
Won = tuple[Winner, dict[str, bytes]]
# Told the stage at work, and how much of how many is done in it.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """Options of a pipeline.

    Attributes: those that are not here are arguments of :func:`tilekern.tune`.
        stages: which of :data:`STAGES` run. Without ``compile``, measuring needs the GPU here; with it, winners are
            predicted where the GPU is not.
        began: when the run began, by ``time.monotonic``; the budget counts from then.
        key: signs artifacts and records that are handed on.
        only_measured: publish measured winners alone.

    Raises:
        InputError: a stage, the executor or the strategy is not known, a number is wrong, or there are too many
            workers.
    """

    stages: Sequence[str] = STAGES
    jobs: int | None = None
    timeout_s: float = TIMEOUT_S
    strategy: str = "race"
    executor: str = LOCAL
    gpus: int | None = None
    budget_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    key: SigningKey | None = None
    only_measured: bool = False

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in STAGES:
                raise InputError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
        if self.executor not in (LOCAL, RAY) and not re.fullmatch(r"ray://.+:[0-9]+", str(self.executor)):
            raise InputError(f"unknown executor {self.executor!r}; known: local, ray, ray://HOST:PORT")
        strategy_named(self.strategy)
        for name, seconds in (("timeout_s", self.timeout_s), ("budget_s", self.budget_s)):
            if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds)):
                raise InputError(f"{name} must be a number of seconds, got {seconds!r:.40}")
        for name, number in (("jobs", self.jobs), ("gpus", self.gpus)):
            if number is not None and (type(number) is not int or number < 1):
                raise InputError(f"{name} must be a whole number of at least 1, got {number!r:.40}")
        if COMPILE in self.stages and self.executor == LOCAL:
            jobs_of(self.jobs)


@dataclass
class Result:
    """Outcome of a run.

    Attributes:
        model: what was tuned, for people.
        target: the GPU.
        toolkit: the compiler: its ``key`` and versions.
        seconds: wall seconds of each stage.
        winners: the winner of each problem that has one; ``winner.record.provenance`` says how it was chosen.
        left_out: problems that the budget did not reach, and what serves them meanwhile.
        others: problems whose records rest on lines of the sweep that others wrote, and are not this user's own.
        lost: problems without a record because an artifact of their winner is lost, and which artifact.
        notes: lines for people.
        compile: the outcome of the compile stage (:class:`tilekern.tuning.compile.stage.CompileSummary`).
        measure: that of the measure stage (:class:`tilekern.tuning.measure.stage.MeasureSummary`), with ``reasons``.
        step: how many kernels were chosen in the step of a token (:class:`tilekern.tuning.rehearse.stage.Summary`);
            empty without such a step.
        results: the file of all records, ``results.pack``; None where none was written.
        cache: the cache that took them in.
        packs: how many records each model's pack has, by its path.
        budget_s: the budget, in seconds; None where there was none.
        spent_s: wall seconds of the run.
        is_whole: whether every problem has a winner that the budget did not leave out.
        stop: the signal that stopped the run (:func:`tilekern.tuning.stopping.stopped_by`); then only what is measured
            is published.
    """

    model: str
    target: Target
    toolkit: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    winners: list[Winner] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    others: set[Named] = field(default_factory=set)
    lost: dict[Named, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compile: dict[str, Any] = field(default_factory=dict)
    measure: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    results: str | None = None
    cache: str | None = None
    packs: dict[str, int] = field(default_factory=dict)
    budget_s: float | None = None
    spent_s: float = 0.0
    is_whole: bool = True
    stop: Stopped | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "model": self.model,
            "target": self.target.describe(),
            "toolkit": self.toolkit,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "compile": self.compile,
            "measure": self.measure,
            "step": self.step,
            "problems": [
                winner.as_json() | {"own": (winner.kernel, winner.problem) not in self.others}
                for winner in self.winners
            ],
            "budget": {
                "seconds": self.budget_s,
                "spent": round(self.spent_s, 3),
                "left_out": [problem.as_json() for problem in self.left_out],
            },
            "lost": [
                {"kernel": kernel, "problem": dict(problem), "reason": reason}
                for (kernel, problem), reason in self.lost.items()
            ],
            "results": self.results,
            "cache": self.cache,
            "packs": self.packs,
            "notes": self.notes,
        }


def described_toolkit() -> dict[str, str]:
    """Return the ``key`` and versions of the compiler that is installed."""
    tools = toolkit()
    return tools.describe() if tools else NO_TOOLKIT


class Pipeline:
    """One run over a planned sweep; its methods stand in the order of the stages.

    Args:
        sweep: the sweep, whose plan is written.
        store: the cache to fill.
        options: how to work.
        tell: told how far each stage is.
        packs: the plans of models by the path of the pack that each gets.
        notes: lines for people that the result begins with.
    """

    def __init__(
        self, sweep: Sweep, store: Store, options: Options, tell: Tell = lambda *_: None, *,
        packs: Mapping[Path, Planned] | None = None, notes: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.sweep, self.store, self.options, self.tell = sweep, store, options, tell
        self.budget = Budget(options.budget_s, options.began) if options.budget_s is not None else None
        self.result = Result(
            sweep.model, sweep.target, described_toolkit(), notes=list(notes), budget_s=options.budget_s
        )
        self._packs = packs or {}
        # Of a run with a budget: what each problem is worth, its turn, and the record that serves it before.
        self._worths: dict[Named, Worth] = {}
        self._served: dict[Named, Hit | None] = {}
        self._turns: dict[Named, int] | None = None
        # Whether the budget ended a stage before all was done.
        self._is_cut = False

    @classmethod
    def of(
        cls, planned: Planned, target: Target, store: Store, options: Options, tell: Tell | None = None, *,
        folder: Path | None = None, packs: Mapping[Path, Planned] | None = None,
    ) -> Pipeline:  # fmt: skip
        """Begin the sweep of a plan, in the cache's folder for the target unless one is named.

        Raises:
            InputError: the folder holds another target's sweep, is held by another run, or cannot be written.
        """
        sweep = Sweep(folder or folder_in(store.root, target.key))
        sweep.begin(
            target, planned.name, planned.problems, launches=planned.launches, invariant=planned.invariant,
            tokens=planned.tokens,
        )  # fmt: skip
        pipeline = cls(sweep, store, options, tell or (lambda *_: None), packs=packs, notes=planned.notes)
        pipeline.result.seconds[PLAN] = time.monotonic() - options.began
        return pipeline

    @property
    def _compiles(self) -> bool:
        return COMPILE in self.options.stages

    @property
    def _measures(self) -> bool:
        return MEASURE in self.options.stages

    def run(self) -> Result:
        """Compile, measure and publish, as the options say; a run that a signal stops publishes what is measured.

        Raises:
            InputError: a folder cannot be written or is another's, or no GPU can be had.
            ToolchainMissing: artifacts are missing and no compiler is installed.
            tilekern.cache.CacheError: a pack or the cache cannot be written.
        """
        try:
            self.work()
            self._end()
        except Stopped as stop:
            self._end_stopped(stop)
        self.result.spent_s = time.monotonic() - self.options.began
        return self.result

    def _end(self) -> None:
        """Publish what the stages found, and note what is missing."""
        notes, folder = self.result.notes, self.sweep.folder
        quoted = shlex.quote(str(folder))
        if self._measures:
            self.publish(self.winners())
        elif self._compiles:
            self.result.winners = [winner for winner, _ in self.winners()]
            notes.append(f"carry {folder} to the target and run --stages measure --sweep {quoted}")
        else:
            count = f"{len(self.sweep.problems())} problems are planned in {folder}"
            notes.append(f"{count}; go on with --stages compile,measure --sweep {quoted}")
        if self._compiles or self._measures:
            self._note_missing()

    def _end_stopped(self, stop: Stopped) -> None:
        """Publish what is measured, and nothing else, since whoever stopped the run may kill it soon."""
        result, self.options = self.result, dataclasses.replace(self.options, only_measured=True)
        result.stop, result.is_whole, result.left_out = stop, False, []
        if self._measures and (found := self.winners()):
            self.publish(found)
        result.notes.append(
            f"{stop}: stopped with {len(result.winners)} of {len(self.sweep.problems())} problems measured; what was "
            "finished is kept, the next run goes on from there"
        )

    def work(self) -> None:
        """Compile and measure, both at once if there is room for both."""
        self.sweep.require_own()
        notes = without_backends(self.sweep, self.sweep.problems()) if self._compiles else whose_artifacts(self.sweep)
        self.result.notes += notes
        _require_writable(self.store, self.sweep)
        if self._compiles and self.options.executor == LOCAL:
            start_server()
        with self._executor() as executor, self._counted():
            if self.budget:
                self._order_by_gain(executor)
            if self._compiles and executor and self._has_room_for_both():
                self._compile_and_measure(executor)
            else:
                if self._compiles:
                    self._compile(will_measure=executor is not None)
                if executor:
                    self._measure(executor)
            if self._measures and self.sweep.tokens:
                self._choose_in_steps(executor)
        if self._compiles and (key := self.options.key):
            self.result.notes.append(f"signed {self.sweep.sign(key)} artifacts with key {key.public_key[:16]}")

    def _order_by_gain(self, executor: Executor | None) -> None:
        sweep, options = self.sweep, self.options
        layers = default_layers(Path(self.store.root), looking=True)
        self._served = served_by(sweep.problems(), sweep.target, layers)
        self._worths = worths_of(
            sweep, self._served, jobs=self._compilers()[0] if self._compiles else 1,
            gpus=executor.width(sweep.target) if executor else 0, timeout_s=options.timeout_s,
            sweeps=earlier_sweeps(Path(self.store.root), sweep),
        )  # fmt: skip
        self._turns = turns_by_gain(self._worths, sweep.target)

    def _compile(self, *, will_measure: bool) -> None:
        jobs, pool = self._compilers()
        # Where the two stages cannot run at once, each gets half of a budget.
        with self._timed(COMPILE), self._counted(0.5 if will_measure else 1.0) as is_over:
            summary = compile_all(
                self.sweep, jobs, self.options.timeout_s, self._told(COMPILE), pool=pool, turns=self._turns,
                is_over=is_over,
            )  # fmt: skip
            self._is_cut = is_over is not None and is_over.is_set()
        self.result.compile = dataclasses.asdict(summary)

    def _measure(self, executor: Executor) -> None:
        with self._timed(MEASURE), shared(self.sweep, self.store.root):
            done = measure_all(
                self.sweep, executor, keep_winners, self.options.strategy, self._told(MEASURE), turns=self._turns,
                is_over=self._spent,
            )  # fmt: skip
        self.result.measure = self._measured(done)

    def _compile_and_measure(self, executor: Executor) -> None:
        """Measure each problem as soon as it is compiled; only the time beyond the last compile counts as measuring."""
        jobs, pool = self._compilers(beside=True)
        started = time.perf_counter()
        with shared(self.sweep, self.store.root):
            compiles = functools.partial(
                compile_all, self.sweep, jobs, self.options.timeout_s, self._told(COMPILE), pool=pool,
                turns=self._turns,
            )  # fmt: skip
            with Compiling(compiles, self._spent) as compiling:
                done = measure_all(
                    self.sweep, executor, keep_winners, self.options.strategy, self._told(MEASURE),
                    coming=compiling.problems(), turns=self._turns, is_over=self._spent,
                )  # fmt: skip
                self.result.compile = dataclasses.asdict(compiling.summary())
        self.result.measure = self._measured(done)
        self.result.seconds[COMPILE] = compiling.ended - started
        self.result.seconds[MEASURE] = time.perf_counter() - compiling.ended

    def _choose_in_steps(self, executor: Executor | None) -> None:
        """Choose the kernels of tokens in the engine's own steps, which run on a GPU of this host."""
        if executor is None or self.options.executor != LOCAL:
            where = "there is none" if executor is None else f"--executor {self.options.executor} has others"
            self.result.notes.append(f"no step of a token is timed, which needs the GPU here, and {where}")
            return
        is_over = self.budget.spent.is_set if self.budget else lambda: False
        with self._timed(STEP):
            done = rehearse(self.sweep, executor, stage_in(Path(self.store.root)), self._told(STEP), is_over)
        self.result.step = {name: value for name, value in vars(done).items() if name != "notes"}
        self.result.notes += done.notes

    def _measured(self, done: MeasureSummary) -> dict[str, Any]:
        """Return the outcome of the measure stage, with the reasons of wrong and quarantined candidates."""
        checks = (line.get("check", {}) for line in self.sweep.measured().values())
        wrong = (check.get("reason", "") for check in checks if not check.get("passed", True))
        return dataclasses.asdict(done) | {"reasons": dict(Counter([*wrong, *self.sweep.quarantined().values()]))}

    def winners(self) -> list[Won]:
        """Return the winners that may be published, and note what the budget left out.

        A problem whose space was compiled in part has none, nor has one that a better record serves than a prediction,
        or whose winner has lost an artifact (``result.lost``).
        """
        self._note_left_out()
        # The machine that measures may have no compiler.
        self.result.toolkit = compiled_with(self.sweep) or self.result.toolkit
        layers = default_layers(Path(self.store.root), looking=True)
        result, only_measured = self.result, self.options.only_measured
        of_journals = list(winners(self.sweep, result.toolkit, only_measured=only_measured, lost=result.lost))
        result.others = of_others(self.sweep, result.toolkit, of_journals)
        found: Iterable[Won] = of_journals
        # What others made is not signed with this user's key, and without the policy any record may be theirs.
        if must_be_signed() or not self.options.key:
            found = with_invariant(found, lambda named: served_by([named], self.sweep.target, layers)[named])
        unfinished = {
            (left.kernel, left.problem)
            for left in self.result.left_out
            if left.reason == NOT_COMPILED or left.provenance == MEASURED
        }
        return [won for won in found if (won[0].kernel, won[0].problem) not in unfinished]

    def publish(self, found: Sequence[Won]) -> None:
        """Write winners to ``results.pack`` and to the packs of models, and install them in the cache.

        Raises:
            InputError: there is no winner, and the budget left nothing out; or all winners have lost an artifact.
            tilekern.cache.CacheError: a pack or the cache cannot be written.
        """
        result, sweep = self.result, self.sweep
        result.winners = [winner for winner, _ in found]
        if not found and result.lost:
            raise InputError(_why_lost(sweep, result.lost))
        if not found and not (self.options.only_measured or result.left_out):
            raise InputError(_why_none(sweep))
        if found:
            self.tell(PUBLISH, 0, 0)
            path = sweep.folder / RESULTS
            installed = publish(found, path, self.store, result.others, self.options.key)
            if installed.unclassed:
                result.notes.append(
                    f"records in {self.store.root} that had a kernel for tilekern.invariant() and have none now: "
                    f"{installed.unclassed}; tune them with --invariant"
                )
            result.results, result.cache = str(path), str(self.store.root)
            result.packs = write_packs(self._packs, found, self.options.key)

    def why_not(self, kernel: str, problem: Problem) -> str:
        """Return why a problem is not among the winners."""
        return self.result.lost.get((kernel, problem)) or why_not(self.sweep, kernel, problem)

    def _note_left_out(self) -> None:
        if not (self.budget and (self._is_cut or self.budget.spent.is_set())):
            return
        done = settled(self.sweep, self.options.timeout_s)
        known = Settled(self.sweep, self.options.strategy)
        for kernel, problem in self.sweep.problems():
            items = [item for item in self.sweep.candidates(kernel, problem) if not item.is_library]
            is_compiled = done.issuperset(item.artifact for item in items)
            if is_compiled and not (self.result.measure and known.racing(known.entrants(kernel, problem))):
                continue
            hit = self._served[kernel, problem]
            provenance = hit.record.provenance if hit else "default"
            if is_compiled and not is_as_good(hit, MEASURED):
                provenance = "predicted"
            reason = NOT_MEASURED if is_compiled else NOT_COMPILED
            cost_s = self._worths[kernel, problem].cost_s
            self.result.left_out.append(LeftOut(kernel, problem, reason, provenance, cost_s))

    def _note_missing(self) -> None:
        """Note each problem without a winner, without a measured one where others have one, or without the bit class
        that it needs, and why.
        """
        result = self.result
        won = {(winner.kernel, winner.problem): winner.record.provenance for winner in result.winners}
        left = {(out.kernel, out.problem) for out in result.left_out}
        result.is_whole = bool(won or not left) and won.keys() | left >= set(self.sweep.problems())
        told = left | result.lost.keys()
        for kernel, problem in self.sweep.problems():
            how = won.get((kernel, problem))
            if (kernel, problem) not in told and (how is None or (result.measure and how != MEASURED)):
                what = "no winner" if how is None else "not measured"
                result.notes.append(f"{what}: {kernel} {problem.key}: {self.why_not(kernel, problem)}")
        if self.sweep.invariant and result.measure:
            for (kernel, problem), why in invariant_winners(self.sweep, Known.of(self.sweep))[1].items():
                result.notes.append(f"no bit class: {kernel} {problem.key}: {why}")

    # Where the stages run.

    @contextlib.contextmanager
    def _executor(self) -> Iterator[Executor | None]:
        """Yield the executor that measures, or None; local processes load their modules while others compile."""
        if not self._measures:
            yield None
        elif self.options.executor != LOCAL:
            cluster = self._cluster()
            if self._compiles:
                try:  # it raises where there is no such GPU, before anything is compiled
                    cluster.width(self.sweep.target)
                except InputError as error:
                    raise InputError(f"{error}; to compile alone give --stages plan,compile") from None
            yield cluster
        elif self._compiles and (why := absence(self.sweep.target, self.options.stages)):
            self.result.notes.append(why)
            yield None
        else:
            from tilekern.tuning.executors.local import LocalExecutor

            with LocalExecutor(self.sweep.cache, self.options.gpus) as executor:
                yield executor

    def _has_room_for_both(self) -> bool:
        """Return whether compilers have a CPU while all GPUs measure; on a cluster each GPU holds one."""
        return self.options.executor == LOCAL or self._cluster().spare_cores(self.sweep.target) > 0

    def _compilers(self, *, beside: bool = False) -> tuple[int, Pool]:
        """Return how many candidates to compile at once, and where: on the measuring cluster, or here."""
        if self.options.executor == LOCAL:
            return jobs_of(self.options.jobs), compile_in_order
        cluster = self._cluster()
        cores = cluster.spare_cores(self.sweep.target) if beside else cluster.cores
        return jobs_of(self.options.jobs, cores), cluster.compile_in_order

    def _cluster(self) -> ClusterExecutor:
        name = self.options.executor
        if importlib.util.find_spec("ray") is None:
            raise InputError(f"--executor {name} needs Ray: pip install 'tilekern[cluster]'")
        from tilekern.tuning.executors.cluster import ClusterExecutor

        return ClusterExecutor(None if name == RAY else name, self.sweep.cache, self.options.gpus)

    # Time and progress.

    def _counted(self, share: float = 1.0) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the event of a share of the remaining budget; None without a budget."""
        return self.budget.counted(share) if self.budget else contextlib.nullcontext()

    @property
    def _spent(self) -> Any:
        return self.budget.spent if self.budget else None

    def _told(self, stage: str) -> Callable[[int, int], None]:
        self.tell(stage, 0, 0)
        return lambda done, total: self.tell(stage, done, total)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.result.seconds[stage] = time.perf_counter() - started


NOT_COMPILED, NOT_MEASURED = "not compiled", "not measured"


def absence(target: Target, stages: Sequence[str]) -> str | None:
    """Return why a run cannot measure here, and what it does instead; None if the GPU here is the target."""
    at_hand = here()
    if at_hand is not None and at_hand.key == target.key:
        return None
    found = "no GPU here" if at_hand is None else f"the GPU here is a {at_hand.name}, not a {target.name}"
    if MEASURE in stages and COMPILE not in stages:
        return f"{found}: the measure stage runs on the target alone"
    return f"{found}: the measure stage is left out and the winners are predicted"


def whose_artifacts(sweep: Sweep) -> Iterator[str]:
    """Describe what becomes of artifacts that others compiled.

    Raises:
        InputError: they must not run, because the policy is ``signed`` or the run signs its results.
    """
    compiled, others = sweep.compiled(), sweep.others
    if not others:
        return
    if not compiled:
        why = "TILEKERN_TRUST is signed, and" if must_be_signed() else "--sign signs what is your own, and"
        raise InputError(
            f"{why} neither you compiled what is in {sweep.folder} nor a trust root signed it; sign it where it is "
            "compiled (--stages plan,compile --sign KEY), or compile it here"
        )
    if others == 1:
        whose = f"1 artifact in {sweep.folder} is by another, and no trust root signed it"
        yield f"{whose}: it is left out" if sweep.is_own else f"{whose}: its records are not signed either"
    else:
        whose = f"{others} artifacts in {sweep.folder} are by others, and no trust root signed them"
        yield f"{whose}: they are left out" if sweep.is_own else f"{whose}: their records are not signed either"


def without_backends(sweep: Sweep, problems: Iterable[Named]) -> Iterator[str]:
    """Say which kernels are swept without the configs of a backend that is not installed."""
    named = dict(problems)
    for backend in (backend for backend in backends() if backend.name in sweep.missing_backends):
        able = sum(
            not set(backend.implementations).isdisjoint(space.axes(problem).get("implementation", ()))
            for kernel, problem in named.items()
            for space in spec_named(kernel).space.beside[:1]
        )
        if able:
            yield (
                f"{', '.join(backend.needs)} is not installed: {able} of {len(named)} kernels are swept without "
                f"{backend.title} ({backend.install})"
            )


def _why_none(sweep: Sweep) -> str:
    if not (problems := sweep.problems()):
        return f"{sweep.folder} plans no problem; run --stages plan for a model that has some"
    kernel, problem = problems[0]
    return (
        f"no candidate compiled and passed its check; of {kernel} {problem.key}: {why_not(sweep, kernel, problem)}; "
        f"python -m tilekern.tune status {shlex.quote(str(sweep.folder))} has the others"
    )


def _why_lost(sweep: Sweep, lost: Mapping[Named, str]) -> str:
    (kernel, problem), reason = next(iter(lost.items()))
    return (
        f"no record can be made of {sweep.folder}: each of {len(lost)} winners has lost an artifact, the first, of "
        f"{kernel} {problem.key}: {reason}, or copy the folder again"
    )


def _require_writable(store: Store, sweep: Sweep) -> None:
    for folder in (Path(store.root), sweep.folder):
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    own_seal(b"")  # so that what cannot be sealed is said before hours are spent on it
