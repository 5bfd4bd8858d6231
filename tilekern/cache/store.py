"""The folder that a cache is written to: records and blobs put there whole, listed, removed, and garbage-collected."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath

from tilekern.cache.entries import BlobFile, Entry, Garbage, Where, entry_of
from tilekern.cache.errors import CacheError, Corrupt, Missing, UnknownSchema
from tilekern.cache.files import (
    BAD_SUFFIX,
    DROPPED_SUFFIX,
    TEMPORARY_SUFFIX,
    identity_of,
    read_if_there,
    read_whole,
)
from tilekern.cache.folders import (
    files_inside,
    is_linked,
    opened,
    remove_empty,
    unlink_below,
    unlink_seen,
    write_below,
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
from tilekern.cache.packs.incoming import abandoned_incoming, finish_incoming, remove_abandoned, unfinished
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record
from tilekern.cache.trust.policy import own_seal, remove_signatures
from tilekern.cache.walking import cannot_list, files_below, is_gone, must_list

# A writer puts blobs first and their record a moment later; a blob this young may be waiting for its record.
GRACE_S = 300.0
_LEFTOVERS = (BAD_SUFFIX, DROPPED_SUFFIX, TEMPORARY_SUFFIX)
_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Store:
    """A cache folder that may be written; it need not exist yet.

    Its root may be a link. Links inside it are read through, and nothing is written or deleted through them.
    """

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
                write_below(self.root, seal, contents)
            write_below(self.root, path.relative_to(self.root), text.encode())
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
        unlisted: list[Entry] = []
        for path in self._record_files(where, self._noted_in(unlisted)):
            if found := self._entry(path):
                yield found
        for entry in unlisted:
            yield entry, b""

    def finish(self) -> None:
        """Go on with an unpack of this user's that was killed while it moved a pack's files to their places."""
        finish_incoming(self.root)

    def is_linked(self, path: Path) -> bool:
        """Whether a file of the cache stands behind a link inside it, so that it is not deleted."""
        return is_linked(self.root, path.parent.relative_to(self.root))

    def blobs(self) -> Iterator[BlobFile]:
        """Every blob file, referred to or not."""
        yield from _blob_files(map(Path, files_below(self._layout / BLOBS)))

    def leftovers(self) -> Iterator[Path]:
        """Files set aside as bad, and what writers and garbage collections left that were killed or are still at it."""
        yield from abandoned_incoming(self.root, time.time())
        yield from unfinished(self.root)
        yield from (self.root / path for path in self._stray_files())

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
        path = blob_path(sha256)
        with contextlib.suppress(OSError), opened(self.root, *path.parent.parts) as folder:
            os.utime(path.name, dir_fd=folder, follow_symlinks=False)
        return True

    def remove(self, entries: Iterable[Entry]) -> frozenset[str]:
        """Delete records, and folders that this leaves empty; blobs stay until :meth:`collect_garbage`.

        A record that was written anew since it was listed stays, and so does one behind a link.

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
        """Delete one record as :meth:`remove` does; False where that leaves it, or it is gone.

        Raises:
            CacheError: the file cannot be deleted.
        """
        if identity is None or self.is_linked(path):
            return False
        below = path.relative_to(self.root)
        try:
            removed = unlink_seen(self.root, below, identity)
        except OSError as error:
            raise CacheError(f"cannot delete {path}: {error.strerror}") from None
        remove_empty(self.root, below.parent)
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
                self._drop(blob.path.relative_to(self.root))
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
                old = path.name.endswith(TEMPORARY_SUFFIX) and os.lstat(self.root / path).st_mtime < oldest
                if old or path.name.endswith(BAD_SUFFIX):
                    self._unlink(path)
        return Garbage(len(sizes), sum(sizes))

    def garbage(
        self, released: Collection[str] = (), grace_s: float = GRACE_S, without: Collection[Path] = ()
    ) -> list[BlobFile]:
        """The blobs that :meth:`collect_garbage` would delete, once the records at the paths ``without`` are gone.

        Raises:
            CacheError: some record cannot be read for references.
        """
        oldest, referred = time.time() - grace_s, self._references(without)[0]
        ours = (self.root / path for path in files_inside(self.root, LAYOUT, BLOBS))
        return [
            blob
            for blob in _blob_files(ours)
            if blob.sha256 not in referred and (blob.sha256 in released or blob.modified < oldest)
        ]

    def _dropped(self) -> list[PurePosixPath]:
        """Blobs that this garbage collection, or one that did not come to its end, has put out of readers' sight."""
        return [path for path in files_inside(self.root, LAYOUT, BLOBS) if path.name.endswith(DROPPED_SUFFIX)]

    def _drop(self, path: PurePath) -> None:
        """Put a blob out of readers' sight, under a name of its own among all that are dropped."""
        self._rename(path, f"{path.name}.{os.urandom(6).hex()}{DROPPED_SUFFIX}")

    def _take_back(self, dropped: Iterable[PurePosixPath]) -> None:
        for path in dropped:
            self._rename(path, path.name.partition(".")[0])

    def _rename(self, path: PurePath, name: str) -> None:
        """Give a file another name in its folder; nothing happens where it is gone."""
        try:
            with contextlib.suppress(FileNotFoundError), opened(self.root, *path.parent.parts) as folder:
                os.replace(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise CacheError(f"cannot rename {self.root / path}: {error.strerror}") from None

    def _delete(self, dropped: PurePosixPath) -> int | None:
        """Delete a dropped blob and the folder that this empties; its bytes, None where it is there no more."""
        try:
            size_bytes = os.lstat(self.root / dropped).st_size
        except OSError:
            return None
        self._unlink(dropped)
        remove_empty(self.root, dropped.parent)
        return size_bytes

    def _unlink(self, path: PurePath) -> None:
        try:
            unlink_below(self.root, path)
        except OSError as error:
            raise CacheError(f"cannot delete {self.root / path}: {error.strerror}") from None

    @property
    def _layout(self) -> Path:
        return self.root / LAYOUT

    def _stray_files(self) -> Iterator[PurePosixPath]:
        files = files_inside(self.root, LAYOUT, skip=(INCOMING,))
        return (path for path in files if path.name.endswith(_LEFTOVERS))

    def _record_files(self, where: Where | None, fail: Callable[[OSError], None]) -> Iterator[str]:
        return (path for path in files_below(self._layout, OWN_FOLDERS, where, fail) if path.endswith(".json"))

    def _noted_in(self, unlisted: list[Entry]) -> Callable[[OSError], None]:
        """A function that notes an entry for each folder that is there and cannot be listed."""

        def note(error: OSError) -> None:
            if not is_gone(error):
                unlisted.append(entry_of(error.filename, None, CacheError(cannot_list(error)), is_folder=True))

        return note

    def _address(self, path: str) -> Address | None:
        """The address of a record's file by its path, unchecked; None where no record may stand."""
        parts = path.removeprefix(f"{self.root}{os.sep}").removesuffix(".json").split(os.sep)
        return Address(*parts[1:]) if len(parts) == 5 else None

    def _entry(self, path: str) -> tuple[Entry, bytes] | None:
        """The record's file at this path and its bytes; None where it was deleted since it was listed."""
        status: os.stat_result | None = None
        contents: Record | CacheError
        try:
            found = read_if_there(path, LARGEST_RECORD)
            if found is None:
                return None
            data, status = found
            contents = decode_record(data, self._address(path))
            address: Address | None = contents.address
        except CacheError as error:
            data, contents, address = b"", error, None
            with contextlib.suppress(CacheError):
                address = parse_path(Path(path).relative_to(self.root).parts)
            with contextlib.suppress(OSError):
                status = status or os.stat(path)
        if status is None:
            return entry_of(path, address, contents), data
        entry = entry_of(
            path,
            address,
            contents,
            file_bytes=status.st_size,
            modified=status.st_mtime,
            used=max(status.st_mtime, status.st_atime),
            identity=identity_of(status),
        )
        return entry, data

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
            write_below(self.root, blob_path(digest), data)

    def _references(self, without: Collection[Path] = ()) -> tuple[set[str], set[str]]:
        """The digests that any record refers to, readable or not, and those of the records themselves.

        Records at the paths ``without`` are left out.
        """
        referred: set[str] = set()
        records: set[str] = set()
        left_out = set(map(str, without))
        # What is on its way counts as a reference, and is no record yet.
        on_their_way = files_inside(self.root, LAYOUT, INCOMING, fail=_must_list_incoming)
        for path in itertools.chain(
            self._record_files(None, must_list(self._layout)),
            (str(self.root / path) for path in on_their_way if path.name.endswith(".json")),
        ):
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


def _must_list_incoming(error: OSError) -> None:
    # Of what is not a real folder nothing will become a record.
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise CacheError(cannot_list(error))


def _blob_files(paths: Iterable[Path]) -> Iterator[BlobFile]:
    for path in paths:
        with contextlib.suppress(CacheError, OSError):
            digest = check_digest("a blob", path.name)
            status = path.stat()
            yield BlobFile(path, digest, status.st_size, status.st_mtime)
