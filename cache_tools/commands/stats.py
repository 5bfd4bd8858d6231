"""The command stats: numbers and bytes of records, and what is wrong with how many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tilekern.cache import Entry, Store, read_wanted
from tilekern.cache.places import USER
from tilekern.cache_tools.shared.options import all_layers, as_json, cache_dir, command
from tilekern.cache_tools.shared.sources import sources_of
from tilekern.cache_tools.shared.staleness import is_fresh, is_stale
from tilekern.cache_tools.shared.tables import print_table
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.warning import tell

_GROUPS = ("layer", "kernel", "target", "toolkit", "provenance")


@command
@all_layers
@cache_dir
@as_json
def stats(store: Store, all_layers: bool, as_json: bool) -> None:
    """Count records and bytes.

    JSON: cache_dir, exists, records, bytes, by {layer, kernel, target, toolkit, provenance} {name: {records, bytes}},
    blobs {count, bytes}, orphans {count, bytes}, stale, not_fresh, unknown_source, unreadable, unknown_schema,
    leftovers, wanted; all in docs/cache-json.md.
    """
    seen = _Seen()
    for source in sources_of(store, all_layers):
        for entry in source.entries():
            seen.note(source.name, entry)
    blobs = list(store.blobs())
    orphans = [blob for blob in blobs if blob.sha256 not in seen.referred]
    document = {
        "cache_dir": str(store.root),
        "exists": store.root.is_dir(),
        "records": seen.records,
        "bytes": seen.own_bytes + sum(blob.size_bytes for blob in blobs),
        "by": {group: dict(sorted(totals.items())) for group, totals in seen.by.items()},
        "blobs": {"count": len(blobs), "bytes": sum(blob.size_bytes for blob in blobs)},
        "orphans": {"count": len(orphans), "bytes": sum(blob.size_bytes for blob in orphans)},
        "stale": seen.stale[True],
        "not_fresh": seen.not_fresh,
        "unknown_source": seen.stale[None],
        "unreadable": seen.unreadable,
        "unknown_schema": seen.unknown_schema,
        "leftovers": sum(1 for _ in store.leftovers()),
        "wanted": len(read_wanted(store.root)),
    }
    if as_json:
        print_json(document)
    else:
        _print(store, document)


class _Seen:
    """Counts of records, taken one after the other, so that none is held.

    A blob that two records share counts in each of them, and once in the total. Packs count by their records
    alone: their blobs are compressed and shared.
    """

    def __init__(self) -> None:
        self.records = self.own_bytes = self.unreadable = self.unknown_schema = 0
        self.by: dict[str, dict[str, dict[str, int]]] = {
            group: defaultdict(lambda: {"records": 0, "bytes": 0}) for group in _GROUPS
        }
        self.stale: Counter[bool | None] = Counter()
        self.not_fresh = 0
        self.referred: set[str] = set()

    def note(self, layer: str, entry: Entry) -> None:
        """Count one entry of a layer; the user's alone are ones whose files and references to blobs count."""
        if layer == USER:
            self.own_bytes += entry.file_bytes
            self.referred |= entry.record.digests if entry.record else frozenset()
        if entry.record is None:
            self.unknown_schema += entry.unknown_schema
            self.unreadable += not entry.unknown_schema
            return
        self.records += 1
        stale = is_stale(entry.record)
        self.stale[stale] += 1
        self.not_fresh += stale is False and not is_fresh(entry.record)
        target, toolkit, kernel, _ = entry.record.address
        for group, name in zip(_GROUPS, (layer, kernel, target, toolkit, entry.record.provenance), strict=True):
            self.by[group][name]["records"] += 1
            self.by[group][name]["bytes"] += entry.size_bytes


def _print(store: Store, document: Mapping[str, Any]) -> None:
    if not document["exists"]:
        tell(f"there is no cache at {store.root} yet")
        return
    tell(f"{store.root}: {count(document['records'], 'record')}, {size(document['bytes'])}")
    rows = [
        (group, name, str(total["records"]), size(total["bytes"]))
        for group, totals in document["by"].items()
        for name, total in totals.items()
    ]
    if rows:
        print_table(("BY", "NAME", "RECORDS", "SIZE"), rows, ("RECORDS", "SIZE"))
    for name in ("blobs", "orphans"):
        tell(f"{name}: {document[name]['count']} ({size(document[name]['bytes'])})")
    for name in ("stale", "not_fresh", "unknown_source", "unreadable", "unknown_schema", "leftovers", "wanted"):
        tell(f"{name.replace('_', ' ')}: {document[name]}")
