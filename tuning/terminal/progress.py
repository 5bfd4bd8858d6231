"""The progress bars of stages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Task

    from tilekern.tuning.pipeline import Tell

PUBLISH = "publish"
_SPEED_OF_S = 600.0


@contextlib.contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Tell]:
    """A bar for each stage that is told of, on the terminal's error stream; stages may be at work at the same time."""
    if quiet:
        yield lambda _stage, _done, _total: None
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
    progress = Progress(*columns, console=Console(stderr=True), speed_estimate_period=_SPEED_OF_S)
    bars: dict[str, Any] = {}
    lock = threading.Lock()

    def tell(stage: str, done: int, total: int) -> None:
        if stage == PUBLISH:  # which takes no time
            return
        with lock:  # stages that run at once tell from threads of their own
            if not bars:
                progress.start()  # not before: what fails first prints its one line alone
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=None)
        progress.update(bars[stage], completed=done, total=total or None)

    try:
        yield tell
    finally:
        if bars:
            progress.stop()
