"""Turns of processes that want to make the same record at the same moment: one makes it, the others read it.

A turn saves double work and guards nothing. On a network's disk it may hold on one node only, whoever waits too long
goes on without one, and so does everybody where no file can be locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tilekern.cache.files import make_folder

_FOLDER = "turns"
# How long one process waits for another. A default takes its compiler some seconds.
LONGEST_S = 60.0
_POLL_S = 0.05


@contextlib.contextmanager
def turn(root: Path | None, what: str) -> Iterator[bool]:
    """Wait for the turn to make something, and have it within the block.

    Args:
        root: the cache's root; None where there is none, and so nobody to wait for.
        what: names what is made, among all that share the cache.

    Yields:
        Whether another process had the turn before, and may have made it.
    """
    descriptor = None if root is None else _opened(path := _file(root, what))
    if descriptor is None:
        yield False
        return
    try:
        yield _has_waited(descriptor)
    finally:
        with contextlib.suppress(OSError):
            # Whoever waits for this very file comes next; who comes later makes one anew, and waits for nobody.
            os.unlink(path)
        # Not by closing alone: a child that was forked meanwhile has it open as well.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _file(root: Path, what: str) -> Path:
    return root / _FOLDER / f"{hashlib.sha256(what.encode()).hexdigest()}.lock"


def _opened(path: Path) -> int | None:
    """The open file; None where it cannot be made."""
    try:
        make_folder(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return None


def _has_waited(descriptor: int) -> bool:
    """Lock a file, waiting for whoever has it locked for a while; whether anybody had."""
    began = time.monotonic()
    waited = False
    while time.monotonic() - began < LONGEST_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            time.sleep(_POLL_S)
        except OSError:  # this file system locks nothing
            break
        else:
            break
    return waited
