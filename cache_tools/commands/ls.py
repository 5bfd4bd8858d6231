"""The command ls: list the records of the cache, or of every layer that a lookup reads."""

from __future__ import annotations

from typing import Any

import click

from tilekern.cache import Entry, Record, Store
from tilekern.cache_tools.shared.installed import is_fresh, is_stale
from tilekern.cache_tools.shared.options import all_layers, as_json, cache_dir, command, with_filters
from tilekern.cache_tools.shared.printing import (
    age,
    count,
    gain_of,
    invariant_of,
    natural,
    predicted_gain_of,
    print_result,
    print_table,
    size,
    time_us_of,
)
from tilekern.cache_tools.shared.selection import Selection, age_s
from tilekern.cache_tools.shared.sources import sources_of
from tilekern.warning import tell


@command
@with_filters()
@all_layers
@click.option("--layer", help="Only of the layer of this name (implies --layers).")
@cache_dir
@as_json
def ls(store: Store, selection: Selection, all_layers: bool, layer: str | None, as_json: bool) -> None:
    """List the records of the cache, or of every layer that a lookup reads.

    Records are grouped by layer, GPU and toolkit, in tables as wide as the terminal or COLUMNS says. GAIN is how many
    times faster than the default config a record is. TIME and GAIN are measured; a predicted one is marked with ~.
    SAME is the time of the kernel of tilekern.invariant() over the fastest's, where the record has one.

    JSON: cache_dir, exists, layers[] {name, path}, records[] {layer, path, kernel, problem, problem_key, target,
    toolkit, provenance, stale, fresh, time_us, gain, predicted_gain, invariant {bits, time_us, price}, size_bytes,
    created, age_s}, unreadable[] {layer, path, problem}; all in docs/cache-json.md.
    """
    sources = sources_of(store, all_layers, layer)
    document: dict[str, Any] = {
        "cache_dir": str(store.root),
        "exists": store.root.is_dir(),
        "layers": [{"name": source.name, "path": str(source.path)} for source in sources],
        "records": [],
        "unreadable": [],
    }
    for source in sources:
        for entry in filter(selection.matches, source.place.entries(selection.where)):
            item = {"layer": source.name, "path": str(entry.path)}
            if entry.record:
                document["records"].append(item | _summary(entry, entry.record))
            else:
                document["unreadable"].append(item | {"problem": entry.problem})
    print_result(document, as_json, lambda: _print(document, selection))


def _summary(entry: Entry, record: Record) -> dict[str, Any]:
    return {
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
        "invariant": invariant_of(record),
        "size_bytes": entry.size_bytes,
        "created": record.created,
        "age_s": round(age_s(entry)),
    }


def _print(document: dict[str, Any], selection: Selection) -> None:
    layers = [layer["name"] for layer in document["layers"]]
    names = ("target", "toolkit", "kernel", "problem_key")
    records = sorted(
        document["records"],
        key=lambda record: (layers.index(record["layer"]), *(natural(record[name]) for name in names)),
    )
    if records:
        grouped = ["TARGET", "TOOLKIT", "LAYER"][: 3 if len(layers) > 1 else 2]
        same = ["SAME"] if any(record["invariant"] for record in records) else []
        header = [*grouped, "KERNEL", "PROBLEM", "PROVENANCE", "TIME", "GAIN", *same, "SIZE", "AGE"]
        rows = [[record[name.lower()] for name in grouped] + _row(record, same) for record in records]
        print_table(header, rows, ("TIME", "GAIN", "SAME", "SIZE", "AGE"), grouped=grouped, below=("PROBLEM",))
    elif not document["unreadable"]:
        root = document["cache_dir"]
        if len(layers) > 1:
            tell(f"no record in {count(len(layers), 'layer')} matches")
        elif not document["exists"]:
            tell(f"there is no cache at {root} yet")
        else:
            tell(f"the cache at {root} is empty" if selection.is_empty else f"no record in {root} matches")
    for item in document["unreadable"]:
        tell(f"unreadable: {item['path']}: {item['problem']}", err=True)


def _row(record: dict[str, Any], same: list[str]) -> list[str]:
    is_measured = record["provenance"] == "measured"
    about, gain = ("", record["gain"]) if is_measured else ("~", record["predicted_gain"])
    mark = " (stale)" if record["stale"] else " (space changed)" if record["fresh"] is False else ""
    return [
        record["kernel"],
        record["problem_key"],
        f"{record['provenance']}{mark}",
        "-" if record["time_us"] is None else f"{about}{record['time_us']:.1f} us",
        "-" if gain is None else f"{about}{gain:.2f}x",
        *(f"{record['invariant']['price']:.2f}x" if record["invariant"] else "-" for _ in same),
        size(record["size_bytes"]),
        age(record["age_s"]),
    ]
