"""The zip file of a pack: its list of members, read within limits, and their contents.

A crafted file takes no memory or disk: limits are checked before what they limit is read. They are far above what a
pack of all models has (7,000 members, 3:1) and far below what hurts. ``zipfile`` would take six times as long for the
list, which each process reads before its first launch. The format is that of PKWARE's APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import BinaryIO

from tilekern.cache.errors import CacheError

MOST_MEMBERS = 250_000
# Of a pack: places in it are numbers of four bytes.
MOST_BYTES = 2**32 - 2
LARGEST_DIRECTORY = 64 * 2**20
MOST_COMPRESSED = 100
# Contents of this size are always allowed, however well they are compressed.
ALWAYS_ALLOWED = 64 * 2**20
_END = struct.Struct("<4s4H2LH")
_END_MAGIC, _ENTRY_MAGIC, _MEMBER_MAGIC = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\6\7"
_END_64 = struct.Struct("<4sQ2H2L4Q")
# Of the list's entry: flags, method, the sizes, the lengths of name, extra field and comment, attributes, place.
_ENTRY = struct.Struct("<4s4x2H8x2L3H4x2L")
# Of the header before a member's contents: the lengths of name and extra field.
_HEADER = struct.Struct("<4s22x2H")
_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Of the attributes, where the kind of a file begins as Unix has it, and the kinds of a plain one.
_KIND, _PLAIN = 28, (0, stat.S_IFREG >> 12)


# Where a member is: its method of compression, its bytes in the file, and unpacked, and its header's place.
Entry = tuple[int, int, int, int]


def read_directory(file: BinaryIO, size: int) -> dict[str, Entry]:
    """Return the members of a zip file of ``size`` bytes.

    Raises:
        CacheError: the list is no list of plain files with names of ASCII, each once, stored or deflated; it is too
            long, or is not the last thing in the file; or the contents are too large.
    """
    tail = _read(file, max(0, size - _END.size - _LOCATOR.size - _END_64.size), size)
    if len(tail) < _END.size or not tail[-_END.size :].startswith(_END_MAGIC):
        raise CacheError("it does not end as a zip file without a comment")
    length, start, end = _directory_of(tail, size)
    if start + length != end:
        raise CacheError("it has bytes before its first member or after its last")
    if length > LARGEST_DIRECTORY:
        raise CacheError(f"its list of members has {length} bytes, and may have {LARGEST_DIRECTORY}")
    directory = _read(file, start, end)
    if (count := directory.count(_ENTRY_MAGIC)) > MOST_MEMBERS:
        raise CacheError(f"it has {count} members, and may have {MOST_MEMBERS}")
    entries = list(_entries(directory))
    check_ratio(sum(size for _, (_, _, size, _) in entries), size)
    found = dict(entries)
    if len(found) != len(entries):
        raise CacheError("it has a member twice")
    return found


def _entries(directory: bytes) -> Iterator[tuple[str, Entry]]:
    at, end, unpack = 0, len(directory), _ENTRY.unpack_from
    while at < end:
        try:
            magic, flags, method, packed, size, letters, extra, comment, attributes, start = unpack(directory, at)
            name = directory[at + _ENTRY.size : at + _ENTRY.size + letters].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise CacheError(f"its list of members is damaged: {error}") from None
        at += _ENTRY.size + letters + extra + comment
        if magic != _ENTRY_MAGIC or at > end:
            raise CacheError("its list of members is damaged")
        if flags & _ENCRYPTED or method not in _METHODS:
            raise CacheError(f"{name!r:.300} must be stored or deflated, and not encrypted")
        if attributes >> _KIND not in _PLAIN:
            raise CacheError(f"{name!r:.300} must be a plain file")
        if max(packed, size, start) > MOST_BYTES:
            raise CacheError(f"{name!r:.300} lies behind 4 GiB, or has as many bytes")
        yield name, (method, packed, size, start)


def read_member(file: BinaryIO, name: str, entry: Entry) -> bytes:
    """Return a member's contents, at most one byte more than its entry says.

    Raises:
        CacheError: the file has something else at its place.
    """
    method, length, size, start = entry
    header = _read(file, start, start + _HEADER.size)
    try:
        magic, letters, extra = _HEADER.unpack(header)
    except struct.error:
        raise CacheError(f"{name} begins behind the end of the file") from None
    start += _HEADER.size
    if magic != _MEMBER_MAGIC or _read(file, start, start + letters) != name.encode():
        raise CacheError(f"another member than {name} is at its place")
    start += letters + extra
    packed = _read(file, start, start + length)
    if method == zipfile.ZIP_STORED:
        return packed[: size + 1]
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    except zlib.error as error:
        raise CacheError(f"{name} cannot be unpacked: {error}") from None


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    """Return bytes of a file from its start to ``end``; fewer if it ends before.

    Threads and forked processes share a file's position, which this leaves alone.
    """
    parts = []
    while start < end and (part := os.pread(file.fileno(), end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


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
    if len(set(map(str.casefold, places))) == len(places):
        return
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
