"""Deletion of records, and of the blobs that only they referred to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from tilekern.cache import BlobFile, CacheError, Entry, Store
from tilekern.cache_tools.shared.printing import count, size
from tilekern.warning import printable, tell

# Far longer than a lookup takes from reading a record to reading its blobs, on a network's disk too.
READING_S = 0.5


class Removed(NamedTuple):
    """The deleted files: numbers of records and blobs, bytes of both; ``kept`` says why no blob was, if so."""

    records: int
    blobs: int
    size_bytes: int
    kept: str | None


def remove(store: Store, entries: Sequence[Entry]) -> Removed:
    """Delete records, and a moment later the blobs that no record refers to any more.

    A job that has just read a record still finds its blobs. Files that were rewritten since they were listed stay.

    Raises:
        CacheError: a file cannot be deleted.
    """
    removed = store.remove(entries)
    if removed:
        time.sleep(READING_S)
    garbage = store.collect_garbage(removed)
    size_bytes = sum(entry.file_bytes for entry in removed) + garbage.size_bytes
    return Removed(len(removed), garbage.blobs, size_bytes, garbage.kept)


def plan_removal(store: Store, entries: Sequence[Entry]) -> Removed:
    """Return what :func:`remove` would delete; change nothing."""
    blobs, kept = garbage_of(store, entries)
    size_bytes = sum(entry.file_bytes for entry in entries) + sum(blob.size_bytes for blob in blobs)
    return Removed(len(entries), len(blobs), size_bytes, kept)


def garbage_of(store: Store, entries: Sequence[Entry]) -> tuple[list[BlobFile], str | None]:
    """Return the blobs that can go with these records; or none, and why it cannot be told."""
    try:
        return store.garbage(entries, without={entry.path for entry in entries}), None
    except CacheError as error:
        return [], f"no blob can be removed: {error}"


def print_removed(removed: Removed, left_alone: int, dry_run: bool = False) -> None:
    """Print what was deleted, or would be, and what was left alone."""
    records, blobs = count(removed.records, "record"), count(removed.blobs, "blob")
    verb = "would remove" if dry_run else "removed"
    tell(f"{verb} {records} and {blobs}, {size(removed.size_bytes)} freed")
    if left_alone:
        tell(f"{count(left_alone, 'record')} left alone: of another version of tilekern, or behind a link")
    if removed.kept:
        tell(removed.kept)


def check_may_ask(command: str, as_json: bool, confirmed: bool, dry_run: bool) -> None:
    """Raise CacheError if a command prints JSON and would have to ask."""
    if as_json and not (confirmed or dry_run):
        raise CacheError(f"{command} --json asks nothing and so needs --yes or --dry-run")


def ask_to_remove(store: Store, records: int) -> None:
    """Ask whether to remove this many records; raise CacheError if the answer is not yes."""
    try:
        confirmed = click.confirm(printable(f"Remove {count(records, 'record')} from {store.root}?"))
    except click.Abort:
        confirmed = False
    if not confirmed:
        raise CacheError("nothing was removed; answer yes, or pass --yes")
