"""The command pull: a pack from elsewhere, checked whole before anything is written, and fetched once.

Which packs were put into a cache stands in it: ``<root>/pulled/<sha256 of the pack>.json`` names a pack's records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
from click.core import ParameterSource

from tilekern.cache import PACK_SUFFIX, CacheError, Corrupt, Store, install_pack
from tilekern.cache.files import read_whole
from tilekern.cache.folders import write_below
from tilekern.cache.keys import blob_path, check_digest, parse_path
from tilekern.cache.records import LARGEST_RECORD, decode_record, parse_object
from tilekern.cache_tools.remotes import failures_of, open_remote
from tilekern.cache_tools.shared.contents import Contents, read_contents, sha256_of
from tilekern.cache_tools.shared.options import as_json, cache_dir, command, plain_http
from tilekern.cache_tools.shared.staleness import today_of
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.warning import tell

_FOLDER = "pulled"
_SCHEMA = 1
_LARGEST = 64 * 2**20


@command
@click.argument("url", metavar="URL")
@click.option("--out", metavar="FILE.pack", type=click.Path(path_type=Path), help="Keep the pack in a file instead.")
@click.option("--digest", "pinned", metavar="SHA256", help="Refuse any other pack than the one with this sha256.")
@plain_http
@cache_dir
@as_json
@click.pass_context
def pull(
    context: click.Context,
    url: str,
    out: Path | None,
    pinned: str | None,
    plain_http: bool,
    store: Store,
    as_json: bool,
) -> None:
    """Fetch a pack and put its records into the cache, once all are checked.

    URL is one that `push` takes, or an https:// one. A pack that is there already is not downloaded again.

    JSON: url, downloaded, sha256, cache_dir and installed (records written), or file.
    """
    if out and context.get_parameter_source("store") is ParameterSource.COMMANDLINE:
        raise CacheError("--out keeps the pack in a file and --cache-dir unpacks it; give one of them")
    if out and out.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {out.name!r}")
    if pinned:
        check_digest("--digest", pinned)
    wanted = (url, pinned, plain_http)
    outcome = _pull_to_file(*wanted, out) if out else _pull_into_cache(*wanted, store)
    if as_json:
        came = {"url": url, "downloaded": outcome.downloaded, "sha256": outcome.sha256}
        print_json(
            came | ({"file": str(out)} if out else {"cache_dir": str(store.root), "installed": outcome.installed})
        )
    elif not outcome.downloaded:
        tell(f"{out or store.root} has this pack already, sha256 {outcome.sha256}")
    elif out:
        tell(f"pulled {out}, {size(out.stat().st_size)}, sha256 {outcome.sha256}")
    else:
        tell(f"pulled {count(outcome.installed, 'record')} into {store.root}, sha256 {outcome.sha256}")


class _Pulled(NamedTuple):
    """The outcome of a pull: the pack's sha256, whether it was downloaded, and how many records were written."""

    sha256: str
    downloaded: bool
    installed: int = 0


def _pull_into_cache(url: str, pinned: str | None, plain_http: bool, store: Store) -> _Pulled:
    """Put the records of a pack elsewhere into a cache, where it has not all of them from an earlier pull.

    Raises:
        Missing: there is nothing at the place.
        Corrupt: the pack there is damaged, or not the one that was wanted; nothing was written.
        CacheError: the place cannot be reached, or the cache cannot be written.
    """
    with _fetched(url, pinned, plain_http, lambda sha256: was_pulled(store, sha256)) as (sha256, pack):
        if pack is None:
            return _Pulled(sha256, downloaded=False)
        installed = install_pack(pack.path, store, today=today_of)
        _note_pulled(store, pack)
        return _Pulled(sha256, downloaded=True, installed=installed)


def _pull_to_file(url: str, pinned: str | None, plain_http: bool, path: Path) -> _Pulled:
    """Put a pack elsewhere into a file, in one step, where the file is not that pack already.

    Raises:
        Missing: there is nothing at the place.
        Corrupt: the pack there is damaged, or not the one that was wanted; the file is as it was.
        CacheError: the place cannot be reached, or the file cannot be written.
    """
    if not path.parent.is_dir():
        raise CacheError(f"there is no folder {path.parent} to keep {path.name} in")

    def is_here(sha256: str) -> bool:
        return path.is_file() and sha256_of(path) == sha256

    with _fetched(url, pinned, plain_http, is_here, path.parent) as (sha256, pack):
        if pack is not None:
            try:
                os.replace(pack.path, path)
            except OSError as error:
                raise CacheError(f"cannot write {path}: {error.strerror}") from None
        return _Pulled(sha256, downloaded=pack is not None)


@contextmanager
def _fetched(
    url: str, sha256: str | None, plain_http: bool, is_here: Callable[[str], bool], folder: Path | None = None
) -> Iterator[tuple[str, Contents | None]]:
    """The pack's sha256, and the pack in a file of ``folder`` that is gone afterwards; None where it is here."""
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


def _note_pulled(store: Store, pack: Contents) -> None:
    """Write down that the cache has this pack.

    Raises:
        CacheError: the folder cannot be written.
    """
    path = _note_path(store, pack.sha256)
    try:
        write_below(
            store.root,
            path.relative_to(store.root),
            json.dumps({"schema": _SCHEMA, "records": pack.records}, indent=1).encode(),
        )
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror or error}") from None


def was_pulled(store: Store, sha256: str) -> bool:
    """Whether a pack was pulled, and a record with its blobs stands where each of its records was put.

    A record that was tuned anew since counts: the pack would not make it better.
    """
    try:
        noted = parse_object(read_whole(_note_path(store, sha256), _LARGEST)[0].decode())
        if noted["schema"] != _SCHEMA:
            return False
        return all(_is_whole(store, name) for name in noted["records"])
    except (CacheError, ValueError, LookupError, TypeError):
        return False


def _is_whole(store: Store, name: str) -> bool:
    try:
        address = parse_path(name.split("/"))
        record = decode_record(read_whole(store.root / address.path, LARGEST_RECORD)[0], address)
    except (CacheError, AttributeError):
        return False
    return all((store.root / blob_path(digest)).is_file() for digest in record.digests)


def _note_path(store: Store, sha256: str) -> Path:
    return store.root / _FOLDER / f"{sha256}.json"
