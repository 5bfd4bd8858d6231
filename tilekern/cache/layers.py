"""A layer is one place to read records from: a folder here, a pack in packs.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord
from tilekern.cache.files import read_whole, report_once, set_aside
from tilekern.cache.keys import BLOBS, LAYOUT, WANTED, Address, Value, blob_path, parse_problem_key, problem_key
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record

Contents = TypeVar("Contents")


class Layer(Protocol):
    """One place to read records from. Listing never raises: what cannot be listed is not there."""

    @property
    def name(self) -> str:
        """What people call the layer."""
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


class FolderLayer:
    """A cache in a folder. Reading takes no lock and writes nothing; a writable one sets bad files aside.

    Where ``as_use`` is False the file system notes no access to the records (:func:`tilekern.cache.files.read_whole`).
    """

    def __init__(self, root: str | os.PathLike[str], name: str, writable: bool = False, *, as_use: bool = True) -> None:
        self.root = Path(root)
        self.name = name
        self.writable = writable
        self.as_use = as_use

    def __repr__(self) -> str:
        return f"FolderLayer({str(self.root)!r}, {self.name!r})"

    def targets(self) -> list[str]:
        """The target keys that it has, sorted."""
        return sorted(set(_names(self.root / LAYOUT)) - {BLOBS, WANTED})

    def toolkits(self, target_key: str) -> list[str]:
        """The toolkit keys that it has for a target, sorted."""
        return sorted(_names(self.root / LAYOUT / target_key))

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """The problems that it has a record of; no file is opened."""
        folder = self.root / LAYOUT / target_key / toolkit_key / kernel
        return problems_of(name.removesuffix(".json") for name in _names(folder) if name.endswith(".json"))

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """One record, checked; raises as :meth:`Layer.read_record` says."""
        address = Address(target_key, toolkit_key, kernel, problem_key(problem))
        try:
            return self._read(self.root / address.path, LARGEST_RECORD, lambda data: decode_record(data, address))
        except Missing as error:
            raise MissingRecord(str(error)) from None

    def read_blob(self, sha256: str) -> bytes:
        """One blob, its digest checked; raises as :meth:`Layer.read_record` says."""
        return self._read(self.root / blob_path(sha256), LARGEST_BLOB, lambda data: check_blob(data, sha256))

    def _read(self, path: Path, largest: int, decode: Callable[[bytes], Contents]) -> Contents:
        data, status = read_whole(path, largest, as_use=self.as_use)
        try:
            return decode(data)
        except Corrupt as error:
            moved = self.writable and set_aside(path, status)
            report_once(path, f"{path} is bad{' and was set aside' if moved else ''}: {error}")
            raise


def problems_of(keys: Iterable[str]) -> list[dict[str, Value]]:
    """The problems that the given keys name; what is no problem key is left out."""
    problems = []
    for key in keys:
        with contextlib.suppress(CacheError):
            problems.append(parse_problem_key(key))
    return problems


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
