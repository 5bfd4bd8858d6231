"""The folder that a cache is written to: records and blobs put there whole, listed, removed, and garbage-collected."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from tilekern.cache.entries import BlobFile, Entry, Garbage, Listed, Where, entry_of
from tilekern.cache.errors import CacheError, Missing, UnknownSchema
from tilekern.cache.files import BAD_SUFFIX, TEMPORARY_SUFFIX, read_whole, unlink_seen, write_whole
from tilekern.cache.keys import BLOBS, LAYOUT, WANTED, Address, blob_path, check_digest, parse_path
from tilekern.cache.outlines import decode_outline
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record

# A writer puts blobs first and their record a moment later; a blob this young may be waiting for its record.
GRACE_S = 300.0
_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Store:
    """A cache folder that may be written; it need not exist yet."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def write(self, record: Record, blobs: Mapping[str, bytes]) -> Path:
        """Put a record and its blobs into the cache, blobs first, each file whole or not at all.

        Where another process writes the same record, the last one stands. A blob that is there and intact is kept.

        Args:
            record: what to write; its path follows from it.
            blobs: bytes by sha256; a blob that the store has already may be left out.

        Returns:
            The record's file.

        Raises:
            UnknownSchema: a record of another version of tilekern stands there; it is left alone.
            CacheError: the record or a blob is not valid, a blob is missing, or the folder cannot be written.
        """
        text = record.to_json()
        path = self.root / Record.from_json(text).address.path
        self._check_blobs(record, blobs)
        self._check_replaceable(path)
        try:
            for digest in record.digests:
                self._put_blob(digest, blobs.get(digest))
            write_whole(path, text.encode())
            for digest in record.digests & blobs.keys():
                # A garbage collection may have run between the two.
                if not (self.root / blob_path(digest)).exists():
                    self._put_blob(digest, blobs[digest])
        except OSError as error:
            raise CacheError(f"cannot write to the cache folder {self.root}: {error.strerror or error}") from None
        return path

    def entries(self, where: Where | None = None) -> Iterator[Entry]:
        """Every record file, in the order of its path; a bad one is an entry that says so.

        Args:
            where: whether to look at a place, given the names that lead there: of a target, then with a toolkit, a
                kernel, a problem's key. What it refuses is neither listed nor read.
        """
        for path in self._record_files(where=where):
            with contextlib.suppress(FileNotFoundError):
                yield self._entry(path)

    def outlines(self, where: Where | None = None) -> Iterator[Listed]:
        """Every record file as :meth:`entries` gives them, of which only what a list needs is read and checked."""
        for path in self._record_files(where=where):
            try:
                data, status = read_whole(path, LARGEST_RECORD, as_use=False)
                outline = decode_outline(data, self._address(path))
            except CacheError:
                with contextlib.suppress(FileNotFoundError):
                    bad = self._entry(path)
                    yield Listed(bad.path, bad.address, None, bad.problem, bad.size_bytes, bad.modified)
                continue
            size_bytes = status.st_size + outline.blob_bytes
            yield Listed(Path(path), outline.address, outline, None, size_bytes, status.st_mtime)

    def blobs(self) -> Iterator[BlobFile]:
        """Every blob file, referred to or not."""
        for path in map(Path, _files(self._layout / BLOBS)):
            with contextlib.suppress(CacheError, OSError):
                digest = check_digest("a blob", path.name)
                status = path.stat()
                yield BlobFile(path, digest, status.st_size, status.st_mtime)

    def leftovers(self) -> Iterator[Path]:
        """Files that were set aside as bad, and temporary files of writers that were killed or are still at it."""
        return (Path(path) for path in _files(self._layout) if path.endswith((BAD_SUFFIX, TEMPORARY_SUFFIX)))

    def read_blob(self, sha256: str) -> bytes:
        """A blob's bytes, checked.

        Raises:
            Missing: it is not there.
            Corrupt: its contents are wrong.
            CacheError: it cannot be read.
        """
        return check_blob(read_whole(self.root / blob_path(sha256), LARGEST_BLOB, as_use=False)[0], sha256)

    def remove(self, entries: Iterable[Entry]) -> frozenset[str]:
        """Delete records, and folders that this leaves empty; blobs stay until :meth:`collect_garbage`.

        A record that was written anew since it was listed stays.

        Returns:
            The sha256 of every blob that the deleted records referred to.

        Raises:
            CacheError: a file cannot be deleted.
        """
        released: set[str] = set()
        for entry in entries:
            if self.remove_one(entry) and entry.record:
                released |= entry.record.digests
        return frozenset(released)

    def remove_one(self, entry: Entry) -> bool:
        """Delete one record as :meth:`remove` does; False where it is gone, or was written anew since it was listed.

        Raises:
            CacheError: the file cannot be deleted.
        """
        assert entry.identity is not None
        try:
            removed = unlink_seen(entry.path, entry.identity)
        except OSError as error:
            raise CacheError(f"cannot delete {entry.path}: {error.strerror}") from None
        _prune(entry.path.parent, self._layout)
        return removed

    def collect_garbage(self, released: Collection[str] = (), grace_s: float = GRACE_S) -> Garbage:
        """Delete blobs that no record refers to and leftovers; what a writer may still need stays for ``grace_s``.

        Records of an unknown schema count: every digest in their text is taken for a reference.

        Args:
            released: digests that :meth:`remove` returned; for these no time is left to a writer.
            grace_s: how old a file must be, in seconds.

        Returns:
            The number of blobs deleted, and their bytes; none where some record cannot be read for references.

        Raises:
            CacheError: a file cannot be deleted.
        """
        try:
            garbage = self.garbage(released, grace_s)
        except CacheError as error:
            return Garbage(0, 0, f"no blob was removed: {error}")
        for blob in garbage:
            _unlink(blob.path)
            _prune(blob.path.parent, self._layout)
        oldest = time.time() - grace_s
        for path in self.leftovers():
            with contextlib.suppress(FileNotFoundError):
                if path.name.endswith(BAD_SUFFIX) or path.stat().st_mtime < oldest:
                    _unlink(path)
        return Garbage(len(garbage), sum(blob.size_bytes for blob in garbage))

    def garbage(
        self, released: Collection[str] = (), grace_s: float = GRACE_S, without: Collection[Path] = ()
    ) -> list[BlobFile]:
        """The blobs that :meth:`collect_garbage` would delete, once the records at the paths ``without`` are gone.

        Raises:
            CacheError: some record cannot be read for references.
        """
        oldest, referred = time.time() - grace_s, self._references(without)
        return [
            blob
            for blob in self.blobs()
            if blob.sha256 not in referred and (blob.sha256 in released or blob.modified < oldest)
        ]

    @property
    def _layout(self) -> Path:
        return self.root / LAYOUT

    def _record_files(self, strict: bool = False, where: Where | None = None) -> Iterator[str]:
        files = _files(self._layout, skip=(BLOBS, WANTED), strict=strict, where=where)
        return (path for path in files if path.endswith(".json"))

    def _address(self, path: str) -> Address | None:
        """What a record's file at this path is of, unchecked; None where no record may stand."""
        parts = path.removeprefix(f"{self.root}{os.sep}").removesuffix(".json").split(os.sep)
        return Address(*parts[1:]) if len(parts) == 5 else None

    def _entry(self, path: str) -> Entry:
        try:
            data, status = read_whole(path, LARGEST_RECORD, as_use=False)
            record = decode_record(data, self._address(path))
        except CacheError as error:
            address = None
            with contextlib.suppress(CacheError):
                address = parse_path(Path(path).relative_to(self.root).parts)
            return entry_of(path, address, None, error, os.stat(path))
        return entry_of(path, record.address, record, None, status)

    def _check_blobs(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        if unclaimed := blobs.keys() - record.digests:
            raise CacheError(f"blob {min(unclaimed)} was given, and the record does not refer to it")
        for name, artifact in record.artifacts.items():
            given = blobs.get(artifact.sha256)
            data = self.read_blob(artifact.sha256) if given is None else check_blob(given, artifact.sha256)
            if len(data) != artifact.size:
                raise CacheError(f"artifact {name} has {len(data)} bytes, and the record says {artifact.size}")

    def _check_replaceable(self, path: Path) -> None:
        try:
            Record.from_json(read_whole(path, LARGEST_RECORD, as_use=False)[0].decode(errors="replace"))
        except UnknownSchema as error:
            raise UnknownSchema(f"{path} is left alone: {error}") from None
        except CacheError:
            return

    def _put_blob(self, digest: str, data: bytes | None) -> None:
        """Write a blob, or mark one that is there and intact as just used, which keeps it from garbage collection."""
        path = self.root / blob_path(digest)
        try:
            self.read_blob(digest)
        except CacheError:
            if data is None:
                raise
            write_whole(path, data)
        else:
            with contextlib.suppress(OSError):
                os.utime(path)

    def _references(self, without: Collection[Path] = ()) -> set[str]:
        """The digests that any record refers to, readable or not, but for those at the paths ``without``."""
        referred: set[str] = set()
        left_out = set(map(str, without))
        for path in self._record_files(strict=True):
            if path in left_out:
                continue
            with contextlib.suppress(Missing):
                data = read_whole(path, LARGEST_RECORD, as_use=False)[0]
                digests = {digest.decode() for digest in _DIGESTS.findall(data)}
                if not digests and _has_unknown_schema(data):
                    raise CacheError(f"{path} has an unknown schema and may refer to any blob")
                referred |= digests
        return referred


def _has_unknown_schema(data: bytes) -> bool:
    try:
        Record.from_json(data.decode(errors="replace"))
    except CacheError as error:
        return isinstance(error, UnknownSchema)
    return False


def _files(folder: Path, skip: Collection[str] = (), strict: bool = False, where: Where | None = None) -> Iterator[str]:
    """All files below a folder, sorted, but for those below ``skip`` and those that ``where`` refuses.

    ``strict``: what cannot be listed raises.
    """

    def fail(error: OSError) -> None:
        if strict and not isinstance(error, FileNotFoundError):
            raise CacheError(f"cannot list {error.filename}: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=fail):
        above = tuple(place.removeprefix(str(folder)).split(os.sep)[1:])
        folders[:] = sorted(folders if above else set(folders) - set(skip))
        if where:
            folders[:] = [name for name in folders if where((*above, name))]
            names[:] = [name for name in names if where((*above, name.removesuffix(".json")))]
        for name in sorted(names):
            yield os.path.join(place, name)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"cannot delete {path}: {error.strerror}") from None


def _prune(folder: Path, stop: Path) -> None:
    """Delete ``folder`` and those above it while they are empty, up to ``stop``."""
    with contextlib.suppress(OSError):
        while folder != stop:
            folder.rmdir()
            folder = folder.parent
