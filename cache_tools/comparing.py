"""Two caches or packs side by side: the command diff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache_tools.selection import Selection
from cache_tools.sources import source_at
from cache_tools.staleness import is_stale
from cache_tools.text import number, plain, print_json, print_table, time_us_of
from tilekern.cache import Entry, Record, by_preference

_LISTED = ("new", "gone", "faster", "slower", "changed", "stale")
_Found = tuple[Entry, Record]
_Side = dict[tuple[str, ...], _Found]


def compare(before: Path, after: Path, selection: Selection, any_toolkit: bool, as_json: bool) -> None:
    """Print what one cache or pack has more, less, faster or slower than another.

    Args:
        before: A: a cache's folder or a pack.
        after: B.
        selection: which records of both are compared.
        any_toolkit: compare the newest toolkit's record of each problem, instead of those of the same toolkit.
        as_json: whether to print a JSON document.

    Raises:
        CacheError: there is no cache or pack at a path, or the pack is bad.
    """
    unreadable: list[dict[str, str | None]] = []
    a, b = (_side(path, selection, any_toolkit, unreadable) for path in (before, after))
    items = [_compared(a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())]
    document: dict[str, Any] = {"a": str(before), "b": str(after)}
    for name in _LISTED[:-1]:
        document[name] = [item for kind, item in items if kind == name]
    document["stale"] = [item for _, item in items if any(item[side] and item[side]["stale"] for side in "ab")]
    document["same"] = sum(kind == "same" for kind, _ in items)
    document["unreadable"] = unreadable
    if as_json:
        print_json(document)
    else:
        _print(document)


def _side(path: Path, selection: Selection, any_toolkit: bool, unreadable: list[dict[str, str | None]]) -> _Side:
    """The records of one side by what they are compared under."""
    found: _Side = {}
    for entry in source_at(path).entries(selection.where):
        if not selection.matches(entry):
            continue
        if entry.record is None:
            unreadable.append({"path": str(entry.path), "problem": entry.problem})
            continue
        target, toolkit, kernel, problem = entry.record.address
        key = (kernel, problem, target) if any_toolkit else (kernel, problem, target, toolkit)
        if key not in found or _is_newer(toolkit, found[key][1].address.toolkit_key):
            found[key] = (entry, entry.record)
    return found


def _is_newer(toolkit: str, other: str) -> bool:
    return by_preference([toolkit, other], None)[0] == toolkit


def _compared(a: _Found | None, b: _Found | None) -> tuple[str, dict[str, Any]]:
    """How B's record differs from A's, and the line that says so."""
    either = b or a
    assert either is not None
    kind, ratio, because = _difference(a[1], b[1]) if a and b else ("new" if b else "gone", None, "")
    address = either[1].address
    return kind, {
        "kernel": address.kernel,
        "problem_key": address.problem_key,
        "target": address.target_key,
        "toolkit": address.toolkit_key,
        "a": a and _summary(*a),
        "b": b and _summary(*b),
        "ratio": ratio,
        "because": because,
    }


def _difference(a: Record, b: Record) -> tuple[str, float | None, str]:
    """The class, how many times faster B is where both were timed, and what else differs."""
    facts = {
        "toolkit": (a.address.toolkit_key, b.address.toolkit_key),
        "provenance": (a.provenance, b.provenance),
        "config": (a.config, b.config),
        "machine code": (a.digests, b.digests),
        "the kernel's source": (a.source_digest, b.source_digest),
    }
    changed = [name for name, (one, other) in facts.items() if one != other]
    because = f"other {', '.join(changed)}" if changed else ""
    ratio = None
    if a.provenance == b.provenance == "measured":
        a_us, b_us = number(a.measurement, "median_us"), number(b.measurement, "median_us")
        if a_us and b_us:
            ratio = a_us / b_us
            noise_us = (number(a.measurement, "spread_us") or 0.0) + (number(b.measurement, "spread_us") or 0.0)
            if abs(a_us - b_us) > noise_us:
                return "faster" if b_us < a_us else "slower", ratio, because
    return "changed" if changed else "same", ratio, because


def _summary(entry: Entry, record: Record) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "toolkit": record.address.toolkit_key,
        "provenance": record.provenance,
        "time_us": time_us_of(record),
        "spread_us": number(record.measurement, "spread_us"),
        "created": record.created,
        "stale": is_stale(record),
    }


def _print(document: dict[str, Any]) -> None:
    rows = [_row(name, item) for name in _LISTED for item in document[name]]
    if rows:
        print_table(("WHAT", "KERNEL", "PROBLEM", "TARGET", "A", "B", "B IS", "BECAUSE"), rows, ("A", "B", "B IS"))
    for item in document["unreadable"]:
        click.echo(f"unreadable: {item['path']}: {item['problem']}", err=True)
    counts = [f"{len(document[name])} {name}" for name in _LISTED]
    click.echo(f"{document['a']} -> {document['b']}: {', '.join(counts)}, {document['same']} the same")


def _row(what: str, item: dict[str, Any]) -> tuple[str, ...]:
    where = " and ".join(side.upper() for side in "ab" if item[side] and item[side]["stale"])
    because = f"stale in {where}" if what == "stale" else item["because"]
    times = [_time(item[side]) for side in "ab"]
    ratio = "-" if item["ratio"] is None else f"{item['ratio']:.2f}x"
    return what, item["kernel"], item["problem_key"], item["target"], *times, ratio, plain(because)


def _time(side: dict[str, Any] | None) -> str:
    if side is None or side["time_us"] is None:
        return "-"
    spread = "" if side["spread_us"] is None else f" ± {side['spread_us']:.1f}"
    about = "" if side["provenance"] == "measured" else "~"
    return f"{about}{side['time_us']:.1f}{spread} us"
