"""Lists of revoked records, which are not loaded any more although they were signed.

A list is a file ``*.revoked`` beside the trust roots: a line of JSON with the sha256 of each record's bytes, and a line
with a public key and its signature of the first line. Only lists of trust roots count, but for records of any signer.
Signatures have no date, so only a list can take back an old record of a good signer.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tilekern.cache.errors import CacheError, Corrupt, Missing
from tilekern.cache.files import read_whole, write_whole
from tilekern.cache.keys import check_digest
from tilekern.cache.records import parse_object
from tilekern.cache.trust.exposure import require_unshared_up
from tilekern.cache.trust.signing import SigningKey, is_signed
from tilekern.warning import warn_once

REVOKED_SUFFIX = ".revoked"
_PURPOSE = b"tilekern revoked records 1\n"
_SCHEMA = 1
# Room for sixty thousand records.
_LARGEST_LIST = 2**22
_SIGNER = re.compile(rb"([0-9a-f]{64}) ([0-9a-f]{128}\n)")


def revoked_beside(folders: Iterable[Path], public_keys: Callable[[], Collection[str]]) -> frozenset[str]:
    """Return the sha256 of the records that the lists in some folders revoke.

    A list of another key has no effect and gives one warning.

    Args:
        folders: the folders of trust roots.
        public_keys: returns the trust roots' public keys; called only if there is a list.

    Raises:
        Untrusted: others can change a list or put another in its place.
        CacheError: a list is damaged or cannot be read, or checking it needs ``cryptography``.
    """
    revoked: set[str] = set()
    for folder in dict.fromkeys(folders):
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(REVOKED_SUFFIX))
        except OSError:
            continue
        for name in names:
            key, records = read_revoked(folder / name)
            if key in public_keys():
                revoked |= records
            else:
                warn_once(f"{folder / name} revokes nothing: the key that signed it, {key[:16]}, is not a trust root")
    return frozenset(revoked)


def read_revoked(path: Path) -> tuple[str, frozenset[str]]:
    """Return the public key that signed a list, and the sha256 of the records on it.

    Raises:
        Missing: there is no such file.
        Untrusted: others can change it or put another in its place.
        CacheError: it is damaged or cannot be read, or checking it needs ``cryptography``.
    """
    data, _ = read_whole(path, _LARGEST_LIST)
    require_unshared_up(path)
    try:
        return _parsed(data)
    except Corrupt as error:
        raise Corrupt(f"{path} is not a list of revoked records as `revoke` writes it: {error}") from None


@functools.lru_cache(maxsize=8)  # a lookup under `signed` reads the lists again for each record
def _parsed(data: bytes) -> tuple[str, frozenset[str]]:
    line, _, ending = data.partition(b"\n")
    signer = _SIGNER.fullmatch(ending)
    if signer is None or not is_signed(signer[1].decode(), line, signer[2], _PURPOSE):
        raise Corrupt("its second line is not a key and that key's signature of the first")
    document = parse_object(line)
    if document.get("schema") != _SCHEMA or not isinstance(document.get("records"), list):
        raise Corrupt(f"its first line must have schema {_SCHEMA} and records")
    try:
        return signer[1].decode(), frozenset(check_digest("a record's sha256", one) for one in document["records"])
    except CacheError as error:
        raise Corrupt(str(error)) from None


def write_revoked(path: Path, records: Collection[str], key: SigningKey) -> frozenset[str]:
    """Add records, by their sha256, to a list ``*.revoked`` and sign it; return all records on it.

    Raises:
        CacheError: the file's name is wrong, it is not a list of this key, it would be too long, or cannot be written.
    """
    if path.suffix != REVOKED_SUFFIX:
        raise CacheError(f"a list of revoked records must end in {REVOKED_SUFFIX}, got {path.name!r}")
    try:
        signer, before = read_revoked(path)
    except Missing:
        signer, before = key.public_key, frozenset()
    if signer != key.public_key:
        raise CacheError(f"{path} is the list of another key, {signer[:16]}; give another name")
    together = before | {check_digest("a record's sha256", one) for one in records}
    line = json.dumps({"schema": _SCHEMA, "records": sorted(together)}).encode()
    data = line + f"\n{key.public_key} ".encode() + key.sign(line, _PURPOSE)
    if len(data) > _LARGEST_LIST:
        raise CacheError(f"{path} would have {len(data)} bytes, and may have {_LARGEST_LIST}; begin another list")
    try:
        write_whole(path, data)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return together
