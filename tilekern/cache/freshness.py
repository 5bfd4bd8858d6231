"""Whether a record may be used with today's source of its kernel, and whether it is still known to be the best."""

from __future__ import annotations

from typing import Literal, get_args

from tilekern.cache.records import Record

# Fresh: the winner is the best known. Dated: it runs as before, but the search space has changed since. Stale: it was
# made from another source, and is never used.
Freshness = Literal["fresh", "dated", "stale"]
FRESH, DATED, STALE = get_args(Freshness)
NOT_FRESH = "not known to be the best: the space has changed since"


def freshness(record: Record, today: str) -> Freshness:
    """Return whether a record is fresh, dated or stale beside the digest of its kernel's source today."""
    if record.source_digest != today:
        return "stale"
    return "fresh" if record.space_digest == today else "dated"
