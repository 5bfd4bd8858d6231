"""A layer is one place to read records from: a folder here, a pack in packs.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord
from tilekern.cache.files import ask_for, read_whole
from tilekern.cache.folders import set_aside
from tilekern.cache.keys import (
    LAYOUT,
    OWN_FOLDERS,
    SIGNATURES,
    Address,
    Value,
    blob_name,
    parse_problem_key,
    problem_key,
)
from tilekern.cache.packs.incoming import cut_off
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record, likely_digests
from tilekern.cache.trust.exposure import others_may_write, require_unshared, require_unshared_folders
from tilekern.cache.trust.policy import must_be_signed, require_trusted
from tilekern.cache.trust.signing import SIGNATURE_BYTES
from tilekern.cache.walking import cannot_list
from tilekern.warning import warn_once

Contents = TypeVar("Contents")


class Layer(Protocol):
    """One place to read records from. Listing never raises: what cannot be listed is said once, and is not there."""

    @property
    def name(self) -> str:
        """The layer's name for people."""
        ...

    def targets(self) -> list[str]:
        """The target keys that it has."""
        ...

    def toolkits(self, target_key: str) -> list[str]:
        """The toolkit keys that it has for a target."""
        ...

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """The problems that it has a record of, from the names alone."""
        ...

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """One record, checked.

        Raises:
            MissingRecord: it is not there.
            Corrupt: it is bad; it has been reported, and set aside where the layer may be written.
            UnknownSchema: another version of tilekern wrote it; it is left alone.
            Untrusted: others can change it, or the policy is ``signed`` and nobody who is trusted signed it.
            CacheError: it cannot be read.
        """
        ...

    def read_blob(self, sha256: str) -> bytes:
        """One blob, its digest checked.

        Raises:
            Missing: it is not there.
            Corrupt: it is bad; it has been reported, and set aside where the layer may be written.
            CacheError: it cannot be read.
        """
        ...

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """The signatures and seals of a record, by the names of their files; what cannot be read is left out."""
        ...


class FolderLayer:
    """A cache in a folder. Reading takes no lock and writes nothing; a writable one sets bad files aside.

    A writable one also says where an unpack was killed while it moved a pack's files to their places.

    Where ``as_use`` is False the file system notes no access to the records (:func:`tilekern.cache.files.read_whole`).
    """

    def __init__(self, root: str | os.PathLike[str], name: str, writable: bool = False, *, as_use: bool = True) -> None:
        self.root = Path(root)
        self.name = name
        self.writable = writable
        self._unshared: set[str] = set()
        self._looked = not writable
        self.as_use = as_use

    def __repr__(self) -> str:
        return f"FolderLayer({str(self.root)!r}, {self.name!r})"

    def targets(self) -> list[str]:
        """The target keys that it has, sorted."""
        return sorted(set(self._names()) - OWN_FOLDERS)

    def toolkits(self, target_key: str) -> list[str]:
        """The toolkit keys that it has for a target, sorted."""
        return sorted(self._names(target_key))

    def kernels(self, target_key: str, toolkit_key: str) -> list[str]:
        """Return the names of the kernels that it has records of."""
        return self._names(target_key, toolkit_key)

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """The problems that it has a record of; no file is opened."""
        names = self._names(target_key, toolkit_key, kernel)
        return problems_of(name.removesuffix(".json") for name in names if name.endswith(".json"))

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """One record, checked; raises as :meth:`Layer.read_record` says."""
        address = Address(target_key, toolkit_key, kernel, problem_key(problem))
        self._look()
        try:
            name = f"{self.root}/{address.name}"
            return self._read(name, LARGEST_RECORD, lambda data: self._trusted(data, address), is_record=True)
        except Missing as error:
            raise MissingRecord(str(error)) from None

    def read_blob(self, sha256: str) -> bytes:
        """One blob, its digest checked; raises as :meth:`Layer.read_record` says."""
        return self._read(f"{self.root}/{blob_name(sha256)}", LARGEST_BLOB, lambda data: check_blob(data, sha256))

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """The signatures and seals of a record, by the names of their files; what cannot be read is left out."""
        folder = self.root / LAYOUT / SIGNATURES / record_sha256[:2]
        found = {}
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if name.startswith(f"{record_sha256}."):
                    with contextlib.suppress(CacheError):
                        found[name] = read_whole(folder / name, SIGNATURE_BYTES + 1)[0]
        return found

    def _read(self, name: str, largest: int, decode: Callable[[bytes], Contents], is_record: bool = False) -> Contents:
        try:
            data, status = read_whole(name, largest, as_use=self.as_use)
        except Corrupt as error:
            warn_once(str(error), about=name)
            raise
        if is_record:
            self._require_unshared(name, status)
            # The disk fetches them while the record is parsed.
            ask_for(f"{self.root}/{blob_name(sha256)}" for sha256 in likely_digests(data))
        try:
            return decode(data)
        except Corrupt as error:
            moved = self.writable and set_aside(self.root, Path(name).relative_to(self.root), status)
            warn_once(f"{name} is bad{' and was set aside' if moved else ''}: {error}", about=name)
            raise

    def _trusted(self, data: bytes, address: Address) -> Record:
        record = decode_record(data, address)
        if must_be_signed():
            require_trusted(data, lambda path: read_whole(self.root / path, SIGNATURE_BYTES + 1)[0])
        return record

    def _require_unshared(self, name: str, status: os.stat_result) -> None:
        """Blobs are not looked at: the record names their sha256."""
        if others_may_write():
            return
        require_unshared(name, status)
        folder = os.path.dirname(name)
        if folder in self._unshared:
            return
        try:
            require_unshared_folders(self.root, Path(folder))
            self._unshared.add(folder)
        except OSError as error:
            raise CacheError(f"cannot tell who can write {folder}: {error.strerror}") from None

    def _names(self, *place: str) -> list[str]:
        self._look()
        folder = "/".join((f"{self.root}/{LAYOUT}", *place))
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            warn_once(f"{cannot_list(error)}; what lies there is passed over", about=folder)
            return []

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        if left := cut_off(self.root):
            warn_once(
                f"{self.root} holds {len(left)} unpacked pack(s) that are not all in place, as the process was killed; "
                "the next command that writes to the cache goes on with them",
                about=f"unfinished {self.root}",
            )


def problems_of(keys: Iterable[str]) -> list[dict[str, Value]]:
    """The problems that the given keys name; other texts are left out."""
    problems = []
    for key in keys:
        with contextlib.suppress(CacheError):
            problems.append(parse_problem_key(key))
    return problems
