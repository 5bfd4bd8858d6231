"""Whether a record was made from the kernel's source of today."""

from __future__ import annotations

import functools
from typing import Protocol


class Made(Protocol):
    """What says which source a record was made from: a record, or what is kept of one."""

    @property
    def module(self) -> str:
        """The kernel's module."""
        ...

    @property
    def source_digest(self) -> str:
        """The digest of its source then."""
        ...


@functools.cache
def digest_today(module: str) -> str | None:
    """The digest of a kernel module's source as it is installed here, or None where it is not."""
    from tilekern.source import digest_of_module  # loads Python's parser; only some commands need it

    try:
        return digest_of_module(module)
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None


def is_stale(record: Made) -> bool | None:
    """True where the source has changed since, False where it is the same, None where it is not installed here."""
    digest = digest_today(record.module)
    return None if digest is None else digest != record.source_digest
