"""The command prune: delete records that are of no use any more.

Jobs write nothing when they read, so the last use of a record is the access time of its file. Linux updates it once a
day (``relatime``), or never (``noatime``), in which case the record's age counts. The commands here and the tuner open
files without updating it where they own them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from tilekern.cache import CacheError, Entry, Record, Store, by_preference, sum_up_misses
from tilekern.cache_tools.shared.installed import is_stale, toolkit_key
from tilekern.cache_tools.shared.options import Duration, as_json, cache_dir, command, confirmed, dry_run
from tilekern.cache_tools.shared.printing import age, count, natural, print_json, print_table, size
from tilekern.cache_tools.shared.removing import (
    ask_to_remove,
    check_may_ask,
    garbage_of,
    plan_removal,
    print_removed,
    remove,
)
from tilekern.cache_tools.shared.selection import seconds_since
from tilekern.warning import tell

ACCESS_TIME, AGE = "access_time", "age"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _Size(click.ParamType):
    """A number of bytes on the command line, such as ``2G`` or ``500M``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        """Return the size in bytes."""
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([KMGT]?)", str(value))
        if not match:
            raise CacheError(f"--max-size must be a number of bytes or one with K, M, G, T, such as 2G, got {value!r}")
        return int(float(match[1]) * _UNITS[match[2]])


class _Limits(NamedTuple):
    """Limits of what a cache keeps, as the options of the command say them; None for no limit."""

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
    help="Of each problem on each GPU, all but the records of N toolkits: the one here, then the newest.",
)
@click.option("--unused-for", "unused_for_s", type=Duration(), help="Records that no job has read for so long: 90d.")
@click.option("--max-size", "max_bytes", type=_Size(), help="The least used, until the cache is no larger: 2G, 500M.")
@dry_run
@confirmed
@cache_dir
@as_json
def prune(store: Store, dry_run: bool, confirmed: bool, as_json: bool, **options: Any) -> None:
    """Remove records that are of no use any more: stale, of old toolkits, or the least used; asks first.

    A record's last use is when a job last read its file, according to the file system: accurate to a day on Linux, and
    unknown if it is mounted with noatime, in which case age decides, with a message. Inspecting a cache does not count.
    A job keeps what it has loaded, and one that has just read a record still finds its artifacts. Counts of misses of
    processes that have ended are merged into one file.

    JSON (needs --yes or --dry-run): cache_dir, dry_run, evidence, records[] {path, kernel, problem_key, target,
    toolkit, size_bytes, last_used, reasons[]}, removed, blobs, bytes, bytes_left, left_alone, kept; all in
    docs/cache-json.md.
    """
    limits = _Limits(**options)
    if limits == _Limits(False, None, None, None):
        raise CacheError("prune needs a limit: --stale, --keep-toolkits, --unused-for or --max-size")
    check_may_ask("prune", as_json, confirmed, dry_run)
    if not dry_run:
        store.finish()
    entries = [entry.without_bulk() for entry in store.entries()]
    removable = {entry.path: entry for entry in entries if entry.record and not store.is_linked(entry.path)}
    reasons = _reasons(store, entries, removable, limits)
    chosen = [entry for entry in entries if entry.path in reasons]
    going = plan_removal(store, chosen)
    evidence = AGE
    with contextlib.suppress(OSError):
        if not os.statvfs(store.root).f_flag & getattr(os, "ST_NOATIME", 0):
            evidence = ACCESS_TIME
    document: dict[str, Any] = {
        "cache_dir": str(store.root),
        "dry_run": dry_run,
        "evidence": evidence,
        "records": [_summary(entry, reasons[entry.path]) for entry in chosen],
        "removed": going.records,
        "blobs": going.blobs,
        "bytes": going.size_bytes,
        "bytes_left": _size_of(store, entries) - going.size_bytes,
        "left_alone": len(entries) - len(removable),
        "kept": going.kept,
    }
    if not as_json:
        _print(document)
    if not dry_run:
        if chosen and not confirmed:
            ask_to_remove(store, len(chosen))
        removed = remove(store, chosen)
        sum_up_misses(store.root)
        document |= {"removed": removed.records, "blobs": removed.blobs, "bytes": removed.size_bytes}
        document |= {"kept": removed.kept, "bytes_left": _size_of(store, store.entries())}
        if not as_json:
            print_removed(removed, document["left_alone"])
    if as_json:
        print_json(document)


def _reasons(
    store: Store, entries: Sequence[Entry], removable: dict[Path, Entry], limits: _Limits
) -> dict[Path, list[str]]:
    """Return why each record must go, by its path."""
    reasons: dict[Path, list[str]] = defaultdict(list)
    if limits.stale:
        for path, entry in removable.items():
            if _is_stale(entry):
                reasons[path].append("stale")
    if limits.keep_toolkits is not None:
        for entry in _of_old_toolkits(removable.values(), limits.keep_toolkits):
            reasons[entry.path].append("old toolkit")
    if limits.unused_for_s is not None:
        for path, entry in removable.items():
            if seconds_since(entry.used) > limits.unused_for_s:
                reasons[path].append("unused")
    if limits.max_bytes is not None:
        for entry in _least_used(store, entries, removable, set(reasons), limits.max_bytes):
            reasons[entry.path].append("least used")
    return reasons


def _of_old_toolkits(entries: Iterable[Entry], keep: int) -> Iterator[Entry]:
    """Yield the records beyond the first ``keep`` of each problem and GPU, in a lookup's order with stale ones last."""
    groups: dict[tuple[str, str, str], dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        if entry.address:
            target, toolkit, kernel, problem = entry.address
            groups[target, kernel, problem][toolkit] = entry
    installed = toolkit_key()
    for by_toolkit in groups.values():
        order = [by_toolkit[toolkit] for toolkit in by_preference(by_toolkit, installed)]
        yield from sorted(order, key=_is_stale)[keep:]


def _is_stale(entry: Entry) -> bool:
    return entry.record is not None and is_stale(entry.record) is True


def _least_used(
    store: Store, entries: Sequence[Entry], removable: dict[Path, Entry], going: set[Path], max_bytes: int
) -> list[Entry]:
    """Return further records to delete, least used first, until the cache has at most ``max_bytes``."""
    staying = [entry for entry in entries if entry.path not in going]
    garbage, kept = garbage_of(store, [entry for entry in entries if entry.path in going])
    sizes = {blob.sha256: blob.size_bytes for blob in store.blobs()}
    for blob in garbage:
        sizes.pop(blob.sha256, None)
    records: dict[Path, Record] = {entry.path: entry.record for entry in staying if entry.record}
    users = Counter(digest for record in records.values() for digest in record.digests)
    total = sum(sizes.values()) + sum(entry.file_bytes for entry in staying)
    chosen = []
    for entry in sorted(staying, key=lambda entry: (entry.used, entry.path)):
        if total <= max_bytes:
            break
        if entry.path not in removable:
            continue
        chosen.append(entry)
        total -= entry.file_bytes
        for digest in records[entry.path].digests:
            users[digest] -= 1
            total -= sizes.get(digest, 0) if not users[digest] and not kept else 0
    return chosen


def _size_of(store: Store, entries: Iterable[Entry]) -> int:
    return sum(entry.file_bytes for entry in entries) + sum(blob.size_bytes for blob in store.blobs())


def _summary(entry: Entry, reasons: list[str]) -> dict[str, Any]:
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
        tell("the file system notes no access times (noatime), so a record's age counts as its last use", err=True)
    rows = []
    for item in document["records"]:
        used = f"{age(seconds_since(datetime.fromisoformat(item['last_used']).timestamp()))} ago"
        names = (item["target"], item["toolkit"], item["kernel"], item["problem_key"])
        rows.append((*names, size(item["size_bytes"]), used, ", ".join(item["reasons"])))
    if rows:
        rows.sort(key=lambda row: [natural(text) for text in row[:4]])
        header = ("TARGET", "TOOLKIT", "KERNEL", "PROBLEM", "SIZE", "LAST USED", "WHY")
        print_table(header, rows, ("SIZE", "LAST USED"), grouped=("TARGET", "TOOLKIT"), below=("PROBLEM",))
    going = f"{count(document['removed'], 'record')} and {count(document['blobs'], 'blob')}"
    verb = "would go" if document["dry_run"] else "to go"
    tell(f"{going} {verb}: {size(document['bytes'])} freed, {size(document['bytes_left'])} left")
    if document["dry_run"] and document["kept"]:
        tell(document["kept"])
