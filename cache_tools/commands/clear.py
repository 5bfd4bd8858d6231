"""The command clear: delete the records that are named by filters."""

from __future__ import annotations

from typing import Any

import click

from tilekern.cache import CacheError, Store
from tilekern.cache_tools.shared.options import (
    as_json,
    cache_dir,
    command,
    confirmed,
    dry_run,
    with_age_filters,
    with_filters,
)
from tilekern.cache_tools.shared.removing import ask, kept_of, remove, say, would_go
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.text import count, print_json


@command
@with_filters
@with_age_filters
@click.option("--all", "everything", is_flag=True, help="All records.")
@dry_run
@confirmed
@cache_dir
@as_json
def clear(store: Store, everything: bool, dry_run: bool, confirmed: bool, as_json: bool, **filters: Any) -> None:
    """Remove records, and the blobs that nothing refers to any more.

    Asks first. JSON (needs --yes or --dry-run): cache_dir, dry_run, removed, blobs, bytes, left_alone, kept; all in
    docs/cache-json.md.
    """
    selection = Selection(**filters)
    if selection.is_empty != everything:
        raise CacheError(
            "clear needs --all, or a filter: --kernel, --gpu, --toolkit, --problem, --provenance, --older-than, --stale"
        )
    if as_json and not (confirmed or dry_run):
        raise CacheError("clear --json asks nothing and so needs --yes or --dry-run")
    if not dry_run:
        store.finish()
    listed = (entry for entry in store.entries(selection.where) if not entry.is_folder)
    matching = [kept_of(entry) for entry in listed if selection.matches(entry)]
    chosen = [entry for entry in matching if not entry.unknown_schema and not store.is_linked(entry.path)]
    if chosen and not confirmed and not dry_run:
        ask(f"Remove {count(len(chosen), 'record')} from {store.root}?")
    removed = would_go(store, chosen) if dry_run else remove(store, chosen)
    left_alone = len(matching) - len(chosen)
    if as_json:
        counts = {"removed": removed.records, "blobs": removed.blobs, "bytes": removed.size_bytes}
        noted = {"left_alone": left_alone, "kept": removed.kept}
        print_json({"cache_dir": str(store.root), "dry_run": dry_run, **counts, **noted})
    else:
        say(removed, left_alone, dry_run)
