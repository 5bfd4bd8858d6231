"""The command unpack: put the records of a pack into the cache."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import Store, install_pack
from tilekern.cache_tools.shared.installed import today_of
from tilekern.cache_tools.shared.options import FILE, as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import count, note_kept, print_result


@command
@click.argument("file", metavar="FILE", type=FILE)
@cache_dir
@as_json
def unpack(file: Path, store: Store, as_json: bool) -> None:
    """Put a pack's records into the cache, once all are checked.

    A record of the cache stays if it is better: of today's source, of the stronger provenance, of today's search space,
    with a kernel for tilekern.invariant(), or newer.

    JSON: pack, cache_dir, installed, kept {reason: records}.
    """
    installed = install_pack(file, store, today=today_of)
    place = {"pack": str(file), "cache_dir": str(store.root)}
    text = f"unpacked {count(installed.records, 'record')} into {store.root}{note_kept(installed)}"
    print_result(place | {"installed": installed.records, "kept": installed.kept}, as_json, text)
