"""Compare training: tokens per second, memory and first steps of tilekern and its peers, over lengths.

Each provider has its own processes. One process takes all lengths in rising order, since making a large model takes
most of the time; a length that does not fit is tried once more in a fresh process. The processes of some providers load
their modules together, before the first of them measures: a step of GPT-2, which waits for the host, took 40 ms on an
H100 beside a loading process, and 21 ms alone.

Steps that wait for the host tell little if providers are measured minutes apart: the same code took 37 and 64 ms for
the same step of Qwen3-0.6B on two hosts, and hosts become faster and slower within a run. With several turns, all
providers keep their models, and take steps again and again, one provider after the other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.environment import ROOT, facts
from benchmarks.profiling import TOTAL
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.sharing import WAYS
from benchmarks.sources import with_sources
from benchmarks.trainers import NO_PATCHES, full_name, trainer_named
from benchmarks.training import CHECKPOINTS, READY, Job, Line
from tilekern.errors import InputError
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.plan.configs import config_named

GIB = 1 << 30
MOST_AT_THE_LONGEST = 3
# The losses of one case have the same weights and tokens; with bf16 they differ at most by this after a few steps.
SAME_LOSS = 0.02
# Processes that wait for their turn at a time.
READY_TOGETHER = 8
# How often to check whether a process waits.
_LOOK_S = 0.05
_READY = json.dumps(READY).encode()
T = TypeVar("T")
Keep = Callable[[Results, Results], None]
Say = Callable[[str], None]


def timed_steps(tokens: Sequence[int], steps: int) -> tuple[int, ...]:
    """Return the number of timed steps at each length: fewer at the longest of several, whose steps take longest."""
    if len(tokens) < 2:
        return (steps,) * len(tokens)
    return (*[steps] * (len(tokens) - 1), min(steps, MOST_AT_THE_LONGEST))


def measure(job: Job, providers: Sequence[str], keep: Keep, say: Say) -> tuple[Results, Results]:
    """Train with each provider as the job says; return the results, and the profile's results.

    Args:
        job: the job of each provider, without its name.
        providers: names of :data:`benchmarks.trainers.TRAINERS`.
        keep: called after each provider with the results so far, so that an interrupted run keeps them.
        say: called with the current step.

    Raises:
        InputError: an unknown provider or model, or no provider took a step at any length.
    """
    layers = job.layers or config_named(job.model)[1].get_text_config().num_hidden_layers
    adapted = f" with {_adapters(job)}" if job.lora else ""
    run = facts() | {"model": name_of(job.model) + adapted, "layers": layers, "warm_up": job.warm_up}
    jobs = [replace(job, provider=one, profile=job.profile and one == OURS) for one in providers]
    return measure_jobs(jobs, run, "train", keep, say)


def measure_jobs(
    jobs: Sequence[Job], run: dict[str, Any], benchmark: str, keep: Keep, say: Say
) -> tuple[Results, Results]:
    """Do jobs one after the other, each in its own processes; return the results, and the profiles' results.

    Args:
        jobs: the jobs, each with its provider.
        run: the run's facts for the results.
        benchmark: the name of the results.
        keep, say: see :func:`measure`.

    Raises:
        InputError: an unknown provider or model, or nothing took a step.
    """
    notes = run["notes"]
    notes.append(NO_PATCHES)
    before = len(notes)
    figures, profile = Results(run), Results(run)
    measured: list[tuple[Job, list[Line], Process]] = []

    def kept() -> None:
        for results in (figures, profile):
            results.rows.clear()
        for job, lines, _ in measured:
            name = full_name(job.provider)
            figures.rows.extend(replace(row, benchmark=benchmark) for line in lines for row in rows_of(line, name, job))
            profile.rows.extend(profile_rows(lines, name, job))
        keep(figures, profile)

    with contextlib.ExitStack() as held, in_turns(_installed(jobs, notes), _start) as started:
        for job, process in started:
            name = full_name(job.provider)
            say(f"{name}: {', '.join(label(job, tokens) for tokens in job.tokens)}")
            lines, last = _first_turn(job, notes, process, held)
            measured.append((job, list(with_a_loss(lines, name, job, notes)), last))
            kept()
        for turn in range(1, max((job.turns for job in jobs), default=1)):
            say(f"turn {turn + 1}")
            # Back and forth, so that none always comes after the same one.
            for job, lines, process in measured[:: -1 if turn % 2 else 1]:
                if process.is_waiting():
                    trouble, more = process.turn()
                    _add(lines, more)
                    notes.extend([f"{job.provider}: turn {turn + 1}: {trouble}"] if trouble else [])
            kept()
    if not figures.rows:
        raise InputError(f"nothing was measured, and nothing is written: {'; '.join(notes[before:])}")
    notes[:] = dict.fromkeys([*notes, *odd_losses(figures)])
    return figures, profile


def _installed(jobs: Sequence[Job], notes: list[str]) -> list[Job]:
    """Return the jobs whose providers are installed; note the others."""
    found = []
    for job in jobs:
        try:
            full_name(job.provider)
            found.append(job)
        except metadata.PackageNotFoundError as error:
            notes.append(f"{job.provider} left out: {error.name} is not installed")
    return found


@contextlib.contextmanager
def in_turns(jobs: Sequence[T], start: Callable[[T], Process]) -> Iterator[Iterator[tuple[T, Process]]]:
    """Yield each job with its process; some processes get ready together before their turns; end all at the end."""
    running: list[Process] = []

    def turns() -> Iterator[tuple[T, Process]]:
        for first in range(0, len(jobs), READY_TOGETHER):
            group = jobs[first : first + READY_TOGETHER]
            # One by one, and not as a list: a signal may come before the last one has started.
            running.extend(start(job) for job in group)
            started = running[first:]
            for process in started:
                process.wait_until_ready()
            yield from zip(group, started, strict=True)

    try:
        yield turns()
    finally:
        for process in running:
            process.end()


def name_of(model: str) -> str:
    """Return a model's name in the results: for a config.json, its folder's name."""
    name = config_named(model)[0]
    return Path(name).resolve().parent.name if name.endswith(".json") else name


def label(job: Job, tokens: int) -> str:
    """Return the job's name in the results at one length."""
    batch = f"{tokens // job.sequence} x {job.sequence}" if job.sequence else f"{tokens}"
    said = f"{name_of(job.model)} {batch} tokens"
    said += f", {job.layers} layers" if job.layers else ""
    said += f", {WAYS[job.way]} on {job.ranks} GPUs" if job.way else ""
    said += f", {_adapters(job)}" if job.lora else ""
    said += ", float32 weights under autocast" if job.autocast else ""
    return said + (f", {CHECKPOINTS[job.checkpointing]}" if job.checkpointing else "")


def _adapters(job: Job) -> str:
    return f"LoRA of rank {job.lora}"


def with_a_loss(lines: Iterable[Line], name: str, job: Job, notes: list[str]) -> Iterator[Line]:
    """Drop lengths whose loss is not a number, and note them: figures of a broken step mean nothing."""
    for line in lines:
        if line["kind"] == "length" and not math.isfinite(line["loss"]):
            notes.append(f"{label(job, line['tokens'])}: {name} left out, its loss is {line['loss']}")
        else:
            yield line


def rows_of(line: Line, name: str, job: Job) -> list[Row]:
    """Return the rows of one length."""
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
    if "host" in line:
        host = Timing.of([1e6 * seconds for seconds in line["host"]])
        values.append(("host_s", host.median_us / 1e6, "s", host.spread_us / 1e6))
    if "gpu_ms" in line:
        values.append(("gpu_s", line["gpu_ms"] / 1000, "s", 0.0))
    for metric, key in (("peak_gib", "peak_bytes"), ("reserved_gib", "reserved_bytes")):
        if key in line:
            values.append((metric, line[key] / GIB, "GiB", 0.0))
    values.append(("loss", line["loss"], "nat", 0.0))
    if "draw" in line:
        draw = line["draw"]
        values += [("power_w", draw["watts"], "W", 0.0), ("power_limit_w", draw["limit_watts"], "W", 0.0)]
        values.append(("sm_clock_mhz", draw["sm_mhz"], "MHz", 0.0))
    rows = [
        Row("train", case, name, metric, round(value, 5), unit, round(spread, 5))
        for metric, value, unit, spread in values
    ]
    return with_sources(rows, line.get("kernels", ()))


def profile_rows(lines: Sequence[Line], name: str, job: Job) -> list[Row]:
    """Return the rows of profiles: each category's milliseconds and share, and the floor.

    The floor is the sum of all matmuls, each at its speed alone, and of attention and the optimizer as measured.
    """
    floors = {line["tokens"]: line["matmuls_ms"] for line in lines if line["kind"] == "floor"}
    kernels = {line["tokens"]: line.get("kernels", ()) for line in lines if line["kind"] == "length"}
    rows: list[Row] = []
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
        found = [Row("train_profile", case, name, metric, round(value, 4), unit) for metric, value, unit in values]
        rows += with_sources(found, kernels.get(line["tokens"], ()))
    return rows


def odd_losses(results: Results) -> Iterator[str]:
    """Note losses that differ from most providers of the same case: one of them computes something else."""
    for case in results.cases():
        losses = [row for row in results.rows if (row.case, row.metric) == (case, "loss")]
        middle = statistics.median(row.value for row in losses)
        for row in losses:
            if abs(row.value - middle) > SAME_LOSS * abs(middle):
                yield f"{case}: {row.provider} has a loss of {row.value:.4g} where the median is {middle:.4g}"


def _first_turn(job: Job, notes: list[str], process: Process, held: contextlib.ExitStack) -> tuple[list[Line], Process]:
    """Return all lines of a provider, from as many processes as it needs, and the last of these.

    ``process`` waits for its turn; ``held`` ends the others.
    """
    left, found = job, list[Line]()
    while True:
        trouble, lines = process.turn()
        found += lines
        notes.extend(f"{job.provider}: {note}" for note in _notes(lines))
        done = {line["tokens"] for line in lines if line["kind"] == "length"}
        full = [line["tokens"] for line in lines if line["kind"] == "out_of_memory"]
        if not full:
            if trouble:
                rest = [tokens for tokens in left.tokens if tokens not in done]
                notes.append(f"{job.provider}: {trouble}; not measured: {', '.join(map(str, rest)) or 'none'}")
            return found, process
        if full[0] == left.tokens[0] or full[0] in done:  # in a fresh process, or its profile
            beside = " beside the others" if job.turns > 1 else ""
            notes.append(
                f"{label(job, full[0])}: {job.provider} is out of memory{beside}, so longer ones were not tried"
            )
            return found, process
        process.end()
        at = left.tokens.index(full[0])
        left = replace(left, tokens=left.tokens[at:], timed=left.timed[at:])
        process = _start(left)
        held.callback(process.end)


def _add(lines: Sequence[Line], more: Sequence[Line]) -> None:
    """Add the times of a later turn to those of their lengths."""
    lengths = {line["tokens"]: line for line in lines if line["kind"] == "length"}
    for line in more:
        if line["kind"] == "again" and line["tokens"] in lengths:
            lengths[line["tokens"]]["timed"] += line["timed"]
            lengths[line["tokens"]]["host"] += line["host"]


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["kind"] == "note":
            yield line["text"]
        elif line["kind"] == "begun" and line["patched"]:
            yield f"patched {', '.join(line['patched'])}; attention implementation {line['attention']}"


def _start(job: Job) -> Process:
    trainer = trainer_named(job.provider)
    command = [sys.executable, "-m", "benchmarks.training", job.written()]
    return Process(command, {**os.environ, **trainer.environment}, job.limit_s or trainer.limit_s)


class Process:
    """A process that gets ready and waits for its turns; its whole process group ends with it.

    Args:
        command: its command; the path of the file for its lines is appended.
        environment: its variables.
        limit_s: seconds that it may take for a turn.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], limit_s: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.limit_s = limit_s
        self.kept, self.said = Path(self.folder.name, "lines.jsonl"), Path(self.folder.name, "said.txt")
        self.kept.touch()
        self.turns = 0
        with self.said.open("w") as said:
            self.child = subprocess.Popen(
                [*command, str(self.kept)], cwd=ROOT, env=environment, start_new_session=True, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said,
            )  # fmt: skip

    def is_waiting(self) -> bool:
        """Return whether it has not ended and waits for its first turn or another one."""
        # It says so before each turn.
        return self.child.poll() is None and self.kept.read_bytes().count(_READY) > self.turns

    def wait_until_ready(self) -> bool:
        """Block until it waits for a turn or has ended; return False if its time is up before."""
        latest = time.monotonic() + self.limit_s
        while self.child.poll() is None and not self.is_waiting():
            if time.monotonic() >= latest:
                return False
            time.sleep(_LOOK_S)
        return True

    def turn(self) -> tuple[str, list[Line]]:
        """Give it a turn, until it waits for another or has ended, for which it may be too late.

        Returns:
            The error in one line, or an empty text, and the lines of this turn.
        """
        before = len(self._lines())
        self.turns += 1
        with contextlib.suppress(BrokenPipeError):
            assert self.child.stdin is not None
            self.child.stdin.write("go\n")
            self.child.stdin.flush()
        trouble = "" if self.wait_until_ready() else f"not done after {self.limit_s:g} s"
        if self.child.returncode:
            trouble = f"ended with {_last(self.said.read_text(errors='replace'), self.child.returncode)}"
        lines = [line for line in self._lines()[before:] if line != READY]
        if trouble:
            self.end()
        return trouble, lines

    def done(self) -> tuple[str, list[Line]]:
        """Give it its only turn, as :meth:`turn` does, and end it."""
        try:
            return self.turn()
        finally:
            self.end()

    def end(self) -> None:
        """End it with all its children, and remove its files."""
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.communicate()
        self.folder.cleanup()

    def _lines(self) -> list[Line]:
        """Return the lines that it has written; the last one may not be whole yet."""
        whole = self.kept.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


def _last(said: str, code: int) -> str:
    return (said.strip().splitlines() or [f"exit code {code}"])[-1].strip()[:300]
