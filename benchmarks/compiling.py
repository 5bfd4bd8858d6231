"""The compile stage: how much of the cores' time goes into the compiler, and how many distinct candidates it makes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.targets import resolve
from tuning.compiling import compile_all, default_jobs, start_server
from tuning.models import resolve_model
from tuning.plan import plan
from tuning.sweep import Sweep

OPS = ["rms_norm", "swiglu", "rope"]
TOKENS = [2048, 8192]


def measure(model: str, gpu: str) -> Results:
    """Compile all candidates of a model for a GPU in an empty sweep folder; needs the compiler and no GPU."""
    start_server()  # before the plan, as the tuner's command line does
    target, shape = resolve(gpu), resolve_model(model)
    results = Results(facts(gpu=target.name))
    jobs = default_jobs()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        sweep.begin(target, shape.name, plan(shape, TOKENS, ["bfloat16"], OPS, target))
        done = compile_all(sweep, jobs)
    case = f"{shape.name}, {', '.join(map(str, TOKENS))} tokens"
    figures = {
        "distinct_candidates": (done.distinct, "1"),
        "failed": (done.failed, "1"),
        "seconds": (round(done.seconds, 2), "s"),
        "tileiras_share": (round(done.tileiras_share, 4), "1"),
        "jobs": (jobs, "1"),
    }
    results.rows.extend(Row("compile", case, OURS, metric, value, unit) for metric, (value, unit) in figures.items())
    return results
