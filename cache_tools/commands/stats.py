"""The command stats: count records and bytes, and what is wrong with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tilekern.cache import Store, read_wanted
from tilekern.cache.places import USER
from tilekern.cache_tools.shared.installed import is_fresh, is_stale
from tilekern.cache_tools.shared.options import all_layers, as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import count, print_json, print_table, size
from tilekern.cache_tools.shared.sources import sources_of
from tilekern.warning import tell

_GROUPS = ("layer", "kernel", "target", "toolkit", "provenance")
_STATES = ("stale", "not_fresh", "unknown_source", "unreadable", "unknown_schema")


@command
@all_layers
@cache_dir
@as_json
def stats(store: Store, all_layers: bool, as_json: bool) -> None:
    """Count records and bytes.

    A blob that two records share counts in the group of each, and once in the total. Blobs in packs do not count: they
    are compressed and shared.

    JSON: cache_dir, exists, records, bytes, by {layer, kernel, target, toolkit, provenance} {name: {records, bytes}},
    blobs {count, bytes}, orphans {count, bytes}, stale, not_fresh, unknown_source, unreadable, unknown_schema,
    leftovers, wanted; all in docs/cache-json.md.
    """
    by: dict[str, dict[str, dict[str, int]]] = {
        group: defaultdict(lambda: {"records": 0, "bytes": 0}) for group in _GROUPS
    }
    states: Counter[str] = Counter()
    records = own_bytes = 0
    referred: set[str] = set()
    for source in sources_of(store, all_layers):
        for entry in source.place.entries():
            record = entry.record
            if source.name == USER:
                own_bytes += entry.file_bytes
                referred |= record.digests if record else set()
            if record is None:
                states["unknown_schema" if entry.unknown_schema else "unreadable"] += 1
                continue
            records += 1
            stale = is_stale(record)
            if stale is None:
                states["unknown_source"] += 1
            elif stale:
                states["stale"] += 1
            elif not is_fresh(record):
                states["not_fresh"] += 1
            target, toolkit, kernel, _ = record.address
            for group, name in zip(_GROUPS, (source.name, kernel, target, toolkit, record.provenance), strict=True):
                by[group][name]["records"] += 1
                by[group][name]["bytes"] += entry.size_bytes
    blobs = list(store.blobs())
    blob_bytes = sum(blob.size_bytes for blob in blobs)
    orphans = [blob for blob in blobs if blob.sha256 not in referred]
    document = {
        "cache_dir": str(store.root),
        "exists": store.root.is_dir(),
        "records": records,
        "bytes": own_bytes + blob_bytes,
        "by": {group: dict(sorted(totals.items())) for group, totals in by.items()},
        "blobs": {"count": len(blobs), "bytes": blob_bytes},
        "orphans": {"count": len(orphans), "bytes": sum(blob.size_bytes for blob in orphans)},
        **{name: states[name] for name in _STATES},
        "leftovers": sum(1 for _ in store.leftovers()),
        "wanted": len(read_wanted(store.root)),
    }
    if as_json:
        print_json(document)
    elif document["exists"]:
        _print(document)
    else:
        tell(f"there is no cache at {store.root} yet")


def _print(document: Mapping[str, Any]) -> None:
    tell(f"{document['cache_dir']}: {count(document['records'], 'record')}, {size(document['bytes'])}")
    rows = [
        (group, name, str(total["records"]), size(total["bytes"]))
        for group, totals in document["by"].items()
        for name, total in totals.items()
    ]
    if rows:
        print_table(("BY", "NAME", "RECORDS", "SIZE"), rows, ("RECORDS", "SIZE"))
    for name in ("blobs", "orphans"):
        tell(f"{name}: {document[name]['count']} ({size(document[name]['bytes'])})")
    for name in (*_STATES, "leftovers", "wanted"):
        tell(f"{name.replace('_', ' ')}: {document[name]}")
