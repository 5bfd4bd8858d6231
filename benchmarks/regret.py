"""Compute the regret: the time of the winner predicted without a GPU over the best measured time."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import ALL, Results, Row
from tilekern.errors import InputError
from tilekern.spec import ALIGNED, Problem
from tilekern.tuning.measure.stage import identity
from tilekern.tuning.predict.ranking import predict_best
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, Candidate
from tilekern.tuning.sweep.folder import Sweep


def measure(folder: Path) -> Results:
    """Return the regret of each problem of a measured sweep, and their median, 90th percentile and worst.

    Raises:
        InputError: the folder holds no sweep, or none of its problems was measured.
    """
    sweep = Sweep.carried(folder)
    results = Results(facts(gpu=sweep.target.name))
    regrets = []
    for kernel, problem in sweep.problems():
        rows = _problem_rows(sweep, kernel, problem, results.run["notes"])
        results.rows.extend(rows)
        regrets += [row.value for row in rows if row.metric == "regret"]
    if not regrets:
        sweep_option = f"--sweep {shlex.quote(str(folder))}"
        raise InputError(f"{folder} holds no measurements; run --stages measure {sweep_option} on its GPU first")
    figures = {"median": statistics.median(regrets), "p90": percentile(regrets, 90), "worst": max(regrets)}
    for name, value in figures.items():
        results.rows.append(Row("regret", ALL, OURS, f"{name}_regret", round(value, 4), "1"))
    return results


def percentile(values: Collection[float], percent: int) -> float:
    """Return the least value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1]


def timed_candidates(sweep: Sweep, kernel: str, problem: Problem) -> dict[Any, tuple[Candidate, Mapping[str, Any]]]:
    """Return a problem's timings by the key of :func:`does`, each with the first candidate of that key.

    Candidates with the same code and grid share one timing.
    """
    compiled, measured = sweep.compiled(), sweep.measured()
    found: dict[Any, tuple[Candidate, Mapping[str, Any]]] = {}
    first: dict[Any, Candidate] = {}
    for item in sweep.candidates(kernel, problem):
        key = does(sweep, item, compiled)
        if item.variant == ALIGNED and key is not None:
            # The default comes first, and stands for its twins.
            first.setdefault(key, item)
            if "timing" in measured.get(item.key, {}):
                found[key] = (first[key], measured[item.key]["timing"])
    return found


def does(sweep: Sweep, item: Candidate, compiled: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """Return a key that is equal for candidates that do the same on the GPU; None if the candidate was not compiled."""
    line = LIBRARY_LINE if item.is_library else compiled.get(item.artifact, {})
    return identity(item, line, sweep.target) if line.get("status") == "ok" else None


def _problem_rows(sweep: Sweep, kernel: str, problem: Problem, notes: list[str]) -> list[Row]:
    compiled = sweep.compiled()
    timed = {key: timing for key, (_, timing) in timed_candidates(sweep, kernel, problem).items()}
    predicted = predict_best(sweep, kernel, problem, sweep.target)
    found = timed.get(does(sweep, predicted, compiled)) if predicted else None
    case = f"{kernel} {problem.key}"
    if found is None:
        notes.append(f"{case}: the predicted winner was not timed ({predicted.config.key if predicted else 'none'})")
        return []
    times = {"predicted": found, "best": min(timed.values(), key=lambda timing: timing["median_us"])}
    if default := timed.get(does(sweep, sweep.candidates(kernel, problem)[0], compiled)):
        times["default"] = default
    rows = [Row("regret", case, OURS, name, one["median_us"], "us", one["spread_us"]) for name, one in times.items()]
    regret = found["median_us"] / times["best"]["median_us"]
    return [*rows, Row("regret", case, OURS, "regret", round(regret, 4), "1")]
