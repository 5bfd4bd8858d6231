"""A progress bar on standard error, for people only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress_bar(label: str, size_bytes: int | None) -> Iterator[Callable[[int], object]]:
    """A function that takes the number of bytes that were moved since its last call.

    Nothing is shown where standard error is not a terminal, or the size in bytes is not known.
    """
    if size_bytes is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=size_bytes, label=label, file=sys.stderr) as bar:
        yield bar.update
