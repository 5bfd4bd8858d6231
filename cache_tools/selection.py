"""Which records a command is about: the filters of the command line."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime

from cache_tools.staleness import is_stale
from tilekern.cache import PROVENANCES, CacheError, Entry

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Selection:
    """Filters that must all hold; one that is None (or False) holds for every record.

    Attributes:
        kernel: the kernel's name.
        target: the target's key, name or arch, upper or lower case.
        toolkit: the toolkit's key.
        provenance: ``measured``, ``predicted`` or ``default``.
        older_than_s: least age in seconds.
        stale: made from another version of the kernel's source than today's.
    """

    kernel: str | None = None
    target: str | None = None
    toolkit: str | None = None
    provenance: str | None = None
    older_than_s: float | None = None
    stale: bool = False

    def __post_init__(self) -> None:
        if self.provenance is not None and self.provenance not in PROVENANCES:
            raise CacheError(f"--provenance must be one of {', '.join(PROVENANCES)}, got {self.provenance!r}")

    @property
    def is_empty(self) -> bool:
        """True where no filter was given."""
        return self == Selection()

    def matches(self, entry: Entry) -> bool:
        """Whether all filters hold; an unreadable record goes by its path and age, and has no provenance."""
        return (
            (self.kernel is None or (entry.address is not None and entry.address.kernel == self.kernel))
            and (self.toolkit is None or (entry.address is not None and entry.address.toolkit_key == self.toolkit))
            and (self.target is None or self.target.lower() in _target_names(entry))
            and (self.provenance is None or (entry.record is not None and entry.record.provenance == self.provenance))
            and (self.older_than_s is None or age_s(entry) > self.older_than_s)
            and (not self.stale or (entry.record is not None and is_stale(entry.record) is True))
        )


def age_s(entry: Entry) -> float:
    """Seconds since the record was made, at least 0; since the file was written where the record is unreadable."""
    made = datetime.fromisoformat(entry.record.created).timestamp() if entry.record else entry.modified
    return max(0.0, time.time() - made)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``30d``, ``12h``, ``15m``.

    Raises:
        CacheError: ``text`` is none.
    """
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if not found:
        raise CacheError(f"--older-than must be a number with one of s, m, h, d, w, such as 30d or 12h, got {text!r}")
    return float(int(found[1]) * _SECONDS[found[2]])


def _target_names(entry: Entry) -> set[str]:
    names = {entry.address.target_key} if entry.address else set()
    if entry.record:
        names |= {entry.record.target["name"], entry.record.target["arch"]}
    return {name.lower() for name in names}
