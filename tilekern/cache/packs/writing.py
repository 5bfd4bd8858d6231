"""Write a pack, with one record in memory at a time."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from tilekern.cache.errors import CacheError
from tilekern.cache.files import write_by
from tilekern.cache.keys import blob_path, signature_path
from tilekern.cache.packs.archives import MOST_BYTES, MOST_MEMBERS, check_clashes, check_ratio
from tilekern.cache.packs.pack import FORMAT, LARGEST_MANIFEST, MANIFEST, SIGNED, UNSIGNED, Member, is_signature
from tilekern.cache.records import Record, check_blob
from tilekern.cache.trust.signing import check_signature

_EPOCH = (1980, 1, 1, 0, 0, 0)
# The contents of a pack up to this size are spooled in memory, larger ones in a temporary file.
_IN_MEMORY = 64 * 2**20


def write_pack(
    path: str | os.PathLike[str],
    records_with_blobs: Iterable[tuple[Record, Mapping[str, bytes]]],
    signatures: Mapping[str, Mapping[str, bytes]] | None = None,
) -> int:
    """Write a pack; the same records, blobs and signatures give the same bytes in any order.

    Args:
        path: the file, which is written in one step.
        records_with_blobs: each record with its blobs by sha256; taken one after the other, and not kept.
        signatures: as :meth:`tilekern.cache.Pack.signatures` returns them, looked up when a record is taken; those of
            other records are left out.

    Returns:
        The number of records in the pack.

    Raises:
        CacheError: a record comes twice, two differ only in upper and lower case, a blob is missing or has the wrong
            digest or size, there is more than a pack may hold, or the file cannot be written.
    """
    records = 0
    try:
        with _Spool() as spool:
            for record, blobs in records_with_blobs:
                _put(spool, record, blobs, signatures or {})
                records += 1
            check_clashes(spool.members)
            manifest = _manifest(spool.members)
            write_by(Path(path), lambda file: _zip(manifest, spool, file))
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return records


class _Spool:
    """The contents of a pack before it is written; ``members`` are the entries of its manifest by name."""

    def __init__(self) -> None:
        # Takes milliseconds; every job imports this file, but few write a pack.
        import tempfile

        self.members: dict[str, Member] = {}
        self._starts: dict[str, int] = {}
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (closed as this is)

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, name: str, data: bytes) -> None:
        """Add a member, unless there is one of this name."""
        if name not in self.members:
            self.members[name] = Member(hashlib.sha256(data).hexdigest(), len(data))
            self._starts[name] = self._file.seek(0, os.SEEK_END)
            self._file.write(data)

    def read(self, name: str) -> bytes:
        """Return a member's bytes."""
        self._file.seek(self._starts[name])
        return self._file.read(self.members[name].size)


def _put(
    spool: _Spool, record: Record, blobs: Mapping[str, bytes], signatures: Mapping[str, Mapping[str, bytes]]
) -> None:
    text = record.to_json()
    name = str(Record.from_json(text).address.path)
    if name in spool.members:
        raise CacheError(f"a pack can hold only one record of {name}, got two")
    for artifact in record.artifacts.values():
        digest = artifact.sha256
        if digest not in blobs:
            raise CacheError(f"{name} refers to blob {digest}, which was not given")
        if len(blobs[digest]) != artifact.size:
            raise CacheError(f"{name} says another size of blob {digest} than it has")
        spool.put(str(blob_path(digest)), check_blob(blobs[digest], digest))
    spool.put(name, text.encode())
    digest = spool.members[name].sha256
    for public_key, signature in signatures.get(digest, {}).items():
        spool.put(str(signature_path(digest, public_key)), check_signature(signature))


def _manifest(members: Mapping[str, Member]) -> bytes:
    schema = SIGNED if any(map(is_signature, members)) else UNSIGNED
    listed = {name: msgspec.structs.asdict(members[name]) for name in sorted(members)}
    text = json.dumps({"format": FORMAT, "schema": schema, "members": listed}, indent=1).encode()
    if len(members) >= MOST_MEMBERS or len(text) > LARGEST_MANIFEST:
        raise CacheError(f"a pack may hold {MOST_MEMBERS} records, artifacts and signatures; select fewer records")
    return text


def _zip(manifest: bytes, spool: _Spool, file: BinaryIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, MANIFEST, manifest)
        for name in sorted(spool.members):
            _add(archive, name, spool.read(name))
    if file.tell() > MOST_BYTES:
        raise CacheError("a pack may have 4 GiB; select fewer records")
    check_ratio(len(manifest) + sum(member.size for member in spool.members.values()), file.tell())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    archive.writestr(info, data, compresslevel=9)
