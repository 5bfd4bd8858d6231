"""Measure one layer of experts at real width: GPU time, memory and waits of tilekern and its peers, both passes.

Providers take turns in one process for each model and token count; those that are known to die or to hang have their
own process. A process that dies is started again, without the provider that it tried, or with the remaining cases.

python -m benchmarks.experts JOB LINES

is that process; JOB is a :class:`Job` as JSON. Each line of LINES is an object with a ``kind``: ``ready``, ``at`` (the
case that is tried now, and its provider unless all race), ``row``, ``note``, or ``case`` (a case that is done).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import experts_cases as layers
from benchmarks.cases import Case, Tensors
from benchmarks.clock import clock_on
from benchmarks.environment import facts
from benchmarks.kernels import Effort, backward, check, clone, forward, memory_row, plan_of, timed_rows
from benchmarks.providers import FP8, OURS, Provider, one_line
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_used, with_sources
from benchmarks.train import GIB, Process, in_turns, name_of
from benchmarks.training import has_a_turn
from tilekern.errors import InputError

BENCHMARK = "experts"
# Time limit of a process in seconds for each of its cases; compilers and autotuners take most of the time.
CASE_S = 60.0
KEPT, WAITS = "kept_for_backward", "waits"
Line = dict[str, Any]
Keep = Callable[[Results], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """The work of one process: cases of one model and token count, and the providers to run."""

    model: str
    tokens: int
    kinds: tuple[str, ...]
    providers: tuple[str, ...]
    samples: int
    seconds: float
    device: str = "cuda"

    @classmethod
    def read(cls, text: str) -> Job:
        """Parse the text of :meth:`written`."""
        found = json.loads(text)
        return cls(**{**found, "kinds": tuple(found["kinds"]), "providers": tuple(found["providers"])})

    def written(self) -> str:
        """Return the job as text."""
        return json.dumps(asdict(self))

    def after(self, lines: Sequence[Line]) -> Job | None:
        """Return the rest of a job after its process died: without the provider that it tried, or without its case."""
        done = [line["case"] for line in lines if line["kind"] == "case"]
        kinds = tuple(kind for kind in self.kinds if layers.label(self.model, self.tokens, kind) not in done)
        tried = next((line["provider"] for line in reversed(lines) if line["kind"] == "at"), "")
        providers = tuple(one for one in self.providers if one != tried)
        if not tried:
            kinds = kinds[1:]
        return replace(self, kinds=kinds, providers=providers) if kinds and providers else None


def measure(
    models: Sequence[str], tokens: Sequence[int], kinds: Sequence[str], names: Sequence[str], effort: Effort,
    keep: Keep, say: Say, device: str = "cuda",
) -> Results:  # fmt: skip
    """Measure the layers of models at token counts.

    Args:
        models: presets or paths of configurations.
        tokens: token counts.
        kinds: of :data:`benchmarks.experts_cases.KINDS`.
        names: of :data:`benchmarks.experts_cases.MAKERS`.
        effort: the samples to take.
        keep: called after each process with the results so far, so that an interrupted run keeps them.
        say: called with the current step.
        device: the device to run on; times on the CPU mean nothing.

    Raises:
        InputError: nothing was measured.
    """
    results = Results(facts() | {"models": [name_of(model) for model in models]})
    notes = results.run["notes"]
    groups = _groups(_installed(names, notes))
    jobs = [
        Job(model, count, tuple(kinds), group, effort.samples, effort.seconds, device)
        for model in models for count in tokens for group in groups
    ]  # fmt: skip
    with in_turns(jobs, _start) as started:
        for job, process in started:
            say(f"{name_of(job.model)} {job.tokens} tokens: {', '.join(job.providers)}")
            for lines in _tries(job, process, notes):
                notes.extend(line["text"] for line in lines if line["kind"] == "note")
                results.rows.extend(Row(**line["row"]) for line in lines if line["kind"] == "row")
                _once(results)
            keep(results)
    if not results.rows:
        raise InputError(f"nothing was measured, and nothing is written: {'; '.join(notes)}")
    notes[:] = dict.fromkeys(notes)
    return results


def left_out(note: str) -> tuple[str, list[str], str]:
    """Parse a note on omitted providers: case or layer (empty for all), names, reason. Other notes have no names."""
    told, _, why = note.partition(" left out: ")
    where, _, names = told.rpartition(": ")
    return where, [name.split(" ")[0] for name in names.split(", ")] if why else [], why


def failures(results: Results) -> list[str]:
    """Return the notes on cases in which tilekern failed, alone or with the providers that shared its process."""
    return [note for note in results.run["notes"] if OURS in left_out(note)[1]]


def _installed(names: Sequence[str], notes: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            layers.full_name(name)
            found.append(name)
        except metadata.PackageNotFoundError as error:
            notes.append(f"{name} left out: {error.name} is not installed")
    return found


def _groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the group of providers that take turns in one process, then each provider with its own process."""
    together = tuple(name for name in names if not layers.MAKERS[name].apart)
    return [group for group in (together, *((name,) for name in names if layers.MAKERS[name].apart)) if group]


def _start(job: Job) -> Process:
    command = [sys.executable, "-m", "benchmarks.experts", job.written()]
    return Process(command, dict(os.environ), CASE_S * len(job.kinds))


def _tries(job: Job, process: Process, notes: list[str]) -> Iterator[list[Line]]:
    """Yield the lines of a job's processes; after a process dies, another one does the rest."""
    left: Job | None = job
    while left is not None:
        trouble, lines = process.done()
        yield lines
        if not trouble:
            return
        at = next((line for line in reversed(lines) if line["kind"] == "at"), {"case": "", "provider": ""})
        where = at["case"] or f"{name_of(job.model)} {job.tokens} tokens"
        notes.append(f"{where}: {at['provider'] or ', '.join(left.providers)} left out: {trouble}")
        left = left.after(lines)
        if left is not None:
            process = _start(left)


def _once(results: Results) -> None:
    """Keep one row of each figure: every process times the products alone; the ones timed with tilekern count."""
    rows: dict[tuple[str, str, str], Row] = {}
    for row in results.rows:
        rows.setdefault((row.case, row.provider, row.metric), row)
    results.rows[:] = rows.values()


def write_plan(
    path: Path, models: Sequence[str], tokens: Sequence[int], kinds: Sequence[str], names: Sequence[str], gpu: str
) -> list[str]:
    """Write the plan of the problems that tilekern's among some providers need; return notes on those without a kernel.

    Raises:
        InputError: the GPU is unknown, or no problem is needed.
    """
    ours = [(model, layers.provider(name, model)) for model in models for name in (OURS, FP8) if name in names]
    return plan_of(path, [(case, one) for model, one in ours for case in layers.cases(model, tokens, kinds)], gpu)


def run(job: Job) -> Iterator[Line]:
    """Check and time a job's cases one after the other."""
    providers = []
    for name in job.providers:
        try:
            providers.append(layers.provider(name, job.model))
        except Exception as error:  # noqa: BLE001 (an import that breaks half-way raises what it likes)
            yield _note(f"{name_of(job.model)} {job.tokens} tokens: {name} left out: {one_line(error)}")
    clock = clock_on(job.device)
    for case in layers.cases(job.model, [job.tokens], job.kinds) if providers else []:
        yield from _run_case(case, providers, clock, job)
        yield {"kind": "case", "case": case.label}
    yield from map(_note, doubts())


def _run_case(case: Case, providers: Sequence[Provider], clock: Any, job: Job) -> Iterator[Line]:
    tensors = case.tensors(job.device)
    expected = case.expected(tensors)
    right: list[Provider] = []
    notes: list[str] = []
    rows: list[Row] = []
    with kernels_used() as used:
        for one in providers:
            yield _at(case, one.name.split(" ")[0])
            try:
                check(case, tensors, expected, one)
                right.append(one)
            except Exception as error:  # noqa: BLE001 (whatever a peer's kernels raise, the others go on)
                yield _note(f"{case.label}: {one.name} left out: {one_line(error)}")
                _settle(job.device)  # an error that the GPU keeps ends the process here
        del expected
        _settle(job.device)
        yield _at(case)
        if right:
            rows += timed_rows(clock, case, tensors, right, Effort(job.samples, job.seconds), notes)
    yield from _rows(with_sources(rows, used))
    for one in right if job.device == "cuda" else []:
        yield _at(case, one.name.split(" ")[0])
        memory = [memory_row(case, tensors, one), kept_row(case, tensors, one), waits_row(case, tensors, one)]
        yield from _rows(with_sources(memory, used))
    yield from map(_note, notes)


def _rows(rows: Sequence[Row]) -> Iterator[Line]:
    return ({"kind": "row", "row": asdict(replace(row, benchmark=BENCHMARK))} for row in rows)


def _at(case: Case, provider: str = "") -> Line:
    return {"kind": "at", "case": case.label, "provider": provider}


def _note(text: str) -> Line:
    return {"kind": "note", "text": text}


def _settle(device: str) -> None:
    """Wait for the GPU, and free unused memory."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def kept_row(case: Case, tensors: Tensors, provider: Provider) -> Row:
    """Measure the bytes that a forward keeps for its backward, besides its inputs and its result."""
    import torch

    mine = clone(tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = forward(case, mine, provider)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - sum(y.numel() * y.element_size() for y in outputs)
    return Row(BENCHMARK, case.label, provider.name, KEPT, round(kept / GIB, 4), "GiB")


def waits_row(case: Case, tensors: Tensors, provider: Provider) -> Row:
    """Count the waits of the host for the GPU in forward and backward, as far as torch reports them."""
    import torch

    mine = clone(tensors)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            backward(mine, forward(case, mine, provider))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    count = sum("called a synchronizing" in str(one.message) for one in said)
    return Row(BENCHMARK, case.label, provider.name, WAITS, count, "1")


def main(text: str, lines: str) -> None:
    """Do a job when told to; append each line to a file at once, so that none is lost if the process dies."""
    import transformers.integrations.moe  # noqa: F401 (takes seconds, in which others load, too)

    if not has_a_turn(lines):
        return
    with Path(lines).open("a", encoding="utf-8") as file:
        for line in run(Job.read(text)):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
