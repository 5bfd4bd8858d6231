"""Measure by processes of their own, one after the other: the rows and notes of each are kept as it says them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from benchmarks.results import Results, Row
from benchmarks.train import Process, in_turns
from benchmarks.training import has_a_turn
from tilekern.errors import InputError

# The fewest seconds that must be left for a process to begin.
LEAST_S = 10.0
T = TypeVar("T")
# A row, or a note.
Found = Row | str


def measure_in_turns(
    results: Results, jobs: Sequence[T], start: Callable[[T], Process], what: Callable[[T], str], limit_s: float,
    keep: Callable[[Results], None], say: Callable[[str], None],
) -> Results:  # fmt: skip
    """Add the rows and notes of jobs to results, which are returned.

    Args:
        results: the facts of the run, and rows that were not measured.
        jobs: in their order.
        start: starts the process of a job.
        what: names a job.
        limit_s: seconds for all; a process that is not done then is ended, and no further one begins.
        keep: called after each process with the results so far, so that an interrupted run keeps them.
        say: called with the current job's name.

    Raises:
        InputError: nothing was measured.
    """
    until, before, notes = time.monotonic() + limit_s, len(results.rows), results.run["notes"]
    with in_turns(jobs, start) as started:
        for job, process in started:
            name, left = what(job), until - time.monotonic()
            if left < LEAST_S:
                notes.append(f"{name}: no time was left")
                continue
            say(name)
            process.limit_s = min(process.limit_s, left)
            trouble, lines = process.done()
            results.rows.extend(Row(**line["row"]) for line in lines if line["kind"] == "row")
            notes.extend(line["text"] for line in lines if line["kind"] == "note")
            if trouble:
                notes.append(f"{name}: {trouble}")
            if len(results.rows) > before:
                keep(results)
    if len(results.rows) == before:
        raise InputError(f"nothing was measured, and nothing is written: {'; '.join(notes)}")
    notes[:] = dict.fromkeys(notes)
    return results


def tell(lines: str, found: Iterable[Found]) -> None:
    """Append rows and notes to the file of a job's process at once, so that none is lost if the process dies."""
    with Path(lines).open("a", encoding="utf-8") as file:
        for one in found:
            line = {"kind": "row", "row": asdict(one)} if isinstance(one, Row) else {"kind": "note", "text": one}
            file.write(json.dumps(line) + "\n")
            file.flush()


def serve(job: T, lines: str, prepare: Callable[[T], object], run: Callable[[T], Iterable[Found]]) -> None:
    """Do a job in a process of its own: get ready, wait for the turn if there is one, and write what is found."""
    prepare(job)
    if has_a_turn(lines):
        tell(lines, run(job))
