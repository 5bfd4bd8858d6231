"""Tunes a batch of wanted problems by the pipeline of any sweep, and publishes the winners into the cache."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tilekern.cache.folders import files_inside, unlink_below
from tilekern.tuning.pipeline import Options, Pipeline, Tell
from tilekern.tuning.plan.given import with_parts
from tilekern.tuning.publishing import Winner, keep_winners, why_not
from tilekern.tuning.serve.watched import MEASURED, WatchedCache
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.holding import written
from tilekern.tuning.sweep.plan import Named

# What the sweep folder may hold of artifacts between two batches; they serve problems that compile to the same.
MOST_ARTIFACT_BYTES = 4 << 30


def tune(cache: WatchedCache, named: Sequence[Named], options: Options, tell: Tell) -> dict[Named, Winner | str]:
    """Compile, measure where the GPU is, and publish; what was finished before is not done again.

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
    pipeline = Pipeline(sweep, cache.store, options, tell)
    pipeline.work()
    if cache.goal == MEASURED:
        keep_winners(sweep)  # which composites of a later batch launch
    if found := pipeline.winners():
        pipeline.publish(found)
    good = {
        (winner.kernel, winner.problem): winner
        for winner, _ in found
        if cache.goal != MEASURED or winner.record.provenance == MEASURED
    }
    _make_room(sweep)
    return {pair: good[pair] if pair in good else why_not(sweep, *pair) for pair in named}


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
