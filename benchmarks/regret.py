"""Regret: the time of the winner that is predicted without a GPU over the best one that was measured."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError
from tilekern.spec import ALIGNED, Problem
from tuning.measuring import identity
from tuning.predicting import predict_best
from tuning.sweep import Candidate, Sweep, candidates

ALL = "all problems"


def measure(folder: Path) -> Results:
    """Regret of each problem of a measured sweep, and their median and worst.

    Raises:
        InputError: the folder holds no sweep, or none of its problems was measured.
    """
    sweep = Sweep(folder)
    results = Results(facts(gpu=sweep.target.name))
    regrets = []
    for kernel, problem in sweep.problems():
        rows = _problem_rows(sweep, kernel, problem, results.run["notes"])
        results.rows.extend(rows)
        regrets += [row.value for row in rows if row.metric == "regret"]
    if not regrets:
        raise InputError(f"{folder} holds no measurements; run --stages measure --sweep {folder} on its GPU first")
    results.rows.append(Row("regret", ALL, OURS, "median_regret", round(statistics.median(regrets), 4), "1"))
    results.rows.append(Row("regret", ALL, OURS, "worst_regret", round(max(regrets), 4), "1"))
    return results


def _problem_rows(sweep: Sweep, kernel: str, problem: Problem, notes: list[str]) -> list[Row]:
    compiled, target = sweep.compiled(), sweep.target

    def twins(item: Candidate) -> tuple[str, str, int] | None:
        line = compiled.get(item.artifact, {})
        return identity(item, line, target) if line.get("status") == "ok" else None

    # Of candidates whose code and grid are the same only one was timed: its time is that of all.
    measured = sweep.measured()
    items = [item for item in candidates(kernel, problem, target) if item.variant == ALIGNED]
    timed = {twins(item): measured[item.key]["timing"] for item in items if "timing" in measured.get(item.key, {})}
    predicted = predict_best(sweep, kernel, problem, target)
    found = timed.get(twins(predicted)) if predicted else None
    case = f"{kernel} {problem.key}"
    if found is None:
        notes.append(f"{case}: the predicted winner was not timed ({predicted.config.key if predicted else 'none'})")
        return []
    times = {"predicted": found, "best": min(timed.values(), key=lambda timing: timing["median_us"])}
    if default := timed.get(twins(items[0])):
        times["default"] = default
    rows = [Row("regret", case, OURS, name, one["median_us"], "us", one["spread_us"]) for name, one in times.items()]
    regret = found["median_us"] / times["best"]["median_us"]
    return [*rows, Row("regret", case, OURS, "regret", round(regret, 4), "1")]
