"""Standing of a record beside today's source of its kernel: may it be used, and is it still known to be the best."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from tilekern.cache.records import WITHOUT_SPACE

# What a record is worth today: its winner is the best known; it runs as it did, and is not known to be the best, since
# the space has changed; it is never used, since another source made it.
Standing = Literal["fresh", "dated", "stale"]
FRESH, DATED, STALE = get_args(Standing)
NOT_FRESH = "not known to be the best: the space has changed since"


class Made(Protocol):
    """The source that a record was made from, told by a record or what is kept of one."""

    @property
    def schema(self) -> int:
        """The form of its text."""
        ...

    @property
    def source_digest(self) -> str:
        """The digest of what makes its artifacts valid."""
        ...

    @property
    def space_digest(self) -> str | None:
        """The digest of what made its winner the best."""
        ...


class Source(Protocol):
    """The digests of a kernel's source of today, as :class:`tilekern.source.digests.Digests` has it."""

    @property
    def source(self) -> str:
        """The digest of what makes artifacts valid."""
        ...

    @property
    def space(self) -> str:
        """The digest of what makes a winner the best."""
        ...

    @property
    def whole(self) -> str:
        """The digest of the whole module, as records of schemas 1 and 2 carry it."""
        ...


def standing(record: Made, today: Source) -> Standing:
    """The standing of a record beside today's source of its kernel: ``fresh``, ``dated`` or ``stale``."""
    if record.schema <= WITHOUT_SPACE:
        return "fresh" if record.source_digest == today.whole else "stale"
    if record.source_digest != today.source:
        return "stale"
    return "fresh" if record.space_digest == today.space else "dated"
