"""Run in a disposable measuring process: check candidates, then time them.

An error that is not one candidate's own is reported to the parent, which then starts another process, since the state
of this one could spoil the next candidate.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from tilekern.runtime.workers import disposable
from tilekern.spec.bits import text_of
from tilekern.tuning.measure.bench import Bench, to_confirm
from tilekern.tuning.measure.gpu import serve_any_size
from tilekern.tuning.measure.tasks import CUDA, INPUTS, QUEUE, STRATEGY, Entrant, Steps, Task, on
from tilekern.tuning.measure.timing import Launch, Stopwatch
from tilekern.tuning.strategies import Lineup, Runner, strategy_named
from tilekern.tuning.strategies.runner import GpuRunner, Several
from tilekern.tuning.sweep.lines import COPY
from tilekern.tuning.verify.check import Check

if TYPE_CHECKING:
    from tilekern.tuning.verify.cases import Kept

# Kinds of messages of a process. READY: its modules are loaded. CHECKED: an entrant's key and its check. RACING: from
# here on launches are queued behind others. TIMED: timings by key. DOUBT: an error that an earlier candidate may have
# caused. FAULT: any other error. Both have a reason and are the last message. DONE: the end of a task, with the seconds
# that each part of it took.
READY, CHECKED, RACING, TIMED, DOUBT, FAULT, DONE = "ready", "checked", "racing", "timed", "doubt", "fault", "done"
# A memory error is the candidate's own if this share of the memory that was free before is free again.
_BACK = 0.9
_T = TypeVar("_T")


def serve(connection: Connection, steps: Steps, cache: str, device: str | None) -> None:
    """Answer the parent's tasks until it hangs up, and announce each step before it begins.

    Args:
        connection: receives tasks, and takes answers: ``(kind, value)`` of the kinds above.
        steps: where steps are announced.
        cache: the folder of the cache in which composites look up kernels.
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
    # Modules stay, so the collector need not look at them after each task.
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
        # Launches and announcers refer to each other, and keep the arrays of a finished problem alive.
        del task, measuring
        gc.collect()


class _Measuring:
    """One task in this process."""

    def __init__(self, connection: Connection, steps: Steps, task: Task, kept: Kept) -> None:
        import torch

        self._torch, self._connection, self._steps, self._task = torch, connection, steps, task
        # By part of the task, in order.
        self.seconds: dict[str, float] = {}
        with self._part("references"):
            steps.begin(INPUTS)
            self._bench = Bench(task, self._announce, kept)
        self._checks = dict(task.checks)
        self._free = self._free_bytes()

    def run(self, watch: Stopwatch) -> None:
        """Check all entrants, time the right ones, and run the whole battery on those that could win."""
        with self._part("screening"):
            for entrant in self._task.entrants:
                if entrant.key not in self._checks:
                    self._check(entrant, self._bench.check)
        racing = [one for one in self._task.entrants if one.is_aligned and self._checks[one.key].passed]
        if self._task.confirms:
            with self._part("battery"):
                able = self._launches(racing)  # of the others, between those of an entrant
                for entrant in racing:
                    if entrant.key in able and not self._checks[entrant.key].cases:
                        self._check(entrant, self._bench.confirm)
        elif racing:
            self._time(racing, watch)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 4)

    def _announce(self, key: str | None) -> None:
        """Announce the entrant whose launch is waited for; None when it is over."""
        self._steps.begin(INPUTS if key is None else key)

    def _check(self, entrant: Entrant, check: Callable[[Entrant], Check]) -> None:
        self._tell(entrant, self._own(entrant, check))

    def _tell(self, entrant: Entrant, check: Check) -> None:
        if check.bits is None and entrant.key in self._checks:
            check = replace(check, bits=self._checks[entrant.key].bits)
        self._checks[entrant.key] = check
        self._connection.send((CHECKED, (entrant.key, check)))

    def _own(self, entrant: Entrant, take: Callable[[Entrant], _T]) -> _T | Check:
        """Return a function's result on an entrant, or a failed check if it raises and this process is still sound."""
        torch = self._torch
        self._steps.begin(entrant.key)
        try:
            return take(entrant)
        except torch.AcceleratorError:
            raise  # the CUDA context is gone
        except Exception as error:  # noqa: BLE001 (what a launch can raise is open; the reason goes into the journal)
            reason, is_memory = _reason(error), isinstance(error, torch.OutOfMemoryError)
        # Outside of the handler nothing holds the frames of the error and their arrays.
        torch.cuda.synchronize()
        if is_memory:
            gc.collect()
            torch.cuda.empty_cache()
            if self._free_bytes() < _BACK * self._free:
                raise torch.OutOfMemoryError(reason.partition(": ")[2])
        return Check(False, math.inf, math.inf, reason)

    def _free_bytes(self) -> int:
        """Return the number of bytes that could be allocated."""
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
        gpu: Runner = GpuRunner(watch, launches, bench.load_code, bench.refresh(), steps.begin, bench.in_a_row)
        runner = Several(_Rounds(gpu, steps, careful=task.careful), configs, task.timed)
        with self._part("race"):
            timings = runner.told(strategy_named(task.strategy)(runner, lineup))
        self._connection.send((RACING, False))
        if task.invariant:
            with self._part("bit classes"):
                self._classify(task.entrants)
        with self._part("battery"):
            for entrant in to_confirm(task.entrants, timings, self._checks, invariant=task.invariant):
                self._check(entrant, bench.confirm)
        with self._part("winners' bit classes"):
            self._classify([entrant for entrant in task.entrants if self._checks[entrant.key].cases])
        self._connection.send((TIMED, timings))

    def _classify(self, entrants: Sequence[Entrant]) -> None:
        """Note the bit classes of entrants that passed; one that cannot run among other rows is of none."""
        checks = self._checks
        unknown = [one for one in entrants if checks[one.key].passed and checks[one.key].bits is None]
        found: dict[str, list[dict[str, str]]] = {one.key: [] for one in unknown}
        failed: set[str] = set()
        self._steps.begin(INPUTS)
        for placements in self._bench.placements() if unknown else ():
            for entrant in unknown:
                digests = self._own(entrant, functools.partial(self._bench.digests, placements))
                if isinstance(digests, Check):
                    failed.add(entrant.key)
                else:
                    found[entrant.key].append(digests)
            self._steps.begin(INPUTS)
        for entrant in unknown:
            if found[entrant.key] or entrant.key in failed:
                bits = "" if entrant.key in failed else text_of(found[entrant.key])
                self._tell(entrant, replace(checks[entrant.key], bits=bits))

    def _launches(self, racing: Sequence[Entrant]) -> dict[str, Launch]:
        """Return the launches to time by key, on ordinary inputs and on the variations that are timed."""
        prepare, varied = self._bench.prepare, self._task.timed

        def on_all_inputs(entrant: Entrant) -> dict[str, Launch]:
            return {entrant.key: prepare(entrant)} | {on(entrant.key, name): prepare(entrant, name) for name in varied}

        self._steps.begin(INPUTS)
        self._bench.load()
        launches: dict[str, Launch] = {}
        for entrant in racing:
            found = self._own(entrant, on_all_inputs)
            if isinstance(found, Check):
                self._tell(entrant, found)
            else:
                launches |= found
        self._steps.begin(COPY)
        with contextlib.suppress(self._torch.OutOfMemoryError):
            launches[COPY] = self._bench.copy()
        return launches


class _Rounds:
    """A runner that announces the queueing of a round, in which a full queue makes the host wait for a hanging launch.

    If ``careful``, it waits for each launch before it queues the next, so that a fault has one culprit.
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
        samples = []
        for key in keys:
            self._steps.begin(key)
            samples += self._runner.round([key])
        return samples


def _reason(error: BaseException) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
