"""The compile stage: how much of the cores' time goes into the compiler, and how fast it is beside one core."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError
from tilekern.spec import ModelShape
from tilekern.targets import Target, resolve
from tuning.compiling import CompileSummary, compile_all, default_jobs, start_server, work_s
from tuning.models import resolve_model
from tuning.plan import plan
from tuning.sweep import Sweep

OPS = ["rms_norm", "swiglu", "rope"]
TOKENS = [2048, 8192]


def measure(model: str, gpu: str, *, alone: bool = False) -> Results:
    """Compile all candidates of a model for a GPU in an empty sweep folder; needs the compiler and no GPU.

    Args:
        model: the model.
        gpu: the GPU.
        alone: whether they are compiled once more one after the other, which takes as many times longer as there are
            cores, to tell what part of that many times the speed the stage reaches.
    """
    start_server()  # before the plan, as the tuner's command line does
    target, shape = resolve(gpu), resolve_model(model)
    results = Results(facts(gpu=target.name))
    jobs = default_jobs()
    done = _compiled(target, shape, jobs)
    case = f"{shape.name}, {', '.join(map(str, TOKENS))} tokens"
    figures = {
        "distinct_candidates": (done.distinct, "1"),
        "failed": (done.failed, "1"),
        "seconds": (round(done.seconds, 2), "s"),
        "tileiras_share": (round(done.tileiras_share, 4), "1"),
        "jobs": (jobs, "1"),
    }
    if alone:
        alone_s = _compiled(target, shape, 1).seconds
        figures |= {"seconds_alone": (round(alone_s, 2), "s")}
        figures |= {"share_of_linear": (round(alone_s / (jobs * done.seconds), 4), "1")}
    results.rows.extend(Row("compile", case, OURS, metric, value, unit) for metric, (value, unit) in figures.items())
    return results


def measure_sample(folder: Path, count: int) -> Results:
    """Compile some of a sweep's artifacts once more, one after the other on one core, with nothing else to do.

    What the stage reached on its cores is told from its own journal: the seconds of work in it, over how much longer
    the work for the sample takes in it than alone, over the seconds that the cores were held.

    Args:
        folder: a sweep folder whose compile stage was one whole run on this machine, with its default jobs.
        count: artifacts of the sample, drawn at random.

    Raises:
        InputError: nothing is compiled there.
    """
    start_server()
    sweep = Sweep(folder)
    took = _made(sweep)
    if not took:
        raise InputError(f"nothing is compiled in {folder}; run the compile stage first")
    seconds = sum(run["seconds"] for run in sweep.runs() if run["stage"] == "compile")
    sample = random.Random(0).sample(sorted(took), min(count, len(took)))
    with tempfile.TemporaryDirectory() as other:
        again = Sweep(Path(other))
        again.begin(sweep.target, sweep.model, sweep.problems())
        compile_all(again, 1, only=sample)
        alone = _made(again)
    slower = sum(work_s(took[key]) for key in alone) / sum(work_s(line) for line in alone.values())
    worked_s = sum(work_s(line) for line in took.values())
    jobs = default_jobs()
    figures = {
        "distinct_candidates": (len(took), "1"),
        "sample": (len(alone), "1"),
        "seconds": (round(seconds, 2), "s"),
        "jobs": (jobs, "1"),
        "slower_together": (round(slower, 4), "1"),
        "share_of_linear": (round(worked_s / slower / (jobs * seconds), 4), "1"),
    }
    rows = [Row("compile", f"{sweep.model}, whole tune", OURS, name, *figure) for name, figure in figures.items()]
    return Results(facts(gpu=sweep.target.name), rows)


def _made(sweep: Sweep) -> dict[str, dict[str, Any]]:
    return {key: line for key, line in sweep.compiled().items() if line["status"] == "ok"}


def _compiled(target: Target, shape: ModelShape, jobs: int) -> CompileSummary:
    """What compiling everything in an empty folder took."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        sweep.begin(target, shape.name, plan(shape, TOKENS, ["bfloat16"], OPS, target))
        return compile_all(sweep, jobs)
