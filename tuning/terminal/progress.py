"""The progress bars of stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, Task

# Told how much of how many is done; None where quiet is asked for.
Tell = Callable[[int, int], None] | None
_SPEED_OF_S = 600.0


@contextlib.contextmanager
def progress_bar(stage: str, *, quiet: bool) -> Iterator[Tell]:
    """A bar on the terminal's error stream."""
    with progress_bars([stage], quiet=quiet) as (tell,):
        yield tell


@contextlib.contextmanager
def progress_bars(stages: Sequence[str], *, quiet: bool) -> Iterator[list[Tell]]:
    """Bars on the terminal's error stream, of stages that are at work at the same time."""
    if quiet:
        yield [None] * len(stages)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Left(ProgressColumn):
        """The time that is left, once enough is done to tell."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            seconds = task.time_remaining
            return Text("" if seconds is None else f"so far, about {timedelta(seconds=round(seconds))} left")

    columns = (
        TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        Left(),
    )  # fmt: skip
    # A single candidate may take a minute, so the speed is that of a longer time than rich takes by default.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=_SPEED_OF_S) as progress:
        yield [_told(progress, stage) for stage in stages]


def _told(progress: Progress, stage: str) -> Tell:
    task = progress.add_task(stage, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)
