"""The service's loop: read the wanted lists, tune the costliest problems, publish the winners, write the history."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tilekern.cache import CacheError, Store
from tilekern.cache.folders import files_inside, unlink_below
from tilekern.errors import TilekernError
from tilekern.tuning.pipeline import Options, Pipeline, Tell
from tilekern.tuning.plan.choosing import with_parts
from tilekern.tuning.publishing import Known, Winner, invariant_winners, is_open, keep_winners
from tilekern.tuning.serve.watched import MEASURED, WAITING, Item, WatchedCache
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.holding import written
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.terminal import sizes_of

# Errors of a cache or its disk; the next pass may not meet them.
TROUBLE = (TilekernError, CacheError, OSError)
# Limit on the artifacts that a sweep folder keeps between two batches, for problems that compile to the same code.
MOST_ARTIFACT_BYTES = 4 << 30


class Service:
    """Works off the wanted lists of some caches.

    Args:
        caches: the caches, each held already.
        options: how to tune.
        batch: how many problems to tune at once; the queue is read anew after each batch.
        say: takes a line for people.

    Attributes:
        published: the history lines of problems that the current pass published.
        failed: the problems that it could not tune, with their reasons.
        left: the items that are still wanted.
        troubled: caches that the current pass gave up, with the reason.
    """

    def __init__(
        self, caches: Sequence[WatchedCache], options: Options, batch: int, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._caches, self._options, self._batch, self._say = list(caches), options, batch, say
        self.published: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.left: list[Item] = []
        self.troubled: dict[WatchedCache, str] = {}

    def run(self, poll_s: float) -> None:
        """Work until a signal raises here; rest for ``poll_s`` seconds when nothing is left to do."""
        while True:
            self.work_off()
            time.sleep(poll_s)

    def work_off(self) -> None:
        """Tune until nothing is left that can be tuned here and now."""
        self.published, self.failed, self.troubled = [], [], {}
        while (chosen := self._choose()) is not None:
            self._tune(*chosen)

    def _choose(self) -> tuple[WatchedCache, list[Item]] | None:
        """Return the next batch: the costliest items of the cache that has the costliest one."""
        queues = {cache: self._queue(cache) for cache in self._caches}
        items = [item for queue in queues.values() for item in queue]
        self.left = sorted(items, key=lambda item: (item.state != WAITING, -item.cost_s, item.created))
        ready = {cache: [item for item in queue if item.state == WAITING] for cache, queue in queues.items()}
        waiting = {cache: items for cache, items in ready.items() if items and cache not in self.troubled}
        if not waiting:
            return None
        cache = max(waiting, key=lambda cache: waiting[cache][0].cost_s)
        return cache, waiting[cache][: self._batch]

    def _queue(self, cache: WatchedCache) -> list[Item]:
        try:
            for item in cache.settle():
                self._say(f"{item.kernel} {sizes_of(item.problem)}: was in {cache.root} already")
            return cache.queue()
        except TROUBLE as error:
            self._trouble(cache, error)
            return []

    def _tune(self, cache: WatchedCache, items: Sequence[Item]) -> None:
        """Tune a batch; if the batch fails as a whole, tune its items one by one."""
        began = time.perf_counter()
        try:
            outcomes = tune(cache, [item.named for item in items], self._options)
        except OSError as error:
            self._trouble(cache, error)
        except Exception as error:  # noqa: BLE001 (no item may end the service)
            if len(items) > 1:
                for item in items:
                    self._tune(cache, [item])
            else:
                reason = str(error) if isinstance(error, TROUBLE) else f"{type(error).__name__}: {error}"[:300]
                self._guarded(cache, self._failed, items[0], reason, passing=True)
        else:
            self._guarded(cache, self._keep, items, outcomes, time.perf_counter() - began)

    def _keep(
        self, cache: WatchedCache, items: Sequence[Item], outcomes: Mapping[Named, Winner | str], seconds: float
    ) -> None:
        """Write the history, and take published items off the wanted list."""
        done = []
        for item in items:
            outcome = outcomes[item.named]
            if isinstance(outcome, str):
                self._failed(cache, item, outcome, passing=is_open(cache.sweep, *item.named))
            elif not cache.serves(item):
                self._failed(cache, item, "its record was published, and a lookup does not find it", passing=False)
            else:
                facts: dict[str, Any] = {
                    "kernel": item.kernel,
                    "problem": dict(item.problem),
                    "provenance": outcome.record.provenance,
                    "config": outcome.record.config,
                    "time_us": round(outcome.time_us, 3),
                    "gain_over_default": round(outcome.gain, 4),
                    "misses": item.misses,
                }
                cache.history.note("published", item.name, seconds=round(seconds, 3), **facts)
                self.published.append({"cache": str(cache.root), **facts})
                self._say(f"{item.kernel} {sizes_of(item.problem)}: {facts['provenance']} {facts['time_us']:.1f} us")
                done.append(item)
        cache.remove(done)

    def _failed(self, cache: WatchedCache, item: Item, reason: str, *, passing: bool) -> None:
        cache.fail(item, reason, passing=passing)
        self.failed.append({
            "cache": str(cache.root), "kernel": item.kernel, "problem": dict(item.problem), "reason": reason,
            "passing": passing,
        })  # fmt: skip
        self._say(f"{item.kernel} {sizes_of(item.problem)}: failed: {reason}")

    def _guarded(self, cache: WatchedCache, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            work(cache, *args, **kwargs)
        except TROUBLE as error:
            self._trouble(cache, error)

    def _trouble(self, cache: WatchedCache, error: Exception) -> None:
        """Leave a cache alone until the next pass."""
        why = f"{cache.root}: {getattr(error, 'strerror', None) or error}"
        if cache not in self.troubled:
            self.troubled[cache] = why
            self._say(f"left until the next pass: {why}")


def tune(
    cache: WatchedCache, named: Sequence[Named], options: Options, tell: Tell = lambda *_: None,
    invariant: Collection[Named] = (),
) -> dict[Named, Winner | str]:  # fmt: skip
    """Compile, measure if the GPU is here, and publish; the sweep's journal saves finished work.

    The parts of composites are tuned with them, unless the cache has them. ``invariant`` are the problems that need a
    kernel of one bit class.

    Returns:
        The winner of each problem, now in the cache, or the reason why it has none that is as good as the goal, or none
        of the bit class that it needs.

    Raises:
        InputError: the sweep folder is held or cannot be written, or there is no such GPU.
        tilekern.cache.CacheError: the cache cannot be written.
    """
    sweep = cache.sweep
    parts = [pair for pair in with_parts(named, cache.target) if pair not in named]
    known = [pair for pair in parts if cache.holds(pair)]
    planned = dict.fromkeys((*named, *(pair for pair in parts if pair not in known)))
    sweep.begin(cache.target, "wanted", list(planned), invariant=invariant)
    cache.lend(known, Store(sweep.cache))  # where composites look them up while they are measured
    pipeline = Pipeline(sweep, cache.store, options, tell)
    pipeline.work()
    if cache.goal == MEASURED:
        keep_winners(sweep)  # which composites of a later batch launch
    if winners := pipeline.winners():
        pipeline.publish(winners)
    good = {
        (winner.kernel, winner.problem): winner
        for winner, _ in winners
        if cache.goal != MEASURED or winner.record.provenance == MEASURED
    }
    classless = invariant_winners(sweep, Known.of(sweep))[1] if invariant else {}
    _make_room(sweep)
    return {
        pair: pipeline.why_not(*pair) if pair not in good else f"no bit class: {classless[pair]}" if pair in classless
        else good[pair]
        for pair in named
    }  # fmt: skip


def _make_room(sweep: Sweep) -> None:
    """Delete the oldest artifacts beyond the limit; they are compiled again when needed."""
    with written(sweep.folder):
        files = [(path, os.lstat(sweep.folder / path)) for path in files_inside(sweep.folder, "artifacts")]
        held = sum(status.st_size for _, status in files)
        for path, status in sorted(files, key=lambda pair: pair[1].st_mtime):
            if held <= MOST_ARTIFACT_BYTES:
                break
            unlink_below(sweep.folder, path)
            held -= status.st_size
