"""The wanted list: problems that jobs asked for and did not find in the cache, one file each.

``<item>.json`` is a problem, written once; its name is the digest of kernel, problem and target. ``<process>.misses``
counts how often one process ran each problem that it missed; that process rewrites it as the counts grow. The counts of
processes that have ended are merged into one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from tilekern.cache.errors import CacheError
from tilekern.cache.files import TEMPORARY_SUFFIX, read_whole, write_whole
from tilekern.cache.folders import unlink_below, write_below
from tilekern.cache.keys import LAYOUT, WANTED, Value, check_digest, check_name, problem_key
from tilekern.cache.records import LARGEST_RECORD, parse_object

_SCHEMA = 1
_MISSES = ".misses"
# A larger count is damage.
_MOST_MISSES = 1 << 53
_PROCESS = re.compile(r"[0-9a-f]{8,64}")
# Seconds without a new count after which a process counts as ended; counts that grow are written every minute.
_OVER_S = 86400.0
# With more files of counts than this, a new process merges the old ones.
_MANY = 32


def note_wanted(root: Path, kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any], reason: str) -> bool:
    """Add a problem to the list, once for each kernel, problem and target.

    Returns:
        True if this call added it; False if it was there already or the folder cannot be written.

    Raises:
        CacheError: the kernel or the problem cannot be the name of a record, or the target is not JSON data.
    """
    wanted = _wanted(kernel, problem, target)
    path = _folder(root) / f"{_digest(wanted)}.json"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if path.exists():
            return False
        text = json.dumps({**wanted, "reason": reason, "created": created}, indent=1)
        write_below(Path(root), path.relative_to(root), text.encode())
    except OSError:
        return False
    return True


def wanted_name(kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any]) -> str:
    """Return the name of a problem in the list, 64 hexadecimal digits; raises as :func:`note_wanted` does."""
    return _digest(_wanted(kernel, problem, target))


def _wanted(kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any]) -> dict[str, Any]:
    check_name("kernel", kernel)
    problem_key(problem)
    return {"schema": _SCHEMA, "kernel": kernel, "problem": dict(problem), "target": dict(target)}


def _digest(wanted: Mapping[str, Any]) -> str:
    try:
        canonical = json.dumps(wanted, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise CacheError(f"the target of a wanted problem must be plain JSON data: {error}") from None
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_wanted(root: Path) -> list[dict[str, Any]]:
    """Return the list, oldest first: ``kernel``, ``problem``, ``target``, ``reason``, ``created``.

    Damaged files are left out.
    """
    wanted = []
    for path in _files(root):
        item = _read(path)
        if item.pop("schema", None) == _SCHEMA and _is_whole(item):
            wanted.append(item)
    return sorted(wanted, key=lambda item: (item["created"], item["kernel"], problem_key(item["problem"])))


def note_misses(root: Path, process: str, misses: Mapping[str, int]) -> bool:
    """Write how often a process has run problems of the list so far, replacing its earlier counts.

    ``process`` is 8 to 64 hexadecimal digits that identify the process; ``misses`` are runs by :func:`wanted_name`.

    Returns:
        False if there is no list, or the folder cannot be written.

    Raises:
        CacheError: a name is not that of a process or a problem.
    """
    if not _PROCESS.fullmatch(process):
        raise CacheError(f"the name of a process must be 8 to 64 hexadecimal digits, got {process!r}")
    text = json.dumps({"schema": _SCHEMA, "misses": {check_digest("a problem", k): n for k, n in misses.items()}})
    path = _folder(root) / f"{process}{_MISSES}"
    try:
        if not _folder(root).is_dir():
            return False
        is_new = not path.exists()
        write_below(Path(root), PurePosixPath(LAYOUT, WANTED, path.name), text.encode())
    except OSError:
        return False
    if is_new and len(_files(root, _MISSES)) > _MANY:
        sum_up_misses(root)
    return True


def sum_up_misses(root: Path) -> int:
    """Merge the counts of processes that have ended into one file, for problems that are still on the list.

    Counts of another version of tilekern are left alone, and so is a folder that cannot be written.

    Returns:
        The number of files that were merged.
    """
    oldest = time.time() - _OVER_S
    sums: Counter[str] = Counter()
    taken: dict[Path, Path] = {}
    left = {path.stem for path in _files(root)}
    for path in _files(root, _MISSES):
        # Renamed first, so that only one of two processes takes it.
        mine = path.with_name(f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}")
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.rename(mine)
                misses = _misses_of(mine)
                if misses is None:
                    mine.rename(path)
                else:
                    taken[mine] = path
                    sums.update({name: n for name, n in misses.items() if name in left})
    text = json.dumps({"schema": _SCHEMA, "misses": {name: min(n, _MOST_MISSES) for name, n in sums.items()}})
    try:
        if sums:
            write_whole(_folder(root) / f"{os.urandom(8).hex()}{_MISSES}", text.encode())
    except OSError:
        for mine, path in taken.items():
            with contextlib.suppress(OSError):
                mine.rename(path)
        return 0
    for mine in taken:
        with contextlib.suppress(OSError):
            mine.unlink()
    return len(taken)


def read_misses(root: Path) -> dict[str, int]:
    """Return how often all processes ran the problems of the list untuned, by name; skip unreadable files."""
    runs: Counter[str] = Counter()
    for path in _files(root, _MISSES):
        runs.update(_misses_of(path) or {})
    return dict(runs)


def remove_wanted(root: Path, names: Collection[str]) -> int:
    """Remove problems from the list, and counts of no problem that is left; return how many were on it.

    Counts of another version of tilekern are left alone.

    Raises:
        CacheError: a name is not that of a problem, or a file cannot be deleted.
    """
    removed = sum(_unlink(root, f"{check_digest('a problem', name)}.json") for name in names)
    left = {path.stem for path in _files(root)}
    for path in _files(root, _MISSES):
        misses = _misses_of(path)
        if misses is not None and left.isdisjoint(misses):
            _unlink(root, path.name)
    return removed


def clear_wanted(root: Path) -> int:
    """Empty the list; return how many problems were on it.

    Raises:
        CacheError: a file cannot be deleted.
    """
    removed = sum(_unlink(root, path.name) for path in _files(root))
    for path in _files(root, _MISSES):
        _unlink(root, path.name)
    return removed


def _unlink(root: Path, name: str) -> bool:
    try:
        return unlink_below(Path(root), PurePosixPath(LAYOUT, WANTED, name))
    except OSError as error:
        raise CacheError(f"cannot delete {_folder(root) / name}: {error.strerror}") from None


def _misses_of(path: Path) -> dict[str, int] | None:
    """Return the counts in a file: empty if it is damaged, None if another version of tilekern wrote it."""
    item = _read(path)
    misses, schema = item.get("misses"), item.get("schema")
    if schema != _SCHEMA and type(schema) is int:
        return None
    if schema != _SCHEMA or not isinstance(misses, dict):
        return {}
    return {name: n for name, n in misses.items() if type(n) is int and 0 < n <= _MOST_MISSES}


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_whole(path, LARGEST_RECORD)[0].decode())
    except (CacheError, UnicodeDecodeError):
        return {}


def _is_whole(item: Mapping[str, Any]) -> bool:
    texts, objects = ("kernel", "reason", "created"), ("problem", "target")
    if item.keys() != {*texts, *objects} or not all(isinstance(item[name], str) for name in texts):
        return False
    try:
        check_name("kernel", item["kernel"])
        return all(isinstance(item[name], dict) for name in objects) and bool(problem_key(item["problem"]))
    except CacheError:
        return False


def _folder(root: Path) -> Path:
    return Path(root) / LAYOUT / WANTED


def _files(root: Path, suffix: str = ".json") -> list[Path]:
    try:
        return sorted(_folder(root).glob(f"*{suffix}"))
    except OSError:
        return []
