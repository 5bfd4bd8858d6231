"""A cache folder that may be written: records and blobs are written whole, listed, removed, and garbage-collected."""

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
    cannot_list,
    files_below,
    files_inside,
    is_gone,
    is_linked,
    must_list,
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

# A writer writes blobs first and their record a moment later; a blob this young may be waiting for its record.
GRACE_S = 300.0
_LEFTOVERS = (BAD_SUFFIX, DROPPED_SUFFIX, TEMPORARY_SUFFIX)
_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Store:
    """A cache folder that may be written; it need not exist yet.

    Its root may be a link. Links inside it are followed to read, but nothing is written or deleted through them.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def write(self, record: Record, blobs: Mapping[str, bytes]) -> Path:
        """Write a record and its blobs, blobs first, each file whole or not at all.

        If another process writes the same record, the last one wins. A blob that is there and intact is kept. Under the
        policy ``signed`` the record is sealed as this user's own.

        Args:
            record: the record, which determines its path.
            blobs: bytes by sha256; a blob that the store has already may be left out.

        Returns:
            The record's file.

        Raises:
            UnknownSchema: a record of another version of tilekern is there; it is left alone.
            CacheError: the record or a blob is not valid, a blob is missing, or the folder cannot be written.
        """
        text = record.to_json()
        path = self.root / Record.from_json(text).address.path
        checked = self._checked_blobs(record, blobs)
        try:
            Record.from_json(read_whole(path, LARGEST_RECORD, as_use=False)[0].decode(errors="replace"))
        except UnknownSchema as error:
            raise UnknownSchema(f"{path} is left alone: {error}") from None
        except (Missing, Corrupt):
            pass
        finish_incoming(self.root)
        try:
            for digest, data in checked.items():
                self._put_blob(digest, data)
            for seal, contents in own_seal(text.encode()).items():
                write_below(self.root, seal, contents)
            write_below(self.root, path.relative_to(self.root), text.encode())
            for digest, data in checked.items():
                # A garbage collection that began before the record was there may have deleted the blob.
                if not (self.root / blob_path(digest)).exists():
                    self._put_blob(digest, data)
        except OSError as error:
            raise CacheError(f"cannot write to the cache folder {self.root}: {error.strerror or error}") from None
        return path

    def entries(self, where: Where | None = None) -> Iterator[Entry]:
        """Yield every record file in the order of paths, also bad ones, then the folders that cannot be listed.

        Args:
            where: whether to look at a folder or record, given the names that lead there: a target, then also a
                toolkit, a kernel, and a problem's key. Files that it refuses are neither listed nor read.
        """
        for entry, _ in self.read_entries(where):
            yield entry

    def read_entries(self, where: Where | None = None) -> Iterator[tuple[Entry, bytes]]:
        """Yield the entries of :meth:`entries`, each with the bytes of its file; empty if it cannot be read."""
        unlisted: list[Entry] = []

        def fail(error: OSError) -> None:
            if not is_gone(error):
                unlisted.append(entry_of(error.filename, None, CacheError(cannot_list(error)), is_folder=True))

        for path in self._record_files(where, fail):
            if found := self._entry(path):
                yield found
        for entry in unlisted:
            yield entry, b""

    def finish(self) -> None:
        """Finish an unpack of this user that was killed while it moved a pack's files to their paths."""
        finish_incoming(self.root)

    def is_linked(self, path: Path) -> bool:
        """Return whether a file of the cache is behind a link inside it, so that it is not deleted."""
        return is_linked(self.root, path.parent.relative_to(self.root))

    def blobs(self) -> Iterator[BlobFile]:
        """Yield every blob file, referred to or not."""
        yield from _blob_files(map(Path, files_below(self._layout / BLOBS)))

    def leftovers(self) -> Iterator[Path]:
        """Yield files set aside as bad, and files of writers and garbage collections that were killed or still run."""
        yield from abandoned_incoming(self.root, time.time())
        yield from unfinished(self.root)
        yield from (self.root / path for path in self._stray_files())

    def read_blob(self, sha256: str) -> bytes:
        """Return a blob's bytes, checked.

        Raises:
            Missing: it is not there.
            Corrupt: its contents are wrong.
            CacheError: it cannot be read.
        """
        return check_blob(read_whole(f"{self.root}/{blob_name(sha256)}", LARGEST_BLOB, as_use=False)[0], sha256)

    def keep_blob(self, sha256: str) -> bool:
        """Mark a blob as just used, which protects it from garbage collection; False if it is missing or bad."""
        try:
            self.read_blob(sha256)
        except CacheError:
            return False
        path = blob_path(sha256)
        with contextlib.suppress(OSError), opened(self.root, *path.parent.parts) as folder:
            os.utime(path.name, dir_fd=folder, follow_symlinks=False)
        return True

    def remove(self, entries: Iterable[Entry]) -> list[Entry]:
        """Delete records, and folders that are empty then; blobs stay until :meth:`collect_garbage`.

        A record that was rewritten since it was listed stays, and so does one behind a link.

        Returns:
            The entries of the deleted records.

        Raises:
            CacheError: a file cannot be deleted.
        """
        removed = []
        for entry in entries:
            if entry.identity is None or self.is_linked(entry.path):
                continue
            below = entry.path.relative_to(self.root)
            try:
                if unlink_seen(self.root, below, entry.identity):
                    removed.append(entry)
            except OSError as error:
                raise CacheError(f"cannot delete {entry.path}: {error.strerror}") from None
            remove_empty(self.root, below.parent)
        return removed

    def collect_garbage(self, removed: Iterable[Entry] = (), grace_s: float = GRACE_S) -> Garbage:
        """Delete blobs that no record refers to, and leftovers, if they are older than ``grace_s``.

        In records of an unknown schema, every digest in the text counts as a reference.

        Args:
            removed: entries that :meth:`remove` returned; their blobs may be younger.
            grace_s: minimum age of a file in seconds; a writer may still need a younger one.

        Returns:
            The number of deleted blobs, and their bytes; zero if some record's references cannot be read.

        Raises:
            CacheError: a file cannot be deleted.
        """
        try:
            remove_abandoned(self.root, time.time() - grace_s)
            for blob in self.garbage(removed, grace_s):
                # Out of readers' sight, under a name that no other dropped file has.
                dropped_name = f"{blob.path.name}.{os.urandom(6).hex()}{DROPPED_SUFFIX}"
                self._rename(blob.path.relative_to(self.root), dropped_name)
        except Missing:
            return Garbage(0, 0)
        except CacheError as error:
            return Garbage(0, 0, f"no blob was removed: {error}")
        # Also those of a garbage collection that was killed.
        files = files_inside(self.root, LAYOUT, BLOBS)
        dropped = [path for path in files if path.name.endswith(DROPPED_SUFFIX)]
        try:
            # A record written since the first look is seen by this second one, unless its writer has yet to check its
            # blobs, and then finds that they are gone. So no record is ever left without a blob.
            referred, records = self._references()
        except CacheError as error:
            self._take_back(dropped)
            return Garbage(0, 0, f"no blob was removed: {error}")
        self._take_back(path for path in dropped if path.name.partition(".")[0] in referred)
        sizes = []
        for path in dropped:
            with contextlib.suppress(OSError):  # taken back, or deleted by another process
                sizes.append(os.lstat(self.root / path).st_size)
                self._unlink(path)
                remove_empty(self.root, path.parent)
        oldest = time.time() - grace_s
        remove_signatures(self.root, records, oldest)
        for path in self._stray_files():
            with contextlib.suppress(OSError):
                old = path.name.endswith(TEMPORARY_SUFFIX) and os.lstat(self.root / path).st_mtime < oldest
                if old or path.name.endswith(BAD_SUFFIX):
                    self._unlink(path)
        return Garbage(len(sizes), sum(sizes))

    def garbage(
        self, removed: Iterable[Entry] = (), grace_s: float = GRACE_S, without: Collection[Path] = ()
    ) -> list[BlobFile]:
        """Return the blobs that :meth:`collect_garbage` would delete once the records at ``without`` are gone.

        Raises:
            CacheError: some record cannot be read for references.
        """
        oldest, referred = time.time() - grace_s, self._references(without)[0]
        released = {digest for entry in removed if entry.record for digest in entry.record.digests}
        ours = (self.root / path for path in files_inside(self.root, LAYOUT, BLOBS))
        return [
            blob
            for blob in _blob_files(ours)
            if blob.sha256 not in referred and (blob.sha256 in released or blob.modified < oldest)
        ]

    def _take_back(self, dropped: Iterable[PurePosixPath]) -> None:
        for path in dropped:
            self._rename(path, path.name.partition(".")[0])

    def _rename(self, path: PurePath, name: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError), opened(self.root, *path.parent.parts) as folder:
                os.replace(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise CacheError(f"cannot rename {self.root / path}: {error.strerror}") from None

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

    def _entry(self, path: str) -> tuple[Entry, bytes] | None:
        """Return a record file's entry and bytes; None if it was deleted since it was listed."""
        status: os.stat_result | None = None
        contents: Record | CacheError
        try:
            found = read_if_there(path, LARGEST_RECORD)
            if found is None:
                return None
            data, status = found
            parts = path.removeprefix(f"{self.root}{os.sep}").removesuffix(".json").split(os.sep)
            # Unchecked: a path that is not that of a record is not its record's address.
            contents = decode_record(data, Address(*parts[1:]) if len(parts) == 5 else None)
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
        """Return the bytes of every blob of a record by digest: those given, else those in the store."""
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

    def _put_blob(self, digest: str, data: bytes) -> None:
        if not self.keep_blob(digest):
            write_below(self.root, blob_path(digest), data)

    def _references(self, without: Collection[Path] = ()) -> tuple[set[str], set[str]]:
        """Return the digests that any record refers to, readable or not, and those of the records themselves.

        Records at the paths ``without`` are left out.
        """
        referred: set[str] = set()
        records: set[str] = set()
        left_out = set(map(str, without))

        def fail(error: OSError) -> None:
            # A link or a file in the place of a folder holds nothing that becomes a record.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise CacheError(cannot_list(error))

        # Files of an unfinished unpack count as references.
        incoming = files_inside(self.root, LAYOUT, INCOMING, fail=fail)
        for path in itertools.chain(
            self._record_files(None, must_list(self._layout)),
            (str(self.root / path) for path in incoming if path.name.endswith(".json")),
        ):
            found = None if path in left_out else read_if_there(path, LARGEST_RECORD)
            if found is None:
                continue
            data = found[0]
            digests = {digest.decode() for digest in _DIGESTS.findall(data)}
            if not digests:
                try:
                    Record.from_json(data.decode(errors="replace"))
                except UnknownSchema:
                    raise CacheError(f"{path} has an unknown schema and may refer to any blob") from None
                except CacheError:
                    pass
            referred |= digests
            records.add(hashlib.sha256(data).hexdigest())
        return referred, records


def _blob_files(paths: Iterable[Path]) -> Iterator[BlobFile]:
    for path in paths:
        with contextlib.suppress(CacheError, OSError):
            digest = check_digest("a blob", path.name)
            status = path.stat()
            yield BlobFile(path, digest, status.st_size, status.st_mtime)
