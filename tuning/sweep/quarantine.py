"""The machine's quarantine: candidates that killed or stalled a measuring process, in any sweep.

The cache's root keeps a copy of such lines, one file for each candidate: ``<root>/quarantine/<target
key>/<sha256>.json``. A line counts while the candidate's source, toolkit, driver and libraries are those that it names.
Deleting the folder forgets them all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tilekern.cache import CacheError
from tilekern.cache.files import read_whole
from tilekern.cache.folders import write_below
from tilekern.cache.records import parse_object
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.journal import Journal
from tilekern.tuning.sweep.lines import is_whole
from tilekern.warning import warn_once

_JOURNAL = "quarantine"
# Far more than a line has.
_LARGEST = 2**20


@contextlib.contextmanager
def shared(sweep: Sweep, root: Path) -> Iterator[None]:
    """Measure a sweep with the machine's quarantine, and add the sweep's to it.

    Args:
        sweep: the sweep; its journal takes in the machine's lines about its candidates.
        root: the cache's root.
    """
    folder = PurePosixPath("quarantine", sweep.target.key)
    before = _lines_of(sweep)
    if lines := [line for line in _read(root / folder) if line["candidate"] not in before]:
        keys = {item.key for named in sweep.problems() for item in sweep.candidates(*named)}
        if mine := [line for line in lines if line["candidate"] in keys]:
            sweep.note(_JOURNAL, *mine)
            before |= {line["candidate"]: line for line in mine}
    try:
        yield
    finally:
        for key, line in _lines_of(sweep).items():
            _keep(root, folder, line, is_new=line != before.get(key))


def _lines_of(sweep: Sweep) -> dict[str, dict[str, Any]]:
    return Journal(
        sweep.folder / f"{_JOURNAL}.jsonl", "candidate", is_whole=functools.partial(is_whole, _JOURNAL)
    ).latest()


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(CacheError):
            line = parse_object(read_whole(path, _LARGEST)[0])
            if is_whole(_JOURNAL, line):
                yield line


def _keep(root: Path, folder: PurePosixPath, line: dict[str, Any], *, is_new: bool) -> None:
    """Write a line to the folder; an old line only if the folder has none."""
    path = folder / f"{hashlib.sha256(line['candidate'].encode()).hexdigest()}.json"
    try:
        if is_new or not (root / path).exists():
            write_below(root, path, json.dumps(line, indent=1, sort_keys=True).encode())
    except OSError as error:
        warn_once(
            f"cannot write {root / folder}: {error.strerror}; what crashed or stalled in this sweep is tried again in "
            "others",
            about=root / folder,
        )
