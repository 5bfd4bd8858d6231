"""Filters of the command line, which choose the records that a command works on."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass
from datetime import datetime

from tilekern.cache import PROVENANCES, CacheError, Entry, parse_problem_key
from tilekern.cache_tools.shared.installed import is_stale


@dataclass(frozen=True)
class Selection:
    """Filters that must all hold; None (or False) holds for every record.

    Attributes:
        kernel: the kernel's name.
        target: the target's key, or its arch or name (``sm_90``, ``H200``), in upper or lower case.
        toolkit: the toolkit's key.
        problem: dimensions that a problem must have: ``rows=8192,dtype=bfloat16``.
        provenance: ``measured``, ``predicted`` or ``default``.
        older_than_s: minimum age in seconds.
        stale: whether the kernel's source must have changed since.
    """

    kernel: str | None = None
    target: str | None = None
    toolkit: str | None = None
    problem: str | None = None
    provenance: str | None = None
    older_than_s: float | None = None
    stale: bool = False

    def __post_init__(self) -> None:
        if self.provenance is not None and self.provenance not in PROVENANCES:
            raise CacheError(f"--provenance must be one of {', '.join(PROVENANCES)}, got {self.provenance!r}")
        if self.problem is not None:
            parse_problem_key(self.problem)

    @property
    def is_empty(self) -> bool:
        """Whether no filter was given."""
        return self == Selection()

    def where(self, names: tuple[str, ...]) -> bool:
        """Return whether a folder or file of a cache may hold a chosen record (see :meth:`Store.entries`)."""
        last, name = len(names), names[-1]
        if last == 1:
            return self.target is None or _is_target(name, self.target)
        if last == 2:
            return self.toolkit in (None, name)
        if last == 3:
            return self.kernel in (None, name)
        return self.problem is None or set(self.problem.split(",")) <= set(name.split(","))

    def matches(self, entry: Entry) -> bool:
        """Return whether all filters hold; an unreadable record is judged by its path and age.

        A folder that cannot be listed always matches, since it may hold chosen records.
        """
        if entry.is_folder:
            return True
        address = entry.address
        if address is None and (self.target or self.toolkit or self.kernel or self.problem):
            return False
        return (
            (address is None or all(self.where(address[:last]) for last in range(1, 5)))
            and (self.provenance is None or (entry.record is not None and entry.record.provenance == self.provenance))
            and (self.older_than_s is None or age_s(entry) > self.older_than_s)
            and (not self.stale or (entry.record is not None and is_stale(entry.record) is True))
        )


def age_s(entry: Entry) -> float:
    """Return seconds since the record was made; since the file was written if it is unreadable."""
    made = datetime.fromisoformat(entry.record.created).timestamp() if entry.record else entry.modified
    return seconds_since(made)


def seconds_since(moment: float) -> float:
    """Return the seconds since a moment, given in seconds since 1970; at least 0."""
    return max(0.0, time.time() - moment)


@functools.lru_cache(maxsize=1024)
def _is_target(key: str, wanted: str) -> bool:
    # A key looks like sm_90-h100_80gb_hbm3-132.
    arch, _, rest = key.lower().partition("-")
    # The driver's names are ASCII; other letters must not pass for the separators of one.
    name = re.sub("[^a-z0-9]+", "_", wanted.lower()).strip("_") if wanted.isascii() else ""
    return wanted.lower() in (key.lower(), arch) or (name != "" and name == rest.rpartition("-")[0])
