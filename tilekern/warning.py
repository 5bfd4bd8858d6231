"""Warnings of the library: one line each, with no line of source, filtered and caught like any other.

They are about a cache, a machine or a model, and not about the line of code that happened to run. So each has the
library's name in the place of a file, and Python prints ``tilekern:0: TilekernWarning: MESSAGE`` and nothing else.
Filters find it by its class, its message or the module ``tilekern``; pytest, ``logging.captureWarnings`` and whoever
has replaced ``warnings.showwarning`` get it as they get others. That function is the application's, so the library
leaves it alone; the command lines, which are applications, replace it while they run (:func:`shown_plainly`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

from tilekern.errors import TilekernWarning

_PLACE = "tilekern"
_said: set[str] = set()
# By which the filter `default` shows a message once, as it does for a place in the code.
_registry: dict[str | tuple[str, type[Warning], int], int] = {}


def warn(message: str) -> None:
    """Warn; the message is one line and says what is wrong, then what to do."""
    warnings.warn_explicit(" ".join(message.split()), TilekernWarning, _PLACE, 0, registry=_registry)


def warn_once(message: str, about: object = None) -> None:
    """Warn, but only the first time in this process.

    Args:
        message: as of :func:`warn`.
        about: what has been warned about afterwards, a file for example; the message itself where None.
    """
    name = message if about is None else str(about)
    if name not in _said:
        _said.add(name)
        warn(message)


@contextlib.contextmanager
def warned_after(seconds: float, message: str) -> Iterator[None]:
    """Warn while a block is at work that takes longer than so many seconds."""
    timer = threading.Timer(seconds, _warn_from_a_thread, [message])
    timer.daemon = True  # a process that ends does not wait for it
    with contextlib.suppress(RuntimeError):  # where no thread can be started the work goes on unexplained
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn_from_a_thread(message: str) -> None:
    # Where warnings are errors there is nobody in a timer's thread to catch this one.
    with contextlib.suppress(TilekernWarning):
        warn(message)


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """Print tilekern's warnings as ``tilekern: MESSAGE``, for a command line; others are shown as before."""
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, TilekernWarning):
            print(f"{_PLACE}: {message}", file=file or sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
