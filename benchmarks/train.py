"""Training against training: tokens per second, memory and first steps of tilekern and its peers, over lengths.

Each provider has processes of its own. One process takes all lengths in rising order, since making a large model is
what costs; a length that does not fit is tried once more in a process that has done nothing before.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, facts
from benchmarks.profiling import TOTAL
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.trainers import NO_PATCHES, full_name, trainer_named
from benchmarks.training import Job, Line
from tilekern.errors import InputError
from tuning.measure.timing import Timing
from tuning.plan.configs import config_named

GIB = 1 << 30
MOST_AT_THE_LONGEST = 3
# Losses of one case are of the same weights and tokens; bf16 and a few steps leave them this far apart at most.
SAME_LOSS = 0.02
Keep = Callable[[Results, Results], None]
Say = Callable[[str], None]


def timed_steps(tokens: Sequence[int], steps: int) -> tuple[int, ...]:
    """Timed steps at each length: fewer at the longest of several, whose steps are the longest too."""
    if len(tokens) < 2:
        return (steps,) * len(tokens)
    return (*[steps] * (len(tokens) - 1), min(steps, MOST_AT_THE_LONGEST))


def measure(job: Job, providers: Sequence[str], keep: Keep, say: Say) -> tuple[Results, Results]:
    """Train with each provider as the job says; gives the results, and those of the profile.

    Args:
        job: what each provider does, its name aside.
        providers: names of :data:`benchmarks.trainers.TRAINERS`.
        keep: called after each provider with what there is by then, so that a run that is cut off leaves something.
        say: told what is done at the moment.

    Raises:
        InputError: an unknown provider or model, or no provider took a step at any length.
    """
    for provider in providers:
        trainer_named(provider)
    layers = job.layers or config_named(job.model)[1].num_hidden_layers
    run = facts() | {"model": name_of(job.model), "layers": layers, "warm_up": job.warm_up}
    notes = run["notes"]
    notes.append(NO_PATCHES)
    before = len(notes)
    figures, profile = Results(run), Results(run)
    for provider in providers:
        try:
            name = full_name(provider)
        except metadata.PackageNotFoundError:
            notes.append(f"{provider} left out: it is not installed")
            continue
        say(f"{name}: {', '.join(map(str, job.tokens))} tokens")
        said = _lines(replace(job, provider=provider, profile=job.profile and provider == OURS), notes)
        lines = list(with_a_loss(said, name, job, notes))
        figures.rows.extend(row for line in lines for row in rows_of(line, name, job))
        profile.rows.extend(profile_rows(lines, name, job))
        keep(figures, profile)
    if not figures.rows:
        raise InputError(f"nothing was measured, and nothing is written: {'; '.join(notes[before:])}")
    notes.extend(odd_losses(figures))
    return figures, profile


def name_of(model: str) -> str:
    """A model's name as results have it: of a config.json, its folder's."""
    name = config_named(model)[0]
    return Path(name).resolve().parent.name if name.endswith(".json") else name


def label(job: Job, tokens: int) -> str:
    """How results name the job at one length."""
    said = f"{name_of(job.model)} {tokens} tokens"
    said += f", {job.layers} layers" if job.layers else ""
    return said + (", checkpointing" if job.checkpointing else "")


def with_a_loss(lines: Iterable[Line], name: str, job: Job, notes: list[str]) -> Iterator[Line]:
    """The lines but for lengths whose loss is no number, which are noted: the figures of a broken step mean nothing."""
    for line in lines:
        if line["kind"] == "length" and not math.isfinite(line["loss"]):
            notes.append(f"{label(job, line['tokens'])}: {name} left out, its loss is {line['loss']}")
        else:
            yield line


def rows_of(line: Line, name: str, job: Job) -> list[Row]:
    """The rows of one length."""
    if line["kind"] != "length":
        return []
    case, tokens = label(job, line["tokens"]), line["tokens"]
    timing = Timing.of([1e6 * seconds for seconds in line["timed"]])
    step_s, spread_s = timing.median_us / 1e6, timing.spread_us / 1e6
    warm = line["warm_up"]
    values: list[tuple[str, float, str, float]] = [
        ("tokens_per_s", tokens / step_s, "tok/s", tokens / step_s * spread_s / step_s),
        ("step_s", step_s, "s", spread_s),
    ]
    if len(warm) > 1:
        values += [("first_step_s", warm[0], "s", 0.0), ("first_step_lag_s", warm[0] - warm[1], "s", 0.0)]
    for metric, key in (("peak_gib", "peak_bytes"), ("reserved_gib", "reserved_bytes")):
        if key in line:
            values.append((metric, line[key] / GIB, "GiB", 0.0))
    values.append(("loss", line["loss"], "nat", 0.0))
    if "draw" in line:
        draw = line["draw"]
        values += [("power_w", draw["watts"], "W", 0.0), ("power_limit_w", draw["limit_watts"], "W", 0.0)]
        values.append(("sm_clock_mhz", draw["sm_mhz"], "MHz", 0.0))
    return [
        Row("train", case, name, metric, round(value, 5), unit, round(spread, 5))
        for metric, value, unit, spread in values
    ]


def profile_rows(lines: Sequence[Line], name: str, job: Job) -> list[Row]:
    """The rows of profiles: each category's milliseconds and share, and the floor.

    The floor is the sum of all matmuls as fast as each is alone, and of attention and the optimizer as measured.
    """
    floors = {line["tokens"]: line["matmuls_ms"] for line in lines if line["kind"] == "floor"}
    rows = []
    for line in lines:
        if line["kind"] != "profile" or TOTAL not in line["parts_ms"]:
            continue
        case, parts = label(job, line["tokens"]), line["parts_ms"]
        values = [(f"{part} ms", took, "ms") for part, took in parts.items()]
        values += [(f"{part} share", took / parts[TOTAL], "1") for part, took in parts.items() if part != TOTAL]
        if line["tokens"] in floors:
            rest = sum(took for part, took in parts.items() if part.startswith("attention") or part == "optimizer")
            floor = floors[line["tokens"]] + rest
            values += [("matmuls alone ms", floors[line["tokens"]], "ms"), ("floor ms", floor, "ms")]
            values.append(("floor tokens_per_s", 1000 * line["tokens"] / floor, "tok/s"))
        rows += [Row("train_profile", case, name, metric, round(value, 4), unit) for metric, value, unit in values]
    return rows


def odd_losses(results: Results) -> Iterator[str]:
    """Notes on losses that are not what most providers of the same case have: one of them computes something else."""
    for case in results.cases():
        losses = [row for row in results.rows if (row.case, row.metric) == (case, "loss")]
        middle = statistics.median(row.value for row in losses)
        for row in losses:
            if abs(row.value - middle) > SAME_LOSS * abs(middle):
                yield f"{case}: {row.provider} has a loss of {row.value:.4g} where the median is {middle:.4g}"


def _lines(job: Job, notes: list[str]) -> Iterator[Line]:
    """All lines of a provider, from as many processes as it needs."""
    left = job
    while left.tokens:
        trouble, lines = _process(left)
        yield from lines
        notes.extend(f"{job.provider}: {note}" for note in _notes(lines))
        done = {line["tokens"] for line in lines if line["kind"] == "length"}
        full = [line["tokens"] for line in lines if line["kind"] == "out_of_memory"]
        if not full:
            if trouble:
                rest = [tokens for tokens in left.tokens if tokens not in done]
                notes.append(f"{job.provider}: {trouble}; not measured: {', '.join(map(str, rest)) or 'none'}")
            return
        if full[0] == left.tokens[0] or full[0] in done:  # in a process that had done nothing before, or its profile
            notes.append(f"{label(job, full[0])}: {job.provider} is out of memory, so longer ones were not tried")
            return
        at = left.tokens.index(full[0])
        left = replace(left, tokens=left.tokens[at:], timed=left.timed[at:])


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["kind"] == "note":
            yield line["text"]
        elif line["kind"] == "begun" and line["patched"]:
            yield f"patched {', '.join(line['patched'])}; attention implementation {line['attention']}"


def _process(job: Job) -> tuple[str, list[Line]]:
    """Run one process; what went wrong, in one line, and its lines up to then."""
    trainer = trainer_named(job.provider)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "lines.jsonl")
        kept.touch()
        command = [sys.executable, "-m", "benchmarks.training", job.written(), str(kept)]
        trouble = _run(command, {**os.environ, **trainer.environment}, trainer.limit_s)
        return trouble, [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def _run(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
    """Run a command in a process group of its own, all of which ends with it; what went wrong, or nothing."""
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **options) as child:
        try:
            said = child.communicate(timeout=limit_s)[1]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return f"not done after {limit_s:g} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode == 0:
        return ""
    last = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    return f"ended with {last.strip()[:300]}"
