"""Measures on the GPUs of this host: one disposable worker process for each, which take tasks from one queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilekern.targets import Target
from tuning.executors import FINISHED
from tuning.gpu import check_gpu, describe_gpu, devices
from tuning.process import Noted, Worker, measure_task
from tuning.tasks import Task


class LocalExecutor:
    """One worker a GPU.

    Args:
        cache: the folder of the cache that composites look kernels up in.
        most: how many of the host's GPUs to use at most; all that are like the first where None.
    """

    def __init__(self, cache: Path, most: int | None = None) -> None:
        self._cache, self._most = cache, most

    def describe_gpu(self, target: Target) -> dict[str, str]:
        """The first GPU, its driver and torch.

        Raises:
            InputError: there is no GPU, or another one than the target.
        """
        check_gpu(target)
        return describe_gpu()

    def run(self, tasks: Sequence[Task]) -> Iterator[Noted]:
        """Measure the tasks; what one GPU fails at does not stop the others' lines from arriving first."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        found: queue.SimpleQueue[Noted | BaseException | None] = queue.SimpleQueue()
        names = devices()[: self._most][: max(1, len(tasks))]
        threads = [threading.Thread(target=self._work, args=(name, waiting, found), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        left = len(threads)
        while left:
            item = found.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def _work(
        self, device: str, waiting: queue.SimpleQueue[Task], found: queue.SimpleQueue[Noted | BaseException | None]
    ) -> None:
        worker = Worker(self._cache, device)
        try:
            while True:
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    break
                for noted in measure_task(worker, task):
                    found.put(noted)
                found.put((FINISHED, {"kernel": task.kernel, "problem": task.problem.key}))
        except BaseException as error:  # noqa: BLE001 (raised again where the lines are taken)
            found.put(error)
        finally:
            worker.close()
            found.put(None)
