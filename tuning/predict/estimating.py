"""Count the candidates of a plan and estimate the time of each stage, for a dry run.

Nothing here compiles, measures or writes. The counts are exact, with one exception: candidates with the same machine
code are timed once, which is known only after they are compiled. The times are means of earlier sweeps.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.compile.toolchain import backends
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import Config, KernelSpec, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.compile.order import COMPILE_S, OTHER_S
from tilekern.tuning.compile.stage import work_s
from tilekern.tuning.measure.stage import Settled, entrants
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.strategies.race import LEAST_ROUNDS, LONGEST_US, ROUNDS
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import is_copy
from tilekern.tuning.sweep.plan import Limits

# The front end's imports and the first call of tileiras in each worker.
COMPILE_START_S = 2.0
# A whole tune on an H200 measured 2,849 candidates of 105 problems in 94 s: the start of a worker and the rise of its
# clocks, the inputs, references and battery of each problem, the screening and the race of each candidate. The launches
# at full size took these multiples of the roofline's time, for each problem and for each candidate.
MEASURE_START_S, PROBLEM_S, CANDIDATE_S = 8.0, 0.33, 0.004
PROBLEM_ROOFLINES, CANDIDATE_ROOFLINES = 60.0, 4.0
# What an exhaustive race takes in addition, for each sample: a multiple of the roofline's time and a constant. On an
# H200, cuda.tile's search took 36.3 s of GPU time for eight samples of each candidate of 134 problems; this gives 40.2.
OVER_ROOFLINE, SAMPLE_S = 2.0, 20e-6
EXHAUSTIVE = "exhaustive"
# With fewer artifacts of a kernel than this the table is more reliable.
_ENOUGH = 5


@dataclass(frozen=True)
class Count:
    """One problem of a plan in numbers.

    ``bucketed``: the dimensions that are rounded up to a bucket. ``space``: all points of the axes, or the configs to
    which the plan is limited. ``ruled_out``: points that a constraint forbids, by reason. ``candidates``: the others,
    the default config and the generic variant. ``artifacts``: artifacts that no earlier problem has. ``compiled``: the
    ones of them that the sweep has. ``settled`` and ``to_measure``: candidates that need no measurement, and those that
    do.
    """

    kernel: str
    problem: Problem
    bucketed: tuple[str, ...]
    space: int
    ruled_out: Mapping[str, int]
    candidates: int
    artifacts: int
    compiled: int
    settled: int
    to_measure: int

    def as_json(self) -> dict[str, Any]:
        """Return the count as ``--json`` prints it."""
        return {**vars(self), "problem": dict(self.problem), "ruled_out": dict(self.ruled_out)}


@dataclass(frozen=True)
class Estimate:
    """Seconds that a stage will take, and the basis of the estimate in words."""

    seconds: float
    basis: str


@dataclass(frozen=True)
class PlanReport:
    """The report of a dry run: the plan in numbers, and the time of each stage.

    ``together`` is the time of both stages if they overlap; None if they do not.
    """

    model: str
    target: Target
    folder: Path
    counts: Sequence[Count]
    compile: Estimate
    measure: Estimate
    notes: Sequence[str] = ()
    together: Estimate | None = None

    def totals(self) -> dict[str, int]:
        """Return the sums over all problems."""
        fields = ("space", "candidates", "artifacts", "compiled", "settled", "to_measure")
        sums = {name: sum(getattr(item, name) for item in self.counts) for name in fields}
        return {"problems": len(self.counts), **sums, "ruled_out": sum(self.ruled_out().values())}

    def estimates(self) -> dict[str, Estimate]:
        """Return the estimates by stage."""
        found = {"compile": self.compile, "measure": self.measure}
        return found if self.together is None else {**found, "together": self.together}

    def ruled_out(self) -> Counter[tuple[str, str]]:
        """Count the forbidden points by kernel and reason."""
        found = Counter[tuple[str, str]]()
        for item in self.counts:
            found.update({(item.kernel, reason): number for reason, number in item.ruled_out.items()})
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "model": self.model,
            "target": self.target.describe(),
            "sweep": str(self.folder),
            "problems": [item.as_json() for item in self.counts],
            "totals": self.totals(),
            "estimate": {
                stage: {"seconds": round(found.seconds, 1), "basis": found.basis}
                for stage, found in self.estimates().items()
            },
            "notes": list(self.notes),
        }


def report_on(
    model: str, target: Target, problems: Sequence[tuple[str, Problem]], sweep: Sweep, *, jobs: int, gpus: int,
    strategy: str, root: Path, done: Collection[str] | None = None, limits: Limits | None = None,
    notes: Sequence[str] = (), here: bool = True, overlapped: bool = False,
) -> PlanReport:  # fmt: skip
    """Count a plan and estimate its time.

    Args:
        model: the model's name, for display.
        target: the GPU to tune for.
        problems: the planned problems.
        sweep: the sweep whose journals say what is done already; its folder need not exist.
        jobs: compile workers.
        gpus: GPUs to measure on.
        strategy: how candidates are timed.
        root: the cache whose earlier sweeps tell how long stages take here.
        done: keys of the artifacts that are not compiled again (:func:`count`).
        limits: the configs to try of a problem; by default its whole space.
        notes: further notes to display.
        here: whether this host compiles.
        overlapped: whether one run compiles and measures, both at the same time.
    """
    counts = count(problems, target, sweep, strategy, done, limits)
    sweeps = earlier_sweeps(root, sweep)
    compiles = estimate_compile(counts, jobs, sweeps, here=here)
    measures = estimate_measure(counts, target, gpus, sweeps, strategy)
    together = estimate_together(compiles, measures) if overlapped else None
    return PlanReport(model, target, sweep.folder, counts, compiles, measures, notes, together)


def count(
    problems: Iterable[tuple[str, Problem]], target: Target, sweep: Sweep, strategy: str,
    done: Collection[str] | None = None, limits: Limits | None = None,
) -> list[Count]:  # fmt: skip
    """Count each problem of a plan; the sweep folder need not exist.

    Args:
        problems: the plan.
        target: the GPU.
        sweep: the sweep whose journals are read.
        strategy: how candidates are timed.
        done: keys of the artifacts that are not compiled again; by default those that were tried and exist.
        limits: the configs to try of a problem; by default its whole space.
    """
    compiled, settled, quarantined = sweep.compiled(), Settled(sweep, strategy), sweep.quarantined()
    done = compiled.keys() - sweep.lost() if done is None else done
    usable = {key for key, line in compiled.items() if line["status"] == "ok"}
    classed, seen = sweep.invariant, set[str]()
    found = []
    for kernel, problem in problems:
        spec, limit = spec_named(kernel), (limits or {}).get((kernel, problem))
        for_bits = (kernel, problem) in classed
        items = candidates(kernel, problem, target, limit, without=sweep.missing_backends, for_bits=for_bits)
        artifacts = {item.artifact for item in items if not item.is_library} - seen
        seen |= artifacts
        running = entrants(kernel, problem, target, compiled, quarantined, items)
        open_keys = settled.unsettled(running)
        unknown = {
            (item.artifact, item.blocks(target.sm_count))
            for item in items
            if not (item.is_library or item.artifact in usable or item.artifact in done)
        }
        ruled_out = _ruled_out(spec, problem, target, sweep) if limit is None else Counter({"": len(limit)})
        found.append(
            Count(
                kernel=kernel,
                problem=problem,
                bucketed=tuple(d.name for d in spec.dimensions if d.kind == "bucketed"),
                space=ruled_out.total(),
                ruled_out={reason: ruled_out[reason] for reason in ruled_out if reason},
                candidates=len(items),
                artifacts=len(artifacts),
                compiled=len(artifacts.intersection(done)),
                settled=len(running) - len(open_keys),
                to_measure=len(open_keys) + len(unknown),
            )
        )
    return found


def _ruled_out(spec: KernelSpec, problem: Problem, target: Target, sweep: Sweep) -> Counter[str]:
    """Count the points of a space by the reason that forbids them; the empty reason counts the allowed ones."""
    found: Counter[str] = Counter()
    missing = {
        name for backend in backends() if backend.name in sweep.missing_backends for name in backend.implementations
    }
    for space in (spec.space, *spec.space.beside):
        axes = space.axes(problem)
        points = (Config(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
        found.update(
            space.violated(problem, config, target) or ""
            for config in points
            if config.get("implementation") not in missing
        )
    return found


def estimate_compile(counts: Sequence[Count], jobs: int, sweeps: Sequence[Sweep], *, here: bool = True) -> Estimate:
    """Estimate the time of the compile stage over ``jobs`` workers from the artifacts of earlier sweeps.

    On this host workers share its cores with other processes; elsewhere each is taken to have its own core.
    """
    rates = compile_rates(sweeps)
    todo = Counter[str]()
    for item in counts:
        todo[item.kernel] += item.artifacts - item.compiled
    artifacts = todo.total()
    if not artifacts:
        return Estimate(0.0, "nothing is left to compile")
    known = {kernel for kernel in todo if rates.get(kernel, (0.0, 0))[1] >= _ENOUGH}
    cores = len(os.sched_getaffinity(0)) if here else jobs
    workers = min(jobs, cores, artifacts)
    # Journals reflect the load of this machine; the shipped means are of an idle core.
    load = os.getloadavg()[0] if here else 0.0
    slower = max(1.0, (load + workers) / cores)
    core_s = sum(todo[kernel] * rates[kernel][0] for kernel in known)
    core_s += slower * sum(todo[kernel] * COMPILE_S.get(kernel, OTHER_S) for kernel in todo.keys() - known)
    said = []
    if known:
        samples = sum(rates[kernel][1] for kernel in known)
        said.append(f"for {sum(todo[kernel] for kernel in known)} the means of {samples} that sweeps here compiled")
    if unknown := sum(todo[kernel] for kernel in todo.keys() - known):
        busy = f", times {slower:.1f} for this machine's load of {load:.1f}" if slower > 1.1 else ""
        said.append(f"for {unknown} shipped means, of a core of an AMD EPYC{busy}")
    over = f"{workers} core{'s' if workers > 1 else ''}"
    basis = f"{artifacts} artifacts at {core_s / artifacts:.2f} s each over {over}; {', '.join(said)}"
    return Estimate(COMPILE_START_S + core_s / workers, basis)


def estimate_together(compiles: Estimate, measures: Estimate) -> Estimate:
    """Estimate the time of both stages if each problem is measured once it is compiled: the longer stage's time.

    The GPU waits until the first problem is compiled, and the compilers while the last one is measured.
    """
    begins_s = min(compiles.seconds, COMPILE_START_S)
    ends_s = PROBLEM_S if measures.seconds else 0.0
    seconds = max(begins_s + measures.seconds, compiles.seconds + ends_s)
    longer = "compile" if compiles.seconds + ends_s > begins_s + measures.seconds else "measure"
    return Estimate(seconds, f"problems are measured while others are compiled, and {longer} takes longer")


def artifact_s(kernel: str, rates: Mapping[str, tuple[float, int]]) -> float:
    """Return the core-seconds of an artifact of a kernel, by :func:`compile_rates` where these have enough of it."""
    mean, count = rates.get(kernel, (0.0, 0))
    return mean if count >= _ENOUGH else COMPILE_S.get(kernel, OTHER_S)


def compile_rates(sweeps: Sequence[Sweep]) -> dict[str, tuple[float, int]]:
    """Return the mean core-seconds of an artifact and how many were compiled, by kernel."""
    seconds: dict[str, list[float]] = {}
    for line in (line for sweep in sweeps for line in sweep.compiled().values()):
        if {"kernel", "tileiras_s"} <= line.keys():
            seconds.setdefault(line["kernel"], []).append(work_s(line))
    return {kernel: (sum(found) / len(found), len(found)) for kernel, found in seconds.items()}


def estimate_measure(
    counts: Sequence[Count], target: Target, gpus: int, sweeps: Sequence[Sweep], strategy: str = "race"
) -> Estimate:
    """Estimate the measure stage from earlier sweeps of the same GPU and strategy, or else from an H200's."""
    todo = [item for item in counts if item.to_measure]
    if not todo:
        return Estimate(0.0, "nothing is left to measure")
    said = f"{sum(item.to_measure for item in todo)} candidates of {len(todo)} problems"
    work_s = sum(problem_s(item.kernel, item.problem, item.to_measure, target) for item in todo)
    took, work = _measured_before(target, sweeps, strategy)
    if work:
        return Estimate(
            (MEASURE_START_S + work_s) * took / work, f"{said}; as long for each as sweeps of a {target.name} took here"
        )
    rounds_s = 0.0
    for item in todo if strategy == EXHAUSTIVE else ():
        round_s = item.to_measure * (OVER_ROOFLINE * launch_s(item.kernel, item.problem, target) + SAMPLE_S)
        rounds_s += min(ROUNDS, max(LEAST_ROUNDS, math.ceil(1e-6 * LONGEST_US / round_s))) * round_s
    seconds = MEASURE_START_S + (work_s + rounds_s) / gpus
    over = f"{gpus} GPUs" if gpus > 1 else "one GPU"
    beside = f", and {rounds_s:.0f} s for up to {ROUNDS} samples of each" if rounds_s else ""
    return Estimate(seconds, f"{said} over {over}; as long for each as one sweep of an H200 took{beside}")


def problem_s(kernel: str, problem: Problem, candidates: int, target: Target) -> float:
    """Estimate the time to measure a problem from the shipped sweep."""
    launches = PROBLEM_ROOFLINES + CANDIDATE_ROOFLINES * candidates
    return PROBLEM_S + CANDIDATE_S * candidates + launches * launch_s(kernel, problem, target)


def _measured_before(target: Target, sweeps: Sequence[Sweep], strategy: str) -> tuple[float, float]:
    """Return the seconds of measure stages for a target and a strategy, and the shipped estimate of their work."""
    took = work = 0.0
    for sweep in sweeps:
        try:
            if sweep.target.key != target.key:
                continue
        except InputError:  # no plan, or one of another version
            continue
        if any(race["strategy"] != strategy for race in sweep.races().values()):
            continue
        seconds = sum(run["seconds"] for run in sweep.runs() if run["stage"] == "measure")
        candidates_of = Counter(key.rsplit("|", 3)[0] for key in sweep.measured() if not is_copy(key))
        if seconds and candidates_of:
            took += seconds
            work += MEASURE_START_S + sum(
                problem_s(kernel, problem, candidates_of[f"{kernel}|{problem.key}"], target)
                for kernel, problem in sweep.problems()
                if f"{kernel}|{problem.key}" in candidates_of
            )
    return took, work


def earlier_sweeps(root: Path, own: Sweep) -> list[Sweep]:
    """Return the sweep of this run and the other sweeps in the cache's root."""
    folders = sorted(path for path in (root / "sweeps").glob("*") if path.is_dir())
    return [own, *(Sweep(folder) for folder in folders if folder.resolve() != own.folder.resolve())]
