"""A pack is one file that carries records and blobs to another machine: a zip file that is read in place.

Its members are ``manifest.json``, then records, blobs and signatures under the same paths as in a cache. The manifest
gives the sha256 and size of each. A member that is not in the manifest, or has no path of a cache, makes the pack bad.
docs/cache-format.md describes the form.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tilekern.cache.entries import Entry, Where, entry_of
from tilekern.cache.errors import CacheError, Corrupt, Missing, UnknownSchema
from tilekern.cache.keys import (
    SIGNATURE_SUFFIX,
    Address,
    blob_name,
    blob_path,
    check_digest,
    parse_path,
    parse_signature_path,
)
from tilekern.cache.packs.archives import check_clashes, check_directory, check_entries
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record, parse_object
from tilekern.cache.trust.signing import SIGNATURE_BYTES, check_signature

PACK_SUFFIX = ".pack"
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
# Version 2 has signatures; a pack without them is written as version 1, which every tilekern reads.
UNSIGNED, SIGNED = 1, 2
FORMAT = "tilekern-pack"
# The errors of zipfile for bytes that are not a sound zip file.
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
    """The manifest's entry of a member: digest in hexadecimal, size in bytes."""

    sha256: str
    size: int


class Pack:
    """An open pack. Its manifest and list of members are checked here, its contents as they are read.

    Raises:
        Corrupt: it is not a sound pack.
        UnknownSchema: another version of tilekern wrote it.
        Missing: there is no such file.
        CacheError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self.status = _open(path)
        # Layers live as long as the process and are never closed.
        weakref.finalize(self, self._file.close)
        self.members, self.records = self._check_members()

    def read(self, name: str) -> bytes:
        """Return a member's bytes, checked against the manifest.

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
        """Return the record at an address; raises as :meth:`read` does, and UnknownSchema."""
        return decode_record(self.read(str(address.path)), address)

    def read_blob(self, sha256: str) -> bytes:
        """Return a blob; raises as :meth:`read` does."""
        return check_blob(self.read(blob_name(sha256)), sha256)

    def entries(self, where: Where | None = None) -> Iterator[Entry]:
        """Yield every record, sorted by address, as :meth:`tilekern.cache.Store.entries` does."""
        modified = self.status.st_mtime
        for address, name in sorted(self.records.items()):
            if where and not all(where(address[:last]) for last in range(1, 5)):
                continue
            contents: Record | CacheError
            try:
                contents = self.read_record(address)
            except CacheError as error:
                contents = error
            file_bytes = self.members[name].size
            yield entry_of(self.path / name, address, contents, file_bytes=file_bytes, modified=modified)

    @cached_property
    def signature_names(self) -> dict[str, list[str]]:
        """The names of all signatures by the sha256 of the record's bytes."""
        found: dict[str, list[str]] = {}
        for name in filter(is_signature, self.members):
            found.setdefault(parse_signature_path(name.split("/"))[0], []).append(name)
        return found

    def signatures(self) -> dict[str, dict[str, bytes]]:
        """Return all signatures by the sha256 of the record's bytes and the public key; raises as :meth:`read` does."""
        found: dict[str, dict[str, bytes]] = {}
        for name in filter(is_signature, self.members):
            digest, public_key = parse_signature_path(name.split("/"))
            found.setdefault(digest, {})[public_key] = check_signature(self.read(name))
        return found

    def _inflate(self, name: str, size: int) -> bytes:
        try:
            with self._zip.open(name) as file:
                return file.read(size + 1)
        except _UNSOUND as error:
            raise Corrupt(f"{self.path}: {name} cannot be read: {error}") from None

    def _check_members(self) -> tuple[dict[str, Member], dict[Address, str]]:
        try:
            check_directory(self._file)
            self._zip = zipfile.ZipFile(self._file)
            infos = self._zip.infolist()
            check_entries(infos, self.status.st_size)
        except (CacheError, *_UNSOUND) as error:
            raise Corrupt(f"{self.path} is not a pack: {error}") from None
        names = [info.filename for info in infos]
        if MANIFEST not in names or len(set(names)) != len(names):
            raise Corrupt(f"{self.path} is not a pack: it needs one {MANIFEST} and no member twice")
        members, records = self._read_manifest()
        if set(names) != {MANIFEST, *members}:
            odd = min(set(names) ^ {MANIFEST, *members})
            raise Corrupt(f"{self.path}: {odd!r:.300} is in the manifest or among the members, but not in both")
        for info in infos:
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG) or info.orig_filename != info.filename:
                raise Corrupt(f"{self.path}: {info.filename!r} must be a plain file")
            if info.filename != MANIFEST and info.file_size != members[info.filename].size:
                raise Corrupt(f"{self.path}: {info.filename} does not have the size that the manifest says")
        return members, records

    def _read_manifest(self) -> tuple[dict[str, Member], dict[Address, str]]:
        try:
            text = self._inflate(MANIFEST, LARGEST_MANIFEST).decode()
            manifest = parse_object(text)
        except (Corrupt, UnicodeDecodeError) as error:
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: {error}") from None
        if manifest.get("format") != FORMAT:
            raise Corrupt(f"{self.path} is not a pack: the format must be {FORMAT}, got {manifest.get('format')!r:.60}")
        schema = manifest.get("schema")
        if type(schema) is not int or schema not in (UNSIGNED, SIGNED):
            raise UnknownSchema(f"{self.path} has schema {schema!r:.60}; this tilekern reads {UNSIGNED} and {SIGNED}")
        members = manifest.get("members")
        if not isinstance(members, dict):
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: members must be an object")
        try:
            check_clashes(members)
            found = {name: _member(name, value) for name, value in members.items()}
            records = {parse_path(name.split("/")): name for name in found if _is_record(name)}
            digests = {found[name].sha256 for name in records.values()}
            for name in filter(is_signature, found):
                if schema == UNSIGNED:
                    raise Corrupt(f"a pack of schema {UNSIGNED} has no signatures, got {name}")
                if parse_signature_path(name.split("/"))[0] not in digests:
                    raise Corrupt(f"{name} is a signature, and the pack has no record for it")
        except CacheError as error:
            raise Corrupt(f"{self.path}: {error}") from None
        return found, records


def _open(path: Path) -> tuple[BinaryIO, os.stat_result]:
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise CacheError(f"{path} is not a pack: a pack is a file")
        return open(descriptor, "rb"), status
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"there is no pack {path}") from None
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _is_record(name: str) -> bool:
    return name.endswith(".json")


def is_signature(name: str) -> bool:
    """Return whether a member is a signature, by its name."""
    return name.endswith(SIGNATURE_SUFFIX)


def _member(name: str, value: Any) -> Member:
    """Return the manifest's entry for ``name``; raise Corrupt or CacheError if a cache has no such file."""
    if not isinstance(value, dict) or value.keys() != {"sha256", "size"}:
        raise Corrupt(f"{name!r:.300} must have a sha256 and a size in the manifest")
    digest, size = check_digest(f"{name!r:.300}: sha256", value["sha256"]), value["size"]
    if _is_record(name):
        largest = LARGEST_RECORD
    elif is_signature(name):
        parse_signature_path(name.split("/"))
        largest = SIGNATURE_BYTES
    elif name == blob_name(digest):
        largest = LARGEST_BLOB
    else:
        raise Corrupt(f"{name!r:.300} is neither the path of a record nor that of its blob or signature")
    if type(size) is not int or not 0 <= size <= largest:
        raise Corrupt(f"{name}: the size must be a number of bytes up to {largest}, got {size!r:.60}")
    return Member(digest, size)


def checked_contents(pack: Pack) -> Iterator[tuple[Record, dict[str, bytes]]]:
    """Yield every record of a pack with its blobs, each checked as it is read.

    Raises:
        Corrupt: a member is not what the manifest says, a record is bad, or a blob is missing, belongs to no record,
            or does not have the size that its record says.
        UnknownSchema: another version of tilekern wrote a record.
    """
    unclaimed = {name for name in pack.members if not _is_record(name) and not is_signature(name)}
    for address in pack.records:
        record = pack.read_record(address)
        blobs = {}
        for artifact in sorted(record.artifacts.values(), key=lambda artifact: artifact.sha256):
            digest = artifact.sha256
            try:
                blobs[digest] = pack.read_blob(digest)
            except Missing:
                raise Corrupt(f"{pack.path}: {address.path} refers to blob {digest}, which is not there") from None
            if len(blobs[digest]) != artifact.size:
                raise Corrupt(f"{pack.path}: {address.path} says another size of blob {digest} than it has")
            unclaimed.discard(str(blob_path(digest)))
        yield record, blobs
    if unclaimed:
        raise Corrupt(f"{pack.path}: no record refers to {min(unclaimed)}")
