"""Whether a record may be used with today's source of its kernel, and which of two records of a problem is better."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, get_args

from tilekern.cache.records import PROVENANCES, Record
from tilekern.spec.kernel_spec import INVARIANT

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


def why_better(record: Record, other: Record, today: str | None, *, other_is_new: bool = False) -> str:
    """Return why a record is better than another of the same problem, target and toolkit; empty if it is not.

    The better one is, in this order: valid for today's source of the kernel; of the stronger provenance (measured, then
    predicted, then default); of today's search space; with an invariant kernel; the newer one. Caches and data packages
    keep the better one, so an old pack does not undo newer records, and a pack that was tuned without ``--invariant``
    does not undo a bit class.

    Args:
        record: the record in question.
        other: the other one.
        today: the digest of their kernel's source today; None if it is not installed here.
        other_is_new: whether the other was made just now: it wins where an invariant kernel or the dates would decide,
            which come from the clocks of two machines.
    """
    worth = [freshness(one, today) if today else None for one in (record, other)]
    if (worth[0] == STALE) != (worth[1] == STALE):
        return "of today's source" if worth[1] == STALE else ""
    if record.source_digest == other.source_digest:
        ranks = [PROVENANCES.index(one.provenance) for one in (record, other)]
        if ranks[0] != ranks[1]:
            return f"{record.provenance}, not {other.provenance}" if ranks[0] < ranks[1] else ""
        if record.space_digest != other.space_digest and FRESH in worth:
            return "of today's search space" if worth[0] == FRESH else ""
        classed = [has_class(one) for one in (record, other)]
        if classed[0] != classed[1] and not other_is_new:
            return "with a kernel for tilekern.invariant()" if classed[0] else ""
    is_newer = not other_is_new and datetime.fromisoformat(record.created) > datetime.fromisoformat(other.created)
    return "newer" if is_newer else ""


def has_class(record: Record | None) -> bool:
    """Return whether there is a record and it names a kernel of one bit class."""
    return record is not None and INVARIANT in (record.measurement or {})
