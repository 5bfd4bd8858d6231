"""The folder that a cache is written to: records and blobs put there whole, listed, removed, and garbage-collected."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from tilekern.cache.entries import BlobFile, Entry, Garbage, Where, entry_of, unreadable_entry
from tilekern.cache.errors import CacheError, Corrupt, Missing, UnknownSchema
from tilekern.cache.files import (
    BAD_SUFFIX,
    DROPPED_SUFFIX,
    TEMPORARY_SUFFIX,
    read_if_there,
    read_whole,
    remove_empty,
    unlink_seen,
    write_whole,
)
from tilekern.cache.keys import (
    BLOBS,
    INCOMING,
    LAYOUT,
    OWN_FOLDERS,
    Address,
    blob_name,
    blob_path,
    check_digest,
    parse_path,
)
from tilekern.cache.packs.incoming import abandoned_incoming, finish_incoming, remove_abandoned
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record
from tilekern.cache.trust.policy import own_seal, remove_signatures
from tilekern.cache.walking import cannot_list, files_below, is_gone, must_list

# A writer puts blobs first and their record a moment later; a blob this young may be waiting for its record.
GRACE_S = 300.0
_LEFTOVERS = (BAD_SUFFIX, DROPPED_SUFFIX, TEMPORARY_SUFFIX)
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
        Under the policy ``signed`` the record is sealed as this user's own.

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
        checked = self._checked_blobs(record, blobs)
        self._check_replaceable(path)
        finish_incoming(self.root)
        try:
            for digest, data in checked.items():
                self._put_blob(digest, data)
            for seal, contents in own_seal(text.encode()).items():
                write_whole(self.root / seal, contents)
            write_whole(path, text.encode())
            for digest, data in checked.items():
                # A garbage collection that began before the record was there may have taken the blob since.
                if not (self.root / blob_path(digest)).exists():
                    self._put_blob(digest, data)
        except OSError as error:
            raise CacheError(f"cannot write to the cache folder {self.root}: {error.strerror or error}") from None
        return path

    def entries(self, where: Where | None = None) -> Iterator[Entry]:
        """Every record file, in the order of its path; a bad one is an entry that says so.

        A folder that cannot be listed, and so may hold records, is such an entry too, after all others.

        Args:
            where: whether to look at a place, given the names that lead there: of a target, then with a toolkit, a
                kernel, a problem's key. Files that it refuses are neither listed nor read.
        """
        for entry, _ in self.read_entries(where):
            yield entry

    def read_entries(self, where: Where | None = None) -> Iterator[tuple[Entry, bytes]]:
        """The entries of :meth:`entries`, each with the bytes of its file; none where it cannot be read."""
        finish_incoming(self.root)
        unlisted: list[Entry] = []
        for path in self._record_files(where, self._noted_in(unlisted)):
            if found := self._entry(path):
                yield found
        for entry in unlisted:
            yield entry, b""

    def blobs(self) -> Iterator[BlobFile]:
        """Every blob file, referred to or not."""
        for path in map(Path, files_below(self._layout / BLOBS)):
            with contextlib.suppress(CacheError, OSError):
                digest = check_digest("a blob", path.name)
                status = path.stat()
                yield BlobFile(path, digest, status.st_size, status.st_mtime)

    def leftovers(self) -> Iterator[Path]:
        """Files set aside as bad, and what writers and garbage collections left that were killed or are still at it."""
        yield from abandoned_incoming(self.root, time.time())
        yield from self._stray_files()

    def read_blob(self, sha256: str) -> bytes:
        """A blob's bytes, checked.

        Raises:
            Missing: it is not there.
            Corrupt: its contents are wrong.
            CacheError: it cannot be read.
        """
        return check_blob(read_whole(f"{self.root}/{blob_name(sha256)}", LARGEST_BLOB, as_use=False)[0], sha256)

    def keep_blob(self, sha256: str) -> bool:
        """Mark a blob that is there and intact as just used, which keeps it from garbage collection; else False."""
        try:
            self.read_blob(sha256)
        except CacheError:
            return False
        with contextlib.suppress(OSError):
            os.utime(self.root / blob_path(sha256))
        return True

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
            if self.remove_one(entry.path, entry.identity) and entry.record:
                released |= entry.record.digests
        return frozenset(released)

    def remove_one(self, path: Path, identity: tuple[int, int, int] | None) -> bool:
        """Delete one record as :meth:`remove` does; False where it is gone, or was written anew since it was listed.

        Raises:
            CacheError: the file cannot be deleted.
        """
        if identity is None:
            return False
        try:
            removed = unlink_seen(path, identity)
        except OSError as error:
            raise CacheError(f"cannot delete {path}: {error.strerror}") from None
        remove_empty(path.parent, self._layout)
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
            remove_abandoned(self.root, time.time() - grace_s)
            for blob in self.garbage(released, grace_s):
                _drop(blob.path)
        except Missing:
            return Garbage(0, 0)
        except CacheError as error:
            return Garbage(0, 0, f"no blob was removed: {error}")
        dropped = self._dropped()
        try:
            # A record that was written since the first look is seen by the second, unless its writer is still to make
            # sure of its blobs and finds that they are gone. So no record is ever left without a blob.
            referred, records = self._references()
        except CacheError as error:
            self._take_back(dropped)
            return Garbage(0, 0, f"no blob was removed: {error}")
        self._take_back(path for path in dropped if path.name.partition(".")[0] in referred)
        sizes = [size_bytes for path in dropped if (size_bytes := self._delete(path)) is not None]
        oldest = time.time() - grace_s
        remove_signatures(self.root, records, oldest)
        for path in self._stray_files():
            with contextlib.suppress(OSError):
                old = path.name.endswith(TEMPORARY_SUFFIX) and path.stat().st_mtime < oldest
                if old or path.name.endswith(BAD_SUFFIX):
                    _unlink(path)
        return Garbage(len(sizes), sum(sizes))

    def garbage(
        self, released: Collection[str] = (), grace_s: float = GRACE_S, without: Collection[Path] = ()
    ) -> list[BlobFile]:
        """The blobs that :meth:`collect_garbage` would delete, once the records at the paths ``without`` are gone.

        Raises:
            CacheError: some record cannot be read for references.
        """
        oldest, referred = time.time() - grace_s, self._references(without)[0]
        return [
            blob
            for blob in self.blobs()
            if blob.sha256 not in referred and (blob.sha256 in released or blob.modified < oldest)
        ]

    def _dropped(self) -> list[Path]:
        """Blobs that this garbage collection, or one that did not come to its end, has put out of readers' sight."""
        return [Path(path) for path in files_below(self._layout / BLOBS) if path.endswith(DROPPED_SUFFIX)]

    def _take_back(self, dropped: Iterable[Path]) -> None:
        for path in dropped:
            with contextlib.suppress(FileNotFoundError):
                _rename(path, path.with_name(path.name.partition(".")[0]))

    def _delete(self, dropped: Path) -> int | None:
        """Delete a dropped blob and the folder that this empties; its bytes, None where it is there no more."""
        try:
            size_bytes = dropped.stat().st_size
        except OSError:
            return None
        _unlink(dropped)
        remove_empty(dropped.parent, self._layout)
        return size_bytes

    @property
    def _layout(self) -> Path:
        return self.root / LAYOUT

    def _stray_files(self) -> Iterator[Path]:
        files = files_below(self._layout, skip=(INCOMING,))
        return (Path(path) for path in files if path.endswith(_LEFTOVERS))

    def _record_files(
        self, where: Where | None, fail: Callable[[OSError], None], skip: Collection[str] = OWN_FOLDERS
    ) -> Iterator[str]:
        return (path for path in files_below(self._layout, skip, where, fail) if path.endswith(".json"))

    def _noted_in(self, unlisted: list[Entry]) -> Callable[[OSError], None]:
        """A function that notes an entry for each folder that is there and cannot be listed."""

        def note(error: OSError) -> None:
            if not is_gone(error):
                unlisted.append(unreadable_entry(error.filename, None, CacheError(cannot_list(error)), is_file=False))

        return note

    def _address(self, path: str) -> Address | None:
        """The address of a record's file by its path, unchecked; None where no record may stand."""
        parts = path.removeprefix(f"{self.root}{os.sep}").removesuffix(".json").split(os.sep)
        return Address(*parts[1:]) if len(parts) == 5 else None

    def _entry(self, path: str) -> tuple[Entry, bytes] | None:
        """The record's file at this path and its bytes; None where it was deleted since it was listed."""
        try:
            found = read_if_there(path, LARGEST_RECORD)
            if found is None:
                return None
            data, status = found
            record = decode_record(data, self._address(path))
        except CacheError as error:
            address = None
            with contextlib.suppress(CacheError):
                address = parse_path(Path(path).relative_to(self.root).parts)
            return unreadable_entry(path, address, error), b""
        return entry_of(path, record, status), data

    def _checked_blobs(self, record: Record, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
        """The bytes of every blob of a record, by digest: those given, and else those that are there."""
        if unclaimed := blobs.keys() - record.digests:
            raise CacheError(f"blob {min(unclaimed)} was given, and the record does not refer to it")
        checked: dict[str, bytes] = {}
        for name, artifact in record.artifacts.items():
            given = blobs.get(artifact.sha256)
            data = self.read_blob(artifact.sha256) if given is None else check_blob(given, artifact.sha256)
            if len(data) != artifact.size:
                raise CacheError(f"artifact {name} has {len(data)} bytes, and the record says {artifact.size}")
            checked[artifact.sha256] = data
        return checked

    def _check_replaceable(self, path: Path) -> None:
        try:
            Record.from_json(read_whole(path, LARGEST_RECORD, as_use=False)[0].decode(errors="replace"))
        except UnknownSchema as error:
            raise UnknownSchema(f"{path} is left alone: {error}") from None
        except (Missing, Corrupt):
            return

    def _put_blob(self, digest: str, data: bytes) -> None:
        """Write a blob, or keep one that is there and intact."""
        if not self.keep_blob(digest):
            write_whole(self.root / blob_path(digest), data)

    def _references(self, without: Collection[Path] = ()) -> tuple[set[str], set[str]]:
        """The digests that any record refers to, readable or not, and those of the records themselves.

        Records at the paths ``without`` are left out.
        """
        referred: set[str] = set()
        records: set[str] = set()
        left_out = set(map(str, without))
        # What is on its way counts as a reference, and is no record yet.
        for path in self._record_files(None, must_list(self._layout), OWN_FOLDERS - {INCOMING}):
            found = None if path in left_out else read_if_there(path, LARGEST_RECORD)
            if found is None:
                continue
            data = found[0]
            digests = {digest.decode() for digest in _DIGESTS.findall(data)}
            if not digests and _has_unknown_schema(data):
                raise CacheError(f"{path} has an unknown schema and may refer to any blob")
            referred |= digests
            records.add(hashlib.sha256(data).hexdigest())
        return referred, records


def _has_unknown_schema(data: bytes) -> bool:
    try:
        Record.from_json(data.decode(errors="replace"))
    except CacheError as error:
        return isinstance(error, UnknownSchema)
    return False


def _drop(path: Path) -> None:
    """Put a blob out of readers' sight, under a name of its own among all that are dropped."""
    with contextlib.suppress(FileNotFoundError):
        _rename(path, path.with_name(f"{path.name}.{os.urandom(6).hex()}{DROPPED_SUFFIX}"))


def _rename(path: Path, to: Path) -> None:
    try:
        path.replace(to)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CacheError(f"cannot rename {path}: {error.strerror}") from None


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"cannot delete {path}: {error.strerror}") from None
