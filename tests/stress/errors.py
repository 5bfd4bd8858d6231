"""Every call that a cache makes to the file system fails in turn, with each of the errors that disks and networks give.

``python tests/stress/errors.py FOLDER EVERY`` runs on top of the fault layer, tries each ``EVERY``th fault, and
prints one JSON document. Right is: an operation does its work or raises a CacheError of one line, a lookup is right or
a miss; afterwards, on a disk that works again, every record is whole as it was or as it was to be.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from faults import OPERATIONS, Faults

from benchmarks.cache_samples import KERNEL, TARGET, fault_of, find, problem, sample
from tilekern.cache import (
    CacheError,
    FolderLayer,
    Store,
    clear_wanted,
    install_pack,
    note_misses,
    note_wanted,
    read_misses,
    read_wanted,
    write_pack,
)  # fmt: skip

ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.EACCES)
OLD, NEW, OTHER = 1, 2, 0
PROCESS = "0123456789abcdef"


class Work(NamedTuple):
    """An operation on a cache: what it does, and whether it may take records away."""

    do: Callable[[Path], object]
    destroys: bool = False


def _read(root: Path) -> None:
    """Look up all there is; a hit under faults must be as right as any."""
    for number in (OTHER, OLD, NEW):
        hit = find([FolderLayer(root, "user", writable=True)], number)
        if hit and (fault := fault_of(hit, number)):
            raise AssertionError(fault)


def _clear(root: Path) -> None:
    store = Store(root)
    store.collect_garbage(store.remove(entry for entry in store.entries() if entry.record), grace_s=0.0)


def _verify(root: Path) -> None:
    store = Store(root)
    list(store.entries())
    for blob in store.blobs():
        store.read_blob(blob.sha256)


WORK = {
    "write": Work(lambda root: Store(root).write(*sample(NEW, 1))),
    "overwrite": Work(lambda root: Store(root).write(*sample(OLD, 2))),
    "look up": Work(_read),
    "verify": Work(_verify),
    "collect garbage": Work(lambda root: Store(root).collect_garbage(grace_s=-1.0)),
    "clear": Work(_clear, destroys=True),
    "unpack": Work(lambda root: install_pack(root.with_suffix(".pack"), Store(root))),
    "note wanted": Work(lambda root: note_wanted(root, KERNEL, problem(OLD), TARGET, "no record")),
    "note misses": Work(lambda root: note_misses(root, PROCESS, {"0" * 64: 3})),
    "read wanted": Work(lambda root: (read_wanted(root), read_misses(root))),
    "clear wanted": Work(clear_wanted),
}


def run(folder: Path, every: int = 1) -> dict[str, Any]:
    """Try faults; ``counts`` of the outcomes, and ``faults`` of the cache that this showed."""
    faults_layer, counts, faults = Faults(), Counter[str](), list[str]()
    root = folder / "cache"
    _make(root.with_suffix(".made"))
    write_pack(root.with_suffix(".pack"), [sample(NEW, 1), sample(OLD, 2)])
    tried = 0
    for name, operation, action in product(WORK, OPERATIONS, ("fail once", "fail on")):
        for error, after in product(ERRORS, range(_calls(faults_layer, root, name, operation))):
            tried += 1
            if tried % every:
                continue
            _fresh(root)
            with faults_layer.failing(root, error, after, [operation], action):
                outcome = _outcome(WORK[name], root)
            where = f"{name}: call {after} of {operation} gave {errno.errorcode[error]} ({action})"
            counts["survived" if outcome is None else outcome.partition(":")[0]] += 1
            if outcome and not outcome.startswith("CacheError: "):
                faults.append(f"{where}: {outcome}")
            faults += [f"{where}: {fault}" for fault in _what_is_wrong(root, WORK[name])]
    return {"counts": dict(counts), "faults": faults}


def _make(root: Path) -> None:
    """A cache with two whole records, a bad one, blobs that are nobody's and a wanted problem."""
    store = Store(root)
    for number in (OTHER, OLD):
        store.write(*sample(number, 1))
    bad = store.write(*sample(3, 1))
    bad.write_text("{")
    note_wanted(root, KERNEL, problem(OTHER), TARGET, "no record")
    note_misses(root, PROCESS, {"0" * 64: 1})


def _fresh(root: Path) -> None:
    """Put the cache back to what it was before the last fault."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(root.with_suffix(".made"), root)


def _calls(faults: Faults, root: Path, name: str, operation: str) -> int:
    """How many calls of a kind an operation makes where nothing fails."""
    _fresh(root)
    with faults.failing(root, errno.EIO, 10**9, [operation]):
        _outcome(WORK[name], root)
        return faults.seen()


def _outcome(work: Work, root: Path) -> str | None:
    """The kind and message of what an operation raised, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work.do(root)
        except CacheError as error:
            one_line = "\n" not in str(error)
            return f"CacheError: {error}" if one_line else f"a message of several lines: {error!r}"
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a fault of the cache)
            return repr(error)
    return None


def _what_is_wrong(root: Path, work: Work) -> Iterator[str]:
    """Yield what is wrong for a reader once the disk works again."""
    for number in (OTHER, OLD, NEW):
        hit = find([FolderLayer(root, "user")], number)
        if hit and (fault := fault_of(hit, number)):
            yield fault
        if not hit and number != NEW and not work.destroys:
            yield f"the record of problem {number} is lost"
    for entry in Store(root).entries():
        if entry.problem and entry.record is None and "columns=512" not in entry.path.name:
            yield f"{entry.path} is left bad: {entry.problem}"


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
