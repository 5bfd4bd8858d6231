"""Fetching a pack from elsewhere: checked whole before anything is written, and not fetched again while it is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cache_tools.pulled import note_pulled, was_pulled
from cache_tools.remotes import failures_of, open_remote
from cache_tools.shared.contents import Contents, read_contents, sha256_of
from tilekern.cache import PACK_SUFFIX, CacheError, Corrupt, Store, install_pack


class Wanted(NamedTuple):
    """What to pull.

    Attributes:
        url: the place.
        sha256: the only pack that will do, or None.
        plain_http: talk to an OCI registry by HTTP.
    """

    url: str
    sha256: str | None = None
    plain_http: bool = False


class Pulled(NamedTuple):
    """What a pull did: the pack's sha256, whether it was downloaded, and how many records were written."""

    sha256: str
    downloaded: bool
    installed: int = 0


def pull_into_cache(wanted: Wanted, store: Store) -> Pulled:
    """Put the records of a pack elsewhere into a cache, where it has not all of them from an earlier pull.

    Raises:
        Missing: there is nothing at the place.
        Corrupt: what is there is no sound pack, or not the one that was wanted; nothing was written.
        CacheError: the place cannot be reached, or the cache cannot be written.
    """
    with _fetched(wanted, lambda sha256: was_pulled(store, sha256)) as (sha256, pack):
        if pack is None:
            return Pulled(sha256, downloaded=False)
        installed = install_pack(pack.path, store)
        note_pulled(store, pack)
        return Pulled(sha256, downloaded=True, installed=installed)


def pull_to_file(wanted: Wanted, path: Path) -> Pulled:
    """Put a pack elsewhere into a file, in one step, where the file is not that pack already.

    Raises:
        Missing: there is nothing at the place.
        Corrupt: what is there is no sound pack, or not the one that was wanted; the file is as it was.
        CacheError: the place cannot be reached, or the file cannot be written.
    """
    if not path.parent.is_dir():
        raise CacheError(f"there is no folder {path.parent} to keep {path.name} in")
    with _fetched(wanted, lambda sha256: path.is_file() and sha256_of(path) == sha256, path.parent) as (sha256, pack):
        if pack is not None:
            try:
                os.replace(pack.path, path)
            except OSError as error:
                raise CacheError(f"cannot write {path}: {error.strerror}") from None
        return Pulled(sha256, downloaded=pack is not None)


@contextmanager
def _fetched(
    wanted: Wanted, is_here: Callable[[str], bool], folder: Path | None = None
) -> Iterator[tuple[str, Contents | None]]:
    """The pack's sha256, and the pack in a file of ``folder`` that is gone afterwards; None where it is here."""
    url, sha256, plain_http = wanted
    if sha256 and is_here(sha256):
        yield sha256, None
        return
    remote = open_remote(url, plain_http)
    with failures_of(url):
        stated = remote.digest()
    if sha256 and stated not in (None, sha256):
        raise Corrupt(f"{url} has another pack than the one that is wanted: sha256 {stated}, not {sha256}")
    sha256 = sha256 or stated
    if sha256 and is_here(sha256):
        yield sha256, None
        return
    with TemporaryDirectory(dir=folder, prefix=".pull-") as place:
        path = Path(place, f"pulled{PACK_SUFFIX}")
        with failures_of(url):
            remote.download(path)
        found = sha256_of(path)
        if found != (sha256 or found):
            raise Corrupt(f"what came from {url} has sha256 {found}, not {sha256}: damaged, or replaced meanwhile")
        yield found, _checked(path, url)


def _checked(path: Path, url: str) -> Contents:
    """The contents of a pack that came from a URL, which errors name in place of its file."""
    try:
        return read_contents(path)
    except CacheError as error:
        raise type(error)(str(error).replace(str(path), url)) from None
