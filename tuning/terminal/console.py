"""Tables of the tuner's command line, and how wide they are."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tilekern.warning import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Where neither a terminal nor COLUMNS says how wide: in a pipe or a file.
PIPE_COLUMNS = 160
# In fewer columns than these, cells that belong together stand one below the other.
STACKED_BELOW = 140


def table_console() -> Console:
    """A console as wide as ``COLUMNS`` says, else as the terminal is; 160 columns in a pipe.

    rich alone takes 80 for a plain terminal (``TERM=dumb``) whatever ``COLUMNS`` says, and in a pipe the width of the
    terminal that the errors go to.
    """
    from rich.console import Console

    columns, lines = shutil.get_terminal_size((PIPE_COLUMNS, 24))
    # Names come from files, and what rich would take for markup in them is their own.
    return Console(width=columns, height=lines, markup=False, emoji=False)


def out(console: Console, line: str) -> None:
    """Print a line that is never wrapped, with nothing in it that a terminal would obey."""
    console.out(printable(line), highlight=False)


def sizes_of(problem: Mapping[str, object]) -> str:
    """A problem's values for a table: numbers and dtypes as they are, flags by their names where they are on."""
    return " ".join(name if value is True else str(value) for name, value in problem.items() if value is not False)


def table_for(
    console: Console,
    title: str,
    columns: Sequence[Sequence[str]],
    rows: Iterable[Sequence[str]],
    right: Collection[str],
    footer: Sequence[str] = (),
) -> Table:
    """A table that a console of 80 columns has room for, too.

    Args:
        console: where it is printed.
        title: its title.
        columns: the columns' names, by what stands in one column where the console is narrow.
        rows: a cell for each name.
        right: the names of columns that are flushed right.
        footer: a cell for each name, or nothing.
    """
    from rich.table import Table

    groups = columns if console.width < STACKED_BELOW else [[name] for name in itertools.chain(*columns)]
    ends = list(itertools.accumulate(len(group) for group in groups))

    def stacked(cells: Sequence[str]) -> list[str]:
        shown = list(map(printable, cells))
        return ["\n".join(shown[end - len(group) : end]) for group, end in zip(groups, ends, strict=True)]

    table = Table(title=printable(title), show_footer=bool(footer))
    names, sums = stacked(list(itertools.chain(*columns))), stacked(footer) if footer else [""] * len(groups)
    for group, name, total in zip(groups, names, sums, strict=True):
        table.add_column(name, total, overflow="fold", justify="right" if group[0] in right else "left")
    for row in rows:
        table.add_row(*stacked(row))
    return table
