"""The command unpack: the records of a pack into the cache."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import Store, install_pack
from tilekern.cache_tools.shared.options import as_json, cache_dir, command
from tilekern.cache_tools.shared.staleness import today_of
from tilekern.cache_tools.shared.text import count, print_json
from tilekern.warning import tell


@command
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@cache_dir
@as_json
def unpack(file: Path, store: Store, as_json: bool) -> None:
    """Put a pack's records into the cache, once all are checked.

    JSON: pack, cache_dir, installed.
    """
    installed = install_pack(file, store, today=today_of)
    if as_json:
        print_json({"pack": str(file), "cache_dir": str(store.root), "installed": installed})
    else:
        tell(f"unpacked {count(installed, 'record')} into {store.root}")
