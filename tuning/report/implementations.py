"""Count how often each implementation of a kernel won its races, and by how much."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilekern.compile.toolchain import backends
from tilekern.tuning.report.rows import Row


@dataclass(frozen=True)
class Standing:
    """One implementation of a kernel, over the problems in which it raced another.

    Attributes:
        kernel: name of the spec.
        implementation: the backend's title, such as ``cuTile``, or the library's name as configs have it.
        raced: the number of problems whose last race timed it and another implementation.
        won: the number of these problems in which it was the fastest.
        ahead: the best other implementation's time over its own, median over the won problems; None without wins.
    """

    kernel: str
    implementation: str
    raced: int
    won: int
    ahead: float | None


def standings(problems: Iterable[Sequence[Row]]) -> list[Standing]:
    """List the implementations of each kernel that has several, in the order of the plan.

    Args:
        problems: the rows, problem by problem.
    """
    raced: dict[tuple[str, str], int] = defaultdict(int)
    ahead: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rows in problems:
        best = _best(rows)
        if len(best) < 2:
            continue
        (first, time_us), (_, second_us), *_ = sorted(best.items(), key=lambda pair: pair[1])
        ahead[rows[0].kernel, first].append(second_us / time_us)
        for implementation in best:
            raced[rows[0].kernel, implementation] += 1
    return [
        Standing(*key, count, len(ahead[key]), statistics.median(ahead[key]) if ahead[key] else None)
        for _, group in itertools.groupby(raced.items(), key=lambda pair: pair[0][0])
        for key, count in sorted(group, key=lambda pair: -len(ahead[pair[0]]))
    ]


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """Return the least time of each implementation in a problem's last race, in microseconds."""
    best: dict[str, float] = {}
    for row in rows:
        if row.measured_us is not None and not row.earlier_race and row.status == "timed":
            asked = row.config.get("implementation")
            name = next((backend.title for backend in backends() if asked in backend.implementations), str(asked))
            best[name] = min(row.measured_us, best.get(name, row.measured_us))
    return best
