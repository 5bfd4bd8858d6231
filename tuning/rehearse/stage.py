"""The stage behind the races: the kernels of a token are chosen among the fastest in a row, in the engine's own step.

Candidates of a problem that are nearly as fast as its best are tried in the step one after the other, those of the
problem with the largest share of the step first. A choice stands the whole battery before it is journalled. It holds
until the problem is raced again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilekern.inference.rehearsal import TokenStep
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import Target
from tilekern.tuning.executors import Executor
from tilekern.tuning.measure.gpu import devices
from tilekern.tuning.measure.stage import confirm
from tilekern.tuning.plan.engine import problems_of_token
from tilekern.tuning.publishing import Known, artifact_in
from tilekern.tuning.rehearse.descent import Choice, Meter, StepFailed, choose
from tilekern.tuning.rehearse.process import Kernel, Stage
from tilekern.tuning.strategies.lineup import ranked
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import not_in
from tilekern.tuning.sweep.plan import Named

STEP = "step"
# Candidates are tried that take at most so many times as long in a row as the fastest, at most so many of a problem:
# slower ones have made no step faster.
_NEAR, _MOST_OTHERS = 1.12, 6


@dataclass
class Summary:
    """The outcome of the stage.

    Attributes:
        chosen: problems whose kernel was chosen in a step.
        changed: those of them whose kernel is not the fastest in a row.
        tried: candidates that were tried beside the fastest ones.
        notes: lines for people.
    """

    chosen: int = 0
    changed: int = 0
    tried: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Open:
    """The problems of a step that are to be decided.

    Attributes:
        given: the kernel of each problem of the step that the sweep has one for.
        others: the candidates to try for each open problem, the problem with the largest share of the step first. Those
            that only some configs of others lead to are the last, and the step may not launch them.
        items: all candidates by their keys.
    """

    given: dict[Named, Kernel]
    others: dict[Named, list[Kernel]]
    items: dict[str, Candidate]

    @property
    def digests(self) -> set[str]:
        """The sha256 of all their artifacts."""
        kernels = [*self.given.values(), *(kernel for some in self.others.values() for kernel in some)]
        return {artifact.sha256 for kernel in kernels for artifact in kernel.artifacts.values()}


# Returns a meter of a step by the artifacts of its kernels; it is a context that ends with the step.
Stages = Callable[[TokenStep, dict[str, bytes]], contextlib.AbstractContextManager[Meter[Kernel]]]


def rehearse(
    sweep: Sweep, executor: Executor, stages: Stages, progress: Callable[[int, int], None] = lambda *_: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Summary:  # fmt: skip
    """Choose the kernels of all tokens of a sweep's plan, and journal the choices.

    Args:
        sweep: the sweep, whose races are over.
        executor: runs the battery on what was chosen.
        stages: times the steps.
        progress: called with the numbers of decided and of all problems.
        is_over: asked before each measurement; what is not decided then is left to the next run.

    Raises:
        InputError: another run holds the sweep, or its folder cannot be written.
    """
    summary = Summary()
    for step in sweep.tokens:
        while not is_over() and (found := open_problems(sweep, step)).others:
            cubins = {digest: sweep.cubin(digest) for digest in found.digests}
            choices, is_broken = [], False
            try:
                with sweep.running(STEP), stages(step, cubins) as meter:
                    for choice in choose(meter, found.given, found.others, is_over):
                        choices.append(choice)
                        progress(len(choices), len(found.others))
            except StepFailed as error:
                is_broken = True
                summary.notes.append(
                    f"{step} does not run, and what it has not decided has the fastest in a row: {error}"
                )
            if not (is_broken or is_over()):
                _leave_out(sweep, step, set(found.others) - {choice.named for choice in choices})
            if not _keep(sweep, executor, step, found, choices, summary) or is_broken:
                break
    return summary


def _leave_out(sweep: Sweep, step: TokenStep, named: Iterable[Named]) -> None:
    """Journal that a step does not launch some problems, so that it is not run again for them alone."""
    races = Known.of(sweep).races
    names = {f"{kernel}|{problem.key}": races[kernel, problem.key]["race"] for kernel, problem in named}
    lines = [{"chosen": not_in(name, step), "of": name, "race": race} for name, race in names.items()]
    sweep.note("chosen", *lines)


def _keep(
    sweep: Sweep, executor: Executor, step: TokenStep, found: Open, choices: Sequence[Choice[Kernel]], summary: Summary
) -> bool:
    """Journal the choices that stand the battery; return whether one did not, whose problem is still open."""
    known = Known.of(sweep)
    items = {choice.named: found.items[choice.kernel.key] for choice in choices}
    doubtful = [item for item in items.values() if not known.is_confirmed(item)]
    # The kernels before them run between their launches.
    before = [found.items[found.given[item.kernel, item.problem].key] for item in doubtful]
    if doubtful:
        confirm(sweep, executor, [*doubtful, *before])
    known = Known.of(sweep)
    is_sound = {named: known.may_win(item) and known.is_confirmed(item) for named, item in items.items()}
    sound = [choice for choice in choices if is_sound[choice.named]]
    races = {named: known.races[named[0], named[1].key]["race"] for named in items}
    for choice in sound:
        (kernel, problem), key = choice.named, choice.kernel.key
        facts = {
            "of": str(step), "layers": step.layers, "token_us": round(choice.token_us, 3),
            "otherwise_us": round(choice.otherwise_us, 3), "tried": choice.tried,
        }  # fmt: skip
        name = f"{kernel}|{problem.key}"
        line = {"chosen": name, "of": name, "candidate": key, "race": races[choice.named], "step": facts}
        sweep.note("chosen", line)
        summary.chosen += 1
        summary.changed += key != found.given[choice.named].key
        summary.tried += choice.tried
        summary.notes += [f"left out of {step}: {kernel} {problem.key}: {reason}" for reason in choice.failed]
    doubted = {named: item for named, item in items.items() if not is_sound[named]}
    failed = {named: known.why_untimed(item) for named, item in doubted.items() if not known.may_win(item)}
    for named in doubted:
        reason = failed.get(named, "its checks did not come to their end")
        summary.notes.append(f"chosen in {step}, and left out since: {named[0]} {named[1].key}: {reason}")
    return bool(failed)


def open_problems(sweep: Sweep, step: TokenStep) -> Open:
    """Return the problems of a step for which no step has chosen a kernel since they were raced.

    Only candidates of their newest race are tried: right ones that need no library, the fastest of each number of
    blocks and threads before others like them.
    """
    known, target, planned = Known.of(sweep), sweep.target, set(sweep.problems())
    launches, problems = problems_of_token(step, target)
    found = Open({}, {}, {})
    shares: dict[Named, float] = {}
    is_worth_it = False
    lost = {sweep.compiled()[key]["sha256"] for key in sweep.lost()}
    for named in (named for named in problems if named in planned):
        candidates = sweep.candidates(*named)
        generic, timings = candidates[-1], known.timings(candidates)
        best = known.best_kernel(timings)
        if best is None or not known.may_win(generic):
            continue

        def kernel_of(item: Candidate, generic: Candidate = generic) -> Kernel:
            found.items[item.key] = item
            lines = {ALIGNED: item, GENERIC: generic}
            artifacts = {name: artifact_in(sweep, one, known.line(one)) for name, one in lines.items()}
            return Kernel(item.key, item.config, artifacts)

        if not {known.line(item)["sha256"] for item in (best, generic)}.isdisjoint(lost):
            continue
        found.given[named] = kernel_of(best)
        shares[named] = launches.get(named, 0) * timings[best]["median_us"]
        name = f"{named[0]}|{named[1].key}"
        if name in known.chosen:
            continue
        near = [
            item for item in ranked(timings)
            if item is not best and not item.is_library and known.line(item)["sha256"] not in lost
            and timings[item]["median_us"] <= _NEAR * timings[best]["median_us"]
        ]  # fmt: skip
        if near:
            found.others[named] = [kernel_of(item) for item in _different(near, known, target)]
            is_worth_it |= not_in(name, step) not in known.chosen
    order = sorted(found.others if is_worth_it else (), key=lambda named: -shares[named])
    return Open(found.given, {named: found.others[named] for named in order}, found.items)


def _different(items: Sequence[Candidate], known: Known, target: Target) -> list[Candidate]:
    """Return some candidates, the fastest first, and before others like it the fastest of each shape of a launch."""
    first: dict[tuple[int, int], Candidate] = {}
    for item in items:
        first.setdefault((item.blocks(target.sm_count), known.line(item)["resources"]["threads"]), item)
    chosen = [*first.values(), *(item for item in items if item not in first.values())][:_MOST_OTHERS]
    return [item for item in items if item in chosen]


def stage_in(cache: Path) -> Stages:
    """Return what times steps on the first GPU of this host; a cache serves the problems that the sweep has not."""
    return lambda step, cubins: Stage(step, cubins, cache, devices()[0])
