"""Time the measure stage on one GPU of this host and on several, from the same compiled sweep."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.whole_tune import tuned
from tilekern.errors import InputError
from tilekern.tuning.measure.gpu import devices

BENCHMARK = "gpus"


def measure(model: str, tokens: str, folder: Path, count: int = 2) -> Results:
    """Compile a sweep once, and measure a copy of it on one GPU and another on several.

    Args:
        model: as the tuner takes it.
        tokens: tokens of a step, with commas between.
        folder: the folder for the sweeps, named ``compiled``, ``1`` and the number of GPUs; these must not exist yet.
        count: the number of GPUs to compare with one, 2 or more.

    Raises:
        InputError: there are fewer equal GPUs, or the folder already has such sweeps.
        TilekernError: the tuner failed.
    """
    if (here := len(devices())) < count:
        raise InputError(f"--gpus {count}: this host's GPUs that are alike are {here}")
    if taken := [name for name in ("compiled", "1", str(count)) if (folder / name).exists()]:
        raise InputError(f"{folder} holds {', '.join(taken)} already; give --sweep another folder")
    tuned(model, "--tokens", tokens, "--stages", "plan,compile", "--sweep", folder / "compiled")
    seconds = {}
    for gpus in (1, count):
        sweep = shutil.copytree(folder / "compiled", folder / str(gpus))
        seconds[gpus] = tuned("--stages", "measure", "--sweep", sweep, "--gpus", str(gpus))["seconds"]["measure"]
    return Results(facts(), rows(f"{model}, {tokens.replace(',', ', ')} tokens", seconds))


def rows(case: str, seconds: dict[int, float]) -> list[Row]:
    """Return the figures of one GPU and of several.

    Args:
        case: the tuned model and tokens.
        seconds: the measure stage's seconds by the number of GPUs: one, and several.
    """
    alone_s, (count, together_s) = seconds[1], max(seconds.items())
    figures = {"measure_on_one": (alone_s, "s"), "measure_on_several": (together_s, "s"), "gpus": (count, "1")}
    figures["share_of_one"] = (together_s / alone_s, "1")
    return [Row(BENCHMARK, case, OURS, name, round(value, 4), unit) for name, (value, unit) in figures.items()]
