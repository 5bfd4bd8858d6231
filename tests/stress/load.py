"""Many processes at once on one cache: they tune, read, prune and clear it, and say what went wrong.

``python tests/stress/load.py ROOT SECONDS PROCESSES`` forks the processes and prints one JSON document. Right is:
a lookup gives a whole record that was written, with its blobs, or a miss in silence; no writer fails; and once all are
done, every record that is left has its blobs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cache_samples import fault_of, find, sample
from tilekern.cache import CacheError, FolderLayer, Store

PROBLEMS, VERSIONS = 40, 3
MOST_FAULTS = 20
# How many of eight processes do what.
ROLES = ("tune", "read", "tune", "read", "clear", "read", "prune", "read")

Work = Callable[[Path, random.Random, Counter[str]], None]


def tune(root: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Write a record and its blobs; few versions, so that writers share blobs with each other and with the past."""
    Store(root).write(*sample(draw.randrange(PROBLEMS), draw.randrange(VERSIONS)))
    counts["records written"] += 1


def read(root: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Look a problem up, as the cache's owner or as one who may not write it."""
    number = draw.randrange(PROBLEMS)
    hit = find([FolderLayer(root, "user", writable=draw.random() < 0.5)], number)
    counts["misses" if hit is None else "hits"] += 1
    if hit and (fault := fault_of(hit, number)):
        raise AssertionError(fault)


def prune(root: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Collect garbage at once, with no grace for blobs that wait for their record."""
    garbage = Store(root).collect_garbage(grace_s=draw.choice([0.0, 300.0]))
    if garbage.kept:
        raise AssertionError(garbage.kept)
    counts["blobs removed"] += garbage.blobs


def clear(root: Path, draw: random.Random, counts: Counter[str]) -> None:
    """Remove some records, or all, and the blobs that they leave."""
    store, share = Store(root), draw.choice([0.1, 0.3, 1.0])
    chosen = [entry for entry in store.entries() if draw.random() < share]
    if broken := [entry for entry in chosen if entry.problem]:
        raise AssertionError(f"{broken[0].path}: {broken[0].problem}")
    counts["records removed"] += len(chosen)
    counts["blobs removed"] += store.collect_garbage(store.remove(chosen)).blobs
    time.sleep(draw.random() * 0.2)  # else there is hardly ever anything to find


WORK: dict[str, Work] = {"tune": tune, "read": read, "prune": prune, "clear": clear}


def run(root: Path, seconds: float, processes: int) -> dict[str, Any]:
    """Let processes loose on a cache and wait for them.

    Returns:
        ``counts`` of what was done, ``faults`` found (the first of each process), ``left`` records at the end.
    """
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as reports:
        start = time.monotonic() + 0.02 * processes
        children = [_forked(Path(reports), number, root, start, seconds) for number in range(processes)]
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                faults.append(f"process {child} ended with status {status}")
        for path in sorted(Path(reports).iterdir()):
            report = json.loads(path.read_text())
            counts.update(report["counts"])
            faults += report["faults"]
    left, broken = _what_is_left(root)
    return {"counts": dict(sorted(counts.items())), "faults": faults + broken, "left": left}


def _forked(reports: Path, number: int, root: Path, start: float, seconds: float) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        report = _worked(ROLES[number % len(ROLES)], number, root, start, seconds)
        (reports / str(number)).write_text(json.dumps(report))
        status = 0
    finally:
        os._exit(status)


def _worked(role: str, number: int, root: Path, start: float, seconds: float) -> dict[str, Any]:
    """Work and return a report. A warning is a fault, because it means that something bad was found."""
    draw, counts = random.Random(number), Counter[str]()
    faults: list[str] = []
    time.sleep(max(0.0, start - time.monotonic()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while time.monotonic() < start + seconds and len(faults) < MOST_FAULTS:
            try:
                WORK[role](root, draw, counts)
            except (AssertionError, CacheError, RuntimeWarning) as error:
                faults.append(f"{role}: {error}")
            except Exception:  # noqa: BLE001 (whatever it is, it is a fault of the cache)
                faults.append(f"{role}: {traceback.format_exc()}")
    return {"counts": counts, "faults": faults}


def _what_is_left(root: Path) -> tuple[int, list[str]]:
    """How many records there are, and what is wrong with them now that nobody writes."""
    store, faults = Store(root), []
    entries = list(store.entries())
    for entry in entries:
        if entry.record is None:
            faults.append(f"at the end: {entry.path}: {entry.problem}")
            continue
        for digest in sorted(entry.record.digests):
            try:
                store.read_blob(digest)
            except CacheError as error:
                faults.append(f"at the end: {entry.path}: {error}")
    return len(entries), faults


if __name__ == "__main__":
    if "LD_PRELOAD" in os.environ:
        from faults import Faults

        Faults().let_locks_lie()
    print(json.dumps(run(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
