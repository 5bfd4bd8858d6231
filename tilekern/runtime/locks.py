"""A lock for state of the whole process, which is free in a forked child."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """A reentrant lock that a forked child does not inherit from another thread.

    A DataLoader may fork its workers while another thread is in a lookup or compiles for seconds. The child does not
    have that thread, so nothing would ever release the lock there. So the guarded state must be consistent at any
    moment: dictionaries that are filled key by key.
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
