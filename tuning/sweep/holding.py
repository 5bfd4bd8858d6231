"""Locks a sweep folder for one run at a time, and keeps a journal of how long each run worked.

The lock ends with its process, however that ends. Readers need none.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tilekern.cache.files import handed_on, why_not_its_own
from tilekern.errors import InputError
from tilekern.tuning.sweep.journal import Journal

LOCK = "run.lock"
# A reader that asks whether the lock is held has it for an instant; a run waits that out.
PATIENCE_S = 1.0
# How often a run notes that it is still at work; a run that is killed loses so much of its time in the journal.
BEAT_S = 2.0


@dataclass
class Run:
    """A run on a stage; the time between :meth:`pause` and :meth:`go_on` does not count."""

    stage: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.time)
    beaten: float = 0.0
    _waited_s: float = 0.0
    _paused_at: float | None = None

    def pause(self) -> None:
        """Stop counting until another stage has come further."""
        if self._paused_at is None:
            self._paused_at = time.time()

    def go_on(self) -> None:
        """Count again; harmless if it was not paused."""
        if self._paused_at is not None:
            self._waited_s += time.time() - self._paused_at
            self._paused_at = None

    def line(self, *, ended: bool) -> dict[str, Any]:
        """Return the run's line for its journal, up to now."""
        self.beaten = time.time()
        worked_until = self.beaten if self._paused_at is None else self._paused_at
        return {
            "run": self.name,
            "stage": self.stage,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(worked_until - self.started - self._waited_s, 3),
            "ended": ended,
        }


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turn errors of writing to the folder of a sweep or a cache into InputError.

    The message names no option: the commands have different ones, and functions have none.

    Raises:
        InputError: it cannot be written, with what the system says.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {folder}: {error.strerror}; choose another folder for the cache or the sweep"
        ) from None


class Holder:
    """The lock of a sweep folder and the journal of its runs; threads of a process hold the lock together.

    Args:
        folder: the sweep folder.
        runs: the journal of its runs.
    """

    def __init__(self, folder: Path, runs: Journal) -> None:
        self._folder, self._path, self._runs = folder, folder / LOCK, runs
        self._held = 0
        self._file: FileLock | None = None
        self._stages: list[Run] = []
        self._mutex = threading.RLock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out; a process that holds the lock may take it again.

        Raises:
            InputError: another run has it, which is named, or the folder cannot be written.
        """
        with self._mutex:
            if self._file is None:
                self._acquire()
            self._held += 1
        try:
            yield
        finally:
            with self._mutex:
                self._held -= 1
                if not self._held and self._file is not None:
                    self._file.release()
                    self._file = None

    def _acquire(self) -> None:
        with written(self._folder):
            lock = self._lock()
            try:
                lock.acquire(timeout=PATIENCE_S)
            except Timeout:
                run, named = self.holder(), "another run"
                if run is not None:
                    named += f": {run['stage']} on {run['host']}, process {run['process']}, since {run['started']}"
                raise InputError(f"{self._folder} is held by {named}; wait for its end or give another") from None
            self._file = lock

    def _lock(self) -> FileLock:
        """Return the lock; others may write its file only if they may write the folder, whatever the umask is.

        Raises:
            OSError: something else stands in the place of its file, which an older filelock would empty.
        """
        with contextlib.suppress(FileNotFoundError):
            if reason := why_not_its_own(self._path, os.lstat(self._path)):
                raise OSError(errno.EINVAL, reason)
        return FileLock(self._path, mode=0o644 | handed_on(self._folder), thread_local=False)

    @contextlib.contextmanager
    def running(self, stage: str) -> Iterator[Run]:
        """Work on a stage under the lock; raises as :meth:`locked`."""
        with self.locked():
            run = Run(stage)
            with self._mutex:
                self._stages.append(run)
                self._runs.append(run.line(ended=False))
            try:
                yield run
            finally:
                with self._mutex:
                    self._stages.remove(run)
                    self._runs.append(run.line(ended=True))
                    self._runs.sync()

    @property
    def stages(self) -> int:
        """Return how many stages this process works on."""
        return len(self._stages)

    def beat(self) -> None:
        """Note how long the running stages have worked, unless that was noted a moment ago."""
        with self._mutex:
            for run in self._stages:
                if time.time() - run.beaten > BEAT_S:
                    self._runs.append(run.line(ended=False))

    def is_held(self) -> bool | None:
        """Return whether a run holds the lock; None if that cannot be told, as in a read-only folder."""
        if not os.path.lexists(self._path):
            return False
        try:
            with self._lock().acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return None

    def holder(self) -> dict[str, Any] | None:
        """Return the newest run that has not ended: the one that holds the lock, if it is held."""
        return next((line for line in reversed(self._runs.latest().values()) if not line["ended"]), None)
