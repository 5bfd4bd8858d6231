"""Deleting what is of no use any more: the command prune.

Jobs write nothing when they read, so what tells of their use is the access time that the file system notes of a
record's file: on Linux (``relatime``) to a day, and nothing where it is mounted with ``noatime``, where a record's age
must do. The commands here and the tuner open files of their own so that it is not noted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from cache_tools.shared.here import toolkit_key
from cache_tools.shared.removing import Kept, ask, garbage_of, kept_of, remove, say, would_go
from cache_tools.shared.selection import seconds_since
from cache_tools.shared.staleness import is_stale
from cache_tools.shared.tables import natural, print_table
from cache_tools.shared.text import age, count, print_json, size
from tilekern.cache import CacheError, Store, by_preference

ACCESS_TIME, AGE = "access_time", "age"
_NO_EVIDENCE = "the file system notes no access times (noatime): a record's age stands for its last use"
_Reasons = dict[Path, list[str]]


@dataclass(frozen=True)
class Limits:
    """What a cache shall not hold any more.

    Attributes:
        stale: records from another source of the kernel than today's.
        keep_toolkits: of each problem on each GPU, how many toolkits' records stay; None for all.
        unused_for_s: the longest time since the last use, in seconds; None for any.
        max_bytes: the largest size of the whole cache; None for any.
    """

    stale: bool
    keep_toolkits: int | None
    unused_for_s: float | None
    max_bytes: int | None


def prune(store: Store, limits: Limits, dry_run: bool, confirmed: bool, as_json: bool) -> None:
    """Delete what exceeds the limits, or print what would be deleted.

    Records that cannot be read, of an unknown schema among them, are left alone.

    Raises:
        CacheError: no limit was given, the question was not answered with yes, or a file cannot be deleted.
    """
    if limits == Limits(False, None, None, None):
        raise CacheError("prune needs a limit: --stale, --keep-toolkits, --unused-for or --max-size")
    if as_json and not (confirmed or dry_run):
        raise CacheError("prune --json asks nothing and so needs --yes or --dry-run")
    entries = [kept_of(entry) for entry in store.entries()]
    reasons = _reasons(store, entries, limits)
    chosen = [entry for entry in entries if entry.path in reasons]
    evidence = ACCESS_TIME if _notes_access(store.root) else AGE
    going = would_go(store, chosen)
    document: dict[str, Any] = {
        "cache_dir": str(store.root),
        "dry_run": dry_run,
        "evidence": evidence,
        "records": [_summary(entry, reasons[entry.path]) for entry in chosen],
        "removed": going.records,
        "blobs": going.blobs,
        "bytes": going.size_bytes,
        "bytes_left": _size_of(store, entries) - going.size_bytes,
        "left_alone": sum(not entry.is_readable for entry in entries),
        "kept": going.kept,
    }
    if not as_json:
        _print(document)
    if not dry_run:
        if chosen and not confirmed:
            ask(f"Remove {count(len(chosen), 'record')} from {store.root}?")
        removed = remove(store, chosen)
        document |= {"removed": removed.records, "blobs": removed.blobs, "bytes": removed.size_bytes}
        document |= {"kept": removed.kept, "bytes_left": _size_of(store, store.entries())}
        if not as_json:
            say(removed, document["left_alone"])
    if as_json:
        print_json(document)


def _reasons(store: Store, entries: Sequence[Kept], limits: Limits) -> _Reasons:
    """Why each record that must go must go, by its path."""
    reasons: _Reasons = defaultdict(list)
    readable = [entry for entry in entries if entry.is_readable]
    if limits.stale:
        for entry in readable:
            if is_stale(entry):
                reasons[entry.path].append("stale")
    if limits.keep_toolkits is not None:
        for entry in _of_old_toolkits(readable, limits.keep_toolkits):
            reasons[entry.path].append("old toolkit")
    if limits.unused_for_s is not None:
        for entry in readable:
            if seconds_since(entry.used) > limits.unused_for_s:
                reasons[entry.path].append("unused")
    if limits.max_bytes is not None:
        for entry in _least_used(store, entries, set(reasons), limits.max_bytes):
            reasons[entry.path].append("least used")
    return reasons


def _of_old_toolkits(entries: Sequence[Kept], keep: int) -> list[Kept]:
    """Of each problem on each GPU, the records behind the first so many in a lookup's order; stale ones come last."""
    groups: dict[tuple[str, str, str], dict[str, Kept]] = defaultdict(dict)
    for entry in entries:
        if entry.address:
            target, toolkit, kernel, problem = entry.address
            groups[target, kernel, problem][toolkit] = entry
    installed = toolkit_key()
    old = []
    for by_toolkit in groups.values():
        order = [by_toolkit[toolkit] for toolkit in by_preference(by_toolkit, installed)]
        order.sort(key=lambda entry: is_stale(entry) is True)
        old += order[keep:]
    return old


def _least_used(store: Store, entries: Sequence[Kept], going: set[Path], max_bytes: int) -> list[Kept]:
    """The readable records to delete, least used first, until the cache has at most ``max_bytes``."""
    staying = [entry for entry in entries if entry.path not in going]
    garbage, kept = garbage_of(store, [entry for entry in entries if entry.path in going])
    sizes = {blob.sha256: blob.size_bytes for blob in store.blobs()}
    for blob in garbage:
        sizes.pop(blob.sha256, None)
    users = Counter(digest for entry in staying for digest in entry.digests)
    total = sum(sizes.values()) + sum(entry.file_bytes for entry in staying)
    chosen = []
    for entry in sorted(staying, key=lambda entry: (entry.used, entry.path)):
        if total <= max_bytes:
            break
        if not entry.is_readable:
            continue
        chosen.append(entry)
        total -= entry.file_bytes
        for digest in entry.digests:
            users[digest] -= 1
            total -= sizes.get(digest, 0) if not users[digest] and not kept else 0
    return chosen


def _notes_access(root: Path) -> bool:
    try:
        return not os.statvfs(root).f_flag & getattr(os, "ST_NOATIME", 0)
    except OSError:
        return False


def _size_of(store: Store, entries: Any) -> int:
    return sum(entry.file_bytes for entry in entries) + sum(blob.size_bytes for blob in store.blobs())


def _summary(entry: Kept, reasons: list[str]) -> dict[str, Any]:
    assert entry.address is not None
    return {
        "path": str(entry.path),
        "kernel": entry.address.kernel,
        "problem_key": entry.address.problem_key,
        "target": entry.address.target_key,
        "toolkit": entry.address.toolkit_key,
        "size_bytes": entry.size_bytes,
        "last_used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
        "reasons": reasons,
    }


def _print(document: dict[str, Any]) -> None:
    if document["evidence"] == AGE and document["records"]:
        click.echo(_NO_EVIDENCE, err=True)
    rows = sorted((_row(item) for item in document["records"]), key=lambda row: [natural(text) for text in row[:4]])
    if rows:
        header = ("TARGET", "TOOLKIT", "KERNEL", "PROBLEM", "SIZE", "LAST USED", "WHY")
        print_table(header, rows, ("SIZE", "LAST USED"), grouped=("TARGET", "TOOLKIT"), below=("PROBLEM",))
    what = f"{count(document['removed'], 'record')} and {count(document['blobs'], 'blob')}"
    verb = "would go" if document["dry_run"] else "to go"
    click.echo(f"{what} {verb}: {size(document['bytes'])} freed, {size(document['bytes_left'])} left")
    if document["dry_run"] and document["kept"]:
        click.echo(document["kept"])


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    used = f"{age(seconds_since(datetime.fromisoformat(item['last_used']).timestamp()))} ago"
    place = (item["target"], item["toolkit"], item["kernel"], item["problem_key"])
    return *place, size(item["size_bytes"]), used, ", ".join(item["reasons"])
