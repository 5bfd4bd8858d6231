"""The wanted list: problems that were asked for at run time and were not in the cache, one file each.

``<item>.json`` is a problem, written once; its name is the digest of kernel, problem and target. ``<process>.misses``
is how often one process ran the problems that it missed, written anew as they grow, by that process alone. Those of
processes that are over are summed up into one.
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
from pathlib import Path
from typing import Any

from tilekern.cache.errors import CacheError
from tilekern.cache.files import TEMPORARY_SUFFIX, read_whole, write_whole
from tilekern.cache.keys import LAYOUT, WANTED, Value, check_digest, check_name, problem_key
from tilekern.cache.records import LARGEST_RECORD, parse_object

_SCHEMA = 1
_MISSES = ".misses"
# No process runs so often; a larger count is damage, and no number of a program's that reckons with it.
_MOST_MISSES = 1 << 53
_PROCESS = re.compile(r"[0-9a-f]{8,64}")
# A process writes its counts every minute while they grow; one that has not for so long is taken to be over.
_OVER_S = 86400.0
# So many counts may stand before a process that comes new sums up the old ones.
_MANY = 32


def note_wanted(root: Path, kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any], reason: str) -> bool:
    """Write down that a problem was asked for on a target; once for each kernel, problem and target.

    Returns:
        True where this call wrote it down; False where it stood there already or the folder cannot be written.

    Raises:
        CacheError: the kernel or the problem cannot be the name of a record, or the target is not JSON data.
    """
    wanted = _wanted(kernel, problem, target)
    path = _folder(root) / f"{_digest(wanted)}.json"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if path.exists():
            return False
        write_whole(path, json.dumps({**wanted, "reason": reason, "created": created}, indent=1).encode())
    except OSError:
        return False
    return True


def wanted_name(kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any]) -> str:
    """The name of a problem in the list: 64 hexadecimal digits; raises as :func:`note_wanted` does."""
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
    """The problems that were asked for, oldest first: ``kernel``, ``problem``, ``target``, ``reason``, ``created``.

    Files that are not whole are left out.
    """
    wanted = []
    for path in _files(root):
        try:
            item = parse_object(read_whole(path, LARGEST_RECORD)[0].decode())
        except (CacheError, UnicodeDecodeError):
            continue
        if item.pop("schema", None) == _SCHEMA and _is_whole(item):
            wanted.append(item)
    return sorted(wanted, key=lambda item: (item["created"], item["kernel"], problem_key(item["problem"])))


def note_misses(root: Path, process: str, misses: Mapping[str, int]) -> bool:
    """Write down how often a process ran problems of the list so far, in place of what it wrote before.

    Args:
        root: the cache's root.
        process: names the process among all that share the cache: hexadecimal digits.
        misses: runs by the problem's name (:func:`wanted_name`).

    Returns:
        False where there is no list, or the folder cannot be written.

    Raises:
        CacheError: a name is not that of a process or a problem.
    """
    if not _PROCESS.fullmatch(process):
        raise CacheError(f"a process is named by 8 to 64 hexadecimal digits, got {process!r}")
    text = json.dumps({"schema": _SCHEMA, "misses": {check_digest("a problem", k): n for k, n in misses.items()}})
    path = _folder(root) / f"{process}{_MISSES}"
    try:
        if not _folder(root).is_dir():
            return False
        is_new = not path.exists()
        write_whole(path, text.encode())
    except OSError:
        return False
    if is_new and len(_files(root, _MISSES)) > _MANY:
        sum_up_misses(root)
    return True


def sum_up_misses(root: Path) -> int:
    """Put the counts of processes that are over into one file, those of the list's problems alone.

    Counts that another version of tilekern wrote are left alone, and so is a folder that cannot be written.

    Returns:
        How many files became one.
    """
    oldest = time.time() - _OVER_S
    sums: Counter[str] = Counter()
    taken: dict[Path, Path] = {}
    left = {path.stem for path in _files(root)}
    for path in _files(root, _MISSES):
        # Renamed first: of two processes that sum up at the same moment one has it.
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
    """How often the problems of the list were run in place of a tuned kernel, by name, over all processes.

    Files that cannot be read count for nothing.
    """
    found: Counter[str] = Counter()
    for path in _files(root, _MISSES):
        found.update(_misses_of(path) or {})
    return dict(found)


def remove_wanted(root: Path, names: Collection[str]) -> int:
    """Take problems off the list, and counts of none that is left; how many problems stood there.

    Counts that another version of tilekern wrote are left alone.

    Raises:
        CacheError: a name is not that of a problem, or a file cannot be deleted.
    """
    removed = sum(_unlink(_folder(root) / f"{check_digest('a problem', name)}.json") for name in names)
    left = {path.stem for path in _files(root)}
    for path in _files(root, _MISSES):
        misses = _misses_of(path)
        if misses is not None and left.isdisjoint(misses):
            _unlink(path)
    return removed


def clear_wanted(root: Path) -> int:
    """Empty the list; the number of problems that stood there.

    Raises:
        CacheError: a file cannot be deleted.
    """
    removed = sum(map(_unlink, _files(root)))
    for path in _files(root, _MISSES):
        _unlink(path)
    return removed


def _unlink(path: Path) -> bool:
    """Delete a file; False where it was not there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(f"cannot delete {path}: {error.strerror}") from None
    return True


def _misses_of(path: Path) -> dict[str, int] | None:
    """The counts of a file, empty where it is damaged; None where another version of tilekern wrote it."""
    try:
        item = parse_object(read_whole(path, LARGEST_RECORD)[0].decode())
    except (CacheError, UnicodeDecodeError):
        return {}
    misses, schema = item.get("misses"), item.get("schema")
    if schema != _SCHEMA and type(schema) is int:
        return None
    if schema != _SCHEMA or not isinstance(misses, dict):
        return {}
    return {name: n for name, n in misses.items() if type(n) is int and 0 < n <= _MOST_MISSES}


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
