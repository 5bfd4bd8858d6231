"""The command prune: delete what is of no use any more.

Jobs write nothing when they read, so what tells of their use is the access time that the file system notes of a
record's file: on Linux (``relatime``) to a day, and nothing where it is mounted with ``noatime``, where a record's age
must do. The commands here and the tuner open files of their own so that it is not noted.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tilekern.cache import CacheError, Store, by_preference, sum_up_misses
from tilekern.cache_tools.shared.here import toolkit_key
from tilekern.cache_tools.shared.options import Duration, as_json, cache_dir, command, confirmed, dry_run
from tilekern.cache_tools.shared.removing import Kept, ask, garbage_of, kept_of, remove, say, would_go
from tilekern.cache_tools.shared.selection import seconds_since
from tilekern.cache_tools.shared.staleness import is_stale
from tilekern.cache_tools.shared.tables import natural, print_table
from tilekern.cache_tools.shared.text import age, count, print_json, size
from tilekern.warning import tell

ACCESS_TIME, AGE = "access_time", "age"
_NO_EVIDENCE = "the file system notes no access times (noatime): a record's age stands for its last use"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_Reasons = dict[Path, list[str]]


class _Size(click.ParamType):
    """A number of bytes on the command line, such as ``2G`` or ``500M``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        """The size in bytes."""
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([KMGT]?)", str(value))
        if not found:
            raise CacheError(f"--max-size must be a number of bytes or one with K, M, G, T, such as 2G, got {value!r}")
        return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class _Limits:
    """Limits of what a cache keeps.

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


@command
@click.option("--stale", is_flag=True, help="Records whose kernel's source has changed since.")
@click.option(
    "--keep-toolkits",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of each problem on each GPU, records but those of N toolkits: the one here, then the newest.",
)
@click.option("--unused-for", "unused_for_s", type=Duration(), help="Records that no job has read for so long: 90d.")
@click.option("--max-size", "max_bytes", type=_Size(), help="The least used, until the cache is no larger: 2G, 500M.")
@dry_run
@confirmed
@cache_dir
@as_json
def prune(
    store: Store,
    stale: bool,
    keep_toolkits: int | None,
    unused_for_s: float | None,
    max_bytes: int | None,
    dry_run: bool,
    confirmed: bool,
    as_json: bool,
) -> None:
    """Remove what is of no use any more: stale, of old toolkits, or the least used; asks first.

    A record's last use is when a job last read its file, as the file system notes it: on Linux to a day, and not at
    all where it is mounted with noatime, which is said; then age decides. Inspecting a cache does not count. A job
    keeps what it has loaded, and one that has read a record finds its artifacts still there. Counts of misses that
    processes left which are over become one file.

    JSON (needs --yes or --dry-run): cache_dir, dry_run, evidence, records[] {path, kernel, problem_key, target,
    toolkit, size_bytes, last_used, reasons[]}, removed, blobs, bytes, bytes_left, left_alone, kept; all in
    docs/cache-json.md.
    """
    limits = _Limits(stale, keep_toolkits, unused_for_s, max_bytes)
    if limits == _Limits(False, None, None, None):
        raise CacheError("prune needs a limit: --stale, --keep-toolkits, --unused-for or --max-size")
    if as_json and not (confirmed or dry_run):
        raise CacheError("prune --json asks nothing and so needs --yes or --dry-run")
    if not dry_run:
        store.finish()
    entries = [kept_of(entry, store.is_linked(entry.path)) for entry in store.entries()]
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
        "left_alone": sum(not entry.may_go for entry in entries),
        "kept": going.kept,
    }
    if not as_json:
        _print(document)
    if not dry_run:
        if chosen and not confirmed:
            ask(f"Remove {count(len(chosen), 'record')} from {store.root}?")
        removed = remove(store, chosen)
        sum_up_misses(store.root)
        document |= {"removed": removed.records, "blobs": removed.blobs, "bytes": removed.size_bytes}
        document |= {"kept": removed.kept, "bytes_left": _size_of(store, store.entries())}
        if not as_json:
            say(removed, document["left_alone"])
    if as_json:
        print_json(document)


def _reasons(store: Store, entries: Sequence[Kept], limits: _Limits) -> _Reasons:
    """Why each record that must go must go, by its path."""
    reasons: _Reasons = defaultdict(list)
    readable = [entry for entry in entries if entry.may_go]
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
        if not entry.may_go:
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
        tell(_NO_EVIDENCE, err=True)
    rows = sorted((_row(item) for item in document["records"]), key=lambda row: [natural(text) for text in row[:4]])
    if rows:
        header = ("TARGET", "TOOLKIT", "KERNEL", "PROBLEM", "SIZE", "LAST USED", "WHY")
        print_table(header, rows, ("SIZE", "LAST USED"), grouped=("TARGET", "TOOLKIT"), below=("PROBLEM",))
    what = f"{count(document['removed'], 'record')} and {count(document['blobs'], 'blob')}"
    verb = "would go" if document["dry_run"] else "to go"
    tell(f"{what} {verb}: {size(document['bytes'])} freed, {size(document['bytes_left'])} left")
    if document["dry_run"] and document["kept"]:
        tell(document["kept"])


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    used = f"{age(seconds_since(datetime.fromisoformat(item['last_used']).timestamp()))} ago"
    place = (item["target"], item["toolkit"], item["kernel"], item["problem_key"])
    return *place, size(item["size_bytes"]), used, ", ".join(item["reasons"])
