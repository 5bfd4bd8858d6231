"""Whether a cache is whole: the command verify."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from cache_tools.staleness import is_stale
from cache_tools.text import count, print_json
from tilekern.cache import CacheError, Entry, Store


def verify(store: Store, as_json: bool) -> bool:
    """Check every record and blob, and print what was found; False where something is broken."""
    entries = list(store.entries())
    records = [(entry, entry.record) for entry in entries if entry.record]
    blobs = {blob.sha256: blob for blob in store.blobs()}
    referred = frozenset().union(*(record.digests for _, record in records))
    bad_blobs = {digest: problem for digest in sorted(referred | blobs.keys()) if (problem := _problem(store, digest))}
    staleness = [(entry, is_stale(record)) for entry, record in records]
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
        ],
        "stale": _paths(entry for entry, stale in staleness if stale),
        "unknown_source": _paths(entry for entry, stale in staleness if stale is None),
        "unknown_schema": _paths(entry for entry in entries if entry.unknown_schema),
        "orphans": len(blobs.keys() - referred),
        "leftovers": [str(path) for path in store.leftovers()],
    }
    if as_json:
        print_json(document)
    else:
        _print(document)
    return not document["broken"]


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
    for section, note in notes.items():
        for path in document[section]:
            click.echo(f"{note}: {path}")
    click.echo(
        f"{document['cache_dir']}: {count(document['records'], 'record')}, {count(document['blobs'], 'blob')}, "
        f"{document['orphans']} without a record; {len(document['broken'])} broken, {len(document['stale'])} stale"
    )
