"""What is in a cache: the commands ls, show, stats and wanted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import click

from cache_tools.selection import Selection, age_s
from cache_tools.text import age, count, number, print_json, print_table, size
from tilekern.cache import CacheError, Entry, Record, Store, clear_wanted, parse_problem_key, problem_key, read_wanted

_COLUMNS = ("KERNEL", "PROBLEM", "TARGET", "TOOLKIT", "PROVENANCE", "TIME", "GAIN", "SIZE", "AGE")
_RIGHT = ("TIME", "GAIN", "SIZE", "AGE", "RECORDS")
_GROUPS = ("kernel", "target", "toolkit", "provenance")


def list_records(store: Store, selection: Selection, as_json: bool) -> None:
    """Print the records of a cache, one line each."""
    entries = [entry for entry in store.entries() if selection.matches(entry)]
    records = [(entry, entry.record) for entry in entries if entry.record]
    unreadable = [entry for entry in entries if not entry.record]
    if as_json:
        print_json(
            {
                "cache_dir": str(store.root),
                "exists": store.root.is_dir(),
                "records": [_summary(entry, record) for entry, record in records],
                "unreadable": [{"path": str(entry.path), "problem": entry.problem} for entry in unreadable],
            }
        )
        return
    if records:
        print_table(_COLUMNS, [_row(entry, record) for entry, record in records], _RIGHT)
    elif not unreadable:
        click.echo(_nothing(store, selection))
    for entry in unreadable:
        click.echo(f"unreadable: {entry.path}: {entry.problem}", err=True)


def show_record(store: Store, kernel: str, key: str, selection: Selection, as_json: bool) -> None:
    """Print one record in full.

    Raises:
        CacheError: no record or more than one matches, or the one that does is unreadable.
    """
    parse_problem_key(key)
    if not store.root.is_dir():
        raise CacheError(f"there is no cache at {store.root}; --cache-dir or TILEKERN_CACHE_DIR says where it is")
    found = [e for e in store.entries() if e.address and e.address[2:] == (kernel, key) and selection.matches(e)]
    if not found:
        raise CacheError(f"there is no record of {kernel} {key} in {store.root}; `ls` lists what is there")
    if len(found) > 1:
        places = ", ".join(f"{e.address.target_key} {e.address.toolkit_key}" for e in found if e.address)
        raise CacheError(f"{len(found)} records match, choose one by --target and --toolkit: {places}")
    entry = found[0]
    if entry.record is None:
        raise CacheError(f"{entry.path} is unreadable: {entry.problem}")
    if as_json:
        print_json({"path": str(entry.path), "size_bytes": entry.size_bytes, "record": asdict(entry.record)})
    else:
        _print_record(entry, entry.record)


def print_stats(store: Store, as_json: bool) -> None:
    """Print counts and bytes by kernel, target, toolkit and provenance, and what is wrong.

    A blob that two records share counts in each of them, and once in the total.
    """
    entries = list(store.entries())
    records = [(entry, entry.record) for entry in entries if entry.record]
    blobs = list(store.blobs())
    referred = frozenset().union(*(record.digests for _, record in records))
    orphans = [blob for blob in blobs if blob.sha256 not in referred]
    document = {
        "cache_dir": str(store.root),
        "exists": store.root.is_dir(),
        "records": len(records),
        "bytes": sum(entry.path.stat().st_size for entry in entries) + sum(blob.size_bytes for blob in blobs),
        "by": {group: _grouped(records, group) for group in _GROUPS},
        "blobs": {"count": len(blobs), "bytes": sum(blob.size_bytes for blob in blobs)},
        "orphans": {"count": len(orphans), "bytes": sum(blob.size_bytes for blob in orphans)},
        "unreadable": sum(entry.problem is not None and not entry.unknown_schema for entry in entries),
        "unknown_schema": sum(entry.unknown_schema for entry in entries),
        "leftovers": sum(1 for _ in store.leftovers()),
        "wanted": len(read_wanted(store.root)),
    }
    if as_json:
        print_json(document)
    else:
        _print_stats(store, document)


def print_wanted(store: Store, clear: bool, as_json: bool) -> None:
    """Print the wanted list, and empty it where ``clear`` says so."""
    wanted = read_wanted(store.root)
    cleared = clear_wanted(store.root) if clear else 0
    if as_json:
        print_json({"cache_dir": str(store.root), "wanted": wanted, "cleared": cleared})
        return
    if wanted:
        rows = [
            (
                item["kernel"],
                problem_key(item["problem"]),
                _plain(item["target"].get("key", "")),
                _plain(item["reason"]),
            )
            for item in wanted
        ]
        print_table(("KERNEL", "PROBLEM", "TARGET", "REASON"), rows)
    else:
        click.echo(f"nothing is wanted in {store.root}")
    if clear:
        click.echo(f"removed {count(cleared, 'wanted problem')}")


def _nothing(store: Store, selection: Selection) -> str:
    if not store.root.is_dir():
        return f"there is no cache at {store.root} yet"
    return f"the cache at {store.root} is empty" if selection.is_empty else f"no record in {store.root} matches"


def _summary(entry: Entry, record: Record) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "kernel": record.kernel,
        "problem": record.problem,
        "problem_key": record.address.problem_key,
        "target": record.target["key"],
        "toolkit": record.toolkit["key"],
        "provenance": record.provenance,
        "time_us": _time_us(record),
        "gain": _gain(record),
        "size_bytes": entry.size_bytes,
        "created": record.created,
        "age_s": round(age_s(entry)),
    }


def _row(entry: Entry, record: Record) -> tuple[str, ...]:
    time_us, gain = _time_us(record), _gain(record)
    about = "" if record.measurement else "~"
    return (
        record.kernel,
        record.address.problem_key,
        record.address.target_key,
        record.address.toolkit_key,
        record.provenance,
        "-" if time_us is None else f"{about}{time_us:.1f} us",
        "-" if gain is None else f"{gain:.2f}x",
        size(entry.size_bytes),
        age(age_s(entry)),
    )


def _time_us(record: Record) -> float | None:
    measured = number(record.measurement, "median_us")
    return number(record.prediction, "time_us") if measured is None else measured


def _gain(record: Record) -> float | None:
    """How many times faster than the default config, where both were timed."""
    median, default = number(record.measurement, "median_us"), number(record.measurement, "default_us")
    return default / median if median and default else None


def _grouped(records: Iterable[tuple[Entry, Record]], group: str) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = defaultdict(lambda: {"records": 0, "bytes": 0})
    for entry, record in records:
        value = getattr(record, group)
        total = totals[value["key"] if isinstance(value, dict) else value]
        total["records"] += 1
        total["bytes"] += entry.size_bytes
    return dict(sorted(totals.items()))


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
    for name in ("unreadable", "unknown_schema", "leftovers", "wanted"):
        click.echo(f"{name.replace('_', ' ')}: {document[name]}")


def _print_record(entry: Entry, record: Record) -> None:
    click.echo(f"{record.kernel} {record.address.problem_key}")
    for name in ("module", "source_digest", "provenance", "candidates", "failed", "created", "created_by"):
        click.echo(f"{name.replace('_', ' ')}: {_plain(getattr(record, name))}")
    click.echo(f"file: {entry.path}")
    for name in ("target", "toolkit", "config", "measurement", "prediction", "check"):
        _print_section(name, getattr(record, name))
    click.echo("runners-up:" if record.runners_up else "runners-up: none")
    for place, runner_up in enumerate(record.runners_up, 2):
        click.echo(f"  {place}. {json.dumps(runner_up)}")
    for variant, artifact in record.artifacts.items():
        facts = {"sha256": artifact.sha256, "size": size(artifact.size), "symbol": artifact.symbol}
        _print_section(f"artifact {variant}", {**facts, **artifact.resources})


def _print_section(name: str, values: Mapping[str, Any] | None) -> None:
    click.echo(f"{name}:" if values else f"{name}: none")
    for key, value in (values or {}).items():
        click.echo(f"  {_plain(key)}: {_plain(value)}")


def _plain(value: Any) -> str:
    """A value on one line, with nothing in it that a terminal would obey."""
    if isinstance(value, str):
        return value if value.isprintable() else json.dumps(value)
    return json.dumps(value)
