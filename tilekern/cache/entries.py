"""The files of a store, as its lists show them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilekern.cache.errors import CacheError, UnknownSchema
from tilekern.cache.files import identity_of
from tilekern.cache.keys import Address, Value
from tilekern.cache.records import Record

Where = Callable[[tuple[str, ...]], bool]


@dataclass(frozen=True)
class Entry:
    """One record file of a store.

    Attributes:
        path: the file.
        address: the record's address by its path; None where it is not the path of a record.
        record: its contents, or None where it is unreadable.
        problem: why it is unreadable, or None.
        unknown_schema: True where another version of tilekern wrote it.
        size_bytes: the record's file, and its blobs by what the record says of them.
        modified: when the file was written, in seconds since 1970.
        file_bytes: the record's file alone.
        used: when the file was last read by another than a store, as far as the file system notes that (on Linux to
            a day, where it is not mounted with ``noatime``), else when it was written; in seconds since 1970.
        identity: which file it was (:func:`tilekern.cache.files.identity_of`); None in a pack, and where it
            could not be told.
        is_folder: True where it is not a record file but a folder that cannot be listed.
    """

    path: Path
    address: Address | None
    record: Record | None
    problem: str | None
    unknown_schema: bool
    size_bytes: int
    modified: float
    file_bytes: int
    used: float
    identity: tuple[int, int, int] | None
    is_folder: bool = False


class Outline(NamedTuple):
    """The fields of a record in a list, so few that a hundred thousand are no burden; fields as of :class:`Record`."""

    address: Address
    problem: dict[str, Value]
    module: str
    source_digest: str
    space_digest: str
    provenance: str
    measurement: dict[str, Any] | None
    prediction: dict[str, Any] | None
    created: str

    @property
    def kernel(self) -> str:
        """The spec's name."""
        return self.address.kernel


class Listed(NamedTuple):
    """One record file of a store, with the outline of its record; the fields are those of :class:`Entry`."""

    path: Path
    address: Address | None
    record: Outline | None
    problem: str | None
    size_bytes: int
    modified: float
    is_folder: bool = False


@dataclass(frozen=True)
class BlobFile:
    """One blob file of a store: its digest by name, size in bytes, time of its last use by a writer (since 1970)."""

    path: Path
    sha256: str
    size_bytes: int
    modified: float


@dataclass(frozen=True)
class Garbage:
    """The outcome of a garbage collection; ``kept`` says why it removed no blob at all where it could not tell."""

    blobs: int
    size_bytes: int
    kept: str | None = None


def entry_of(path: str, record: Record, status: os.stat_result) -> Entry:
    """The entry of a record's file at ``path``, which ``status`` is of."""
    sizes = {artifact.sha256: artifact.size for artifact in record.artifacts.values()}
    size_bytes = status.st_size + sum(sizes.values())
    used, identity = max(status.st_mtime, status.st_atime), identity_of(status)
    return Entry(
        Path(path), record.address, record, None, False, size_bytes, status.st_mtime, status.st_size, used, identity
    )


def listed(entry: Entry) -> Listed:
    """An entry as a list has it."""
    outline = outline_of(entry.record) if entry.record else None
    return Listed(entry.path, entry.address, outline, entry.problem, entry.size_bytes, entry.modified, entry.is_folder)


def outline_of(record: Record) -> Outline:
    """The outline of a record."""
    return Outline(
        record.address,
        record.problem,
        record.module,
        record.source_digest,
        record.space_digest,
        record.provenance,
        record.measurement,
        record.prediction,
        record.created,
    )


def unreadable_entry(path: str, address: Address | None, error: CacheError, is_file: bool = True) -> Entry:
    """The entry of a file, or of a folder, that holds no record that can be read; ``error`` says why."""
    unknown = isinstance(error, UnknownSchema)
    status = None
    with contextlib.suppress(OSError):
        status = os.stat(path) if is_file else None
    if status is None:
        # No age that would let a filter for old records choose it.
        now = time.time()
        return Entry(Path(path), address, None, str(error), unknown, 0, now, 0, now, None, not is_file)
    size_bytes, used = status.st_size, max(status.st_mtime, status.st_atime)
    return Entry(
        Path(path), address, None, str(error), unknown, size_bytes, status.st_mtime, size_bytes, used,
        identity_of(status),
    )  # fmt: skip
