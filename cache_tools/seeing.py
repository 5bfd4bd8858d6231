"""The commands that look and change nothing: ls, show, stats, diff, why, wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache_tools.shared.options import PlaceType, as_json, cache_dir, target, toolkit, with_age_filters, with_filters
from cache_tools.shared.selection import Selection
from tilekern.cache import Store

all_layers = click.option(
    "--layers", "all_layers", is_flag=True, help="All layers of a lookup: the cache, TILEKERN_CACHE_PATH, packs."
)


@click.command()
@with_filters
@with_age_filters
@all_layers
@click.option("--layer", help="Only of the layer of this name (implies --layers).")
@cache_dir
@as_json
def ls(store: Store, all_layers: bool, layer: str | None, as_json: bool, **filters: Any) -> None:
    """List the records of the cache, or of every layer that a lookup reads.

    They stand by layer, GPU and toolkit, each as wide as the terminal or COLUMNS says. TIME and GAIN, which is how many
    times faster than the default config, are measured; what is predicted has a ~.

    JSON: cache_dir, exists, layers[] {name, path}, records[] {layer, path, kernel, problem, problem_key, target,
    toolkit, provenance, stale, fresh, time_us, gain, predicted_gain, size_bytes, created, age_s}, unreadable[] {layer,
    path, problem}; all in docs/cache-json.md.
    """
    from cache_tools.commands import ls as listing

    listing.list_records(store, Selection(**filters), all_layers, layer, as_json)


@click.command()
@click.argument("kernel", metavar="KERNEL")
@click.argument("problem_key", metavar="PROBLEM_KEY")
@target
@toolkit
@click.option("--sass", is_flag=True, help="Also the machine code of the artifacts (needs tilekern[inspect]).")
@click.option("--variant", help="With --sass: only of this artifact, such as aligned.")
@cache_dir
@as_json
def show(
    kernel: str, problem_key: str, store: Store, sass: bool, variant: str | None, as_json: bool, **filters: Any
) -> None:
    """Print one record in full; PROBLEM_KEY as `ls` prints it.

    Looks through all layers of a lookup, says which of them have the record, and which one a lookup takes.

    JSON: layer, path, size_bytes, stale, fresh, record (all fields as the cache keeps them), places[] {layer, path,
    target, toolkit, provenance, time_us, gain, created, outcome, detail}, wins, sass {variant: text}; all in
    docs/cache-json.md.
    """
    from cache_tools.commands import show as showing

    variants = None if not sass else variant or ""
    showing.show_record(store, kernel, problem_key, Selection(kernel=kernel, **filters), variants, as_json)


@click.command()
@all_layers
@cache_dir
@as_json
def stats(store: Store, all_layers: bool, as_json: bool) -> None:
    """Count records and bytes.

    JSON: cache_dir, exists, records, bytes, by {layer, kernel, target, toolkit, provenance} {name: {records, bytes}},
    blobs {count, bytes}, orphans {count, bytes}, stale, not_fresh, unknown_source, unreadable, unknown_schema,
    leftovers, wanted; all in docs/cache-json.md.
    """
    from cache_tools.commands import ls as listing

    listing.print_stats(store, all_layers, as_json)


@click.command()
@click.argument("before", metavar="A", type=PlaceType())
@click.argument("after", metavar="B", type=PlaceType())
@with_filters
@click.option("--any-toolkit", is_flag=True, help="Compare the newest toolkit's record of each problem.")
@as_json
def diff(before: Path, after: Path, any_toolkit: bool, as_json: bool, **filters: Any) -> None:
    """Compare two caches or packs: what B has more, lacks, and does faster or slower than A.

    A time counts as another one where the two differ by more than both their spreads.

    JSON: a, b, new[], gone[], faster[], slower[], changed[], stale[] of records {kernel, problem_key, target,
    toolkit, a, b, ratio, because}, same, unreadable[]; all in docs/cache-json.md.
    """
    from cache_tools.commands import diff as comparing

    comparing.compare(before, after, Selection(**filters), any_toolkit, as_json)


@click.command()
@click.argument("kernel", metavar="KERNEL")
@click.argument("problem_key", metavar="PROBLEM")
@click.option("--target", help="The GPU: its name, arch or key (else the one of this machine).")
@cache_dir
@as_json
def why(kernel: str, problem_key: str, target: str | None, store: Store, as_json: bool) -> None:
    """Explain a lookup step by step; PROBLEM with real sizes, such as rows=5000,columns=4096,dtype=bfloat16.

    Looks the problem up as a job on that GPU would, through the same code, and says what was tried in which layer and
    why it was passed over or taken.

    JSON: kernel, problem, problem_key, target, toolkit, source_digest, space_digest, layers[], steps[] {layer, target,
    toolkit, problem_key, outcome, detail}, hit; all in docs/cache-json.md.
    """
    from cache_tools.commands import why as explaining

    explaining.explain(store, kernel, problem_key, target, as_json)


@click.command()
@click.option("--clear", "empty", is_flag=True, help="Empty the list after printing it.")
@cache_dir
@as_json
def wanted(store: Store, empty: bool, as_json: bool) -> None:
    """List what was asked for at run time and was not there.

    JSON: cache_dir, wanted[] {kernel, problem, target, reason, created, runs}, cleared; all in docs/cache-json.md.
    """
    from cache_tools.commands import ls as listing

    listing.print_wanted(store, empty, as_json)
