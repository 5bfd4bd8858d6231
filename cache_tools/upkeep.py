"""What changes a cache or carries it: the commands clear, pack and unpack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from cache_tools.selection import Selection
from cache_tools.text import count, print_json, size
from tilekern.cache import PACK_SUFFIX, CacheError, Entry, Record, Store, install_pack, write_pack


def clear(store: Store, selection: Selection, everything: bool, confirmed: bool, as_json: bool) -> None:
    """Delete the selected records and then the blobs that nothing refers to any more.

    Records of an unknown schema are left alone.

    Raises:
        CacheError: nothing was selected, the question was not answered with yes, or a file cannot be deleted.
    """
    if selection.is_empty != everything:
        raise CacheError(
            "clear needs --all, or a filter: --kernel, --target, --toolkit, --provenance, --older-than, --stale"
        )
    if as_json and not confirmed:
        raise CacheError("clear --json asks nothing and so needs --yes")
    matching = [entry for entry in store.entries() if selection.matches(entry)]
    chosen = [entry for entry in matching if not entry.unknown_schema]
    if chosen and not confirmed:
        _ask(f"Remove {count(len(chosen), 'record')} from {store.root}?")
    record_bytes = sum(entry.path.stat().st_size for entry in chosen)
    garbage = store.collect_garbage(store.remove(chosen))
    left_alone = len(matching) - len(chosen)
    freed = record_bytes + garbage.size_bytes
    if as_json:
        removed = {"removed": len(chosen), "blobs": garbage.blobs, "bytes": freed}
        print_json({"cache_dir": str(store.root), **removed, "left_alone": left_alone, "kept": garbage.kept})
        return
    click.echo(f"removed {count(len(chosen), 'record')} and {count(garbage.blobs, 'blob')}, {size(freed)} freed")
    if left_alone:
        click.echo(f"{count(left_alone, 'record')} of another version of tilekern left alone")
    if garbage.kept:
        click.echo(garbage.kept)


def pack(store: Store, path: Path, selection: Selection, as_json: bool) -> None:
    """Write the selected records and their blobs into one file; raises as :func:`write_selected` does."""
    written, left_out = write_selected(store, path, selection)
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"pack": str(path), "records": written, "bytes": size_bytes, "left_out": left_out})
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    click.echo(f"packed {count(written, 'record')} into {path}, {size(size_bytes)}{note}")


def write_selected(store: Store, path: Path, selection: Selection) -> tuple[int, int]:
    """Write a pack of the selected records; the number that went in, and of unreadable ones that were left out.

    Raises:
        CacheError: the file's name is wrong, no record is selected, a blob is bad, or the file cannot be written.
    """
    if path.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {path.name!r}")
    matching = [entry for entry in store.entries() if selection.matches(entry)]
    if not any(entry.record for entry in matching):
        raise CacheError(
            f"no record in {store.root} matches, and a pack must hold at least one; `ls` lists what is there"
        )
    written = write_pack(path, _with_blobs(store, matching))
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


def _ask(question: str) -> None:
    try:
        confirmed = click.confirm(question)
    except click.Abort:
        confirmed = False
    if not confirmed:
        raise CacheError("nothing was removed; answer yes, or pass --yes")
