"""``python -m tilekern.tune status DIR``: shows the state of a sweep by its journals; writes nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tilekern.tuning.compile.stage import default_jobs
from tilekern.tuning.measure.stage import Settled
from tilekern.tuning.options import FOLDER, tuner_command
from tilekern.tuning.predict.estimating import count, estimate_compile, estimate_measure
from tilekern.tuning.sweep.folder import Sweep
from tilekern.warning import tell


@tuner_command(short_help="Say where a sweep stands: what is done, failed and left.")
@click.argument("folder", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of lines.")
def command(folder: Path, as_json: bool) -> None:
    """Show the state of the sweep in FOLDER: what is compiled and measured, what failed, what is left, and the run.

    Needs no GPU and no lock; a run that is at work is not disturbed.
    """
    found = standing(Sweep(folder, foreign=True))
    tell(*(json.dumps(found, indent=1).splitlines() if as_json else _lines(found)))


def standing(sweep: Sweep) -> dict[str, Any]:
    """Return the state of a sweep, as ``--json`` prints it; ages and times in seconds.

    ``left_s`` is an estimate of what a stage still takes, on this machine's cores and on one GPU.

    Raises:
        InputError: the folder is not a sweep.
    """
    target = sweep.target
    stages = {"compile": _compile(sweep), "measure": _measure(sweep)}
    for name, stage in stages.items():
        stage["seconds"] = round(sum(run["seconds"] for run in sweep.runs() if run["stage"] == name), 1)
    _estimate(sweep, stages)
    newest = max((path.stat().st_mtime for path in sweep.folder.glob("*.jsonl")), default=None)
    held = sweep.holder.is_held()
    return {
        "folder": str(sweep.folder),
        "model": sweep.model,
        "target": target.describe(),
        **stages,
        "gpu": sweep.gpu() or None,
        "held": held,
        "holder": sweep.holder.holder() if held else None,
        "last_line_s": None if newest is None else round(max(0.0, time.time() - newest), 1),
    }


def _estimate(sweep: Sweep, stages: dict[str, dict[str, Any]]) -> None:
    counts = []
    if any(stage["left"] for stage in stages.values()):
        counts = count(sweep.problems(), sweep.target, sweep, stages["measure"]["strategy"], limits=sweep.limits)
    estimates = {
        "compile": estimate_compile(counts, default_jobs(), [sweep]),
        "measure": estimate_measure(counts, sweep.target, 1, [sweep], stages["measure"]["strategy"]),
    }
    for name, stage in stages.items():
        stage["left_s"] = round(estimates[name].seconds, 1) if stage["left"] else 0.0


def _compile(sweep: Sweep) -> dict[str, Any]:
    """Count artifacts by outcome; ``done`` are those whose outcome is known."""
    compiled, lost = sweep.compiled(), sweep.lost()
    wanted = {item.artifact for named in sweep.problems() for item in sweep.candidates(*named) if not item.is_library}
    tried = [compiled[key] for key in wanted - lost if _is_known(compiled, key)]
    failed = [line for line in tried if line["status"] == "failed"]
    return {
        "artifacts": len(wanted),
        "done": len(tried),
        "failed": len(failed),
        "left": len(wanted) - len(tried),
        "reasons": sorted({line["reason"] for line in failed}),
    }


def _is_known(compiled: dict[str, Any], artifact: str) -> bool:
    return artifact in compiled and compiled[artifact]["status"] != "open"


def _measure(sweep: Sweep) -> dict[str, Any]:
    """Count problems; ``done`` are those of whose candidates nothing is left to learn."""
    races = sweep.races()
    strategy = next(reversed(races.values()))["strategy"] if races else "race"
    settled, problems, tried = Settled(sweep, strategy), sweep.problems(), sweep.compiled()
    whole = [
        named
        for named in problems
        if all(item.is_library or _is_known(tried, item.artifact) for item in sweep.candidates(*named))
    ]
    done = sum(not settled.racing(settled.entrants(*named)) for named in whole)
    return {
        "problems": len(problems),
        "done": done,
        "left": len(problems) - done,
        "strategy": strategy,
        "wrong": {
            key: line["check"].get("reason", "")
            for key, line in settled.measured.items()
            if not line.get("check", {}).get("passed", True)
        },
        "quarantined": sweep.quarantined(),
        "skipped": sweep.skipped(),
        "chosen_in_step": sum("step" in line for line in sweep.chosen().values()),
        "parts_s": _parts(races.values()),
    }


def _parts(races: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the measuring time of all races by part, the longest first."""
    total: Counter[str] = Counter()
    for race in races:
        total.update(race.get("seconds", {}))
    return {part: round(seconds, 1) for part, seconds in total.most_common()}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    compiled, measured = found["compile"], found["measure"]
    yield f"{found['model']} for {found['target']['name']} ({found['target']['arch']}) in {found['folder']}"
    tried = f"{compiled['done']} of {compiled['artifacts']} artifacts, {compiled['failed']} failed"
    known = f"{len(measured['wrong'])} wrong, {len(measured['quarantined'])} in quarantine"
    yield f"compile: {tried}{_time(compiled)}"
    yield f"measure: {measured['done']} of {measured['problems']} problems, {known}{_time(measured)}"
    if measured["chosen_in_step"]:
        yield f"chosen in the step of a token: kernels of {measured['chosen_in_step']} problems"
    if measured["parts_s"]:
        parts = ", ".join(f"{part} {_span(seconds)}" for part, seconds in measured["parts_s"].items())
        yield f"time of measuring: {parts}"
    if found["gpu"]:
        yield f"measured on {found['gpu']['gpu']}, driver {found['gpu']['driver']}"
    if found["holder"]:
        run = found["holder"]
        yield f"at work: {run['stage']} on {run['host']}, process {run['process']}, since {run['started']}"
    elif found["held"] is False:
        yield "no run is at work"
    if found["last_line_s"] is not None:
        yield f"last progress {_span(found['last_line_s'])} ago"
    for reason in compiled["reasons"]:
        yield f"failed: {reason}"
    for word in ("wrong", "quarantined", "skipped"):
        for key, reason in measured[word].items():
            yield f"{word}: {key}: {reason}"


def _time(stage: dict[str, Any]) -> str:
    left = f", about {_span(stage['left_s'])} left" if stage["left_s"] else ""
    return f"; {_span(stage['seconds'])} so far{left}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
