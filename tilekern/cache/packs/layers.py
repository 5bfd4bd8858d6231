"""A pack as a layer: records and blobs are read where the pack lies, with nothing unpacked."""

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
    """A pack read in place, opened when it is first asked for something. A bad pack is reported once and is empty.

    ``origin`` says how it came here: as a ``file``, which must not be one that others can write; in an installed
    ``package``, where whoever can write it can write code as well; or in tilekern's own ``wheel``, whose packs need no
    signature either.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None, origin: Origin = "file") -> None:
        self.path = Path(path)
        self.origin = origin
        self.name = name or self.path.name
        self._opened: tuple[int, Pack | None] | None = None

    def __repr__(self) -> str:
        return f"PackLayer({str(self.path)!r})"

    def targets(self) -> list[str]:
        """The target keys that it has, sorted."""
        return sorted({address.target_key for address in self._addresses()})

    def toolkits(self, target_key: str) -> list[str]:
        """The toolkit keys that it has for a target, sorted."""
        return sorted({address.toolkit_key for address in self._addresses() if address.target_key == target_key})

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """The problems that it has a record of."""
        place = (target_key, toolkit_key, kernel)
        return problems_of(address.problem_key for address in self._addresses() if address[:3] == place)

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """One record, checked; raises as :meth:`tilekern.cache.layers.Layer.read_record` says."""
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
        """One blob, its digest checked; raises as :meth:`tilekern.cache.layers.Layer.read_record` says."""
        pack = self._pack()
        if pack is None:
            raise Missing(f"{self.path} has no blob {sha256}")
        try:
            return pack.read_blob(sha256)
        except Corrupt as error:
            warn_once(str(error), about=self.path / sha256)
            raise

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """The signatures of a record, by the names of their files; what cannot be read is left out."""
        pack = self._pack()
        found: dict[str, bytes] = {}
        if pack is None:
            return found
        for name in pack.signature_names.get(record_sha256, ()):
            with contextlib.suppress(CacheError):
                found[name.rpartition("/")[2]] = pack.read(name)
        return found

    def _addresses(self) -> Iterable[Address]:
        pack = self._pack()
        return pack.records if pack else ()

    def _pack(self) -> Pack | None:
        """The open pack; each process opens its own, since a forked child shares its parent's place in the file."""
        # No lock: a child that is forked while another thread holds it would wait for ever, and two threads that open
        # the pack at once lose a millisecond.
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            try:
                opened = (os.getpid(), self._open())
            except CacheError as error:
                opened = (os.getpid(), None)
                warn_once(f"{error}; it is left out", about=self.path)
            self._opened = opened
        return opened[1]

    def _open(self) -> Pack:
        pack = Pack(self.path)
        if self.origin == "file" and not others_may_write():
            require_unshared(self.path, pack.status)
        return pack
