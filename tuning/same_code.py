"""``refresh --same-code``: records that an edit made stale keep their figures where their machine code is the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tilekern.cache import Record, Store, user_root
from tilekern.compile.toolchain import require_toolkit
from tilekern.tuning.carrying import Carried, carry_over, held_in_cache, held_in_pack, write_to_cache, write_to_pack
from tilekern.tuning.compile.pool import Answer, Lost
from tilekern.tuning.compile.stage import jobs_of
from tilekern.tuning.terminal.console import sizes_of
from tilekern.tuning.terminal.progress import progress_bars
from tilekern.warning import tell


@dataclass(frozen=True)
class Place:
    """The outcome for a pack or a cache; ``unsigned`` records were signed before they were carried over."""

    path: Path
    found: Carried
    unsigned: int

    def as_json(self) -> dict[str, Any]:
        """The place as ``--json`` prints it."""
        return {
            "place": str(self.path),
            "carried": [{**_named(new), "fresh": self.found.fresh(new)} for _, (new, _) in self.found.carried],
            "stale": [{**_named(left.record), "reason": left.reason} for left in self.found.left],
            "current": self.found.current,
            "compiled": self.found.compiled,
            "unsigned": self.unsigned,
        }


def run(
    cache_dir: Path | None, packs: Sequence[Path], jobs: int | None, *, same_calls: bool, as_json: bool
) -> None:  # fmt: skip
    """Carry over the records of packs, and of a cache where one is named or no pack is; say what became of them.

    Raises:
        ToolchainMissing: no compiler is installed.
        tilekern.cache.CacheError: a pack or the cache cannot be read or written.
    """
    tools, places = require_toolkit(), []
    memo: dict[str, Answer | Lost] = {}
    caches = [cache_dir or user_root()] if cache_dir or not packs else []
    for path in [*packs, *caches]:
        held = held_in_pack(path) if path in packs else held_in_cache(path)
        with progress_bars(quiet=as_json) as tell_stage:
            progress = functools.partial(tell_stage, "compile")
            found = carry_over(held, tools.key, jobs_of(jobs), same_calls=same_calls, progress=progress, memo=memo)
        unsigned = 0
        if found.carried and path in packs:
            unsigned = write_to_pack(path, held, found)
        elif found.carried:
            write_to_cache(Store(path), found)
        places.append(Place(path, found, unsigned))
    if as_json:
        click.echo(json.dumps({"toolkit": tools.key, "places": [place.as_json() for place in places]}, indent=1))
    else:
        for place in places:
            _print(place)


def _named(record: Record) -> dict[str, Any]:
    return {"kernel": record.kernel, "problem": record.problem, "target": record.target["key"]}


def _print(place: Place) -> None:
    found = place.found
    for left in found.left:
        tell(f"stale: {left.record.kernel} {sizes_of(left.record.problem)}: {left.reason}")
    dated = sum(not found.fresh(new) for _, (new, _) in found.carried)
    tell(
        f"{place.path}: {len(found.carried)} records carried over, {len(found.left)} stay stale, "
        f"{found.current} were of today; {found.compiled} artifacts compiled"
    )
    if dated:
        tell(f"{dated} of them are not known to be the best: their space is another one")
    if place.unsigned:
        tell(f"{place.unsigned} of them were signed; sign them again: python -m tilekern.cache_tools sign")
