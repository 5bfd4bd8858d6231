"""The freshness of a record beside the kernel's source that is installed here."""

from __future__ import annotations

import functools
from typing import Protocol

from tilekern.cache import FRESH, STALE, Freshness, freshness
from tilekern.cache import Made as MadeOf


class Made(MadeOf, Protocol):
    """The source that a record, or an excerpt of one, was made from."""

    @property
    def module(self) -> str:
        """The kernel's module."""
        ...


@functools.cache
def digest_today(module: str) -> str | None:
    """Return the digest of a module's source that is installed here, or None where there is none."""
    from tilekern.spec.source import source_digest  # loads Python's parser; only some commands need it

    try:
        return source_digest(module)
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None


def today_of(record: Made) -> str | None:
    """Return the digest of the source of a record's kernel that is installed here, or None where there is none."""
    return digest_today(record.module)


def freshness_of(record: Made) -> Freshness | None:
    """Return whether a record is fresh, dated or stale; None where its kernel's source is not installed here."""
    today = today_of(record)
    return None if today is None else freshness(record, today)


def is_stale(record: Made) -> bool | None:
    """Return whether the source has changed since; None where it is not installed here."""
    found = freshness_of(record)
    return None if found is None else found == STALE


def is_fresh(record: Made) -> bool | None:
    """Return whether a record's winner is still known to be the best; None where the source is not installed here."""
    found = freshness_of(record)
    return None if found is None else found == FRESH
