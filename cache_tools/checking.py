"""Whether a cache or a pack is whole, and who signed it: the command verify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from cache_tools.staleness import is_stale
from cache_tools.text import count, print_json
from cache_tools.trusting import print_survey, records_of_pack, records_of_store, survey
from tilekern.cache import CacheError, Corrupt, Entry, Pack, Store, UnknownSchema, Untrusted, checked_contents
from tilekern.cache.exposure import others_may_write, require_unshared, require_unshared_folders
from tilekern.cache.trust import must_be_signed


def verify(store: Store, as_json: bool, signed: bool = False) -> bool:
    """Check every record, blob and signature of a cache, and print what was found; False where something is broken.

    ``signed``, or the policy of that name: a record that no trust root signed is a fault as well.

    Raises:
        CacheError: ``TILEKERN_TRUST`` is no policy.
    """
    signed = signed or must_be_signed()
    entries = list(store.entries())
    records = [(entry, entry.record) for entry in entries if entry.record]
    blobs = {blob.sha256: blob for blob in store.blobs()}
    referred = frozenset().union(*(record.digests for _, record in records))
    bad_blobs = {digest: problem for digest in sorted(referred | blobs.keys()) if (problem := _problem(store, digest))}
    staleness = [(entry, is_stale(record)) for entry, record in records]
    signatures = survey(records_of_store(store, [entry.path for entry, _ in records]))
    document: dict[str, Any] = {
        "cache_dir": str(store.root),
        "records": len(records),
        "blobs": len(blobs),
        "broken": [
            *({"path": str(e.path), "problem": e.problem} for e in entries if e.problem and not e.unknown_schema),
            *(
                {"path": str(entry.path), "problem": bad_blobs[digest]}
                for entry, record in records
                for digest in sorted(record.digests & bad_blobs.keys())
            ),
            *({"path": str(blobs[d].path), "problem": bad_blobs[d]} for d in sorted(bad_blobs.keys() - referred)),
            *signatures["bad"],
        ],
        "stale": _paths(entry for entry, stale in staleness if stale),
        "unknown_source": _paths(entry for entry, stale in staleness if stale is None),
        "unknown_schema": _paths(entry for entry in entries if entry.unknown_schema),
        "orphans": len(blobs.keys() - referred),
        "leftovers": [str(path) for path in store.leftovers()],
        "signatures": signatures,
        "exposed": list(_exposed(store, [entry.path for entry, _ in records])),
    }
    if as_json:
        print_json(document)
    else:
        _print(document)
    return _is_sound(document, signed)


def _exposed(store: Store, paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Records that no job loads, since others can write them or a folder that leads there."""
    if others_may_write():
        return
    for path in paths:
        try:
            require_unshared_folders(store.root, path.parent)
            require_unshared(path, path.stat())
        except Untrusted as error:
            yield {"path": str(path), "problem": str(error)}
        except OSError:
            continue


def verify_pack(path: Path, as_json: bool, signed: bool = False) -> bool:
    """The same of a pack: its form, every hash, every record and signature.

    Raises:
        Missing: there is no such file.
        UnknownSchema: another version of tilekern wrote it.
        CacheError: it cannot be read, or ``TILEKERN_TRUST`` is no policy.
    """
    signed = signed or must_be_signed()
    document: dict[str, Any] = {"pack": str(path), "records": 0, "blobs": 0, "broken": []}
    signatures = survey(())
    try:
        pack = Pack(path)
        records = [record for record, _ in checked_contents(pack)]
        signatures = survey(records_of_pack(pack))
        staleness = [(str(record.address.path), is_stale(record)) for record in records]
        document |= {
            "records": len(records),
            "blobs": len(frozenset().union(*(record.digests for record in records))),
            "broken": signatures["bad"],
            "stale": [name for name, stale in staleness if stale],
            "unknown_source": [name for name, stale in staleness if stale is None],
        }
    except UnknownSchema:
        raise
    except Corrupt as error:
        document["broken"] = [{"path": str(path), "problem": str(error)}]
    document |= {"stale": document.get("stale", []), "unknown_source": document.get("unknown_source", [])}
    document["signatures"] = signatures
    if as_json:
        print_json(document)
    else:
        of_caches: dict[str, Any] = {"unknown_schema": [], "leftovers": [], "exposed": [], "orphans": 0}
        _print({"cache_dir": str(path), **of_caches, **document})
    return _is_sound(document, signed)


def _is_sound(document: dict[str, Any], signed: bool) -> bool:
    signatures = document["signatures"]
    untrusted = document["records"] - signatures["trusted"]
    return not document["broken"] and not (untrusted and signed)


def _problem(store: Store, digest: str) -> str | None:
    try:
        store.read_blob(digest)
    except CacheError as error:
        return str(error)
    return None


def _paths(entries: Iterable[Entry]) -> list[str]:
    return [str(entry.path) for entry in entries]


def _print(document: dict[str, Any]) -> None:
    for item in document["broken"]:
        click.echo(f"broken: {item['path']}: {item['problem']}")
    notes = {
        "stale": "stale, the kernel's source has changed since",
        "unknown_source": "the kernel's source is not installed here",
        "unknown_schema": "left alone, another version of tilekern wrote it",
        "leftovers": "left over, was set aside as bad or never finished",
    }
    for item in document["exposed"]:
        click.echo(f"not loaded by any job: {item['path']}: {item['problem']}")
    for section, note in notes.items():
        for path in document[section]:
            click.echo(f"{note}: {path}")
    click.echo(
        f"{document['cache_dir']}: {count(document['records'], 'record')}, {count(document['blobs'], 'blob')}, "
        f"{document['orphans']} without a record; {len(document['broken'])} broken, {len(document['stale'])} stale"
    )
    print_survey(document["signatures"])
