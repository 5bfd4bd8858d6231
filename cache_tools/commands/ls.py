"""The command ls: the records of the cache, or of every layer that a lookup reads."""

from __future__ import annotations

from typing import Any

import click

from tilekern.cache import DATED, FRESH, STALE, Listed, Outline, Store
from tilekern.cache_tools.shared.options import all_layers, as_json, cache_dir, command, with_age_filters, with_filters
from tilekern.cache_tools.shared.selection import Selection, age_s
from tilekern.cache_tools.shared.sources import Source, sources_of
from tilekern.cache_tools.shared.staleness import freshness_of, is_fresh, is_stale
from tilekern.cache_tools.shared.tables import natural, print_table
from tilekern.cache_tools.shared.text import age, count, gain_of, predicted_gain_of, print_json, size, time_us_of
from tilekern.warning import tell

_COLUMNS = ("TARGET", "TOOLKIT", "LAYER", "KERNEL", "PROBLEM", "PROVENANCE", "TIME", "GAIN", "SIZE", "AGE")
# What stands beside a provenance.
_MARKS = {FRESH: "", DATED: " (space changed)", STALE: " (stale)", None: ""}


@command
@with_filters
@with_age_filters
@all_layers
@click.option("--layer", help="Only of the layer of this name (implies --layers).")
@cache_dir
@as_json
def ls(store: Store, all_layers: bool, layer: str | None, as_json: bool, **filters: Any) -> None:
    """List the records of the cache, or of every layer that a lookup reads.

    They stand by layer, GPU and toolkit, each as wide as the terminal or COLUMNS says. TIME and GAIN, which is how many
    times faster than the default config, are measured; what is predicted has a ~.

    JSON: cache_dir, exists, layers[] {name, path}, records[] {layer, path, kernel, problem, problem_key, target,
    toolkit, provenance, stale, fresh, time_us, gain, predicted_gain, size_bytes, created, age_s}, unreadable[] {layer,
    path, problem}; all in docs/cache-json.md.
    """
    selection, sources = Selection(**filters), sources_of(store, all_layers, layer)
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
        tell(_nothing(store, selection, len(sources)))
    for _, entry in unreadable:
        tell(f"unreadable: {entry.path}: {entry.problem}", err=True)


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
    print_table(columns, rows, ("TIME", "GAIN", "SIZE", "AGE"), grouped=grouped, below=("PROBLEM",))


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
        "PROVENANCE": f"{record.provenance}{_MARKS[freshness_of(record)]}",
        "TIME": "-" if time_us is None else f"{about}{time_us:.1f} us",
        "GAIN": "-" if gain is None else f"{about}{gain:.2f}x",
        "SIZE": size(entry.size_bytes),
        "AGE": age(age_s(entry)),
    }
