"""The commands and their options. Each command with --json prints one JSON document, which its help describes.

This is click and not typer, whose import and first call alone took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache_tools import checking, upkeep
from cache_tools.clearing import clear, prune
from cache_tools.options import as_json, cache_dir, with_age_filters, with_filters
from cache_tools.seeing import diff, ls, show, stats, wanted, why
from cache_tools.selection import Selection
from tilekern.cache import Store


@click.group(no_args_is_help=False)
def app() -> None:
    """Look after a cache of tuned kernels."""


@app.command()
@cache_dir
@as_json
@click.pass_context
def verify(context: click.Context, store: Store, as_json: bool) -> None:
    """Check every record and blob; exit code 1 where one is broken.

    Stale records are reported, and are no fault.

    JSON: cache_dir, records, blobs, broken[] {path, problem}, stale[], unknown_source[], unknown_schema[], orphans,
    leftovers[].
    """
    if not checking.verify(store, as_json):
        context.exit(1)


@app.command()
@click.argument("out", metavar="OUT.pack", type=click.Path(path_type=Path))
@with_filters
@with_age_filters
@cache_dir
@as_json
def pack(out: Path, store: Store, as_json: bool, **filters: Any) -> None:
    """Write records and their artifacts into one file.

    JSON: pack, records, bytes, left_out.
    """
    upkeep.pack(store, out, Selection(**filters), as_json)


@app.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@cache_dir
@as_json
def unpack(file: Path, store: Store, as_json: bool) -> None:
    """Put a pack's records into the cache, once all are checked.

    JSON: pack, cache_dir, installed.
    """
    upkeep.unpack(store, file, as_json)


for command in (ls, show, stats, diff, why, wanted, clear, prune):
    app.add_command(command)
