"""What carries a cache to another machine: the commands pack and unpack."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import click

from cache_tools.commands.pack import is_needed, needed_by
from cache_tools.shared.selection import Selection
from cache_tools.shared.text import count, print_json, size
from tilekern.cache import PACK_SUFFIX, CacheError, Entry, Record, Store, install_pack, write_pack
from tilekern.cache.trust.policy import read_signatures


def pack(store: Store, path: Path, selection: Selection, as_json: bool, model: str | None = None, tp: int = 1) -> None:
    """Write the selected records, or of those a model's, into one file; raises as :func:`write_selected` does."""
    written, left_out = write_selected(store, path, selection, model, tp)
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"pack": str(path), "records": written, "bytes": size_bytes, "left_out": left_out})
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    click.echo(f"packed {count(written, 'record')} into {path}, {size(size_bytes)}{note}")


def write_selected(
    store: Store, path: Path, selection: Selection, model: str | None = None, tp: int = 1
) -> tuple[int, int]:
    """Write a pack of the selected records with their blobs and signatures.

    Returns:
        The number of records that went in, and of unreadable ones that were left out.

    Raises:
        CacheError: the file's name is wrong, no record is selected, a record or a blob is bad, a folder that may hold
            selected records cannot be listed, or the file cannot be written.
    """
    if path.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {path.name!r}")
    chosen = _Chosen(store, selection, model, tp)
    return write_pack(path, chosen, chosen.signatures), chosen.left_out


def unpack(store: Store, path: Path, as_json: bool) -> None:
    """Put a pack's records and blobs into the cache.

    Raises:
        CacheError: the pack is bad, in which case nothing was written, or the cache cannot be written.
    """
    installed = install_pack(path, store)
    if as_json:
        print_json({"pack": str(path), "cache_dir": str(store.root), "installed": installed})
    else:
        click.echo(f"unpacked {count(installed, 'record')} into {store.root}")


class _Chosen:
    """The selected records with their blobs, each read when it is asked for.

    ``signatures`` holds those of the records that have come, ``left_out`` counts the unreadable ones.
    """

    def __init__(self, store: Store, selection: Selection, model: str | None, tp: int) -> None:
        self.signatures: dict[str, dict[str, bytes]] = {}
        self.left_out = 0
        self._store, self._selection = store, selection
        # By target, since each is planned for by the tuner.
        self._needed = functools.cache(lambda target_key: needed_by(model, {target_key}, tp)) if model else None

    def __iter__(self) -> Iterator[tuple[Record, dict[str, bytes]]]:
        found = False
        for entry in filter(self._selection.matches, self._store.entries(self._selection.where)):
            if entry.is_folder:
                raise CacheError(f"{entry.problem}; a pack would lack the records that are there")
            if entry.record is None:
                self.left_out += 1
            elif self._is_needed(entry):
                digest = hashlib.sha256(_text(entry)).hexdigest()
                self.signatures[digest] = read_signatures(self._store.root, digest)
                yield entry.record, {sha256: self._store.read_blob(sha256) for sha256 in entry.record.digests}
                found = True
        if not found:
            raise CacheError(
                f"no record in {self._store.root} matches, and a pack must hold at least one; `ls` lists what is there"
            )

    def _is_needed(self, entry: Entry) -> bool:
        if self._needed is None:
            return True
        return entry.address is not None and is_needed(entry, self._needed(entry.address.target_key))


def _text(entry: Entry) -> bytes:
    """A record as it goes into a pack; raises CacheError, which names the file, where it holds what JSON cannot."""
    assert entry.record is not None
    try:
        return entry.record.to_json().encode()
    except CacheError as error:
        raise CacheError(f"{entry.path}: {error}; remove it or tune it again") from None
