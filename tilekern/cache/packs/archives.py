"""Limits of a zip file, checked before anything in it is read, so that a crafted one takes no memory or disk.

They are far above what a pack of a whole model has (250 members, 7:1) and far below what hurts.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Collection, Sequence
from typing import BinaryIO

from tilekern.cache.errors import CacheError

MOST_MEMBERS = 250_000
LARGEST_DIRECTORY = 64 * 2**20
MOST_COMPRESSED = 100
# Contents of this size are always allowed, however well they are compressed.
ALWAYS_ALLOWED = 64 * 2**20
_END = struct.Struct("<4s4H2LH")
_END_MAGIC, _ENTRY_MAGIC = b"PK\5\6", b"PK\1\2"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\6\7"
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENCRYPTED = 0x1


def check_directory(file: BinaryIO) -> None:
    """Check the size of the list of members before zipfile reads it into many times that memory.

    Raises:
        CacheError: it is too long, has too many entries, or is not the last thing in the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size - _LOCATOR.size - _END_64.size))
    tail = file.read()
    if len(tail) < _END.size or not tail[-_END.size :].startswith(_END_MAGIC):
        raise CacheError("it does not end as a zip file without a comment")
    length, start, end = _directory_of(tail, size)
    if start + length != end:
        raise CacheError("it has bytes before its first member or after its last")
    if length > LARGEST_DIRECTORY:
        raise CacheError(f"its list of members has {length} bytes, and may have {LARGEST_DIRECTORY}")
    file.seek(start)
    if (entries := file.read(length).count(_ENTRY_MAGIC)) > MOST_MEMBERS:
        raise CacheError(f"it has {entries} members, and may have {MOST_MEMBERS}")
    file.seek(0)


def check_entries(entries: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Refuse members that only other programs write, and too much contents for a file of ``size`` bytes.

    Raises:
        CacheError: a member is encrypted or compressed by another method, or the contents are too large.
    """
    for entry in entries:
        if entry.flag_bits & _ENCRYPTED or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CacheError(f"{entry.filename!r:.300} must be stored or deflated, and not encrypted")
    check_ratio(sum(entry.file_size for entry in entries), size)


def check_ratio(contents_bytes: int, size: int) -> None:
    """Raise CacheError if a file of ``size`` bytes unpacks to far more."""
    if contents_bytes > max(ALWAYS_ALLOWED, MOST_COMPRESSED * size):
        raise CacheError(f"{size} bytes would unpack to {contents_bytes}, more than {MOST_COMPRESSED} times as many")


def check_clashes(names: Collection[str]) -> None:
    """Raise CacheError if two files or folders would be one on a file system that ignores case."""
    places = set(names)
    for folder in {name.rpartition("/")[0] for name in names}:
        parts = folder.split("/")
        places |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    seen: dict[str, str] = {}
    for place in sorted(places):
        other = seen.setdefault(place.casefold(), place)
        if other != place:
            raise CacheError(f"{other!r:.300} and {place!r:.300} differ in upper and lower case alone")


def _directory_of(tail: bytes, size: int) -> tuple[int, int, int]:
    """Return the length, start and end of the list of members, in bytes."""
    _, _, _, _, _, length, start, _ = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if len(locator) == _LOCATOR.size and locator.startswith(_LOCATOR_MAGIC):
        if len(tail) < _END.size + _LOCATOR.size + _END_64.size:
            raise CacheError("it does not end as a zip file")
        _, _, _, _, _, _, _, _, length, start = _END_64.unpack(tail[: _END_64.size])
        end -= _LOCATOR.size + _END_64.size
    return length, start, end
