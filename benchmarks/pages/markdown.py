"""Make parts of the result pages: tables, links to the JSON files, and the first lines of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from benchmarks.environment import NO_GPU
from benchmarks.results import Results

PLOTS = "plots"
# From the pages in docs/results/ to the JSON files.
_TO_JSON = "../../benchmarks/results"


def head(title: str, text: str) -> str:
    """Return the first lines of a page."""
    made = "<!-- Written by `python -m benchmarks report`; do not edit. -->"
    return f"# {title}\n\n{made}\n\n{text.strip()}\n"


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def link(results: Results) -> str:
    """Return a link to the JSON file of results, or the benchmark's name if they have no file."""
    name = results.file.rpartition("/")[2]
    return f"[{name}]({_TO_JSON}/{results.file})" if results.file else results.benchmark


def links(everything: Iterable[Results]) -> str:
    """Return the links to several files, each once."""
    return ", ".join(dict.fromkeys(map(link, everything)))


def plot(name: str, what: str) -> str:
    """Return a line that shows a plot."""
    return f"![{what}]({PLOTS}/{name})\n"


def slug(*parts: str) -> str:
    """Return a file name without ending, of letters, digits, dots and hyphens."""
    return "-".join(re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-") for part in parts)


def by_gpu(everything: Iterable[Results]) -> dict[str, list[Results]]:
    """Return the results of each GPU, in order; omit machines without a GPU."""
    found: dict[str, list[Results]] = {}
    for results in everything:
        if results.run["gpu"] != NO_GPU:
            found.setdefault(results.run["gpu"], []).append(results)
    return found
