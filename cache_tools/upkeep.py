"""What carries a cache to another machine: the commands pack and unpack."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import click

from cache_tools.planning import is_needed, needed_by
from cache_tools.selection import Selection
from cache_tools.text import count, print_json, size
from tilekern.cache import PACK_SUFFIX, CacheError, Entry, Record, Store, install_pack, write_pack
from tilekern.cache.trust import read_signatures


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
    matching = [entry for entry in store.entries(selection.where) if selection.matches(entry)]
    for entry in matching:
        if entry.is_folder:
            raise CacheError(f"{entry.problem}; a pack would lack the records that are there")
    if model:
        needed = needed_by(model, {entry.address.target_key for entry in matching if entry.address}, tp)
        matching = [entry for entry in matching if entry.record is None or is_needed(entry, needed)]
    if not any(entry.record for entry in matching):
        raise CacheError(
            f"no record in {store.root} matches, and a pack must hold at least one; `ls` lists what is there"
        )
    written = write_pack(path, _with_blobs(store, matching), _signatures(store, matching))
    return len(written), len(matching) - len(written)


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


def _with_blobs(store: Store, entries: list[Entry]) -> Iterator[tuple[Record, dict[str, bytes]]]:
    for entry in entries:
        if entry.record:
            yield entry.record, {digest: store.read_blob(digest) for digest in entry.record.digests}


def _signatures(store: Store, entries: list[Entry]) -> dict[str, dict[str, bytes]]:
    digests = [hashlib.sha256(_text(entry)).hexdigest() for entry in entries if entry.record]
    return {digest: read_signatures(store.root, digest) for digest in digests}


def _text(entry: Entry) -> bytes:
    """A record as it goes into a pack; raises CacheError, which names the file, where it holds what JSON cannot."""
    assert entry.record is not None
    try:
        return entry.record.to_json().encode()
    except CacheError as error:
        raise CacheError(f"{entry.path}: {error}; remove it or tune it again") from None
