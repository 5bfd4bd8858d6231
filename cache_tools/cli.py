"""The commands and their options. Each command with --json prints one JSON document, which its help describes.

This is click and not typer, whose import and first call alone took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache_tools import checking, listing, upkeep
from cache_tools.options import as_json, cache_dir, target, toolkit, with_age_filters, with_filters
from cache_tools.selection import Selection
from cache_tools.shipping import pull, push, wheel
from tilekern.cache import Store


@click.group(no_args_is_help=False)
def app() -> None:
    """Look after a cache of tuned kernels."""


@app.command()
@with_filters
@cache_dir
@as_json
def ls(store: Store, as_json: bool, **filters: Any) -> None:
    """List the records.

    JSON: cache_dir, exists, records[] {path, kernel, problem, problem_key, target, toolkit, provenance, time_us,
    gain, size_bytes, created, age_s}, unreadable[] {path, problem}.
    """
    listing.list_records(store, Selection(**filters), as_json)


@app.command()
@click.argument("kernel", metavar="KERNEL")
@click.argument("problem_key", metavar="PROBLEM_KEY")
@target
@toolkit
@cache_dir
@as_json
def show(kernel: str, problem_key: str, store: Store, as_json: bool, **filters: Any) -> None:
    """Print one record in full; PROBLEM_KEY as `ls` prints it.

    JSON: path, size_bytes, record (all fields as the cache keeps them).
    """
    listing.show_record(store, kernel, problem_key, Selection(**filters), as_json)


@app.command()
@cache_dir
@as_json
def stats(store: Store, as_json: bool) -> None:
    """Count records and bytes.

    JSON: cache_dir, exists, records, bytes, by {kernel, target, toolkit, provenance} {name: {records, bytes}},
    blobs {count, bytes}, orphans {count, bytes}, unreadable, unknown_schema, leftovers, wanted.
    """
    listing.print_stats(store, as_json)


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
@with_filters
@with_age_filters
@click.option("--all", "everything", is_flag=True, help="All records.")
@click.option("--yes", "-y", "confirmed", is_flag=True, help="Do not ask.")
@cache_dir
@as_json
def clear(store: Store, everything: bool, confirmed: bool, as_json: bool, **filters: Any) -> None:
    """Remove records, and the blobs that nothing refers to any more.

    Asks first. JSON (needs --yes): cache_dir, removed, blobs, bytes, left_alone, kept.
    """
    upkeep.clear(store, Selection(**filters), everything, confirmed, as_json)


@app.command()
@click.option("--clear", "empty", is_flag=True, help="Empty the list after printing it.")
@cache_dir
@as_json
def wanted(store: Store, empty: bool, as_json: bool) -> None:
    """List what was asked for at run time and was not there.

    JSON: cache_dir, wanted[] {kernel, problem, target, reason, created}, cleared.
    """
    listing.print_wanted(store, empty, as_json)


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


for command in (wheel, push, pull):
    app.add_command(command)
