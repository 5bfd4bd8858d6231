"""The command wanted: problems that jobs asked for and did not find, and how often each ran untuned."""

from __future__ import annotations

import click

from tilekern.cache import Store, clear_wanted, problem_key, read_misses, read_wanted, wanted_name
from tilekern.cache_tools.shared.options import as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import count, natural, plain, print_json, print_table
from tilekern.warning import tell


@command
@click.option("--clear", "empty", is_flag=True, help="Empty the list after printing it.")
@cache_dir
@as_json
def wanted(store: Store, empty: bool, as_json: bool) -> None:
    """List the problems that jobs asked for and did not find.

    JSON: cache_dir, wanted[] {kernel, problem, target, reason, created, runs}, cleared; all in docs/cache-json.md.
    """
    runs = read_misses(store.root)
    items = [
        {**item, "runs": runs.get(wanted_name(item["kernel"], item["problem"], item["target"]), 0)}
        for item in read_wanted(store.root)
    ]
    cleared = clear_wanted(store.root) if empty else 0
    if as_json:
        print_json({"cache_dir": str(store.root), "wanted": items, "cleared": cleared})
        return
    rows = []
    for item in items:
        target, reason = plain(item["target"].get("key", "")), plain(item["reason"])
        rows.append((target, item["kernel"], problem_key(item["problem"]), str(item["runs"]), reason))
    rows.sort(key=lambda row: [natural(text) for text in row])
    if rows:
        header = ("TARGET", "KERNEL", "PROBLEM", "RUNS", "REASON")
        print_table(header, rows, ("RUNS",), grouped=("TARGET",), below=("PROBLEM", "REASON"))
    else:
        tell(f"nothing is wanted in {store.root}")
    if empty:
        tell(f"removed {count(cleared, 'wanted problem')}")
