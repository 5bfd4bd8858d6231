"""The service's loop: looks at the wanted lists, tunes the costliest problems first, publishes, writes its history."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilekern.cache import CacheError
from tilekern.errors import TilekernError
from tilekern.tuning.pipeline import Options
from tilekern.tuning.publishing import Winner, is_open
from tilekern.tuning.serve.board import IDLE, MOST_SHOWN, TUNING, Board
from tilekern.tuning.serve.tuner import tune
from tilekern.tuning.serve.watched import WAITING, Item, WatchedCache
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.terminal.console import sizes_of

# What the world does to a cache, and the next pass may be spared.
TROUBLE = (TilekernError, CacheError, OSError)


class Service:
    """Works off the wanted lists of some caches.

    Args:
        caches: the caches, each held already.
        options: how to tune.
        batch: how many problems to tune at once; after each batch the queue is looked at anew.
        board: where to say what is done.
        say: takes a line for people.
    """

    def __init__(
        self, caches: Sequence[WatchedCache], options: Options, batch: int, board: Board, say: Callable[[str], None]
    ) -> None:
        self._caches, self._options, self._batch, self._board, self._say = list(caches), options, batch, board, say
        # What the pass at work has come to: lines of the history, what is still wanted, caches that are in trouble.
        self.published: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.left: list[Item] = []
        self.troubled: dict[WatchedCache, str] = {}

    def run(self, poll_s: float) -> None:
        """Work until the process is told to stop, which raises here.

        Args:
            poll_s: seconds to wait where nothing is left to do.
        """
        while True:
            self.work_off()
            time.sleep(poll_s)

    def work_off(self) -> None:
        """Tune until nothing is left that can be tuned here and now."""
        self.published, self.failed, self.troubled = [], [], {}
        while (chosen := self._choose()) is not None:
            self._board.put(state=TUNING)
            self._tune(*chosen)
        self._board.add(passes=1)
        self._board.put(state=IDLE, error="; ".join(self.troubled.values()) or None)

    def _choose(self) -> tuple[WatchedCache, list[Item]] | None:
        """The next batch: the costliest items of the cache that has the costliest one; None where nothing is left."""
        queues = {cache: self._queue(cache) for cache in self._caches}
        found = [item for queue in queues.values() for item in queue]
        self.left = sorted(found, key=lambda item: (item.state != WAITING, -item.cost_s, item.created))
        self._board.queue([str(cache.root) for cache in self._caches], self.left)
        lines = [line for cache in self._caches for line in cache.history.last(MOST_SHOWN)]
        self._board.put(history=sorted(lines, key=lambda line: str(line.get("time")), reverse=True)[:MOST_SHOWN])
        ready = {cache: [item for item in queue if item.state == WAITING] for cache, queue in queues.items()}
        waiting = {cache: items for cache, items in ready.items() if items and cache not in self.troubled}
        if not waiting:
            return None
        cache = max(waiting, key=lambda cache: waiting[cache][0].cost_s)
        return cache, waiting[cache][: self._batch]

    def _queue(self, cache: WatchedCache) -> list[Item]:
        try:
            for item in cache.settle():
                self._say(f"{item.kernel} {_values(item)}: was in {cache.root} already")
            return cache.queue()
        except TROUBLE as error:
            self._trouble(cache, error)
            return []

    def _tune(self, cache: WatchedCache, items: Sequence[Item]) -> None:
        """Tune a batch; one that fails as a whole is tried item by item, so that one item never stops others."""
        began = time.perf_counter()
        shown = [{"kernel": item.kernel, "problem": dict(item.problem)} for item in items]
        self._board.put(batch={"cache": str(cache.root), "items": shown, "stage": "plan", "done": 0, "of": 0})
        try:
            found = tune(cache, [item.named for item in items], self._options, self._board.tell)
        except OSError as error:
            self._trouble(cache, error)
        except Exception as error:  # noqa: BLE001 (whatever an item does must not end the service)
            if len(items) > 1:
                for item in items:
                    self._tune(cache, [item])
            else:
                reason = str(error) if isinstance(error, TROUBLE) else f"{type(error).__name__}: {error}"[:300]
                self._guarded(cache, self._failed, items[0], reason, passing=True)
        else:
            self._guarded(cache, self._keep, items, found, time.perf_counter() - began)
        finally:
            self._board.put(batch=None)

    def _keep(
        self, cache: WatchedCache, items: Sequence[Item], found: Mapping[Named, Winner | str], seconds: float
    ) -> None:
        """Write down what became of items, and take those off the list that the cache holds now."""
        self._board.add(tuning_s=round(seconds, 3))
        done = []
        for item in items:
            outcome = found[item.named]
            if isinstance(outcome, str):
                self._failed(cache, item, outcome, passing=is_open(cache.sweep, *item.named))
            elif not cache.serves(item):
                self._failed(cache, item, "its record was published, and a lookup does not find it", passing=False)
            else:
                facts = _facts(item, outcome)
                cache.history.note("published", item.name, seconds=round(seconds, 3), **facts)
                self.published.append({"cache": str(cache.root), **facts})
                self._board.add(published=1)
                self._say(f"{item.kernel} {_values(item)}: {facts['provenance']} {facts['time_us']:.1f} us")
                done.append(item)
        cache.remove(done)

    def _failed(self, cache: WatchedCache, item: Item, reason: str, *, passing: bool) -> None:
        cache.fail(item, reason, passing=passing)
        self.failed.append({
            "cache": str(cache.root), "kernel": item.kernel, "problem": dict(item.problem), "reason": reason,
            "passing": passing,
        })  # fmt: skip
        self._board.add(failed=1)
        self._say(f"{item.kernel} {_values(item)}: failed: {reason}")

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


def _facts(item: Item, winner: Winner) -> dict[str, Any]:
    return {
        "kernel": item.kernel,
        "problem": dict(item.problem),
        "provenance": winner.record.provenance,
        "config": winner.record.config,
        "time_us": round(winner.time_us, 3),
        "gain_over_default": round(winner.gain, 4),
        "misses": item.misses,
    }


def _values(item: Item) -> str:
    return sizes_of(item.problem)
