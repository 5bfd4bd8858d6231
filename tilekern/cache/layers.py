"""Layers: places that a lookup reads records from, each a folder or a pack."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord
from tilekern.cache.files import ask_for, read_whole
from tilekern.cache.folders import cannot_list, set_aside
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
from tilekern.cache.packs.pack import Pack
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record, likely_digests
from tilekern.cache.trust.exposure import others_may_write, require_unshared, require_unshared_folders
from tilekern.cache.trust.policy import must_be_signed, require_trusted
from tilekern.cache.trust.signing import SIGNATURE_BYTES
from tilekern.warning import warn_once

Contents = TypeVar("Contents")
Origin = Literal["file", "package", "wheel"]


class Layer(Protocol):
    """One place to read records from. Listing never raises: a folder that cannot be listed gives one warning."""

    @property
    def name(self) -> str:
        """The layer's name for people."""
        ...

    def targets(self) -> list[str]:
        """Return the keys of its targets."""
        ...

    def toolkits(self, target_key: str) -> list[str]:
        """Return the keys of its toolkits for a target."""
        ...

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems that it has records of, without opening them."""
        ...

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record, checked.

        Raises:
            MissingRecord: it is not there.
            Corrupt: it is bad; this was reported, and the file was set aside if the layer may be written.
            UnknownSchema: another version of tilekern wrote it; it is left alone.
            Untrusted: others can change it, or the policy is ``signed`` and no trust root signed it.
            CacheError: it cannot be read.
        """
        ...

    def read_blob(self, sha256: str) -> bytes:
        """Return one blob, its digest checked; raises Missing, Corrupt and CacheError as :meth:`read_record` does."""
        ...

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """Return the signatures and seals of a record by the names of their files, without unreadable ones."""
        ...


class FolderLayer:
    """A cache in a folder. Reading takes no lock and writes nothing.

    Args:
        root: the folder.
        name: the layer's name for people.
        writable: whether to set bad files aside, and to warn of an unpack that was killed halfway.
        as_use: whether reading a record counts as its use (:func:`tilekern.cache.files.read_whole`).
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
        """Return the keys of its targets, sorted."""
        return sorted(set(self._names()) - OWN_FOLDERS)

    def toolkits(self, target_key: str) -> list[str]:
        """Return the keys of its toolkits for a target, sorted."""
        return sorted(self._names(target_key))

    def kernels(self, target_key: str, toolkit_key: str) -> list[str]:
        """Return the names of the kernels that it has records of."""
        return self._names(target_key, toolkit_key)

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems that it has records of; open no file."""
        names = self._names(target_key, toolkit_key, kernel)
        return problems_of(name.removesuffix(".json") for name in names if name.endswith(".json"))

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record, checked; raises as :meth:`Layer.read_record` says."""
        address = Address(target_key, toolkit_key, kernel, problem_key(problem))

        def decode(data: bytes) -> Record:
            record = decode_record(data, address)
            if must_be_signed():
                require_trusted(data, lambda path: read_whole(self.root / path, SIGNATURE_BYTES + 1)[0])
            return record

        self._warn_of_unfinished()
        try:
            name = f"{self.root}/{address.name}"
            return self._read(name, LARGEST_RECORD, decode, is_record=True)
        except Missing as error:
            raise MissingRecord(str(error)) from None

    def read_blob(self, sha256: str) -> bytes:
        """Return one blob, its digest checked; raises as :meth:`Layer.read_record` says."""
        return self._read(f"{self.root}/{blob_name(sha256)}", LARGEST_BLOB, lambda data: check_blob(data, sha256))

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """Return the signatures and seals of a record by the names of their files, without unreadable ones."""
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
            # The disk fetches the blobs while the record is parsed.
            ask_for(f"{self.root}/{blob_name(sha256)}" for sha256 in likely_digests(data))
        try:
            return decode(data)
        except Corrupt as error:
            moved = self.writable and set_aside(self.root, Path(name).relative_to(self.root), status)
            warn_once(f"{name} is bad{' and was set aside' if moved else ''}: {error}", about=name)
            raise

    def _require_unshared(self, name: str, status: os.stat_result) -> None:
        # Blobs need no check: the record names their sha256.
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

    def _names(self, *names: str) -> list[str]:
        self._warn_of_unfinished()
        folder = "/".join((f"{self.root}/{LAYOUT}", *names))
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            warn_once(f"{cannot_list(error)}; its records are passed over", about=folder)
            return []

    def _warn_of_unfinished(self) -> None:
        if self._looked:
            return
        self._looked = True
        if left := cut_off(self.root):
            warn_once(
                f"{self.root} holds {len(left)} pack(s) whose unpacking was killed; "
                "the next command that writes to the cache finishes it",
                about=f"unfinished {self.root}",
            )


def problems_of(keys: Iterable[str]) -> list[dict[str, Value]]:
    """Return the problems that keys name; leave out other texts."""
    problems = []
    for key in keys:
        with contextlib.suppress(CacheError):
            problems.append(parse_problem_key(key))
    return problems


class PackLayer:
    """A pack that is read in place and opened at its first use. A bad pack gives one warning and counts as empty.

    Args:
        path: the pack.
        name: the layer's name for people; default the file's name.
        origin: where the pack comes from: a ``file``, which others must not be able to write; an installed
            ``package``, which can only be changed by those who can change its code; or tilekern's own ``wheel``, whose
            packs need no signature either.
        package: the name by which pip knows that package.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        origin: Origin = "file",
        package: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.origin = origin
        self.package = package
        self.name = name or self.path.name
        self._opened: tuple[Pack | None] | None = None

    def __repr__(self) -> str:
        return f"PackLayer({str(self.path)!r})"

    def targets(self) -> list[str]:
        """Return the keys of its targets, sorted."""
        return sorted({target_key for target_key, _, _ in self._problem_keys()})

    def toolkits(self, target_key: str) -> list[str]:
        """Return the keys of its toolkits for a target, sorted."""
        return sorted({place[1] for place in self._problem_keys() if place[0] == target_key})

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems that it has records of."""
        return problems_of(self._problem_keys().get((target_key, toolkit_key, kernel), ()))

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record, checked; raises as :meth:`Layer.read_record` says."""
        address = Address(target_key, toolkit_key, kernel, problem_key(problem))
        pack = self._pack()
        if pack is None or address not in pack.records:
            raise MissingRecord(f"{self.path} has no {address.path}")
        try:
            data = pack.read(str(address.path))
            record = decode_record(data, address)
        except Corrupt as error:
            warn_once(f"{self.path}: {address.path} is bad: {error}", about=self.path / address.path)
            raise
        if self.origin != "wheel" and must_be_signed():
            require_trusted(data, lambda path: pack.read(str(path)))
        return record

    def read_blob(self, sha256: str) -> bytes:
        """Return one blob, its digest checked; raises as :meth:`Layer.read_record` says."""
        pack = self._pack()
        if pack is None:
            raise Missing(f"{self.path} has no blob {sha256}")
        try:
            return pack.read_blob(sha256)
        except Corrupt as error:
            warn_once(str(error), about=self.path / sha256)
            raise

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """Return the signatures of a record by the names of their files, without unreadable ones."""
        signatures: dict[str, bytes] = {}
        if pack := self._pack():
            for name in pack.signature_names.get(record_sha256, ()):
                with contextlib.suppress(CacheError):
                    signatures[name.rpartition("/")[2]] = pack.read(name)
        return signatures

    def addresses(self) -> Iterable[Address]:
        """Return the addresses of its records; none if the pack cannot be read, which it warns about."""
        pack = self._pack()
        return pack.records if pack else ()

    def digest(self) -> str:
        """Return the sha256 of its file, in hexadecimal; empty if the pack cannot be read."""
        pack = self._pack()
        return pack.digest if pack else ""

    def is_changed(self) -> bool:
        """Return whether the pack's file was written to since it was opened."""
        pack = self._pack()
        return pack is not None and pack.is_changed

    def _problem_keys(self) -> Mapping[tuple[str, str, str], list[str]]:
        pack = self._pack()
        return pack.problem_keys if pack else {}

    def _pack(self) -> Pack | None:
        # Without a lock: a child forked while another thread holds it would wait forever.
        if self._opened is None:
            try:
                pack = Pack(self.path)
                if self.origin == "file" and not others_may_write():
                    require_unshared(self.path, pack.status)
                self._opened = (pack,)
            except CacheError as error:
                self._opened = (None,)
                warn_once(f"{error}; it is left out", about=self.path)
        return self._opened[0]
