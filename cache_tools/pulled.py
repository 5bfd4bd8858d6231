"""Which packs were put into a cache by a pull: ``<root>/pulled/<sha256 of the pack>.json`` names their records."""

from __future__ import annotations

import json
from pathlib import Path

from cache_tools.shared.contents import Contents
from tilekern.cache import CacheError, Store
from tilekern.cache.files import read_whole, write_whole
from tilekern.cache.keys import blob_path, parse_path
from tilekern.cache.records import LARGEST_RECORD, decode_record, parse_object

FOLDER = "pulled"
_SCHEMA = 1
_LARGEST = 64 * 2**20


def note_pulled(store: Store, pack: Contents) -> None:
    """Write down that the cache has this pack.

    Raises:
        CacheError: the folder cannot be written.
    """
    path = _path(store, pack.sha256)
    try:
        write_whole(path, json.dumps({"schema": _SCHEMA, "records": pack.records}, indent=1).encode())
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror or error}") from None


def was_pulled(store: Store, sha256: str) -> bool:
    """Whether a pack was pulled, and a record with its blobs stands where each of its records was put.

    A record that was tuned anew since counts: the pack would not make it better.
    """
    try:
        noted = parse_object(read_whole(_path(store, sha256), _LARGEST)[0].decode())
        if noted["schema"] != _SCHEMA:
            return False
        return all(_is_whole(store, name) for name in noted["records"])
    except (CacheError, ValueError, LookupError, TypeError):
        return False


def _is_whole(store: Store, name: str) -> bool:
    try:
        address = parse_path(name.split("/"))
        record = decode_record(read_whole(store.root / address.path, LARGEST_RECORD)[0], address)
    except (CacheError, AttributeError):
        return False
    return all((store.root / blob_path(digest)).is_file() for digest in record.digests)


def _path(store: Store, sha256: str) -> Path:
    return store.root / FOLDER / f"{sha256}.json"
