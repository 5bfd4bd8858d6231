"""Tables for people, as wide as the terminal.

They are laid out here and not by rich: rich takes most of a second for a thousand rows.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Sequence

from tilekern.warning import printable, tell

# Where neither a terminal nor COLUMNS says how wide: in a pipe or a file.
PIPE_COLUMNS = 120
_GAP = 2


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
        header: the columns' names.
        rows: a text for each column; printed in the order in which they come.
        right: columns that are flushed right.
        grouped: columns whose texts are said once, above the rows that have them; such rows must stand together.
        below: columns of long texts. One that the terminal has no room for stands below its row, broken at commas and
            blanks. A first column's that has no room beside the others stands on a line of its own above them.
    """
    said = [at for at, name in enumerate(header) if name in grouped]
    shown = [at for at, name in enumerate(header) if name not in grouped]
    names = [header[at] for at in shown]
    cells = [[printable(row[at]) for at in shown] for row in rows]
    table = _Table(names, cells, right, below, terminal_columns())
    if not said:
        tell(*table.lines(range(len(rows))))
        return
    for number, (group, found) in enumerate(
        itertools.groupby(range(len(rows)), lambda index: [rows[index][at] for at in said])
    ):
        tell(*[""] * (number > 0), ", ".join(group), *table.lines(found))


def terminal_columns() -> int:
    """How many columns the terminal has, or ``COLUMNS`` says; 120 in a pipe."""
    return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns


def natural(text: str) -> list[str | int]:
    """A key that sorts numbers within texts by their values: ``rows=512`` before ``rows=8192``, ``sm_90`` first."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", text)]


class _Table:
    """Rows of one layout, printed in groups."""

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[str],
        below: Sequence[str],
        columns: int,
    ) -> None:
        self._names, self._rows, self._below, self._columns = names, rows, below, columns
        self._widths = self._fitted(below)
        self._forms = [
            f"{{:{'>' if name in right else '<'}{width}}}"
            for name, width in zip(names, self._widths, strict=True)
            if width
        ]

    def lines(self, indices: Iterator[int] | range) -> Iterator[str]:
        """The header, and these rows with what stands below each."""
        yield from self._line(self._names)
        for index in indices:
            yield from self._line(self._rows[index])

    def _fitted(self, below: Sequence[str]) -> list[int]:
        """The width of each column; 0 where all that it holds stands below the rows."""
        lengths = [[len(row[at]) for row in self._rows] for at in range(len(self._names))]
        whole = [max([len(name), *found]) for name, found in zip(self._names, lengths, strict=True)]
        left = self._columns - _GAP * (len(self._names) - 1)
        left -= sum(width for name, width in zip(self._names, whole, strict=True) if name not in below)
        widths = []
        for at, (name, found) in enumerate(zip(self._names, lengths, strict=True)):
            if name in below:
                fits = [length for length in found if length <= left]
                width = max(len(name), *fits) if fits and len(name) <= left else 0
                left -= width
            elif at == 0 and left < 0:
                width = max([len(name), *(length for length in found if length <= whole[at] + left)])
                left += whole[at] - width
            else:
                width = whole[at]
            widths.append(width)
        return widths

    def _line(self, texts: Sequence[str]) -> Iterator[str]:
        pairs = list(zip(texts, self._widths, strict=True))
        if self._names[0] not in self._below and len(texts[0]) > self._widths[0]:
            yield texts[0]
            pairs[0] = ("", self._widths[0])
        cells = [text if len(text) <= width else "" for text, width in pairs if width]
        yield (" " * _GAP).join(form.format(cell) for form, cell in zip(self._forms, cells, strict=True)).rstrip()
        if texts is not self._names:
            for text, width in pairs:
                if len(text) > width:
                    yield from (f"{' ' * _GAP}{part}" for part in _broken(text, self._columns - _GAP))


def _broken(text: str, columns: int) -> Iterator[str]:
    """A text in lines of at most so many columns, broken behind commas and at blanks; other parts are left whole."""
    line = ""
    for piece in re.findall(r"[^, ]*[, ]*", text):
        if line and len(line) + len(piece.rstrip()) > columns:
            yield line.rstrip()
            line = ""
        line += piece
    if line:
        yield line.rstrip()
