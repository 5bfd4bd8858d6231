"""The command diff: compare two caches or packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tilekern.cache import Entry, Record, by_preference
from tilekern.cache_tools.shared.installed import is_fresh, is_stale
from tilekern.cache_tools.shared.options import PLACE, as_json, command, with_filters
from tilekern.cache_tools.shared.printing import natural, number, plain, print_result, print_table, time_us_of
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.sources import place_at
from tilekern.spec import INVARIANT
from tilekern.warning import tell

_LISTED = ("new", "gone", "faster", "slower", "changed", "stale")


@command
@click.argument("before", metavar="A", type=PLACE)
@click.argument("after", metavar="B", type=PLACE)
@with_filters("kernel", "target", "toolkit", "problem", "provenance")
@click.option("--any-toolkit", is_flag=True, help="Compare the newest toolkit's record of each problem.")
@as_json
def diff(before: Path, after: Path, selection: Selection, any_toolkit: bool, as_json: bool) -> None:
    """Compare two caches or packs: which records only one of them has, and which are faster or slower in B than in A.

    Two times differ if their difference is larger than the sum of both spreads.

    JSON: a, b, new[], gone[], faster[], slower[], changed[], stale[] of records {kernel, problem_key, target,
    toolkit, a, b, ratio, because}, same, unreadable[]; all in docs/cache-json.md.
    """
    unreadable: list[dict[str, str | None]] = []
    a, b = (_records_by_problem(path, selection, any_toolkit, unreadable) for path in (before, after))
    document: dict[str, Any] = {"a": str(before), "b": str(after), **{name: [] for name in _LISTED}, "same": 0}
    for key in sorted(a.keys() | b.keys()):
        kind, item = _compared(a.get(key), b.get(key))
        if kind == "same":
            document["same"] += 1
        else:
            document[kind].append(item)
        if any(item[side] and item[side]["stale"] for side in "ab"):
            document["stale"].append(item)
    document["unreadable"] = unreadable
    print_result(document, as_json, lambda: _print(document))


def _records_by_problem(
    path: Path, selection: Selection, any_toolkit: bool, unreadable: list[dict[str, str | None]]
) -> dict[tuple[str, ...], tuple[Entry, Record]]:
    records: dict[tuple[str, ...], tuple[Entry, Record]] = {}
    for entry in place_at(path).entries(selection.where):
        if not selection.matches(entry):
            continue
        light = entry.without_bulk()
        if light.record is None:
            unreadable.append({"path": str(entry.path), "problem": entry.problem})
            continue
        target, toolkit, kernel, problem = light.record.address
        key = (kernel, problem, target) if any_toolkit else (kernel, problem, target, toolkit)
        other = records[key][1].address.toolkit_key if key in records else toolkit
        if by_preference([toolkit, other], None)[0] == toolkit:
            records[key] = (light, light.record)
    return records


def _compared(a: tuple[Entry, Record] | None, b: tuple[Entry, Record] | None) -> tuple[str, dict[str, Any]]:
    """Return the kind of difference, and its item of the document."""
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
    """Return the kind of difference, how many times faster B was measured, and what else differs."""
    facts = {
        "toolkit": (a.address.toolkit_key, b.address.toolkit_key),
        "provenance": (a.provenance, b.provenance),
        "config": (a.config, b.config),
        "machine code": (a.digests, b.digests),
        "the kernel's source": (a.source_digest, b.source_digest),
        "kernel for tilekern.invariant()": (_invariant_kernel(a), _invariant_kernel(b)),
        "search space": (a.space_digest == a.source_digest, b.space_digest == b.source_digest),
    }
    changed = [name for name, (of_a, of_b) in facts.items() if of_a != of_b]
    because = f"other {', '.join(changed)}" if changed else ""
    ratio = None
    if a.provenance == b.provenance == "measured":
        a_us, b_us = number(a.measurement, "median_us"), number(b.measurement, "median_us")
        if a_us and b_us:
            ratio = a_us / b_us
            noise_us = sum(number(record.measurement, "spread_us") or 0.0 for record in (a, b))
            if abs(a_us - b_us) > noise_us:
                return "faster" if b_us < a_us else "slower", ratio, because
    return "changed" if changed else "same", ratio, because


def _invariant_kernel(record: Record) -> tuple[Any, ...]:
    """Return the config and the class of a record's invariant kernel."""
    facts = (record.measurement or {}).get(INVARIANT) or {}
    return facts.get("config"), facts.get("bits"), facts.get("generic")


def _summary(entry: Entry, record: Record) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "toolkit": record.address.toolkit_key,
        "provenance": record.provenance,
        "time_us": time_us_of(record),
        "spread_us": number(record.measurement, "spread_us"),
        "created": record.created,
        "stale": is_stale(record),
        "fresh": is_fresh(record),
    }


def _print(document: dict[str, Any]) -> None:
    rows = [
        row
        for name in _LISTED
        for row in sorted(
            (_row(name, item) for item in document[name]), key=lambda row: [natural(text) for text in row[1:4]]
        )
    ]
    if rows:
        header = ("WHAT", "TARGET", "KERNEL", "PROBLEM", "A", "B", "B IS", "BECAUSE")
        print_table(header, rows, ("A", "B", "B IS"), grouped=("WHAT", "TARGET"), below=("PROBLEM", "BECAUSE"))
    for item in document["unreadable"]:
        tell(f"unreadable: {item['path']}: {item['problem']}", err=True)
    counts = [f"{len(document[name])} {name}" for name in _LISTED]
    tell(f"{document['a']} -> {document['b']}: {', '.join(counts)}, {document['same']} the same")


def _row(what: str, item: dict[str, Any]) -> tuple[str, ...]:
    stale_in = " and ".join(side.upper() for side in "ab" if item[side] and item[side]["stale"])
    because = f"stale in {stale_in}" if what == "stale" else item["because"]
    times = [_time(item[side]) for side in "ab"]
    ratio = "-" if item["ratio"] is None else f"{item['ratio']:.2f}x"
    return what, item["target"], item["kernel"], item["problem_key"], *times, ratio, plain(because)


def _time(side: dict[str, Any] | None) -> str:
    if side is None or side["time_us"] is None:
        return "-"
    spread = "" if side["spread_us"] is None else f" ± {side['spread_us']:.1f}"
    about = "" if side["provenance"] == "measured" else "~"
    return f"{about}{side['time_us']:.1f}{spread} us"
