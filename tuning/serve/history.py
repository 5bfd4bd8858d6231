"""A service's work and failures, in the cache's root: ``service/history.jsonl`` and ``service/failed.jsonl``."""

from __future__ import annotations

import datetime
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilekern.cache import CacheError, Missing, parse_problem_key, problem_key
from tilekern.cache.files import read_whole, write_whole
from tilekern.tuning.sweep.journal import Journal, Line
from tilekern.warning import warn_once

# Lines that are kept; the file is cut back to them where it has come to twice as many.
MOST_LINES = 1000
_LARGEST = 2**26
# How long an item is let alone that failed for a passing reason: this long, then twice as long, up to a day.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 86400.0


def now() -> str:
    """The time as the service's files have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class History:
    """The outcome for items, newest last, in a file of bounded size. Only the service at work writes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._journal = path, Journal(path, "item")

    def note(self, event: str, item: str, kernel: str, problem: Mapping[str, Any], **facts: Any) -> None:
        """Append a line with the time; the problem stands in it by its key, which keeps its order.

        Raises:
            OSError: the file cannot be written.
            CacheError: the file is far larger than a service lets it grow.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        named = {"kernel": kernel, "problem": problem_key(problem)}
        self._journal.append({"time": now(), "event": event, "item": item, **named, **facts})
        lines = read_whole(self._path, _LARGEST)[0].splitlines(keepends=True)
        if len(lines) >= 2 * MOST_LINES:
            write_whole(self._path, b"".join(lines[-MOST_LINES:]))

    def last(self, count: int) -> list[Line]:
        """The last lines, the newest first."""
        try:
            data, _ = read_whole(self._path, _LARGEST)
        except Missing:
            return []
        except CacheError as error:
            warn_once(f"the service's history is left out: {error}")
            return []
        found = (_parsed(line) for line in reversed(data.splitlines()))
        return list(itertools.islice((line for line in found if line is not None), count))


class Failures:
    """Items that are not to be tried again as yet, each with its reason.

    A failure of the item itself stands until the kernel's source, the toolkit or what was aimed at is another one; one
    that may pass (a full disk, a GPU that is gone) until its time has come.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._journal = path, Journal(path, "item", is_whole=_is_failure)

    def note(self, item: str, reason: str, state: Mapping[str, str], *, passing: bool) -> None:
        """Write a failure down.

        Args:
            item: the wanted problem's name.
            reason: why, for people.
            state: what the failure depends on.
            passing: whether it may go by itself.

        Raises:
            OSError: the file cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line: Line = {"item": item, "reason": reason, "state": dict(state), "time": now()}
        if passing:
            tries = int(self._journal.latest().get(item, {}).get("tries", 0)) + 1
            pause_s = min(FIRST_PAUSE_S * 2 ** min(tries - 1, 20), LONGEST_PAUSE_S)
            line |= {"tries": tries, "again_at": time.time() + pause_s}
        self._journal.append(line)

    def forget(self) -> None:
        """Have everything tried again.

        Raises:
            OSError: the file cannot be deleted.
        """
        self._path.unlink(missing_ok=True)

    def why(self, item: str, state: Mapping[str, str]) -> str | None:
        """Why an item is not to be tried now; None where it may be."""
        line = self._journal.latest().get(item)
        if line is None or line.get("state") != dict(state) or line.get("again_at", float("inf")) <= time.time():
            return None
        return str(line.get("reason"))


def _is_failure(line: Line) -> bool:
    """Whether a line holds what is read of it, in the types that it is read in."""
    is_pause = type(line.get("tries", 0)) is int and type(line.get("again_at", 0)) in (int, float)
    return is_pause and isinstance(line.get("reason"), str)


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
        json.dumps(line, ensure_ascii=False, allow_nan=False).encode()  # as the status does, which it becomes part of
        return {**line, "problem": parse_problem_key(line["problem"])}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, CacheError):  # torn by a kill
        return None
