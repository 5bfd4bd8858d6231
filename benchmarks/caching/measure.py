"""The cache under load and faults, as results: what each harness did, and how many wrong answers it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.caching import faults
from benchmarks.environment import NO_GPU, ROOT, facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError

PROCESSES = 64
WRONG = "wrong answers"
Keep = Callable[[Results], None]


HARNESSES = ("load", "kills", "errors", "mutations")


def measure(
    seconds: int, kills: int, mutations: int, chosen: Sequence[str], keep: Keep, say: Callable[[str], None] = print
) -> Results:
    """Run harnesses one after the other.

    Args:
        seconds: of the load.
        kills: processes to kill on a disk that syncs, and as many on one that does not.
        mutations: of records, blobs and packs.
        chosen: which of ``HARNESSES``.
        keep: takes the results so far after each harness.
        say: takes a line for each harness that begins, and for each fault.

    Raises:
        InputError: the fault layer cannot be had here, or a harness did not come to its end.
    """
    if why_not := faults.why_not():
        raise InputError(why_not)
    results = Results(facts(gpu=NO_GPU))
    with tempfile.TemporaryDirectory() as made:
        layer = faults.build(Path(made))
        plans: dict[str, tuple[Mapping[str, str], list[str]]] = {
            f"{PROCESSES} processes": ({}, ["load", "{}", str(seconds), str(PROCESSES)]),
            f"{PROCESSES} processes, locks do nothing": (layer, ["load", "{}", str(seconds), str(PROCESSES)]),
            "kill -9": (layer, ["kills", "{}", str(kills)]),
            "kill -9, fsync does nothing": (layer, ["kills", "{}", str(kills), "lying-sync"]),
            "each call fails in turn": (layer, ["errors", "{}", "1"]),
            "random mutations": ({}, ["mutations", "{}", "0", str(mutations)]),
        }
        for case, (environment, command) in plans.items():
            if command[0] not in chosen:
                continue
            say(f"{case} ...")
            found = _said(environment, command)
            results.rows.extend(_rows(case, found))
            for fault in found["faults"][:20]:
                say(f"  fault: {fault}")
            keep(results)
    return results


def _said(environment: Mapping[str, str], command: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        module, *arguments = [part.format(folder) for part in command]
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.caching.{module}", *arguments], capture_output=True, text=True,
            check=False, cwd=ROOT, env={**os.environ, **environment},
        )  # fmt: skip
    if done.returncode:
        raise InputError(f"benchmarks.caching.{module} failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout))


def _rows(case: str, found: Mapping[str, Any]) -> list[Row]:
    units = {"slowest_ms": "ms", "peak_mib": "MiB", "left": "1"}
    figures = {**found["counts"], **{name: found[name] for name in units if name in found}}
    rows = [Row("cache", case, OURS, WRONG, len(found["faults"]), "1")]
    return rows + [Row("cache", case, OURS, name, value, units.get(name, "1")) for name, value in figures.items()]
