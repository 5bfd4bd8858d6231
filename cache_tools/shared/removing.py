"""Deleting records and what only they referred to."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tilekern.cache import Address, BlobFile, CacheError, Entry, Store
from tilekern.cache_tools.shared.text import count, size
from tilekern.warning import printable, tell

# Many times what a lookup takes from the reading of a record to that of its artifacts, on a network's disk too.
READING_S = 0.5


class Kept(NamedTuple):
    """The fields of an entry that deleting it goes by, so few that a hundred thousand are no burden.

    The fields are those of :class:`tilekern.cache.Entry`; ``may_go`` says that it is readable and stands behind no link
    inside the cache; ``digests`` are the blobs that it refers to, and of what cannot be read none. Whether it is stale
    is asked of few, and takes loading Python's parser.
    """

    path: Path
    address: Address | None
    may_go: bool
    unknown_schema: bool
    digests: tuple[str, ...]
    module: str
    source_digest: str
    space_digest: str
    size_bytes: int
    file_bytes: int
    used: float
    identity: tuple[int, int, int] | None

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.address.kernel if self.address else ""


def kept_of(entry: Entry, is_linked: bool = False) -> Kept:
    """The fields that deleting an entry goes by; ``is_linked`` as :meth:`tilekern.cache.Store.is_linked` says."""
    record = entry.record
    return Kept(
        entry.path,
        entry.address,
        record is not None and not is_linked,
        entry.unknown_schema,
        tuple(map(sys.intern, record.digests)) if record else (),
        sys.intern(record.module) if record else "",
        sys.intern(record.source_digest) if record else "",
        sys.intern(record.space_digest) if record else "",
        entry.size_bytes,
        entry.file_bytes,
        entry.used,
        entry.identity,
    )


class Removed(NamedTuple):
    """The deleted files: numbers of records and blobs, bytes of both; ``kept`` says why no blob was, if so."""

    records: int
    blobs: int
    size_bytes: int
    kept: str | None


def remove(store: Store, entries: Sequence[Kept]) -> Removed:
    """Delete records, and a moment later the blobs that nothing refers to any more.

    A job that has read a record just before finds its blobs still there; one that has them needs no file. Files
    that were written anew since they were listed stay.

    Raises:
        CacheError: a file cannot be deleted.
    """
    removed = [entry for entry in entries if store.remove_one(entry.path, entry.identity)]
    if removed:
        time.sleep(READING_S)
    garbage = store.collect_garbage(digests_of(removed))
    size_bytes = sum(entry.file_bytes for entry in removed) + garbage.size_bytes
    return Removed(len(removed), garbage.blobs, size_bytes, garbage.kept)


def would_go(store: Store, entries: Sequence[Kept]) -> Removed:
    """The files that :func:`remove` would delete, if nothing changed until then; nothing is changed."""
    blobs, kept = garbage_of(store, entries)
    size_bytes = sum(entry.file_bytes for entry in entries) + sum(blob.size_bytes for blob in blobs)
    return Removed(len(entries), len(blobs), size_bytes, kept)


def garbage_of(store: Store, going: Sequence[Kept]) -> tuple[list[BlobFile], str | None]:
    """The blobs that can go with these records; none, and why, where some record cannot be read for references."""
    try:
        return store.garbage(digests_of(going), without={entry.path for entry in going}), None
    except CacheError as error:
        return [], f"no blob can be removed: {error}"


def digests_of(entries: Sequence[Kept]) -> frozenset[str]:
    """The blobs that records refer to."""
    return frozenset(digest for entry in entries for digest in entry.digests)


def say(removed: Removed, left_alone: int, dry_run: bool = False) -> None:
    """Print what was deleted, or would be, and what not and why."""
    records, blobs = count(removed.records, "record"), count(removed.blobs, "blob")
    verb = "would remove" if dry_run else "removed"
    tell(f"{verb} {records} and {blobs}, {size(removed.size_bytes)} freed")
    if left_alone:
        tell(f"{count(left_alone, 'record')} left alone: of another version of tilekern, or behind a link")
    if removed.kept:
        tell(removed.kept)


def ask(question: str) -> None:
    """Ask a yes-or-no question.

    Raises:
        CacheError: the answer is not yes.
    """
    try:
        confirmed = click.confirm(printable(question))
    except click.Abort:
        confirmed = False
    if not confirmed:
        raise CacheError("nothing was removed; answer yes, or pass --yes")
