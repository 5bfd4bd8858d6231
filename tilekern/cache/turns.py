"""Turns of processes that want to make the same record at the same time: one makes it, the others read it.

Turns only save double work; nothing relies on them. On a network's disk a lock may hold on one node only. A process
that waits too long goes on without a turn, and so do all if no file can be locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tilekern.cache.files import make_folder

_FOLDER = "turns"
# How long one process waits for another. Compiling a default takes some seconds.
LONGEST_S = 60.0
_POLL_S = 0.05


@contextlib.contextmanager
def turn(root: Path | None, what: str) -> Iterator[bool]:
    """Wait for the turn to make ``what`` in the cache at ``root`` (if any), and hold it during the block.

    Yields:
        Whether another process had the turn before, and may have made it.
    """
    lock = None if root is None else _opened(root, what)
    if lock is None:
        yield False
        return
    try:
        began, has_waited = time.monotonic(), False
        while time.monotonic() - began < LONGEST_S:
            try:
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_waited = True
                time.sleep(_POLL_S)
            except OSError:  # this file system does not support locks
                break
            else:
                break
        yield has_waited
    finally:
        lock.end()


def free_turn(root: Path | None, what: str) -> Callable[[], None] | None:
    """Take the turn to make ``what`` if no process has it.

    Returns:
        The function that ends the turn; None if another process has it.
    """
    lock = None if root is None else _opened(root, what)
    if lock is None:
        return lambda: None
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock.descriptor)
        return None
    except OSError:  # this file system does not support locks
        pass
    return lock.end


class _Lock(NamedTuple):
    path: Path
    descriptor: int

    def end(self) -> None:
        with contextlib.suppress(OSError):
            # A process that waits for this very file is next; a later one makes a new file and waits for nobody.
            os.unlink(self.path)
        # Closing is not enough: a child that was forked meanwhile has the file open too.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


def _opened(root: Path, what: str) -> _Lock | None:
    """Return the file of a turn; None if it cannot be made."""
    path = root / _FOLDER / f"{hashlib.sha256(what.encode()).hexdigest()}.lock"
    try:
        make_folder(path.parent)
        return _Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
    except OSError:
        return None
