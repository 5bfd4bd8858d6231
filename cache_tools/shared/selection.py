"""Which records a command is about: the filters of the command line."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass
from datetime import datetime

from tilekern.cache import PROVENANCES, CacheError, Entry, Listed, parse_problem_key
from tilekern.cache_tools.shared.staleness import is_stale


@dataclass(frozen=True)
class Selection:
    """Filters that must all hold; one that is None (or False) holds for every record.

    Attributes:
        kernel: the kernel's name.
        target: the target's key, or the arch or name that stands in it (``sm_90``, ``H200``), upper or lower case.
        toolkit: the toolkit's key.
        problem: dimensions that a problem must have, as in its key: ``rows=8192,dtype=bfloat16``.
        provenance: ``measured``, ``predicted`` or ``default``.
        older_than_s: least age in seconds.
        stale: made from another version of the kernel's source than today's.
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
        """True where no filter was given."""
        return self == Selection()

    def where(self, names: tuple[str, ...]) -> bool:
        """Whether records may be wanted at a place of a cache, as :meth:`tilekern.cache.Store.entries` asks."""
        last, name = len(names), names[-1]
        if last == 1:
            return self.target is None or _is_target(name, self.target)
        if last == 2:
            return self.toolkit in (None, name)
        if last == 3:
            return self.kernel in (None, name)
        return self.problem is None or set(self.problem.split(",")) <= set(name.split(","))

    def matches(self, entry: Entry | Listed) -> bool:
        """Whether all filters hold; an unreadable record goes by its path and age, and has no provenance.

        A folder that :meth:`where` let pass and that cannot be listed may hold what is wanted.
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


def age_s(entry: Entry | Listed) -> float:
    """Seconds since the record was made, at least 0; since the file was written where the record is unreadable."""
    made = datetime.fromisoformat(entry.record.created).timestamp() if entry.record else entry.modified
    return seconds_since(made)


def seconds_since(moment: float) -> float:
    """Seconds since a moment, given in seconds since 1970; at least 0."""
    return max(0.0, time.time() - moment)


@functools.lru_cache(maxsize=1024)
def _is_target(key: str, wanted: str) -> bool:
    """Whether a target's key (``sm_90-h100_80gb_hbm3-132``) is the one wanted, or has the arch or name wanted."""
    arch, _, rest = key.lower().partition("-")
    name = re.sub("[^a-z0-9]+", "_", wanted.lower()).strip("_")
    return wanted.lower() in (key.lower(), arch) or (name != "" and name == rest.rpartition("-")[0])
