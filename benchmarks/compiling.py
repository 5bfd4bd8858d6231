"""The compile stage: how much of the cores' time goes into the compiler, and how many distinct candidates it makes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.spec import ModelShape
from tilekern.targets import Target, resolve
from tuning.compiling import CompileSummary, compile_all, default_jobs, start_server
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


def _compiled(target: Target, shape: ModelShape, jobs: int) -> CompileSummary:
    """What compiling everything in an empty folder took."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        sweep.begin(target, shape.name, plan(shape, TOKENS, ["bfloat16"], OPS, target))
        return compile_all(sweep, jobs)
