"""Measure the compile stage: the compiler's share of the cores' time, and the speedup over one core."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.compile.toolchain import compile_candidate
from tilekern.errors import InputError
from tilekern.spec.targets import Target, resolve
from tilekern.tuning.compile.order import lowered_as
from tilekern.tuning.compile.pool import start_server
from tilekern.tuning.compile.stage import CompileSummary, compile_all, default_jobs, wanted, work_s
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep

OPS = ["rms_norm", "swiglu", "rope"]
TOKENS = [2048, 8192]


def measure(model: str, gpu: str, *, alone: bool = False) -> Results:
    """Compile all candidates of a model for a GPU in an empty sweep folder; needs the compiler and no GPU.

    Args:
        model: the model.
        gpu: the GPU.
        alone: whether to compile them again on one core, to compare the speedup with the number of cores. This takes
            longer by that number.
    """
    start_server()  # before the plan, as the tuner's command line does
    from tilekern.tuning.plan.models import (
        plan_of_model,  # which loads torch, and the workers that import this file must not
    )
    from tilekern.tuning.plan.steps import Steps

    target = resolve(gpu)
    planned = plan_of_model(model, Steps(TOKENS, ops=OPS), target)
    results = Results(facts(gpu=target.name))
    jobs = default_jobs()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        sweep.begin(target, planned.name, planned.problems)
        done, _ = _made(sweep, jobs)
        alone_s = _made(sweep, 1)[0].seconds if alone else None
    case = f"{planned.name}, {', '.join(map(str, TOKENS))} tokens"
    figures = {
        "distinct_candidates": (done.distinct, "1"),
        "failed": (done.failed, "1"),
        "seconds": (round(done.seconds, 2), "s"),
        "tileiras_share": (round(done.tileiras_share, 4), "1"),
        "jobs": (jobs, "1"),
    }
    if alone_s is not None:
        figures |= {"seconds_alone": (round(alone_s, 2), "s")}
        figures |= {"share_of_linear": (round(alone_s / (jobs * done.seconds), 4), "1")}
    results.rows.extend(Row("compile", case, OURS, metric, value, unit) for metric, (value, unit) in figures.items())
    return results


def measure_sample(folder: Path, count: int) -> Results:
    """Compile all artifacts that a sweep wants on all cores; before and after, compile a sample of them on one core.

    The time of one core for everything is estimated: the work of the stage (``work_share`` of the time that the cores
    were held), divided by the slowdown of the sample's work in the stage against alone. The sample consists of whole
    batches, because one core would lower each batch once. It runs alone before and after the stage, because the cores'
    speed varies over time. ``bound_of_linear`` is the share of a linear speedup that independent cores reach, by the
    compiler's time only: each core compiles the whole sample by itself.

    Args:
        folder: a sweep folder with a plan; artifacts already compiled in it are ignored.
        count: the least number of artifacts in the sample; random batches are added until it is reached.

    Raises:
        InputError: the plan is empty, or nothing in it compiles.
    """
    start_server()
    sweep = Sweep(folder)
    with tempfile.TemporaryDirectory() as other:
        drawn = _sample(wanted(sweep.again(Path(other))), count)
    if not drawn:
        raise InputError(f"nothing is planned in {folder} that is compiled; run the plan stage first")
    sample = [item.artifact for item in drawn]
    jobs = default_jobs()
    _, before = _made(sweep, 1, sample)
    done, together = _made(sweep, jobs)
    _, after = _made(sweep, 1, sample)
    compiled = before.keys() & together.keys() & after.keys()
    if not compiled:
        raise InputError(f"not one of {len(sample)} candidates of {folder} can be compiled; draw more with --sample")
    kept = [item for item in drawn if item.artifact in compiled]
    alone_s, crowded_s, again_s = (_together(kept, sweep.target, processes) for processes in (1, jobs, 1))
    bound = (alone_s + again_s) / 2 / crowded_s
    before_s, together_s, after_s = (sum(work_s(lines[key]) for key in compiled) for lines in (before, together, after))
    slower = 2 * together_s / (before_s + after_s)
    figures = {
        "distinct_candidates": (done.distinct, "1"),
        "failed": (done.failed, "1"),
        "seconds": (round(done.seconds, 2), "s"),
        "jobs": (jobs, "1"),
        "work_share": (round(done.work_share, 4), "1"),
        "sample": (len(compiled), "1"),
        "sample_before_s": (round(before_s, 3), "s"),
        "sample_together_s": (round(together_s, 3), "s"),
        "sample_after_s": (round(after_s, 3), "s"),
        "slower_together": (round(slower, 4), "1"),
        "share_of_linear": (round(done.work_share / slower, 4), "1"),
        "bound_of_linear": (round(bound, 4), "1"),
    }
    rows = [Row("compile", f"{sweep.model}, whole tune", OURS, name, *figure) for name, figure in figures.items()]
    return Results(facts(gpu=sweep.target.name), rows)


def _sample(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Return the candidates of random batches: at least ``count``, or all if there are fewer."""
    batches: dict[Any, list[Candidate]] = {}
    for item in candidates:
        batches.setdefault(lowered_as(item), []).append(item)
    drawn = list(batches.values())
    random.Random(0).shuffle(drawn)
    sizes = itertools.accumulate(map(len, drawn), initial=0)
    return [item for before, batch in zip(sizes, drawn, strict=False) if before < count for item in batch]


def _together(items: Sequence[Candidate], target: Target, processes: int) -> float:
    """Return the compiler's seconds per process if several processes each compile all candidates.

    Each process begins at another candidate, so that they do different work at the same time.
    """
    starts = [place * len(items) // processes for place in range(processes)]
    turned = [[*items[start:], *items[:start]] for start in starts]
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        # No process begins before all have been started.
        list(pool.map(time.sleep, [0.2] * processes))
        return sum(pool.map(_compiler_s, turned, itertools.repeat(target))) / processes


def _compiler_s(items: Iterable[Candidate], target: Target) -> float:
    return sum(
        compile_candidate(item.spec, item.problem, item.config, target, item.variant).tileiras_s for item in items
    )


def _made(
    sweep: Sweep, jobs: int, only: Collection[str] | None = None
) -> tuple[CompileSummary, dict[str, dict[str, Any]]]:
    """Compile a sweep's candidates in an empty folder; return the time, and the lines of those that compile."""
    with tempfile.TemporaryDirectory() as folder:
        again = sweep.again(Path(folder))
        done = compile_all(again, jobs, only=only)
        return done, {key: line for key, line in again.compiled().items() if line["status"] == "ok"}
