"""The command diff: two caches or packs side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from tilekern.cache import Address, Record, by_preference
from tilekern.cache_tools.shared.options import PlaceType, as_json, command, with_filters
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.sources import source_at
from tilekern.cache_tools.shared.staleness import is_fresh, is_stale
from tilekern.cache_tools.shared.tables import natural, print_table
from tilekern.cache_tools.shared.text import number, plain, print_json, time_us_of
from tilekern.warning import tell

_LISTED = ("new", "gone", "faster", "slower", "changed", "stale")


class _Kept(NamedTuple):
    """The fields of a record that are compared and shown; so few that a hundred thousand are no burden."""

    path: str
    address: Address
    provenance: str
    config: str
    digests: frozenset[str]
    source_digest: str
    space_digest: str
    time_us: float | None
    median_us: float | None
    spread_us: float | None
    created: str
    stale: bool | None
    fresh: bool | None


_Side = dict[tuple[str, ...], _Kept]


@command
@click.argument("before", metavar="A", type=PlaceType())
@click.argument("after", metavar="B", type=PlaceType())
@with_filters
@click.option("--any-toolkit", is_flag=True, help="Compare the newest toolkit's record of each problem.")
@as_json
def diff(before: Path, after: Path, any_toolkit: bool, as_json: bool, **filters: Any) -> None:
    """Compare two caches or packs: which records B has more or fewer, and which are faster or slower than in A.

    A time counts as another one where the two differ by more than both their spreads.

    JSON: a, b, new[], gone[], faster[], slower[], changed[], stale[] of records {kernel, problem_key, target,
    toolkit, a, b, ratio, because}, same, unreadable[]; all in docs/cache-json.md.
    """
    selection = Selection(**filters)
    unreadable: list[dict[str, str | None]] = []
    a, b = (_side(path, selection, any_toolkit, unreadable) for path in (before, after))
    document: dict[str, Any] = {"a": str(before), "b": str(after), **{name: [] for name in _LISTED}, "same": 0}
    for key in sorted(a.keys() | b.keys()):
        _note(document, a.get(key), b.get(key))
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
        if key not in found or _is_newer(toolkit, found[key].address.toolkit_key):
            found[key] = _kept_of(str(entry.path), entry.record)
    return found


def _is_newer(toolkit: str, other: str) -> bool:
    return by_preference([toolkit, other], None)[0] == toolkit


def _kept_of(path: str, record: Record) -> _Kept:
    return _Kept(
        path,
        record.address,
        record.provenance,
        json.dumps(record.config, sort_keys=True),
        frozenset(map(sys.intern, record.digests)),
        sys.intern(record.source_digest),
        sys.intern(record.space_digest),
        time_us_of(record),
        number(record.measurement, "median_us"),
        number(record.measurement, "spread_us"),
        record.created,
        is_stale(record),
        is_fresh(record),
    )


def _note(document: dict[str, Any], a: _Kept | None, b: _Kept | None) -> None:
    """Put into the document how B's record differs from A's."""
    kind, ratio, because = _difference(a, b) if a and b else ("new" if b else "gone", None, "")
    item = _item(a, b, ratio, because)
    if kind == "same":
        document["same"] += 1
    else:
        document[kind].append(item)
    if (a and a.stale) or (b and b.stale):
        document["stale"].append(item)


def _item(a: _Kept | None, b: _Kept | None, ratio: float | None, because: str) -> dict[str, Any]:
    either = b or a
    assert either is not None
    address = either.address
    return {
        "kernel": address.kernel,
        "problem_key": address.problem_key,
        "target": address.target_key,
        "toolkit": address.toolkit_key,
        "a": a and _summary(a),
        "b": b and _summary(b),
        "ratio": ratio,
        "because": because,
    }


def _difference(a: _Kept, b: _Kept) -> tuple[str, float | None, str]:
    """The class, how many times faster B is where both were timed, and what else differs."""
    facts = {
        "toolkit": (a.address.toolkit_key, b.address.toolkit_key),
        "provenance": (a.provenance, b.provenance),
        "config": (a.config, b.config),
        "machine code": (a.digests, b.digests),
        "the kernel's source": (a.source_digest, b.source_digest),
        "search space": (a.space_digest == a.source_digest, b.space_digest == b.source_digest),
    }
    changed = [name for name, (one, other) in facts.items() if one != other]
    because = f"other {', '.join(changed)}" if changed else ""
    ratio = None
    if a.provenance == b.provenance == "measured":
        a_us, b_us = a.median_us, b.median_us
        if a_us and b_us:
            ratio = a_us / b_us
            noise_us = (a.spread_us or 0.0) + (b.spread_us or 0.0)
            if abs(a_us - b_us) > noise_us:
                return "faster" if b_us < a_us else "slower", ratio, because
    return "changed" if changed else "same", ratio, because


def _summary(one: _Kept) -> dict[str, Any]:
    return {
        "path": one.path,
        "toolkit": one.address.toolkit_key,
        "provenance": one.provenance,
        "time_us": one.time_us,
        "spread_us": one.spread_us,
        "created": one.created,
        "stale": one.stale,
        "fresh": one.fresh,
    }


def _print(document: dict[str, Any]) -> None:
    rows = [row for name in _LISTED for row in sorted((_row(name, item) for item in document[name]), key=_place)]
    if rows:
        header = ("WHAT", "TARGET", "KERNEL", "PROBLEM", "A", "B", "B IS", "BECAUSE")
        print_table(header, rows, ("A", "B", "B IS"), grouped=("WHAT", "TARGET"), below=("PROBLEM", "BECAUSE"))
    for item in document["unreadable"]:
        tell(f"unreadable: {item['path']}: {item['problem']}", err=True)
    counts = [f"{len(document[name])} {name}" for name in _LISTED]
    tell(f"{document['a']} -> {document['b']}: {', '.join(counts)}, {document['same']} the same")


def _row(what: str, item: dict[str, Any]) -> tuple[str, ...]:
    where = " and ".join(side.upper() for side in "ab" if item[side] and item[side]["stale"])
    because = f"stale in {where}" if what == "stale" else item["because"]
    times = [_time(item[side]) for side in "ab"]
    ratio = "-" if item["ratio"] is None else f"{item['ratio']:.2f}x"
    return what, item["target"], item["kernel"], item["problem_key"], *times, ratio, plain(because)


def _place(row: tuple[str, ...]) -> list[list[str | int]]:
    return [natural(text) for text in row[1:4]]


def _time(side: dict[str, Any] | None) -> str:
    if side is None or side["time_us"] is None:
        return "-"
    spread = "" if side["spread_us"] is None else f" ± {side['spread_us']:.1f}"
    about = "" if side["provenance"] == "measured" else "~"
    return f"{about}{side['time_us']:.1f}{spread} us"
