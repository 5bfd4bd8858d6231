"""Output of the commands: JSON, numbers with units, tables as wide as the terminal, progress bars.

Tables are laid out here because rich takes most of a second for a thousand rows.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from tilekern.cache import Installed, Record
from tilekern.warning import printable, tell

# Width of a table when neither a terminal nor COLUMNS sets one: in a pipe or a file.
PIPE_COLUMNS = 120
_GAP = 2


def print_result(document: dict[str, Any], as_json: bool, text: str | Callable[[], None]) -> None:
    """Print the outcome of a command: one JSON document, or for people a line, or what a function prints."""
    if as_json:
        print_json(document)
    elif isinstance(text, str):
        tell(text)
    else:
        text()


def print_json(document: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(document, indent=1))


def size(size_bytes: float) -> str:
    """Format a number of bytes: ``512 B``, ``34.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def age(seconds: float) -> str:
    """Format an age: ``45s``, ``12m``, ``5h``, ``30d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"


def count(number: int, thing: str) -> str:
    """Format a number with its noun: ``1 record``, ``2 records``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def note_left_out(records: int) -> str:
    """Format the end of a sentence that says how many unreadable records were left out; empty for none."""
    return f"; {count(records, 'unreadable record')} left out" if records else ""


def note_kept(installed: Installed) -> str:
    """Format the end of a sentence that says which records of a cache stayed, and why; empty for none."""
    total = sum(installed.kept.values())
    reasons = ", ".join(f"{records} {reason}" for reason, records in installed.kept.items())
    return f"; {count(total, 'better record')} of the cache stayed: {reasons}" if total else ""


def number(document: dict[str, Any] | None, name: str) -> float | None:
    """Return ``document[name]`` if it is a finite number, else None."""
    value = (document or {}).get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def time_us_of(record: Record) -> float | None:
    """Return how many microseconds a record's winner takes: measured, else predicted, else None."""
    measured = number(record.measurement, "median_us")
    return number(record.prediction, "time_us") if measured is None else measured


def invariant_of(record: Record) -> dict[str, Any] | None:
    """Return the class and time of a record's invariant kernel, and ``price``: that time over the winner's."""
    facts = (record.measurement or {}).get("invariant")
    own, same = number(record.measurement, "median_us"), number(facts if isinstance(facts, dict) else None, "median_us")
    if not isinstance(facts, dict) or not own or same is None:
        return None
    return {"bits": str(facts.get("bits", "")), "time_us": same, "price": same / own}


def gain_of(record: Record) -> float | None:
    """Return how many times faster than the default config the winner was measured, if both were."""
    return _gain(record.measurement, "median_us")


def predicted_gain_of(record: Record) -> float | None:
    """Return how many times faster than the default config the winner was predicted, if both were."""
    return _gain(record.prediction, "time_us")


def _gain(facts: dict[str, Any] | None, name: str) -> float | None:
    own, default = number(facts, name), number(facts, "default_us")
    return default / own if own and default else None


def plain(value: Any) -> str:
    """Format a value on one line, with nothing in it that a terminal would obey."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def natural(text: str) -> list[str | int]:
    """Return a sort key that orders numbers in texts by value: ``rows=512`` before ``rows=8192``."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", text)]


@contextmanager
def progress_bar(label: str, size_bytes: int | None) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of bytes moved since its last call.

    Nothing is shown if standard error is not a terminal, or if the size is unknown.
    """
    if size_bytes is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=size_bytes, label=label, file=sys.stderr) as bar:
        yield bar.update


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    *,
    grouped: Sequence[str] = (),
    below: Sequence[str] = (),
) -> None:
    """Print rows under a header, in columns two spaces apart.

    Args:
        header: names of the columns.
        rows: one text for each column, printed in this order.
        right: names of right-aligned columns.
        grouped: names of columns whose texts are printed once, above all rows that share them. Such rows must be
            adjacent.
        below: names of columns with long texts. A text that is too wide for the terminal is printed below its row,
            broken at commas and spaces. If the first column is too wide, its text is printed above the row.
    """
    group_at = [at for at, name in enumerate(header) if name in grouped]
    shown_at = [at for at, name in enumerate(header) if name not in grouped]
    names = [header[at] for at in shown_at]
    cells = [[printable(row[at]) for at in shown_at] for row in rows]
    columns = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    widths = _fitted_widths(names, cells, below, columns)
    sides = [">" if name in right else "<" for name in names]

    def table_lines(indices: Iterable[int]) -> Iterator[str]:
        for texts in (names, *(cells[index] for index in indices)):
            pairs = list(zip(texts, widths, strict=True))
            if names[0] not in below and len(texts[0]) > widths[0]:
                yield texts[0]
                pairs[0] = ("", widths[0])
            yield (
                (" " * _GAP)
                .join(
                    f"{text if len(text) <= width else '':{side}{width}}"
                    for (text, width), side in zip(pairs, sides, strict=True)
                    if width
                )
                .rstrip()
            )
            if texts is not names:
                for text, width in pairs:
                    if len(text) > width:
                        yield from (f"{' ' * _GAP}{part}" for part in _broken(text, columns - _GAP))

    groups = itertools.groupby(range(len(rows)), lambda index: [rows[index][at] for at in group_at])
    for position, (group, indices) in enumerate(groups):
        title = [*[""] * (position > 0), ", ".join(group)] if group_at else []
        tell(*title, *table_lines(indices))


def _fitted_widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[str], columns: int
) -> list[int]:  # fmt: skip
    """Return the width of each column; 0 for one whose texts are all printed below the rows."""
    lengths = [[len(row[at]) for row in rows] for at in range(len(names))]
    whole = [max([len(name), *of_column]) for name, of_column in zip(names, lengths, strict=True)]
    left = columns - _GAP * (len(names) - 1)
    left -= sum(width for name, width in zip(names, whole, strict=True) if name not in below)
    widths = []
    for at, (name, of_column) in enumerate(zip(names, lengths, strict=True)):
        width = whole[at]
        if name in below:
            fits = [length for length in of_column if length <= left]
            width = max(len(name), *fits) if fits and len(name) <= left else 0
            left -= width
        elif at == 0 and left < 0:
            width = max([len(name), *(length for length in of_column if length <= whole[at] + left)])
            left += whole[at] - width
        widths.append(width)
    return widths


def _broken(text: str, columns: int) -> Iterator[str]:
    """Break a text after commas and at spaces into lines of at most this many columns, if possible."""
    line = ""
    for piece in re.findall(r"[^, ]*[, ]*", text):
        if line and len(line) + len(piece.rstrip()) > columns:
            yield line.rstrip()
            line = ""
        line += piece
    if line:
        yield line.rstrip()
