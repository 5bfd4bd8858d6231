"""Record and blob files of a cache or pack, as listings show them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tilekern.cache.errors import CacheError, UnknownSchema
from tilekern.cache.keys import Address
from tilekern.cache.records import Artifact, Record

Where = Callable[[tuple[str, ...]], bool]


@dataclass(frozen=True)
class Entry:
    """One record file.

    Attributes:
        path: the file.
        address: the record's address according to its path; None if the path is not that of a record.
        record: its contents, or None if it is unreadable.
        problem: why it is unreadable, or None.
        unknown_schema: whether another version of tilekern wrote it.
        size_bytes: size of the record's file and of the blobs that it names.
        file_bytes: size of the record's file alone.
        modified: when the file was written, in seconds since 1970.
        used: when a job last read the file, in seconds since 1970. This is the access time (on Linux accurate to a
            day, and never noted under ``noatime``), or the time of writing if that is later.
        identity: the identity of the file (:func:`tilekern.cache.files.identity_of`); None in a pack, and if unknown.
        is_folder: whether this is a folder that cannot be listed instead of a record file.
    """

    path: Path
    address: Address | None
    record: Record | None
    problem: str | None
    unknown_schema: bool
    size_bytes: int
    file_bytes: int
    modified: float
    used: float
    identity: tuple[int, int, int] | None
    is_folder: bool

    def without_bulk(self) -> Entry:
        """Return the entry without the bulk of its record, so that lists of 100,000 entries fit in memory.

        Left out are runners-up, checks, and all but the digests and sizes of artifacts, and the keys and arch of the
        target and toolkit.
        """
        record = self.record
        if record is None:
            return self
        light = msgspec.structs.replace(
            record,
            module=sys.intern(record.module),
            target={"key": sys.intern(record.target["key"]), "arch": sys.intern(record.target["arch"])},
            toolkit={"key": sys.intern(record.toolkit["key"])},
            source_digest=sys.intern(record.source_digest),
            space_digest=sys.intern(record.space_digest),
            artifacts={
                sys.intern(name): Artifact(sys.intern(artifact.sha256), artifact.size, "", {}, [], {})
                for name, artifact in record.artifacts.items()
            },
            best_kernel=None,
            check=None,
            runners_up=[],
        )
        return dataclasses.replace(self, record=light)


class BlobFile(NamedTuple):
    """One blob file of a store; ``modified`` is when a writer last used it, in seconds since 1970."""

    path: Path
    sha256: str
    size_bytes: int
    modified: float


class Garbage(NamedTuple):
    """The outcome of a garbage collection; ``kept`` says why no blob could be removed, if so."""

    blobs: int
    size_bytes: int
    kept: str | None = None


def entry_of(
    path: str | Path,
    address: Address | None,
    contents: Record | CacheError,
    *,
    file_bytes: int = 0,
    modified: float | None = None,
    used: float | None = None,
    identity: tuple[int, int, int] | None = None,
    is_folder: bool = False,
) -> Entry:
    """Return the entry of a file whose contents are a record, or an error that says why it cannot be read."""
    record = contents if isinstance(contents, Record) else None
    sizes = {artifact.sha256: artifact.size for artifact in record.artifacts.values()} if record else {}
    modified = time.time() if modified is None else modified  # an unknown age must not look old to a filter
    return Entry(
        path=Path(path),
        address=address,
        record=record,
        problem=None if record else str(contents),
        unknown_schema=isinstance(contents, UnknownSchema),
        size_bytes=file_bytes + sum(sizes.values()),
        file_bytes=file_bytes,
        modified=modified,
        used=modified if used is None else used,
        identity=identity,
        is_folder=is_folder,
    )
