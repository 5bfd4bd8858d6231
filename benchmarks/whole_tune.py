"""Measure a whole tune like a user's: the seconds of each stage, and the states of the candidates."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError, TilekernError

BENCHMARK = "tune"


def measure(model: str, tokens: str, sweep: Path | None = None) -> Results:
    """Tune a model for this host's GPU, in an empty sweep folder and an empty cache.

    Args:
        model: as the tuner takes it.
        tokens: tokens of a step, with commas between.
        sweep: the path of the new sweep folder; None keeps none.

    Raises:
        InputError: the sweep folder exists.
        TilekernError: the tuner failed.
    """
    if sweep is not None and sweep.exists():
        raise InputError(f"{sweep} is there already; a whole tune is timed in a sweep folder that it makes")
    with tempfile.TemporaryDirectory() as folder:
        outcome = tuned(model, "--tokens", tokens, "--sweep", sweep or Path(folder, "sweep"))
    return Results(facts(), rows(f"{model}, {tokens.replace(',', ', ')} tokens", outcome))


def tuned(*arguments: str | Path) -> dict[str, Any]:
    """Run the tuner with ``--json`` and a temporary empty cache; return its output.

    Raises:
        TilekernError: the tuner failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "tilekern.tune", *map(str, arguments), "--json", "--cache-dir", cache]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise TilekernError(f"the tuner failed: {ran.stderr.strip()}")
    outcome: dict[str, Any] = json.loads(ran.stdout)
    return outcome


def rows(case: str, outcome: Mapping[str, Any]) -> list[Row]:
    """Return the figures of the tuner's output with ``--json``."""
    seconds = outcome["seconds"]
    figures = {f"{stage}_s": (took, "s") for stage, took in {**seconds, "whole": sum(seconds.values())}.items()}
    counts = {"problems": len(outcome["problems"]), "artifacts": outcome["compile"]["distinct"]}
    counts |= {name: outcome["measure"][name] for name in ("timed", "wrong", "quarantined")}
    figures |= {name: (count, "1") for name, count in counts.items()}
    figures["work_share"] = (round(outcome["compile"]["work_share"], 4), "1")
    return [Row(BENCHMARK, case, OURS, name, round(value, 4), unit) for name, (value, unit) in figures.items()]
