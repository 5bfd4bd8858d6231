"""The progress bar of a stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(stage: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal's error stream, told how much of how many is done; None where quiet is asked for."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"{stage:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(stage, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
