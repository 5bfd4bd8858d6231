"""Whether a record was made from the kernel's source of today."""

from __future__ import annotations

from tilekern.cache import Record


def is_stale(record: Record) -> bool | None:
    """True where the source has changed since, False where it is the same, None where it is not installed here."""
    from tilekern.source import digest_of_module  # loads Python's parser; only some commands need it

    try:
        return digest_of_module(record.module) != record.source_digest
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None
