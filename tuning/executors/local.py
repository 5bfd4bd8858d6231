"""Measures on this host's GPUs: one disposable worker process each, which take tasks from one queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tilekern.errors import InputError
from tilekern.spec.targets import Target
from tilekern.tuning.executors.work import Family, Waiting, family, finished, place_of_next
from tilekern.tuning.measure.gpu import check_gpu, describe_gpu, devices
from tilekern.tuning.measure.process import LAUNCH_TIMEOUT_S, Noted, Worker, measure_task
from tilekern.tuning.measure.tasks import Task


class LocalExecutor:
    """One worker for each GPU.

    As a context, it starts the workers at once and keeps them between runs, since their modules take seconds to load.
    Otherwise each run starts and ends its own.

    Args:
        cache: the folder of the cache that composites look kernels up in.
        most: how many of the host's GPUs to use at most; all that are like the first where None.
        launch_timeout_s: the least time that a candidate is given for what it launches.
    """

    def __init__(self, cache: Path, most: int | None = None, launch_timeout_s: float = LAUNCH_TIMEOUT_S) -> None:
        self._cache, self._most, self._launch_timeout_s = cache, most, launch_timeout_s
        # Workers that are not at work, by their GPU; None where none is to stay.
        self._ready: dict[str, Worker] | None = None

    def __enter__(self) -> LocalExecutor:
        self._ready = {name: self._worker(name) for name in devices()[: self._most]}
        for worker in self._ready.values():
            worker.process()
        return self

    def __exit__(self, *_: object) -> None:
        ready, self._ready = self._ready or {}, None
        for worker in ready.values():
            worker.close()

    def _worker(self, device: str) -> Worker:
        return Worker(self._cache, device, self._launch_timeout_s)

    def describe_gpu(self, target: Target) -> dict[str, str]:
        """Return the first GPU, its driver, torch and the libraries that candidates call.

        Raises:
            InputError: there is no GPU, or another one than the target.
        """
        check_gpu(target)
        return describe_gpu()

    def width(self, target: Target) -> int:  # noqa: ARG002
        """Return how many GPUs measure at once."""
        return len(devices()[: self._most])

    def run(self, tasks: Iterable[Task]) -> Iterator[Noted]:
        """Measure the tasks, the longest available first; a GPU that fails leaves the rest to the others.

        Raises:
            InputError: a GPU could not be used; the others have measured all but the task that it was at.
        """
        names = devices()[: self._most]
        if isinstance(tasks, Sequence):
            if not tasks:
                return
            names = names[: len(tasks)]
        if not names:
            raise InputError("there is no GPU here to measure on")
        work = _Work(tasks, names)
        threads = [threading.Thread(target=self._serve, args=(name, work), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        try:
            yield from work.lines()
        finally:
            work.end()

    def _serve(self, device: str, work: _Work) -> None:
        """Have one GPU's worker take tasks until there are none, or the run is over."""
        worker = (self._ready or {}).pop(device, None) or self._worker(device)
        stays = False
        try:
            for task in work.of(device):
                for noted in measure_task(worker, task):
                    work.found.put(noted)
                    if work.is_over.is_set():
                        return
                work.found.put(finished(task))
            stays = True
        except BaseException as error:  # noqa: BLE001 (raised again where the lines are taken)
            work.found.put(error)
        finally:
            if stays and self._ready is not None:
                self._ready[device] = worker
            else:
                worker.close()
            work.found.put(None)


class _Work:
    """State that the threads of some GPUs share: remaining tasks, and lines.

    Args:
        tasks: the tasks, as they come.
        names: of the GPUs, each with one thread.
    """

    def __init__(self, tasks: Iterable[Task], names: Sequence[str]) -> None:
        self._waiting = Waiting(tasks)
        self._at: dict[str, Family] = {}
        self._lock = threading.Lock()
        self._threads = len(names)
        # Lines, errors, and None at the end of each thread.
        self.found: queue.SimpleQueue[Noted | BaseException | None] = queue.SimpleQueue()
        self.is_over = threading.Event()

    def of(self, device: str) -> Iterator[Task]:
        """Yield the tasks for one of the GPUs."""
        mine: Family | None = None
        while not self.is_over.is_set():
            with self._lock:
                self._at.pop(device, None)
                if task := self._next(mine):
                    self._at[device] = mine = family(task)
            if task:
                yield task
            elif not self._waiting.wait():
                return

    def _next(self, mine: Family | None) -> Task | None:
        return self._waiting.take(lambda left: place_of_next(left, mine, self._at.values()))

    def end(self) -> None:
        """Have the threads end after their current tasks."""
        self.is_over.set()
        self._waiting.close()

    def lines(self) -> Iterator[Noted]:
        """Yield the lines of all threads; then raise the first of their errors, or that of the tasks."""
        errors: list[BaseException] = []
        at_work = self._threads
        while at_work:
            item = self.found.get()
            if item is None:
                at_work -= 1
            elif isinstance(item, BaseException):
                errors.append(item)
            else:
                yield item
        if self._waiting.error is not None:
            errors.append(self._waiting.error)
        if errors:
            raise errors[0]
