"""Executors run the tasks of the measure stage on this host's GPUs or a cluster's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a node without the dependencies of these must be able to say so
    from tilekern.spec.targets import Target
    from tilekern.tuning.measure.process import Noted
    from tilekern.tuning.measure.tasks import Task

# Stands in place of a journal's name when a task has come to its end.
FINISHED = "finished"


class Executor(Protocol):
    """Measures tasks on GPUs of one kind."""

    def describe_gpu(self, target: Target) -> dict[str, str]:
        """Return the GPU, its driver and torch, as records keep them.

        Raises:
            InputError: no GPU of the target can be had.
        """

    def width(self, target: Target) -> int:
        """Return how many tasks are measured at once: the number of GPUs of the target."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Noted]:
        """Measure tasks in any order; yield lines for the journals as they come, and ``FINISHED`` after each task.

        Args:
            tasks: the tasks; the next one of an iterator may be long in coming, while those before it are measured.

        Raises:
            InputError: some tasks could not be measured; the lines of all others have come before. What ``tasks``
                raises is raised when those at work are over.
        """
