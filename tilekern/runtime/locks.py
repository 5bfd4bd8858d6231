"""The lock of what a whole process shares; a forked child finds it free."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """A lock that its holder may take again, and that a forked child does not inherit from another thread.

    A DataLoader forks its workers whenever it likes: while another thread is in a lookup, or compiles for seconds. The
    child has no such thread, so nobody would ever release the lock there. What the lock guards must therefore make
    sense at any moment: dictionaries that are filled key by key.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._free)

    def _free(self) -> None:
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # the thread that forks goes on with what it holds
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
