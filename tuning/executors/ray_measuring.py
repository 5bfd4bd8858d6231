"""Measures on a Ray cluster: actors with one GPU each take one task after another.

If a node is lost, its task goes back with the known checks, and is begun once more, on another node if there is one.
The second time its problem is given up with the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from tilekern.errors import InputError
from tilekern.runtime.workers.disposable import GONE_WITHIN_S
from tilekern.spec.targets import Target
from tilekern.tuning.executors import FINISHED
from tilekern.tuning.executors.node import code_digest
from tilekern.tuning.executors.ray_nodes import FREE_WITHIN_S, TRIES, gpus_like, is_rays_own, reason_of
from tilekern.tuning.executors.work import Family, Waiting, family, finished, left_of, place_of_next
from tilekern.tuning.measure.process import Noted
from tilekern.tuning.measure.tasks import Task
from tilekern.warning import warn

# How long to wait for any answer before looking whether there is still hope for one, in seconds.
_PATIENCE_S = 5.0
# The same where a GPU has nothing to do and tasks may come.
_IDLE_PATIENCE_S = 0.5


@dataclass(eq=False)
class _Gpu:
    """An actor with a GPU, its task, and the family of that or of the last one.

    ``tries`` is how many actors may be started for it, this one among them.
    """

    actor: Any
    tries: int
    node: str = ""
    task: Task | None = None
    at: Family | None = None
    lines: list[Noted] = field(default_factory=list)


class Measuring:
    """One run over tasks.

    Args:
        tasks: the tasks, as they come.
        target: the GPU that they are for.
        gpu: what the GPUs must be, as records keep it; one with another driver is left out.
        pack: what composites look kernels up in; empty for nothing.
        start: starts an actor on a GPU, or raises InputError where the cluster has none any more.
    """

    def __init__(
        self, tasks: Iterable[Task], target: Target, gpu: Mapping[str, str], pack: bytes, start: Callable[[], Any]
    ) -> None:
        self._waiting, self._target = Waiting(tasks), target
        self._gpu, self._pack, self._start = dict(gpu), ray.put(pack), start
        self._actors: list[Any] = []
        # GPUs by the call that they work on, and those that wait for a task.
        self._calls: dict[Any, _Gpu] = {}
        self._idle: list[_Gpu] = []
        # The node that a problem's task was lost on.
        self._lost_on: dict[tuple[str, str], str] = {}
        self._left_out: list[str] = []

    def lines(self, count: int) -> Iterator[Noted]:
        """Measure on that many GPUs; yield lines as they come, and ``FINISHED`` after each task.

        Raises:
            InputError: no GPU is left that could measure. Errors of the tasks are raised at the end.
        """
        try:
            for _ in range(count):
                self._add()
            while not self._waiting.is_empty() or self._is_at_work():
                if (call := self._answered()) is not None:
                    yield from self._take(call, self._calls.pop(call))
                self._hand_out()
        finally:
            self._waiting.close()
            self._end()
        for reason in dict.fromkeys(self._left_out):
            warn(f"a GPU was left out: {reason}")
        if self._waiting.error is not None:
            raise self._waiting.error

    def _add(self, tries: int = TRIES) -> None:
        """Start an actor on one more GPU; ``tries`` is how many actors may be started for it."""
        try:
            actor = self._start()
        except InputError as error:
            self._left_out.append(str(error))
            return
        self._actors.append(actor)
        self._calls[actor.begin.remote(code_digest(), self._target, self._pack)] = _Gpu(actor, tries)

    def _is_at_work(self) -> bool:
        return any(gpu.task for gpu in self._calls.values())

    def _answered(self) -> Any:
        """A call that was answered; None where none was yet, and a task may have come for an idle GPU.

        Raises:
            InputError: none will be.
        """
        deadline = time.monotonic() + FREE_WITHIN_S
        may_hand_out = bool(self._idle) and not self._waiting.is_empty()
        while self._calls:
            done, _ = ray.wait(list(self._calls), timeout=_IDLE_PATIENCE_S if may_hand_out else _PATIENCE_S)
            if done:
                return done[0]
            if may_hand_out:
                return None
            if not self._is_at_work():
                gpus_like(self._target)
                if time.monotonic() > deadline:
                    self._left_out.append(f"no {self._target.name} became free within {FREE_WITHIN_S:g} s")
                    break
        if may_hand_out:
            self._waiting.wait()
            return None
        raise InputError("; ".join(dict.fromkeys(self._left_out)))

    def _take(self, call: Any, gpu: _Gpu) -> Iterator[Noted]:
        try:
            answer = ray.get(call)
        except ray.exceptions.RayError as error:
            if is_rays_own(error) and gpu.task:
                yield from self._lose(gpu, gpu.task, reason_of(error))
            elif is_rays_own(error) and gpu.tries > 1:
                self._add(gpu.tries - 1)
            else:
                self._leave_out(gpu, reason_of(error))
        else:
            if gpu.task is None:
                self._welcome(gpu, *answer)
                return
            gpu.lines += answer
            yield from answer
            if answer and answer[-1][0] == FINISHED:
                gpu.task = None
                self._idle.append(gpu)
            else:
                self._calls[gpu.actor.more.remote()] = gpu

    def _welcome(self, gpu: _Gpu, node: str, found: Mapping[str, str]) -> None:
        if found == self._gpu:
            gpu.node = node
            self._idle.append(gpu)
        else:
            self._leave_out(gpu, f"it is {_named(found)}, and the others are {_named(self._gpu)}")

    def _leave_out(self, gpu: _Gpu, reason: str) -> None:
        self._left_out.append(reason)
        if gpu.task:
            self._waiting.put_back(left_of(gpu.task, gpu.lines))

    def _lose(self, gpu: _Gpu, task: Task, reason: str) -> Iterator[Noted]:
        """Have the task of an actor that is gone begun once more, and another actor in its place."""
        key = (task.kernel, task.problem.key)
        if key in self._lost_on:
            said = f"two nodes were lost while it was measured: {reason}"
            yield "skipped", {"kernel": task.kernel, "problem": task.problem.key, "reason": said}
            yield finished(task)
        else:
            self._lost_on[key] = gpu.node
            self._waiting.put_back(left_of(task, gpu.lines))
        if not self._waiting.is_empty():
            self._add()

    def _hand_out(self) -> None:
        """Give each idle GPU a task."""
        for gpu in list(self._idle):
            if task := self._next(gpu):
                gpu.task, gpu.at, gpu.lines = task, family(task), []
                self._idle.remove(gpu)
                self._calls[gpu.actor.measure.remote(task)] = gpu

    def _next(self, gpu: _Gpu) -> Task | None:
        """The next task for a GPU; none that was lost on its node while there are others."""
        others = [other for other in (*self._calls.values(), *self._idle) if other is not gpu]
        elsewhere = {other.node for other in others if other.node} - {gpu.node}
        taken = {other.at for other in others if other.task}

        def place(waiting: Sequence[Task]) -> int | None:
            allowed = [
                place
                for place, task in enumerate(waiting)
                if not elsewhere or self._lost_on.get((task.kernel, task.problem.key)) != gpu.node
            ]
            return allowed[place_of_next([waiting[at] for at in allowed], gpu.at, taken)] if allowed else None

        return self._waiting.take(place)

    def _end(self) -> None:
        ready = [gpu.actor for gpu in (*self._calls.values(), *self._idle) if gpu.node]
        with contextlib.suppress(ray.exceptions.RayError):
            if closed := [actor.close.remote() for actor in ready]:
                ray.wait(closed, num_returns=len(closed), timeout=GONE_WITHIN_S)
        for actor in self._actors:
            ray.kill(actor)


def _named(gpu: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in gpu.items())
