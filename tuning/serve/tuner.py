"""Tunes a batch of wanted problems with the stages of any sweep, and publishes the winners into the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilekern.cache.folders import files_inside, unlink_below
from tilekern.compile.toolchain import require_toolkit
from tilekern.tuning.compile.stage import TIMEOUT_S, compile_all
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.plan.given import with_parts
from tilekern.tuning.publishing import Winner, keep_winners, publish, why_not, winners
from tilekern.tuning.serve.watched import MEASURED, WatchedCache
from tilekern.tuning.sweep.folder import RESULTS, Sweep
from tilekern.tuning.sweep.holding import written
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.sweep.quarantine import shared

# What the sweep folder may hold of artifacts between two batches; they serve problems that compile to the same.
MOST_ARTIFACT_BYTES = 4 << 30
# Told the stage at work, and how much of how many is done in it.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class How:
    """How to tune: ``jobs`` compile workers, at most so many ``gpus``, ``timeout_s`` for one compile."""

    jobs: int
    gpus: int | None = None
    timeout_s: float = TIMEOUT_S


def tune(cache: WatchedCache, named: Sequence[Named], how: How, tell: Tell) -> dict[Named, Winner | str]:
    """Compile, measure where the goal is ``measured``, and publish; what was finished before is not done again.

    The parts of composites are tuned with them, unless the cache has them.

    Returns:
        The winner of each problem, now in the cache, or why it has none that is as good as the goal.

    Raises:
        InputError: the sweep folder is held or cannot be written, or there is no such GPU.
        tilekern.cache.CacheError: the cache cannot be written.
    """
    sweep = cache.sweep
    parts = [pair for pair in with_parts(named, cache.target) if pair not in named and not cache.holds(pair)]
    sweep.begin(cache.target, "wanted", [*dict.fromkeys(named), *parts])
    tell("compile", 0, 0)
    compile_all(sweep, how.jobs, how.timeout_s, lambda done, of: tell("compile", done, of))
    if cache.goal == MEASURED:
        tell("measure", 0, len(named))
        with shared(sweep, cache.root), LocalExecutor(sweep.cache, how.gpus) as executor:
            measure_all(sweep, executor, keep_winners, progress=lambda done, of: tell("measure", done, of))
        # What composites of a later batch launch.
        keep_winners(sweep)
    tell("publish", 0, 0)
    found = list(winners(sweep, require_toolkit().describe()))
    if found:
        publish(found, sweep.folder / RESULTS, cache.store, own=sweep.is_own)
    won = {(winner.kernel, winner.problem): winner for winner, _ in found}
    results: dict[Named, Winner | str] = {}
    for pair in named:
        winner = won.get(pair)
        good = winner is not None and (cache.goal != MEASURED or winner.record.provenance == MEASURED)
        results[pair] = winner if good and winner is not None else why_not(sweep, *pair)
    _make_room(sweep)
    return results


def _make_room(sweep: Sweep) -> None:
    """Drop the oldest artifacts where there are too many; those that are asked for again are compiled again."""
    with written(sweep.folder):
        files = [(path, os.lstat(sweep.folder / path)) for path in files_inside(sweep.folder, "artifacts")]
        held = sum(status.st_size for _, status in files)
        for path, status in sorted(files, key=lambda pair: pair[1].st_mtime):
            if held <= MOST_ARTIFACT_BYTES:
                break
            unlink_below(sweep.folder, path)
            held -= status.st_size
