"""Turn the report's rows into the columns that its page draws: candidates, problems and frontiers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilekern.spec import Value
from tilekern.tuning.report.rows import STATUSES, Row
from tilekern.tuning.terminal import short

Columns = dict[str, Any]
# The kinds of points; a candidate has the first kind that applies.
MARKS = ("winner", "default", "measured", "predicted")
_NUMBERS = (
    "number", "time_us", "measured_us", "spread_us", "samples", "predicted_us", "share_of_roofline",
    "gain_over_default", "registers", "stack_bytes", "shared_bytes", "threads", "resident_blocks",
)  # fmt: skip
_UNKNOWN = float("nan")


def problems_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the rows by problem, the fastest candidate first and those without a time last."""
    grouped = itertools.groupby(rows, key=lambda row: (row.kernel, row.problem))
    return [
        sorted(group, key=lambda row: (row.time_us is None, row.time_us or 0.0, row.number)) for _, group in grouped
    ]


def frontier(rows: Iterable[Row]) -> list[Row]:
    """Return the candidates that no other beats in both registers and time, by registers."""
    found: list[Row] = []
    timed = [row for row in rows if row.registers is not None and row.time_us is not None]
    for row in sorted(timed, key=lambda row: (row.registers, row.time_us)):
        if not found or row.time_us < found[-1].time_us:  # type: ignore[operator]
            found.append(row)
    return found


def candidate_columns(problems: Sequence[Sequence[Row]]) -> Columns:
    """Return a line for each candidate.

    ``problem_id`` is the index of its problem as text, ``rank`` its rank by time, from 1.
    """
    rows = [row for group in problems for row in group]
    columns: Columns = {name: _numbers(getattr(row, name) for row in rows) for name in _NUMBERS}
    spread = np.nan_to_num(columns["spread_us"])
    return columns | {
        "problem_id": [str(at) for at, group in enumerate(problems) for _ in group],
        "rank": np.array([rank for group in problems for rank in range(1, len(group) + 1)], dtype=float),
        "name": [name_of(row) for row in rows],
        "config": [_spaced(row.config) for row in rows],
        "short_config": [text for group in problems for text in _differences(group)],
        "status": [row.status for row in rows],
        "mark": [_mark(row) for row in rows],
        "role": [_roles(row) for row in rows],
        "remark": [
            (row.reason or "") if row.same_as is None else f"same machine code as number {row.same_as}" for row in rows
        ],
        "time_text": [_time_text(row) for row in rows],
        "cost_text": [_cost_text(row) for row in rows],
        "worth_text": [_worth_text(row) for row in rows],
        "low_us": columns["time_us"] - spread,
        "high_us": columns["time_us"] + spread,
    }


def problem_columns(problems: Sequence[Sequence[Row]]) -> Columns:
    """Return a line for each problem, with the figures of its winner if it has one."""
    winners = [next((row for row in group if row.winner), None) for group in problems]
    columns: Columns = {
        name: _numbers(getattr(row, name) if row else None for row in winners)
        for name in ("time_us", "spread_us", "share_of_roofline", "gain_over_default", "gigabytes_per_s", "teraflops")
    }
    counts = [Counter(row.status for row in group) for group in problems]
    return columns | {
        "problem_id": [str(at) for at in range(len(problems))],
        "kernel": [group[0].kernel for group in problems],
        "problem": [_spaced(group[0].problem) for group in problems],
        "name": [name_of(group[0]) for group in problems],
        "winner": [short(row.config) if row else "no winner" for row in winners],
        "provenance": [(row and row.provenance) or "" for row in winners],
        "bound": [group[0].bound or "" for group in problems],
        "time_text": [_time_text(row) if row else "" for row in winners],
        "worth_text": [_worth_text(row) if row else "" for row in winners],
        "candidates": _numbers(len(group) for group in problems),
        "lost": _numbers(count["failed"] + count["wrong"] + count["quarantined"] for count in counts),
        "heading": [_heading(group, count) for group, count in zip(problems, counts, strict=True)],
    }


def frontier_columns(problems: Sequence[Sequence[Row]]) -> Columns:
    """Return the steps of each problem's frontier as lines from (x0, y0) to (x1, y1)."""
    columns: dict[str, list[Any]] = {name: [] for name in ("problem_id", "x0", "y0", "x1", "y1")}
    for at, group in enumerate(problems):
        for left, right in itertools.pairwise(frontier(group)):
            for line in (
                (left.registers, left.time_us, right.registers, left.time_us),
                (right.registers, left.time_us, right.registers, right.time_us),
            ):
                for name, value in zip(columns, (str(at), *line), strict=True):
                    columns[name].append(value)
    return dict(columns)


def name_of(row: Row) -> str:
    """Name the row's problem on one line."""
    return f"{row.kernel} {_spaced(row.problem)}"


def _heading(group: Sequence[Row], count: Mapping[str, int]) -> str:
    states = ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
    hows = {row.provenance for row in group} - {None}
    if hows == {"measured"}:
        how = "times are medians of measurements"
    elif hows:
        how = "nothing was timed here: times are predicted from compile-time facts"
    else:
        how = "no candidate has a time"
    return f"{name_of(group[0])}: {len(group)} candidates ({states}); {how}."


def _numbers(values: Iterable[float | None]) -> Any:
    return np.array([_UNKNOWN if value is None else value for value in values], dtype=float)


def _spaced(point: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={value}" for name, value in point.items())


def _differences(group: Sequence[Row]) -> list[str]:
    """Show each config without the options that all configs of its problem share."""
    names = dict.fromkeys(name for row in group for name in row.config)
    differing = [name for name in names if len({row.config.get(name) for row in group}) > 1]
    return [_spaced({name: row.config[name] for name in differing if name in row.config}) for row in group]


def _roles(row: Row) -> str:
    named = {"winner": row.winner, "default": row.default, "library": row.library}
    named[row.variant] = row.variant != "aligned"
    return ", ".join(name for name, holds in named.items() if holds)


def _mark(row: Row) -> str:
    if row.provenance is None:
        return ""
    return "winner" if row.winner else "default" if row.default else row.provenance


def _time_text(row: Row) -> str:
    if row.time_us is None:
        return row.status
    if row.provenance == "predicted":
        return f"{row.time_us:.2f} µs, predicted"
    expected = f", predicted {row.predicted_us:.2f} µs" if row.predicted_us is not None else ""
    earlier = " in an earlier race" if row.earlier_race else ""
    return f"{row.time_us:.2f} ± {row.spread_us or 0.0:.2f} µs, measured {row.samples} times{earlier}{expected}"


def _cost_text(row: Row) -> str:
    if row.registers is None:
        return "run by a library" if row.library else "not compiled"
    return (
        f"{row.registers} registers, {row.stack_bytes} B of stack, {row.shared_bytes} B of shared memory, "
        f"{row.threads} threads, {row.resident_blocks} blocks on an SM"
    )


def _worth_text(row: Row) -> str:
    share = f"{100 * row.share_of_roofline:.1f} % of the roofline" if row.share_of_roofline is not None else ""
    gain = f"{row.gain_over_default:.3f} x the default" if row.gain_over_default is not None else ""
    return ", ".join(text for text in (share, gain) if text)
