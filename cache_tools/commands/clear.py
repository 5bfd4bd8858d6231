"""The commands that delete: clear and prune."""

from __future__ import annotations

from typing import Any

import click

from cache_tools.shared.options import (
    Duration,
    Size,
    as_json,
    cache_dir,
    confirmed,
    dry_run,
    with_age_filters,
    with_filters,
)
from cache_tools.shared.selection import Selection
from tilekern.cache import Store


@click.command()
@with_filters
@with_age_filters
@click.option("--all", "everything", is_flag=True, help="All records.")
@dry_run
@confirmed
@cache_dir
@as_json
def clear(store: Store, everything: bool, dry_run: bool, confirmed: bool, as_json: bool, **filters: Any) -> None:
    """Remove records, and the blobs that nothing refers to any more.

    Asks first. JSON (needs --yes or --dry-run): cache_dir, dry_run, removed, blobs, bytes, left_alone, kept; all in
    docs/cache-json.md.
    """
    from cache_tools.shared import removing

    removing.clear(store, Selection(**filters), everything, dry_run, confirmed, as_json)


@click.command()
@click.option("--stale", is_flag=True, help="Records whose kernel's source has changed since.")
@click.option(
    "--keep-toolkits",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of each problem on each GPU, records but those of N toolkits: the one here, then the newest.",
)
@click.option("--unused-for", "unused_for_s", type=Duration(), help="Records that no job has read for so long: 90d.")
@click.option("--max-size", "max_bytes", type=Size(), help="The least used, until the cache is no larger: 2G, 500M.")
@dry_run
@confirmed
@cache_dir
@as_json
def prune(
    store: Store,
    stale: bool,
    keep_toolkits: int | None,
    unused_for_s: float | None,
    max_bytes: int | None,
    dry_run: bool,
    confirmed: bool,
    as_json: bool,
) -> None:
    """Remove what is of no use any more: stale, of old toolkits, or the least used; asks first.

    A record's last use is when a job last read its file, as the file system notes it: on Linux to a day, and not at
    all where it is mounted with noatime, which is said; then age decides. Looking at a cache is no use of it. A job
    keeps what it has loaded, and one that has read a record finds its artifacts still there.

    JSON (needs --yes or --dry-run): cache_dir, dry_run, evidence, records[] {path, kernel, problem_key, target,
    toolkit, size_bytes, last_used, reasons[]}, removed, blobs, bytes, bytes_left, left_alone, kept; all in
    docs/cache-json.md.
    """
    from cache_tools.commands import prune as pruning

    limits = pruning.Limits(stale, keep_toolkits, unused_for_s, max_bytes)
    pruning.prune(store, limits, dry_run, confirmed, as_json)
