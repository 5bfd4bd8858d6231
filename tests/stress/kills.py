"""Processes that are killed in the middle of a call on a cache, and what a reader sees afterwards.

``python tests/stress/kills.py ROOT KILLS`` runs on top of the fault layer and prints one JSON document. Each
process writes, prunes and clears until SIGKILL comes at one of its calls to the file system, before which a beginning
is all that stays of what was written and not synced. Every other process works on a disk that also fails one call in
between. Right is: no record is ever seen that is not whole; and where only writers died, none that was there is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import Faults

from benchmarks.cache_samples import fault_of, find, sample
from tilekern.cache import CacheError, FolderLayer, Store

PROBLEMS, VERSIONS = 4, 50
# A write makes some forty calls; a process makes several writes.
MOST_CALLS = 250
DESTROYS = ("clear", "write and clear")


def run(root: Path, kills: int, seed: int = 0, lying_sync: bool = False) -> dict[str, Any]:
    """Kill processes one after the other and look at the cache after each.

    Args:
        root: the cache.
        kills: how many processes die.
        seed: of what they do and where they die.
        lying_sync: fsync does nothing, so that a loss of power tears files that were put in place: readers must then
            take them for bad, and never for right.

    Returns:
        ``counts`` of what was seen, and ``faults``.
    """
    faults_layer, counts, faults = Faults(), Counter[str](), list[str]()
    store = Store(root)
    for number in range(PROBLEMS):
        store.write(*sample(number, 0))
    for number in range(kills):
        draw = random.Random(f"{seed} {number}")
        work = draw.choice(list(_WORK))
        before = _seen(root, faults, number)
        child = os.fork()
        if not child:
            _die(faults_layer, root, work, draw, lying_sync)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            counts[f"killed in: {work}"] += 1
        else:
            faults.append(f"kill {number}: the process ended by itself, with status {status}")
        after = _seen(root, faults, number, lying_sync)
        counts["records seen whole"] += len(after)
        if not lying_sync and work not in DESTROYS and (lost := before - after):
            faults.append(f"kill {number}, {work}: the records of {sorted(lost)} are lost")
        _heal(store, after)
    counts["leftovers of killed processes"] = sum(1 for _ in store.leftovers())
    return {"counts": dict(counts), "faults": faults}


def _seen(root: Path, faults: list[str], number: int, may_be_bad: bool = False) -> set[int]:
    """Return the problems that a lookup finds; every hit must be right, and no file may be bad."""
    found = set()
    for problem in range(PROBLEMS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hit = find([FolderLayer(root, "user")], problem)
        if caught and not may_be_bad:
            faults.append(f"kill {number}: {caught[0].message}")
        if hit:
            found.add(problem)
        if hit and (fault := fault_of(hit, problem)):
            faults.append(f"kill {number}: {fault}")
    if not may_be_bad:
        faults += [f"kill {number}: {e.path}: {e.problem}" for e in Store(root).entries() if e.problem]
    return found


def _heal(store: Store, present: set[int]) -> None:
    """Write what was cleared, so that the next process has something to destroy."""
    for number in range(PROBLEMS):
        if number not in present:
            store.write(*sample(number, 0))


def _die(faults: Faults, root: Path, work: str, draw: random.Random, lying_sync: bool) -> None:
    """Work until the fault layer kills this process."""
    store, status = Store(root), 1
    after, fails_at = draw.randrange(MOST_CALLS), draw.random() < 0.5
    try:
        if fails_at:
            # A failed fsync or rename first; what it leaves behind must be no worse when the process dies later.
            operation, error = draw.choice([("fsync", 5), ("rename", 5), ("rename", 28), ("write", 28), ("unlink", 5)])
            with faults.failing(root, error, draw.randrange(4), [operation]), contextlib.suppress(CacheError):
                _WORK[work](store, draw)
        faults.arm(root, "kill", after, seed=draw.randrange(2**31), lying_sync=lying_sync)
        for _ in range(MOST_CALLS):
            _WORK[work](store, draw)
    except BaseException as error:  # noqa: BLE001 (this process has nobody above it that could say so)
        print(f"{work}: {error!r}", file=sys.stderr)
    finally:
        os._exit(status)


def _write(store: Store, draw: random.Random) -> None:
    store.write(*sample(draw.randrange(PROBLEMS), draw.randrange(1, VERSIONS), draw.randrange(1, 40_000)))


def _collect(store: Store, draw: random.Random) -> None:
    """Write and at once remove what no record refers to any more."""
    _write(store, draw)
    store.collect_garbage(grace_s=0.0)


def _clear(store: Store, draw: random.Random) -> None:
    chosen = [entry for entry in store.entries() if draw.random() < 0.5]
    store.collect_garbage(store.remove(chosen))


def _write_and_clear(store: Store, draw: random.Random) -> None:
    _write(store, draw)
    _clear(store, draw)


_WORK: dict[str, Callable[[Store, random.Random], None]] = {
    "write": _write,
    "write and collect": _collect,
    "clear": _clear,
    "write and clear": _write_and_clear,
}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), lying_sync="lying-sync" in sys.argv)))
