"""Whether a record may be used beside today's source of its kernel, and whether it is still known to be the best."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

# Fresh: the winner is the best known. Dated: it runs as it did, but the search space has changed since. Stale: it was
# made from another source, and is never used.
Freshness = Literal["fresh", "dated", "stale"]
FRESH, DATED, STALE = get_args(Freshness)
NOT_FRESH = "not known to be the best: the space has changed since"


class Made(Protocol):
    """The digests that a record, or an excerpt of one, was made from."""

    @property
    def source_digest(self) -> str:
        """The digest of the source that its artifacts are valid for."""
        ...

    @property
    def space_digest(self) -> str:
        """The digest of the source in whose search space it won."""
        ...


def freshness(record: Made, today: str) -> Freshness:
    """Return whether a record is fresh, dated or stale.

    Args:
        record: the record.
        today: the digest of its kernel's source today (:func:`tilekern.spec.source.source_digest`).
    """
    if record.source_digest != today:
        return "stale"
    return "fresh" if record.space_digest == today else "dated"
