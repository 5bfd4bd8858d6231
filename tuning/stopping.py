"""Signals that stop a run in good order: an exception in the main thread, as of Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

# ``timeout`` signals the process and then its group, so a second signal may follow at once.
AT_ONCE_S = 1.0


class Stopped(BaseException):
    """Raised in the main thread by a signal; finished work is kept. click would take a KeyboardInterrupt for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Return the exit code by which shells name the signal."""
        return 128 + self.number


@contextlib.contextmanager
def stopped_by(*numbers: int) -> Iterator[None]:
    """Raise :class:`Stopped` at the first of some signals; one that comes :data:`AT_ONCE_S` later ends the process."""
    first: float | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            raise Stopped(number)
        if time.monotonic() - first > AT_ONCE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
