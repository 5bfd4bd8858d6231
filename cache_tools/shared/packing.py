"""A pack of the records of a cache that are chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tilekern.cache import PACK_SUFFIX, CacheError, Entry, Record, Store, write_pack
from tilekern.cache.trust.policy import read_signatures
from tilekern.cache_tools.shared.selection import Selection


def write_selected(
    store: Store, path: Path, selection: Selection, is_needed: Callable[[Record], bool] = lambda _: True
) -> tuple[int, int]:
    """Write a pack of the selected records that are needed, with their blobs and signatures.

    Returns:
        The number of records that went in, and of unreadable ones that were left out.

    Raises:
        CacheError: the file's name is wrong, no record is selected, a record or a blob is bad, a folder that may hold
            selected records cannot be listed, or the file cannot be written.
    """
    if path.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {path.name!r}")
    chosen = _Chosen(store, selection, is_needed)
    return write_pack(path, chosen, chosen.signatures), chosen.left_out


class _Chosen:
    """The selected records with their blobs, each read when it is asked for.

    ``signatures`` holds those of the records that have come, ``left_out`` counts the unreadable ones.
    """

    def __init__(self, store: Store, selection: Selection, is_needed: Callable[[Record], bool]) -> None:
        self.signatures: dict[str, dict[str, bytes]] = {}
        self.left_out = 0
        self._store, self._selection, self._is_needed = store, selection, is_needed

    def __iter__(self) -> Iterator[tuple[Record, dict[str, bytes]]]:
        found = False
        for entry in filter(self._selection.matches, self._store.entries(self._selection.where)):
            if entry.is_folder:
                raise CacheError(f"{entry.problem}; its records would be missing from the pack")
            if entry.record is None:
                self.left_out += 1
            elif self._is_needed(entry.record):
                digest = hashlib.sha256(_text(entry)).hexdigest()
                self.signatures[digest] = read_signatures(self._store.root, digest)
                yield entry.record, {sha256: self._store.read_blob(sha256) for sha256 in entry.record.digests}
                found = True
        if not found:
            raise CacheError(
                f"no record in {self._store.root} matches, and a pack must hold at least one; `ls` lists what is there"
            )


def _text(entry: Entry) -> bytes:
    """A record as it goes into a pack; raises CacheError, which names the file, where it holds what JSON cannot."""
    assert entry.record is not None
    try:
        return entry.record.to_json().encode()
    except CacheError as error:
        raise CacheError(f"{entry.path}: {error}; remove it or tune it again") from None
