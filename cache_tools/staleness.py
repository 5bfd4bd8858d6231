"""Whether a record was made from the kernel's source of today."""

from __future__ import annotations

import functools

from tilekern.cache import Record


def is_stale(record: Record) -> bool | None:
    """True where the source has changed since, False where it is the same, None where it is not installed here."""
    digest = _digest_of(record.module)
    return None if digest is None else digest != record.source_digest


@functools.cache
def _digest_of(module: str) -> str | None:
    """The digest of a module's source, None where it is not installed; a search that finds nothing takes a while."""
    from tilekern.source import digest_of_module  # loads Python's parser; only some commands need it

    try:
        return digest_of_module(module)
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None
