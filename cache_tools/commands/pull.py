"""The command pull: fetch a pack once, and check all of it before anything is written.

A cache notes which packs were put into it: ``<root>/pulled/<sha256 of the pack>.json`` names a pack's records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.core import ParameterSource

from tilekern.cache import PACK_SUFFIX, CacheError, Corrupt, Installed, Store, install_pack
from tilekern.cache.files import read_whole
from tilekern.cache.folders import write_below
from tilekern.cache.keys import blob_path, check_digest, parse_path
from tilekern.cache.records import LARGEST_RECORD, decode_record, parse_object
from tilekern.cache_tools.remotes import failures_of, open_remote
from tilekern.cache_tools.shared.installed import today_of
from tilekern.cache_tools.shared.options import FILE, as_json, cache_dir, command, plain_http
from tilekern.cache_tools.shared.packs import Contents, check_suffix, read_contents, sha256_of
from tilekern.cache_tools.shared.printing import count, note_kept, print_result, size

_FOLDER = "pulled"
_SCHEMA = 1
_LARGEST = 64 * 2**20


@command
@click.argument("url", metavar="URL")
@click.option("--out", metavar="FILE.pack", type=FILE, help="Keep the pack in a file instead.")
@click.option("--digest", "pinned", metavar="SHA256", help="Refuse any pack but the one with this sha256.")
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

    URL is one that `push` takes, or an https:// one. A pack that the cache has is not downloaded again.

    JSON: url, downloaded, sha256, cache_dir, installed (records written) and kept {reason: records}, or file.
    """
    if out and context.get_parameter_source("store") is ParameterSource.COMMANDLINE:
        raise CacheError("--out keeps the pack in a file and --cache-dir unpacks it; give one of them")
    if out:
        check_suffix(out)
        if not out.parent.is_dir():
            raise CacheError(f"there is no folder {out.parent} to keep {out.name} in")
    if pinned:
        check_digest("--digest", pinned)
    installed = Installed(0, {})
    is_here = _is_file(out) if out else (lambda sha256: was_pulled(store, sha256))
    with _fetched(url, pinned, plain_http, is_here, out.parent if out else None) as (sha256, pack):
        if pack and out:
            try:
                os.replace(pack.path, out)
            except OSError as error:
                raise CacheError(f"cannot write {out}: {error.strerror}") from None
        elif pack:
            installed = install_pack(pack.path, store, today=today_of)
            _note_pulled(store, pack)
    place: dict[str, Any] = {"file": str(out)}
    if not out:
        place = {"cache_dir": str(store.root), "installed": installed.records, "kept": installed.kept}
    if not pack:
        text = f"{out or store.root} has this pack already"
    elif out:
        text = f"pulled {out}, {size(out.stat().st_size)}"
    else:
        text = f"pulled {count(installed.records, 'record')} into {store.root}{note_kept(installed)}"
    document = {"url": url, "downloaded": pack is not None, "sha256": sha256, **place}
    print_result(document, as_json, f"{text}, sha256 {sha256}")


def _is_file(path: Path) -> Callable[[str], bool]:
    return lambda sha256: path.is_file() and sha256_of(path) == sha256


@contextmanager
def _fetched(
    url: str, sha256: str | None, plain_http: bool, is_here: Callable[[str], bool], folder: Path | None = None
) -> Iterator[tuple[str, Contents | None]]:
    """Yield the pack's sha256, and the pack in a temporary file of ``folder``; None if it is here already.

    Raises:
        Missing: there is nothing at the URL.
        Corrupt: the pack there is damaged, or is another one than ``sha256``.
        CacheError: the URL cannot be reached.
    """
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
    with TemporaryDirectory(dir=folder, prefix=".pull-") as temporary:
        path = Path(temporary, f"pulled{PACK_SUFFIX}")
        with failures_of(url):
            remote.download(path)
        pulled = sha256_of(path)
        if sha256 and pulled != sha256:
            raise Corrupt(f"what came from {url} has sha256 {pulled}, not {sha256}: damaged, or replaced meanwhile")
        try:
            contents = read_contents(path)
        except CacheError as error:
            raise type(error)(str(error).replace(str(path), url)) from None
        yield pulled, contents


def _note_pulled(store: Store, pack: Contents) -> None:
    text = json.dumps({"schema": _SCHEMA, "records": pack.records}, indent=1)
    path = PurePosixPath(_FOLDER, f"{pack.sha256}.json")
    try:
        write_below(store.root, path, text.encode())
    except OSError as error:
        raise CacheError(f"cannot write {store.root / path}: {error.strerror or error}") from None


def was_pulled(store: Store, sha256: str) -> bool:
    """Return whether a pack was pulled, and each of its records, or one tuned since, is there with its blobs."""
    try:
        note = parse_object(read_whole(store.root / _FOLDER / f"{sha256}.json", _LARGEST)[0].decode())
        return note["schema"] == _SCHEMA and all(_is_whole(store, name) for name in note["records"])
    except (CacheError, ValueError, LookupError, TypeError):
        return False


def _is_whole(store: Store, name: str) -> bool:
    try:
        address = parse_path(name.split("/"))
        record = decode_record(read_whole(store.root / address.path, LARGEST_RECORD)[0], address)
    except (CacheError, AttributeError):
        return False
    return all((store.root / blob_path(digest)).is_file() for digest in record.digests)
