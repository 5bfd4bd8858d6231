"""The standing of a record beside the kernel's source of today."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from tilekern.cache import FRESH, STALE, Record, Standing, standing
from tilekern.cache import Made as MadeOf

if TYPE_CHECKING:
    from tilekern.source.digests import Digests


class Made(MadeOf, Protocol):
    """The source that a record was made from, told by a record or what is kept of one."""

    @property
    def module(self) -> str:
        """The kernel's module."""
        ...

    @property
    def kernel(self) -> str:
        """The spec's name."""
        ...


@functools.cache
def digests_today(module: str, kernel: str) -> Digests | None:
    """The digests of a kernel's source as it is installed here, or None where it is not."""
    from tilekern.source.digests import digests_of  # loads Python's parser; only some commands need it

    try:
        return digests_of(module, kernel)
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None


def today_of(record: Record) -> Digests | None:
    """The digests of a record's kernel as it is installed here, or None where it is not."""
    return digests_today(record.module, record.kernel)


def standing_of(record: Made) -> Standing | None:
    """Whether a record is fresh, dated or stale, by :func:`tilekern.cache.standing`; None without its source here."""
    today = digests_today(record.module, record.kernel)
    return None if today is None else standing(record, today)


def is_stale(record: Made) -> bool | None:
    """True where the source has changed since, False where it is the same, None where it is not installed here."""
    found = standing_of(record)
    return None if found is None else found == STALE


def is_fresh(record: Made) -> bool | None:
    """Whether a record's winner is still known to be the best; None where the source is not installed here."""
    found = standing_of(record)
    return None if found is None else found == FRESH
