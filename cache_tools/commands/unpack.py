"""The command unpack: put the records of a pack into the cache."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import Store, install_pack
from tilekern.cache_tools.shared.installed import today_of
from tilekern.cache_tools.shared.options import FILE, as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import count, print_result


@command
@click.argument("file", metavar="FILE", type=FILE)
@cache_dir
@as_json
def unpack(file: Path, store: Store, as_json: bool) -> None:
    """Put a pack's records into the cache, once all are checked.

    JSON: pack, cache_dir, installed.
    """
    installed = install_pack(file, store, today=today_of)
    document = {"pack": str(file), "cache_dir": str(store.root), "installed": installed}
    print_result(document, as_json, f"unpacked {count(installed, 'record')} into {store.root}")
