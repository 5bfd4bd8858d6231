"""What is in a cache: the commands ls, stats and wanted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import click

from cache_tools.shared.selection import Selection, age_s
from cache_tools.shared.sources import Source, layers_of_a_lookup, user_cache
from cache_tools.shared.staleness import is_fresh, is_stale, standing_of
from cache_tools.shared.tables import natural, print_table
from cache_tools.shared.text import age, count, gain_of, plain, predicted_gain_of, print_json, size, time_us_of
from tilekern.cache import (
    DATED,
    FRESH,
    STALE,
    CacheError,
    Entry,
    Listed,
    Outline,
    Store,
    clear_wanted,
    problem_key,
    read_misses,
    read_wanted,
    wanted_name,
)
from tilekern.cache.places import USER

_COLUMNS = ("TARGET", "TOOLKIT", "LAYER", "KERNEL", "PROBLEM", "PROVENANCE", "TIME", "GAIN", "SIZE", "AGE")
_RIGHT = ("TIME", "GAIN", "SIZE", "AGE", "RECORDS", "RUNS")
# What stands beside a provenance.
_MARKS = {FRESH: "", DATED: " (space changed)", STALE: " (stale)", None: ""}
_GROUPS = ("layer", "kernel", "target", "toolkit", "provenance")


def list_records(store: Store, selection: Selection, all_layers: bool, layer: str | None, as_json: bool) -> None:
    """Print the records of a cache or of all layers of a lookup, by layer, target and toolkit.

    Raises:
        CacheError: there is no layer of that name.
    """
    sources = _sources(store, all_layers, layer)
    entries = [(s, entry) for s in sources for entry in s.outlines(selection.where) if selection.matches(entry)]
    records = [(source, entry, entry.record) for source, entry in entries if entry.record]
    unreadable = [(source, entry) for source, entry in entries if not entry.record]
    if as_json:
        print_json(
            {
                "cache_dir": str(store.root),
                "exists": store.root.is_dir(),
                "layers": [{"name": source.name, "path": str(source.path)} for source in sources],
                "records": [_summary(*found) for found in records],
                "unreadable": [
                    {"layer": source.name, "path": str(entry.path), "problem": entry.problem}
                    for source, entry in unreadable
                ],
            }
        )
        return
    if records:
        _print_records(records, several=len(sources) > 1)
    elif not unreadable:
        click.echo(_nothing(store, selection, len(sources)))
    for _, entry in unreadable:
        click.echo(f"unreadable: {entry.path}: {entry.problem}", err=True)


class _Seen:
    """What was counted of records, one after the other, so that none is held."""

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


def print_stats(store: Store, all_layers: bool, as_json: bool) -> None:
    """Print counts and bytes by layer, kernel, target, toolkit and provenance, and what is wrong.

    A blob that two records share counts in each of them, and once in the total. What packs hold counts by its records
    alone: their blobs are compressed and shared.
    """
    seen = _Seen()
    for source in _sources(store, all_layers, None):
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
        _print_stats(store, document)


def print_wanted(store: Store, clear: bool, as_json: bool) -> None:
    """Print the wanted list with how often each problem ran untuned, and empty it where ``clear`` says so."""
    runs = read_misses(store.root)
    wanted = [
        {**item, "runs": runs.get(wanted_name(item["kernel"], item["problem"], item["target"]), 0)}
        for item in read_wanted(store.root)
    ]
    cleared = clear_wanted(store.root) if clear else 0
    if as_json:
        print_json({"cache_dir": str(store.root), "wanted": wanted, "cleared": cleared})
        return
    if wanted:
        rows = [
            (
                plain(item["target"].get("key", "")),
                item["kernel"],
                problem_key(item["problem"]),
                str(item["runs"]),
                plain(item["reason"]),
            )
            for item in wanted
        ]
        rows.sort(key=lambda row: [natural(text) for text in row])
        header = ("TARGET", "KERNEL", "PROBLEM", "RUNS", "REASON")
        print_table(header, rows, _RIGHT, grouped=("TARGET",), below=("PROBLEM", "REASON"))
    else:
        click.echo(f"nothing is wanted in {store.root}")
    if clear:
        click.echo(f"removed {count(cleared, 'wanted problem')}")


def _sources(store: Store, all_layers: bool, layer: str | None) -> list[Source]:
    if not all_layers and layer is None:
        return [user_cache(store)]
    sources = layers_of_a_lookup(store)
    chosen = [source for source in sources if layer in (None, source.name)]
    if not chosen:
        raise CacheError(f"there is no layer {layer!r}; a lookup reads {', '.join(source.name for source in sources)}")
    return chosen


def _nothing(store: Store, selection: Selection, sources: int) -> str:
    if sources > 1:
        return f"no record in {count(sources, 'layer')} matches"
    if not store.root.is_dir():
        return f"there is no cache at {store.root} yet"
    return f"the cache at {store.root} is empty" if selection.is_empty else f"no record in {store.root} matches"


def _summary(source: Source, entry: Listed, record: Outline) -> dict[str, Any]:
    return {
        "layer": source.name,
        "path": str(entry.path),
        "kernel": record.address.kernel,
        "problem": record.problem,
        "problem_key": record.address.problem_key,
        "target": record.address.target_key,
        "toolkit": record.address.toolkit_key,
        "provenance": record.provenance,
        "stale": is_stale(record),
        "fresh": is_fresh(record),
        "time_us": time_us_of(record),
        "gain": gain_of(record),
        "predicted_gain": predicted_gain_of(record),
        "size_bytes": entry.size_bytes,
        "created": record.created,
        "age_s": round(age_s(entry)),
    }


def _print_records(found: list[tuple[Source, Listed, Outline]], *, several: bool) -> None:
    layers = {source.name: at for at, source in enumerate(dict.fromkeys(source for source, _, _ in found))}
    found.sort(key=lambda one: (layers[one[0].name], *map(natural, one[2].address)))
    grouped = ("TARGET", "TOOLKIT", "LAYER") if several else ("TARGET", "TOOLKIT")
    columns = [name for name in _COLUMNS if several or name != "LAYER"]
    rows = [[cells[name] for name in columns] for one in found for cells in [_row(*one)]]
    print_table(columns, rows, _RIGHT, grouped=grouped, below=("PROBLEM",))


def _row(source: Source, entry: Listed, record: Outline) -> dict[str, str]:
    """A record's cells by column."""
    time_us, gain = time_us_of(record), gain_of(record) if record.measurement else predicted_gain_of(record)
    about = "" if record.measurement else "~"
    return {
        "TARGET": record.address.target_key,
        "TOOLKIT": record.address.toolkit_key,
        "LAYER": source.name,
        "KERNEL": record.address.kernel,
        "PROBLEM": record.address.problem_key,
        "PROVENANCE": f"{record.provenance}{_MARKS[standing_of(record)]}",
        "TIME": "-" if time_us is None else f"{about}{time_us:.1f} us",
        "GAIN": "-" if gain is None else f"{about}{gain:.2f}x",
        "SIZE": size(entry.size_bytes),
        "AGE": age(age_s(entry)),
    }


def _print_stats(store: Store, document: Mapping[str, Any]) -> None:
    if not document["exists"]:
        click.echo(f"there is no cache at {store.root} yet")
        return
    click.echo(f"{store.root}: {count(document['records'], 'record')}, {size(document['bytes'])}")
    rows = [
        (group, name, str(total["records"]), size(total["bytes"]))
        for group, totals in document["by"].items()
        for name, total in totals.items()
    ]
    if rows:
        print_table(("BY", "NAME", "RECORDS", "SIZE"), rows, _RIGHT)
    for name in ("blobs", "orphans"):
        click.echo(f"{name}: {document[name]['count']} ({size(document[name]['bytes'])})")
    for name in ("stale", "not_fresh", "unknown_source", "unreadable", "unknown_schema", "leftovers", "wanted"):
        click.echo(f"{name.replace('_', ' ')}: {document[name]}")
