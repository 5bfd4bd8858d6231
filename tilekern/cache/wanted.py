"""The wanted list: problems that were asked for at run time and were not in the cache, one file each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilekern.cache.errors import CacheError
from tilekern.cache.files import read_whole, write_whole
from tilekern.cache.keys import LAYOUT, WANTED, Value, check_name, problem_key
from tilekern.cache.records import LARGEST_RECORD, SCHEMA, parse_object


def note_wanted(root: Path, kernel: str, problem: Mapping[str, Value], target: Mapping[str, Any], reason: str) -> bool:
    """Write down that a problem was asked for on a target; once for each kernel, problem and target.

    Returns:
        True where this call wrote it down; False where it stood there already or the folder cannot be written.

    Raises:
        CacheError: the kernel or the problem cannot be the name of a record, or the target is no JSON data.
    """
    check_name("kernel", kernel)
    problem_key(problem)
    wanted = {"schema": SCHEMA, "kernel": kernel, "problem": dict(problem), "target": dict(target)}
    try:
        canonical = json.dumps(wanted, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise CacheError(f"the target of a wanted problem must be plain JSON data: {error}") from None
    path = _folder(root) / f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if path.exists():
            return False
        write_whole(path, json.dumps({**wanted, "reason": reason, "created": created}, indent=1).encode())
    except OSError:
        return False
    return True


def read_wanted(root: Path) -> list[dict[str, Any]]:
    """What was asked for, oldest first: ``kernel``, ``problem``, ``target``, ``reason``, ``created``.

    Files that are not whole are left out.
    """
    wanted = []
    for path in _files(root):
        try:
            item = parse_object(read_whole(path, LARGEST_RECORD)[0].decode())
        except (CacheError, UnicodeDecodeError):
            continue
        if item.pop("schema", None) == SCHEMA and _is_whole(item):
            wanted.append(item)
    return sorted(wanted, key=lambda item: (item["created"], item["kernel"], problem_key(item["problem"])))


def clear_wanted(root: Path) -> int:
    """Empty the list; the number of problems that stood there.

    Raises:
        CacheError: a file cannot be deleted.
    """
    removed = 0
    for path in _files(root):
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CacheError(f"cannot delete {path}: {error.strerror}") from None
        removed += 1
    return removed


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


def _files(root: Path) -> list[Path]:
    try:
        return sorted(_folder(root).glob("*.json"))
    except OSError:
        return []
