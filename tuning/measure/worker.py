"""The work of a disposable measuring process: check candidates, then time them.

Every error that is not one candidate's own is told to the parent, which then takes another process: what is left of
this one could spoil the next candidate.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from tilekern.tuning import disposable
from tilekern.tuning.measure.bench import Bench, to_confirm
from tilekern.tuning.measure.gpu import serve_any_size
from tilekern.tuning.measure.steps import CUDA, INPUTS, QUEUE, STRATEGY, Steps
from tilekern.tuning.measure.tasks import Entrant, Task, on
from tilekern.tuning.measure.timing import Launch, Stopwatch
from tilekern.tuning.strategies import Lineup, Runner, strategy_named
from tilekern.tuning.strategies.runner import GpuRunner
from tilekern.tuning.strategies.several import Several
from tilekern.tuning.sweep.lines import COPY
from tilekern.tuning.verify.check import Check

if TYPE_CHECKING:
    from tilekern.tuning.verify.cases import Kept

# Kinds of what a process says. READY: it has loaded all that it needs. CHECKED: an entrant's key and its check.
# RACING: from here on launches are queued behind others. TIMED: timings by key. DOUBT: an error that may be due to what
# an earlier candidate left behind. FAULT: any other error; both with a reason, and the last that is said. DONE: the
# end of a task, with the seconds that each part of it took.
READY, CHECKED, RACING, TIMED, DOUBT, FAULT, DONE = "ready", "checked", "racing", "timed", "doubt", "fault", "done"
# A candidate's error for memory is its own if the GPU has at least this part of what was free before.
_BACK = 0.9
_T = TypeVar("_T")


def serve(connection: Connection, steps: Steps, cache: str, device: str | None) -> None:
    """Answer the parent's tasks until it hangs up; each step is announced before it is taken.

    Args:
        connection: where tasks come from and answers go to: ``(kind, value)`` of the kinds above.
        steps: where steps are announced.
        cache: the folder of the cache that composites look kernels up in.
        device: which of the host's GPUs to use, as ``CUDA_VISIBLE_DEVICES`` names it; None for the first.
    """
    disposable.begin()
    os.environ["TILEKERN_CACHE_DIR"] = cache
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    serve_any_size()
    import torch

    from tilekern.kernels import all_specs
    from tilekern.tuning.verify.cases import Kept

    all_specs()
    # What is there by now stays: the collector need not look at it after each task.
    gc.freeze()
    connection.send((READY, None))
    watch: Stopwatch | None = None
    kept = Kept()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):  # the parent has hung up, or is gone
            return
        steps.follow(task)
        try:
            if watch is None:
                steps.begin(CUDA)
                watch = Stopwatch(task.target.l2_bytes)
                watch.warm_clocks()
            measuring = _Measuring(connection, steps, task, kept)
            measuring.run(watch)
            connection.send((DONE, measuring.seconds))
        except torch.OutOfMemoryError as error:
            connection.send((DOUBT, _reason(error)))
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends this process and nothing else)
            connection.send((FAULT, _reason(error)))
            return
        # Launches and what announces them hold each other, and with them the arrays of a problem that is done with.
        del task, measuring
        gc.collect()


class _Measuring:
    """The way of one task through this process."""

    def __init__(self, connection: Connection, steps: Steps, task: Task, kept: Kept) -> None:
        import torch

        self._torch, self._connection, self._steps, self._task = torch, connection, steps, task
        # By part of the way, in its order.
        self.seconds: dict[str, float] = {}
        with self._part("references"):
            steps.begin(INPUTS)
            self._bench = Bench(task, self._announce, kept)
        self._checks = dict(task.checks)
        self._free = self._free_bytes()

    def run(self, watch: Stopwatch) -> None:
        """Check all, time those that are right, and have those that could win stand the whole battery."""
        with self._part("screening"):
            for entrant in self._task.entrants:
                if entrant.key not in self._checks:
                    self._check(entrant, self._bench.check)
        racing = [entrant for entrant in self._task.entrants if entrant.is_aligned and self._passed(entrant)]
        if racing:
            self._time(racing, watch)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 4)

    def _passed(self, entrant: Entrant) -> bool:
        return self._checks[entrant.key].passed

    def _announce(self, key: str | None) -> None:
        """Say whose launch is waited for; None where it is over and its outcome is looked at."""
        self._steps.begin(INPUTS if key is None else key)

    def _check(self, entrant: Entrant, check: Callable[[Entrant], Check]) -> None:
        self._tell(entrant, self._own(entrant, check))

    def _tell(self, entrant: Entrant, check: Check) -> None:
        self._checks[entrant.key] = check
        self._connection.send((CHECKED, (entrant.key, check)))

    def _own(self, entrant: Entrant, take: Callable[[Entrant], _T]) -> _T | Check:
        """A function's result on an entrant; a failed check where it raises and the process is as good as before."""
        torch = self._torch
        self._steps.begin(entrant.key)
        try:
            return take(entrant)
        except torch.AcceleratorError:
            raise  # the CUDA context is gone
        except Exception as error:  # noqa: BLE001 (what a launch can raise is open; the reason goes into the journal)
            reason, is_memory = _reason(error), isinstance(error, torch.OutOfMemoryError)
        # Outside of the handler, where nothing holds the frames of the error and what they allocated.
        torch.cuda.synchronize()
        if is_memory and not self._memory_is_back():
            raise torch.OutOfMemoryError(reason.partition(": ")[2])
        return Check(False, math.inf, math.inf, reason)

    def _memory_is_back(self) -> bool:
        gc.collect()
        self._torch.cuda.empty_cache()
        return self._free_bytes() >= _BACK * self._free

    def _free_bytes(self) -> int:
        """The bytes that could be allocated."""
        cuda = self._torch.cuda
        return int(cuda.mem_get_info()[0] + cuda.memory_reserved() - cuda.memory_allocated())

    def _time(self, racing: Sequence[Entrant], watch: Stopwatch) -> None:
        task, bench, steps = self._task, self._bench, self._steps
        with self._part("inputs"):
            launches = self._launches(racing)
        configs = {entrant.key: entrant.candidate.config for entrant in racing if entrant.key in launches}
        if not configs:
            return
        beside = (COPY,) if COPY in launches else ()
        stay = task.stay if task.stay in configs else None
        lineup = Lineup(tuple(configs), stay, beside, task.predicted)
        steps.begin(STRATEGY)
        self._connection.send((RACING, True))
        gpu: Runner = GpuRunner(watch, launches, bench.load_code, bench.refresh(), steps.begin)
        runner = Several(_Rounds(gpu, steps, careful=task.careful), configs, task.timed)
        with self._part("race"):
            timings = runner.told(strategy_named(task.strategy)(runner, lineup))
        self._connection.send((RACING, False))
        with self._part("battery"):
            for entrant in to_confirm(task.entrants, timings, self._checks):
                self._check(entrant, bench.confirm)
        self._connection.send((TIMED, timings))

    def _on_all_inputs(self, entrant: Entrant) -> dict[str, Launch]:
        """An entrant's launches: on ordinary inputs, and on those variations of them that are timed."""
        prepare, varied = self._bench.prepare, self._task.timed
        return {entrant.key: prepare(entrant)} | {on(entrant.key, name): prepare(entrant, name) for name in varied}

    def _launches(self, racing: Sequence[Entrant]) -> dict[str, Launch]:
        """The launches to time, by key; one that cannot be made ready has failed."""
        self._steps.begin(INPUTS)
        self._bench.load()
        launches: dict[str, Launch] = {}
        for entrant in racing:
            found = self._own(entrant, self._on_all_inputs)
            if isinstance(found, Check):
                self._tell(entrant, found)
            else:
                launches |= found
        self._steps.begin(COPY)
        with contextlib.suppress(self._torch.OutOfMemoryError):
            launches[COPY] = self._bench.copy()
        return launches


class _Rounds:
    """A runner that announces the queueing of a round, where a full queue makes the host wait for whoever hangs.

    A ``careful`` one waits for each launch before it queues the next, so that it is known which one faulted.
    """

    def __init__(self, runner: Runner, steps: Steps, *, careful: bool) -> None:
        self._runner, self._steps, self._careful = runner, steps, careful

    @property
    def spent_us(self) -> float:
        return self._runner.spent_us

    def round(self, keys: Sequence[str]) -> list[float]:
        if not self._careful:
            self._steps.begin(QUEUE)
            return self._runner.round(keys)
        return [self._alone(key) for key in keys]

    def _alone(self, key: str) -> float:
        """One sample of a key that has the GPU to itself, whose doing any fault is, even while it is queued."""
        self._steps.begin(key)
        return self._runner.round([key])[0]


def _reason(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
