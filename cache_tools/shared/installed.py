"""What is installed here: the GPU, the toolkit, and the source of the kernels, which makes records fresh or stale."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tilekern.cache import FRESH, STALE, CacheError, Freshness, Record, freshness
from tilekern.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tilekern.spec import KernelSpec
    from tilekern.spec.targets import Target


def toolkit_key() -> str | None:
    """Return the key of the toolkit that is installed here, or None."""
    from tilekern.compile.toolchain import toolkit

    installed = toolkit()
    return installed.key if installed else None


def target_named(name: str | None) -> Target:
    """Return a GPU by its name, arch or key; the GPU of this machine for None.

    Raises:
        InputError: the GPU is unknown, or this machine has none.
    """
    from tilekern.spec.targets import here, resolve

    target = here() if name is None else resolve(name)
    if target is None:
        raise CacheError("this machine has no CUDA GPU; name one by --gpu, such as --gpu B200")
    return target


def spec_named(kernel: str) -> KernelSpec:
    """Return a kernel's spec.

    Raises:
        InputError: there is no such kernel.
        CacheError: cuda-tile, which the kernels are written in, is not installed.
    """
    try:
        from tilekern.kernels import all_specs
        from tilekern.kernels import spec_named as named

        if kernel not in all_specs() and (meant := did_you_mean(kernel, all_specs())):
            raise InputError(f"unknown kernel {kernel!r}{meant}")
        return named(kernel)
    except ImportError as error:
        raise CacheError(f"the kernels cannot be loaded ({error}); install them with: pip install tilekern") from None


@functools.cache
def digest_today(module: str) -> str | None:
    """Return the digest of a module's source that is installed here, or None if it is not."""
    from tilekern.spec.source import source_digest  # loads Python's parser; only some commands need it

    try:
        return source_digest(module)
    except (ImportError, OSError, ValueError, SyntaxError, AttributeError):
        return None


def today_of(record: Record) -> str | None:
    """Return the digest of the source of a record's kernel that is installed here, or None if it is not."""
    return digest_today(record.module)


def freshness_of(record: Record) -> Freshness | None:
    """Return whether a record is fresh, dated or stale; None if its kernel's source is not installed here."""
    today = today_of(record)
    return None if today is None else freshness(record, today)


def is_stale(record: Record) -> bool | None:
    """Return whether the kernel's source has changed since; None if it is not installed here."""
    state = freshness_of(record)
    return None if state is None else state == STALE


def is_fresh(record: Record) -> bool | None:
    """Return whether a record's winner is still known to be the best; None if the source is not installed here."""
    state = freshness_of(record)
    return None if state is None else state == FRESH
