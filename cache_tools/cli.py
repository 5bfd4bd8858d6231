"""The commands and their options. Each command with --json prints one JSON document, which its help describes.

This is click and not typer, whose import and first call alone took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cache_tools import checking, listing, trusting, upkeep
from cache_tools.selection import Selection, parse_duration
from tilekern.cache import CacheError, Store, user_root

Command = Callable[..., Any]


class StoreType(click.ParamType):
    """A cache's folder on the command line."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Store:  # noqa: ARG002
        """The store in a folder, which need not exist; a file is refused."""
        root = Path(value)
        if root.exists() and not root.is_dir():
            raise CacheError(f"{root} is a file; a cache is a folder")
        return Store(root)


class Duration(click.ParamType):
    """An age on the command line, such as ``30d`` or ``12h``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        """The age in seconds."""
        return parse_duration(value)


cache_dir = click.option(
    "--cache-dir",
    "store",
    type=StoreType(),
    default=lambda: str(user_root()),
    help="The cache (else TILEKERN_CACHE_DIR, else the user's cache folder).",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
target = click.option("--target", help="Only of this GPU: its key, name or arch.")
toolkit = click.option("--toolkit", help="Only of this toolkit's key.")


def with_filters(command: Command) -> Command:
    """Options that choose records by what they are of."""
    for option in (
        click.option("--provenance", help="Only measured, predicted or default ones."),
        toolkit,
        target,
        click.option("--kernel", help="Only records of this kernel."),
    ):
        command = option(command)
    return command


def with_age_filters(command: Command) -> Command:
    """Options that choose records by their age."""
    command = click.option("--stale", is_flag=True, help="Only those whose kernel's source has changed since.")(command)
    older_than = click.option("--older-than", "older_than_s", type=Duration(), help="Only older ones: 30d, 12h.")
    return older_than(command)


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
@click.argument("path", metavar="[PACK|CACHE]", required=False, type=click.Path(path_type=Path))
@click.option("--signed", is_flag=True, help="A record that no trust root signed is a fault, too.")
@cache_dir
@as_json
@click.pass_context
def verify(context: click.Context, path: Path | None, signed: bool, store: Store, as_json: bool) -> None:
    """Check every record, artifact and signature of a pack or a cache; exit code 1 where one is broken.

    Stale records are reported, and are no fault.

    JSON: cache_dir or pack, records, blobs, broken[] {path, problem}, stale[], unknown_source[], signatures {trusted,
    other_key, unsigned, by {name: records}, bad[] {path, problem}, unchecked}, and of a cache unknown_schema[],
    orphans, leftovers[].
    """
    is_pack = path is not None and not path.is_dir()
    sound = (
        checking.verify_pack(path, as_json, signed)
        if path is not None and is_pack
        else checking.verify(Store(path) if path else store, as_json, signed)
    )
    if not sound:
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
app.add_command(trusting.keygen)
app.add_command(trusting.sign)
