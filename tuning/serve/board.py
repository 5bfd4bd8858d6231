"""The service's status: one document, written by the loop and read by the server's thread."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilekern import __version__
from tilekern.spec.targets import Target
from tilekern.tuning.serve.history import now
from tilekern.tuning.serve.watched import MEASURED, STATES, Item

SCHEMA = 1
STARTING, IDLE, TUNING, STOPPING = "starting", "idle", "tuning", "stopping"
# How many items and lines of the history the document has at most; the counts are of all.
MOST_SHOWN = 200


class Board:
    """The service's state. Each method takes microseconds, so that neither side waits for the other.

    Args:
        target: the GPU that the service tunes for.
        toolkit: what it compiles with.
        goal: ``measured`` or ``predicted``.
        poll_s: seconds between two looks at the wanted lists.
    """

    def __init__(self, target: Target, toolkit: dict[str, str], goal: str, poll_s: float) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._known: dict[str, Any] = {
            "schema": SCHEMA,
            "version": __version__,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": now(),
            "gpu": {**target.describe(), "here": goal == MEASURED},
            "toolkit": toolkit,
            "publishes": goal,
            "poll_s": poll_s,
            "state": STARTING,
            "error": None,
            "caches": [],
            "queue": [],
            "batch": None,
            "history": [],
            "totals": {"passes": 0, "published": 0, "failed": 0, "tuning_s": 0.0},
        }

    def put(self, **fields: Any) -> None:
        """Replace fields of the document."""
        with self._lock:
            self._known.update(fields)

    def add(self, **counts: float) -> None:
        """Add to the totals."""
        with self._lock:
            totals = self._known["totals"]
            self._known["totals"] = totals | {name: totals[name] + count for name, count in counts.items()}

    def queue(self, roots: Sequence[str], items: Sequence[Item]) -> None:
        """Show what is wanted, and how many items of each state each cache wants."""
        counts = Counter((str(item.root), item.state) for item in items)
        self.put(
            queue=[_item_json(item) for item in items[:MOST_SHOWN]],
            caches=[{"root": root, **{state: counts[root, state] for state in STATES}} for root in roots],
        )

    def tell(self, stage: str, done: int, of: int) -> None:
        """Show how far the batch at work has come; ``of`` is 0 where that is not known yet."""
        with self._lock:
            if self._known["batch"] is not None:
                self._known["batch"] = self._known["batch"] | {"stage": stage, "done": done, "of": of}

    def document(self) -> dict[str, Any]:
        """The document as ``/status`` gives it."""
        with self._lock:
            known = dict(self._known)
        return known | {"uptime_s": round(time.monotonic() - self._started, 1)}


def _item_json(item: Item) -> dict[str, Any]:
    return {
        "cache": str(item.root),
        "item": item.name,
        "kernel": item.kernel,
        "problem": dict(item.problem),
        "gpu": item.target.get("name"),
        "state": item.state,
        "why": item.why,
        "created": item.created,
        "reason": item.reason,
        "misses": item.misses,
        "lost_us": round(1e6 * item.lost.seconds, 3),
        "cost_s": item.cost_s,
        "basis": item.lost.basis,
    }
