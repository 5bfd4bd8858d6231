"""The commands and their options. Each command with --json prints one JSON document, which its help describes.

This is click and not typer, whose import and first call alone took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache_tools.commands import verify as checking
from cache_tools.commands.clear import clear, prune
from cache_tools.commands.push import pull, push, wheel
from cache_tools.commands.sign import keygen, sign
from cache_tools.seeing import diff, ls, show, stats, wanted, why
from cache_tools.shared import packing as upkeep
from cache_tools.shared.options import HELP, PlaceType, as_json, cache_dir, version, with_age_filters, with_filters
from cache_tools.shared.selection import Selection
from tilekern.cache import CacheError, Store


@click.group(no_args_is_help=False, context_settings=HELP)
def app() -> None:
    """Look after a cache of tuned kernels."""


@app.command()
@click.argument("path", metavar="[PACK|CACHE]", required=False, type=PlaceType())
@click.option("--signed", is_flag=True, help="A record that no trust root signed is a fault, too.")
@cache_dir
@as_json
@click.pass_context
def verify(context: click.Context, path: Path | None, signed: bool, store: Store, as_json: bool) -> None:
    """Check every record, artifact and signature of a pack or a cache; exit code 1 where one is broken.

    Stale records are reported, and are no fault; nor are those that are not known to be the best any more, nor records
    that others can write, which no job loads. A reason is said once, with how many it holds for and the first of them;
    --json names all. A folder that --cache-dir names must be there; the user's own cache may be empty.

    JSON: cache_dir or pack, records, blobs, broken[] {path, problem}, stale[], not_fresh[], unknown_source[],
    signatures {trusted, other_key, unsigned, by {name: records}, bad[] {path, problem}, unchecked}, and of a cache
    unknown_schema[], orphans, leftovers[], exposed[] {path, problem}.
    """
    if context.get_parameter_source("store") == click.core.ParameterSource.COMMANDLINE:
        if path is not None:
            raise CacheError("verify takes a PACK or CACHE, or --cache-dir, and not both")
        if not store.root.is_dir():
            raise CacheError(f"there is no cache at {store.root}, which --cache-dir names")
    is_pack = path is not None and not path.is_dir()
    sound = (
        checking.verify_pack(path, as_json, signed)
        if path is not None and is_pack
        else checking.verify(Store(path) if path else store, as_json, signed)
    )
    if not sound:
        context.exit(1)


@app.command()
@click.argument("out", metavar="OUT.pack", type=click.Path(path_type=Path))
@with_filters
@with_age_filters
@click.option("--model", help="Only what this model needs: a preset, the path of a config.json, or a hub id.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel degree: ranks of the model.")
@cache_dir
@as_json
def pack(out: Path, model: str | None, tp: int, store: Store, as_json: bool, **filters: Any) -> None:
    """Write records, their artifacts and signatures into one file; the same records give the same bytes.

    A model's records are those of its sizes, in any dtype and for steps of any length.

    JSON: pack, records, bytes, left_out.
    """
    upkeep.pack(store, out, Selection(**filters), as_json, model, tp)


@app.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@cache_dir
@as_json
def unpack(file: Path, store: Store, as_json: bool) -> None:
    """Put a pack's records into the cache, once all are checked.

    JSON: pack, cache_dir, installed.
    """
    upkeep.unpack(store, file, as_json)


app.add_command(unpack, "add")
for command in (ls, show, stats, diff, why, wanted, clear, prune, wheel, push, pull, keygen, sign):
    app.add_command(command)
# That of `wheel` is the package's.
for command in {app, *app.commands.values()} - {wheel}:
    version(command)
