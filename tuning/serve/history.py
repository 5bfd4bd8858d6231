"""The service's history and failures, in the cache's root: ``service/history.jsonl`` and ``service/failed.jsonl``."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilekern.cache import problem_key
from tilekern.cache.files import read_whole, write_whole
from tilekern.tuning.sweep.journal import Journal, Line

# The history keeps at least this many lines; at twice as many it is cut back.
MOST_LINES = 1000
_LARGEST = 2**26
# Pause after a failure that may pass; it doubles with each try.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 86400.0


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class History:
    """The outcomes of items, newest last, in a file of bounded size that only the running service writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._journal = path, Journal(path, "item")

    def note(self, event: str, item: str, kernel: str, problem: Mapping[str, Any], **facts: Any) -> None:
        """Append a line with the time; the problem is written as its key.

        Raises:
            OSError: the file cannot be written.
            CacheError: the file is far larger than a service lets it grow.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        named = {"kernel": kernel, "problem": problem_key(problem)}
        self._journal.append({"time": _now(), "event": event, "item": item, **named, **facts})
        lines = read_whole(self._path, _LARGEST)[0].splitlines(keepends=True)
        if len(lines) >= 2 * MOST_LINES:
            write_whole(self._path, b"".join(lines[-MOST_LINES:]))


class Failures:
    """Items that must not be tried again yet, each with its reason.

    A failure of the item itself stands until the kernel's source, the toolkit or the goal changes. One that may pass (a
    full disk, a lost GPU) stands until its pause is over.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._journal = path, Journal(path, "item", is_whole=_is_failure)

    def note(self, item: str, reason: str, state: Mapping[str, str], *, passing: bool) -> None:
        """Note a failure.

        Args:
            item: the wanted problem's name.
            reason: the reason, for people.
            state: the facts that the failure depends on.
            passing: whether the reason may pass by itself.

        Raises:
            OSError: the file cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line: Line = {"item": item, "reason": reason, "state": dict(state), "time": _now()}
        if passing:
            tries = int(self._journal.latest().get(item, {}).get("tries", 0)) + 1
            pause_s = min(FIRST_PAUSE_S * 2 ** min(tries - 1, 20), LONGEST_PAUSE_S)
            line |= {"tries": tries, "again_at": time.time() + pause_s}
        self._journal.append(line)

    def forget(self) -> None:
        """Allow all items to be tried again.

        Raises:
            OSError: the file cannot be deleted.
        """
        self._path.unlink(missing_ok=True)

    def why(self, item: str, state: Mapping[str, str]) -> str | None:
        """Return why an item must not be tried now; None if it may."""
        line = self._journal.latest().get(item)
        if line is None or line.get("state") != dict(state) or line.get("again_at", float("inf")) <= time.time():
            return None
        return str(line.get("reason"))


def _is_failure(line: Line) -> bool:
    """Return whether a line has the fields that are read, in their types."""
    is_pause = type(line.get("tries", 0)) is int and type(line.get("again_at", 0)) in (int, float)
    return is_pause and isinstance(line.get("reason"), str)
