"""The command clear: delete the records that filters choose."""

from __future__ import annotations

import click

from tilekern.cache import CacheError, Store
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, confirmed, dry_run, with_filters
from tilekern.cache_tools.shared.printing import print_json
from tilekern.cache_tools.shared.removing import ask_to_remove, check_may_ask, plan_removal, print_removed, remove
from tilekern.cache_tools.shared.selection import Selection


@command
@with_filters()
@click.option("--all", "everything", is_flag=True, help="All records.")
@dry_run
@confirmed
@cache_dir
@as_json
def clear(
    store: Store, selection: Selection, everything: bool, dry_run: bool, confirmed: bool, as_json: bool
) -> None:  # fmt: skip
    """Remove records, and the blobs that no record refers to any more.

    Asks first. JSON (needs --yes or --dry-run): cache_dir, dry_run, removed, blobs, bytes, left_alone, kept; all in
    docs/cache-json.md.
    """
    if selection.is_empty != everything:
        raise CacheError(
            "clear needs --all, or a filter: --kernel, --gpu, --toolkit, --problem, --provenance, --older-than, --stale"
        )
    check_may_ask("clear", as_json, confirmed, dry_run)
    if not dry_run:
        store.finish()
    entries = (entry for entry in store.entries(selection.where) if not entry.is_folder)
    matching = [entry.without_bulk() for entry in entries if selection.matches(entry)]
    chosen = [entry for entry in matching if not entry.unknown_schema and not store.is_linked(entry.path)]
    if chosen and not confirmed and not dry_run:
        ask_to_remove(store, len(chosen))
    removed = plan_removal(store, chosen) if dry_run else remove(store, chosen)
    left_alone = len(matching) - len(chosen)
    if as_json:
        counts = {"removed": removed.records, "blobs": removed.blobs, "bytes": removed.size_bytes}
        notes = {"left_alone": left_alone, "kept": removed.kept}
        print_json({"cache_dir": str(store.root), "dry_run": dry_run, **counts, **notes})
    else:
        print_removed(removed, left_alone, dry_run)
