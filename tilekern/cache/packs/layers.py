"""A pack as a layer: records and blobs are read from the pack, without unpacking it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord
from tilekern.cache.keys import Address, Value, problem_key
from tilekern.cache.layers import problems_of
from tilekern.cache.packs.pack import Pack
from tilekern.cache.records import Record, decode_record
from tilekern.cache.trust.exposure import others_may_write, require_unshared
from tilekern.cache.trust.policy import must_be_signed, require_trusted
from tilekern.warning import warn_once

Origin = Literal["file", "package", "wheel"]


class PackLayer:
    """A pack that is read in place and opened at its first use. A bad pack gives one warning and counts as empty.

    Args:
        path: the pack.
        name: the layer's name for people; default the file's name.
        origin: where the pack comes from: a ``file``, which others must not be able to write; an installed
            ``package``, which can only be changed by those who can change its code; or tilekern's own ``wheel``, whose
            packs need no signature either.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None, origin: Origin = "file") -> None:
        self.path = Path(path)
        self.origin = origin
        self.name = name or self.path.name
        self._opened: tuple[int, Pack | None] | None = None

    def __repr__(self) -> str:
        return f"PackLayer({str(self.path)!r})"

    def targets(self) -> list[str]:
        """Return the keys of its targets, sorted."""
        return sorted({address.target_key for address in self._addresses()})

    def toolkits(self, target_key: str) -> list[str]:
        """Return the keys of its toolkits for a target, sorted."""
        return sorted({address.toolkit_key for address in self._addresses() if address.target_key == target_key})

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems that it has records of."""
        place = (target_key, toolkit_key, kernel)
        return problems_of(address.problem_key for address in self._addresses() if address[:3] == place)

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record, checked; raises as :meth:`tilekern.cache.layers.Layer.read_record` says."""
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
        """Return one blob, its digest checked; raises as :meth:`tilekern.cache.layers.Layer.read_record` says."""
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

    def _addresses(self) -> Iterable[Address]:
        pack = self._pack()
        return pack.records if pack else ()

    def _pack(self) -> Pack | None:
        # Each process opens the pack itself, since a forked child shares its parent's position in the file. Without a
        # lock: a child forked while another thread holds it would wait forever.
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            try:
                pack = Pack(self.path)
                if self.origin == "file" and not others_may_write():
                    require_unshared(self.path, pack.status)
                opened = (os.getpid(), pack)
            except CacheError as error:
                opened = (os.getpid(), None)
                warn_once(f"{error}; it is left out", about=self.path)
            self._opened = opened
        return opened[1]
