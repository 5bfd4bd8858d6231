"""A pack is one file that carries records and blobs to another machine: a zip file, read in place.

Its members are ``manifest.json``, then records and blobs under the very paths that they have in a cache. The manifest
gives the sha256 and size of each; a member that the manifest or the layout does not allow makes the pack bad.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord, UnknownSchema
from tilekern.cache.files import report_once, write_whole
from tilekern.cache.keys import Address, Value, blob_path, check_digest, parse_path, problem_key
from tilekern.cache.layers import problems_of
from tilekern.cache.records import (
    LARGEST_BLOB,
    LARGEST_RECORD,
    PROVENANCES,
    SCHEMA,
    Record,
    check_blob,
    decode_record,
    parse_object,
)
from tilekern.cache.store import Store

PACK_SUFFIX = ".pack"
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
_FORMAT = "tilekern-pack"
_EPOCH = (1980, 1, 1, 0, 0, 0)
# All that zipfile raises on bytes that are no sound zip file.
_UNSOUND = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    LookupError,
    OverflowError,
    MemoryError,
)


class Member(NamedTuple):
    """What the manifest says of a member: digest in hexadecimal, size in bytes."""

    sha256: str
    size: int


class Pack:
    """An open pack whose manifest and list of members were checked; contents are checked as they are read.

    Raises:
        Corrupt: it is no sound pack.
        UnknownSchema: another version of tilekern wrote it.
        Missing: there is no such file.
        CacheError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"there is no pack {path}") from None
        except OSError as error:
            raise CacheError(f"cannot read {path}: {error.strerror or error}") from None
        except _UNSOUND as error:
            raise Corrupt(f"{path} is no pack: {error}") from None
        try:
            self.members = self._check_members()
        except CacheError:
            self._zip.close()
            raise
        self.records = {parse_path(name.split("/")): name for name in self.members if _is_record(name)}

    def read(self, name: str) -> bytes:
        """A member's bytes, checked against the manifest.

        Raises:
            Missing: there is no such member.
            Corrupt: it is not what the manifest says.
        """
        member = self.members.get(name)
        if member is None:
            raise Missing(f"{self.path} has no {name}")
        data = self._inflate(name, member.size)
        if len(data) != member.size or hashlib.sha256(data).hexdigest() != member.sha256:
            raise Corrupt(f"{self.path}: {name} is not what the manifest says")
        return data

    def read_record(self, address: Address) -> Record:
        """The record at an address; raises as :meth:`read` does, and UnknownSchema."""
        return decode_record(self.read(str(address.path)), address)

    def read_blob(self, sha256: str) -> bytes:
        """A blob; raises as :meth:`read` does."""
        return check_blob(self.read(str(blob_path(sha256))), sha256)

    def _inflate(self, name: str, size: int) -> bytes:
        try:
            with self._zip.open(name) as file:
                return file.read(size + 1)
        except _UNSOUND as error:
            raise Corrupt(f"{self.path}: {name} cannot be read: {error}") from None

    def _check_members(self) -> dict[str, Member]:
        infos = self._zip.infolist()
        names = [info.filename for info in infos]
        if MANIFEST not in names or len(set(names)) != len(names):
            raise Corrupt(f"{self.path} is no pack: it needs one {MANIFEST} and no member twice")
        members = self._read_manifest()
        if set(names) != {MANIFEST, *members}:
            odd = min(set(names) ^ {MANIFEST, *members})
            raise Corrupt(f"{self.path}: {odd!r} stands in the manifest or among the members, but not in both")
        for info in infos:
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG) or info.orig_filename != info.filename:
                raise Corrupt(f"{self.path}: {info.filename!r} must be a plain file")
            if info.filename != MANIFEST and info.file_size != members[info.filename].size:
                raise Corrupt(f"{self.path}: {info.filename} does not have the size that the manifest says")
        return members

    def _read_manifest(self) -> dict[str, Member]:
        try:
            text = self._inflate(MANIFEST, LARGEST_MANIFEST).decode()
            manifest = parse_object(text)
        except (Corrupt, UnicodeDecodeError) as error:
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: {error}") from None
        if manifest.get("format") != _FORMAT:
            raise Corrupt(f"{self.path} is no pack: the format must be {_FORMAT}, got {manifest.get('format')!r:.60}")
        if manifest.get("schema") != SCHEMA:
            raise UnknownSchema(f"{self.path} has schema {manifest.get('schema')!r:.60}; this tilekern reads {SCHEMA}")
        members = manifest.get("members")
        if not isinstance(members, dict):
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: members must be an object")
        try:
            return {name: _member(name, value) for name, value in members.items()}
        except CacheError as error:
            raise Corrupt(f"{self.path}: {error}") from None


def _is_record(name: str) -> bool:
    return name.endswith(".json")


def _member(name: str, value: Any) -> Member:
    """The manifest's entry for ``name``, where the layout allows both."""
    if not isinstance(value, dict) or value.keys() != {"sha256", "size"}:
        raise Corrupt(f"{name!r:.300} must have a sha256 and a size in the manifest")
    digest, size = check_digest(f"{name!r:.300}: sha256", value["sha256"]), value["size"]
    if _is_record(name):
        parse_path(name.split("/"))
    elif name != str(blob_path(digest)):
        raise Corrupt(f"{name!r:.300} is neither the path of a record nor that of its blob")
    largest = LARGEST_RECORD if _is_record(name) else LARGEST_BLOB
    if type(size) is not int or not 0 <= size <= largest:
        raise Corrupt(f"{name}: the size must be a number of bytes up to {largest}, got {size!r:.60}")
    return Member(digest, size)


class PackLayer:
    """A pack read in place, opened when it is first asked for something. A bad pack is reported once and is empty."""

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.name
        self._lock = threading.Lock()
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
            return pack.read_record(address)
        except Corrupt as error:
            report_once(self.path / address.path, f"{self.path}: {address.path} is bad: {error}")
            raise

    def read_blob(self, sha256: str) -> bytes:
        """One blob, its digest checked; raises as :meth:`tilekern.cache.layers.Layer.read_record` says."""
        pack = self._pack()
        if pack is None:
            raise Missing(f"{self.path} has no blob {sha256}")
        try:
            return pack.read_blob(sha256)
        except Corrupt as error:
            report_once(self.path / sha256, str(error))
            raise

    def _addresses(self) -> Iterable[Address]:
        pack = self._pack()
        return pack.records if pack else ()

    def _pack(self) -> Pack | None:
        """The open pack; each process opens its own, since a forked child shares its parent's place in the file."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                try:
                    self._opened = (os.getpid(), Pack(self.path))
                except CacheError as error:
                    self._opened = (os.getpid(), None)
                    report_once(self.path, f"{error}; it is left out")
            return self._opened[1]


def write_pack(
    path: str | os.PathLike[str], records_with_blobs: Iterable[tuple[Record, Mapping[str, bytes]]]
) -> list[Record]:
    """Write a pack; the same records and blobs give the same bytes in whatever order they come.

    Args:
        path: the file to write, put there in one step when it is whole.
        records_with_blobs: each record with its blobs by sha256.

    Returns:
        The records that went in.

    Raises:
        CacheError: a record stands twice, a blob is missing or has the wrong digest, or the file cannot be written.
    """
    contents: dict[str, bytes] = {}
    records = []
    for record, blobs in records_with_blobs:
        text = record.to_json()
        name = str(Record.from_json(text).address.path)
        if name in contents:
            raise CacheError(f"a pack can hold one record of {name}, got two")
        for digest in record.digests:
            if digest not in blobs:
                raise CacheError(f"{name} refers to blob {digest}, which was not given")
            contents[str(blob_path(digest))] = check_blob(blobs[digest], digest)
        contents[name] = text.encode()
        records.append(record)
    try:
        write_whole(Path(path), _zip(contents))
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return records


def _zip(contents: Mapping[str, bytes]) -> bytes:
    manifest = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "members": {
            name: {"sha256": hashlib.sha256(contents[name]).hexdigest(), "size": len(contents[name])}
            for name in sorted(contents)
        },
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in [(MANIFEST, json.dumps(manifest, indent=1).encode()), *sorted(contents.items())]:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data, compresslevel=9)
    return file.getvalue()


def checked_contents(pack: Pack) -> Iterator[tuple[Record, dict[str, bytes]]]:
    """Every record of a pack with its blobs, each checked as it is read.

    Raises:
        Corrupt: a member is not what the manifest says, a record is bad, or a blob is missing or is nobody's.
        UnknownSchema: another version of tilekern wrote a record.
    """
    unclaimed = {name for name in pack.members if not _is_record(name)}
    for address in pack.records:
        record = pack.read_record(address)
        blobs = {}
        for digest in sorted(record.digests):
            try:
                blobs[digest] = pack.read_blob(digest)
            except Missing:
                raise Corrupt(f"{pack.path}: {address.path} refers to blob {digest}, which is not there") from None
            unclaimed.discard(str(blob_path(digest)))
        yield record, blobs
    if unclaimed:
        raise Corrupt(f"{pack.path}: no record refers to {min(unclaimed)}")


def install_pack(path: str | os.PathLike[str], store: Store) -> int:
    """Put a pack's records and blobs into a store, after all of them have been checked.

    A record that the store has from a better source stays: measured beats predicted, and predicted beats default,
    where both are of the same source of the kernel.

    Returns:
        The number of records written.

    Raises:
        Corrupt: anything in the pack is wrong; nothing was written.
        UnknownSchema: another version of tilekern wrote the pack; nothing was written.
        CacheError: the pack cannot be read, or the store cannot be written.
    """
    pack = Pack(Path(path))
    for _ in checked_contents(pack):
        pass
    present = {entry.address: entry.record for entry in store.entries() if entry.record}
    written = 0
    for record, blobs in checked_contents(pack):
        if not _is_better(present.get(record.address), record):
            store.write(record, blobs)
            written += 1
    return written


def _is_better(present: Record | None, offered: Record) -> bool:
    if present is None or present.source_digest != offered.source_digest:
        return False
    return PROVENANCES.index(present.provenance) < PROVENANCES.index(offered.provenance)
