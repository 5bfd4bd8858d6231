"""A pack is one file that carries records and blobs to another machine: a zip file that is read in place.

Its members are ``manifest.json``, then records, blobs and signatures under the same paths as in a cache. The manifest
gives the sha256 and size of each. A member that is not in the manifest, or has no path of a cache, makes the pack bad.
docs/cache-format.md describes the form.
"""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

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
from tilekern.cache.packs.archives import check_clashes, read_directory, read_member
from tilekern.cache.records import LARGEST_BLOB, LARGEST_RECORD, Record, check_blob, decode_record, parse_object
from tilekern.cache.trust.signing import SIGNATURE_BYTES, check_signature

PACK_SUFFIX = ".pack"
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
# Version 2 has signatures; a pack without them is written as version 1, which every tilekern reads.
UNSIGNED, SIGNED = 1, 2
FORMAT = "tilekern-pack"
# Bytes of a file that are read at once.
_PART = 2**20


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
        data = self._inflate(name)
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
    def problem_keys(self) -> dict[tuple[str, str, str], list[str]]:
        """The keys of the problems that it has records of, by target, toolkit and kernel."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for address in self.records:
            found.setdefault(address[:3], []).append(address.problem_key)
        return found

    @property
    def is_changed(self) -> bool:
        """Whether its file was written to since it was opened."""
        now = os.fstat(self._file.fileno())
        return (now.st_mtime_ns, now.st_size) != (self.status.st_mtime_ns, self.status.st_size)

    @cached_property
    def digest(self) -> str:
        """The sha256 of its file, in hexadecimal."""
        found, at = hashlib.sha256(), 0
        while part := os.pread(self._file.fileno(), _PART, at):
            found.update(part)
            at += len(part)
        return found.hexdigest()

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

    def _inflate(self, name: str) -> bytes:
        try:
            return read_member(self._file, name, self._places[name])
        except (CacheError, OSError) as error:
            raise Corrupt(f"{self.path}: {error}") from None

    def _check_members(self) -> tuple[dict[str, Member], dict[Address, str]]:
        try:
            self._places = read_directory(self._file, self.status.st_size)
        except (CacheError, OSError) as error:
            raise Corrupt(f"{self.path} is not a pack: {error}") from None
        sizes = {name: size for name, (_, _, size, _) in self._places.items()}
        if not 0 < sizes.pop(MANIFEST, 0) <= LARGEST_MANIFEST:
            raise Corrupt(f"{self.path} is not a pack: it needs a {MANIFEST} of at most {LARGEST_MANIFEST} bytes")
        members, records = self._read_manifest()
        if sizes.keys() != members.keys():
            odd = min(sizes.keys() ^ members.keys())
            raise Corrupt(f"{self.path}: {odd!r:.300} is in the manifest or among the members, but not in both")
        for name, member in members.items():
            if sizes[name] != member.size:
                raise Corrupt(f"{self.path}: {name} does not have the size that the manifest says")
        return members, records

    def _read_manifest(self) -> tuple[dict[str, Member], dict[Address, str]]:
        try:
            text = self._inflate(MANIFEST).decode()
            manifest = parse_object(text)
        except (Corrupt, UnicodeDecodeError) as error:
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: {error}") from None
        if manifest.get("format") != FORMAT:
            raise Corrupt(f"{self.path} is not a pack: the format must be {FORMAT}, got {manifest.get('format')!r:.60}")
        schema = manifest.get("schema")
        if type(schema) is not int or schema not in (UNSIGNED, SIGNED):
            raise UnknownSchema(f"{self.path} has schema {schema!r:.60}; this tilekern reads {UNSIGNED} and {SIGNED}")
        try:
            found = msgspec.convert(manifest.get("members"), dict[str, Member])
        except msgspec.ValidationError as error:
            raise Corrupt(f"{self.path} has a bad {MANIFEST}: members: {error}") from None
        return found, self._addresses(found, schema)

    def _addresses(self, found: dict[str, Member], schema: int) -> dict[Address, str]:
        """Return the names of records by their addresses; raise Corrupt if a cache has no such files."""
        records, signed = dict[Address, str](), set[str]()
        name = MANIFEST
        try:
            check_clashes(found)
            for name, member in found.items():
                largest = LARGEST_RECORD
                if _is_record(name):
                    check_digest("the sha256", member.sha256)
                    records[parse_path(name.split("/"))] = name
                elif is_signature(name):
                    check_digest("the sha256", member.sha256)
                    signed.add(parse_signature_path(name.split("/"))[0])
                    largest = SIGNATURE_BYTES
                elif name == blob_name(member.sha256):
                    largest = LARGEST_BLOB
                else:
                    raise Corrupt("this is neither the path of a record nor that of its blob or signature")
                if not 0 <= member.size <= largest:
                    raise Corrupt(f"the size must be a number of bytes up to {largest}, got {member.size}")
        except CacheError as error:
            raise Corrupt(f"{self.path}: {name!r:.300}: {error}") from None
        if signed and schema == UNSIGNED:
            raise Corrupt(f"{self.path}: a pack of schema {UNSIGNED} has no signatures, and this has {len(signed)}")
        if without := signed - {found[name].sha256 for name in records.values()}:
            raise Corrupt(f"{self.path}: it has a signature, and no record, of the sha256 {min(without)}")
        return records


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
