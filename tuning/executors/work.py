"""Distributes tasks over GPUs, and resumes tasks that were broken off.

Problems of one family share screening of code and cases about values, so a GPU stays with a family while it has
problems left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from tilekern.kernels import spec_named
from tilekern.tuning.executors import FINISHED
from tilekern.tuning.measure.process import Noted, least_s
from tilekern.tuning.measure.tasks import Task
from tilekern.tuning.verify.check import Check, odd_problem

# About how long a candidate takes whatever its size, in seconds, and how often it is launched: they order tasks only.
CANDIDATE_S, LAUNCHES = 0.02, 30


# A kernel and the sizes at which its candidates are screened.
Family = tuple[str, str]


def family(task: Task) -> Family:
    """Return a key that is equal for tasks which share work of a measuring process."""
    return task.kernel, odd_problem(spec_named(task.kernel), task.problem).key


def longest_first(tasks: Sequence[Task]) -> list[Task]:
    """Sort tasks so that GPUs which take them by :func:`place_of_next` finish at about the same time.

    Families come in the order of the time that all of their tasks take, and their tasks in the order of their own.
    """
    whole_s: Counter[Family] = Counter()
    for task in tasks:
        whole_s[family(task)] += _about_s(task)  # type: ignore[assignment]
    return sorted(tasks, key=lambda task: (whole_s[family(task)], family(task), _about_s(task)), reverse=True)


def place_of_next(waiting: Sequence[Task], mine: Family | None, others: Container[Family | None]) -> int:
    """Return the index of the task that a GPU takes next.

    Args:
        waiting: the tasks that nobody has taken, the longest first; at least one.
        mine: the family of the task that the GPU was at.
        others: those of the tasks that other GPUs are at.
    """
    families = [family(task) for task in waiting]
    if mine in families:
        return families.index(mine)
    return next((place for place, found in enumerate(families) if found not in others), 0)


class Waiting:
    """The tasks that have come and that nobody has taken; threads may share it.

    Args:
        tasks: the tasks; a thread goes through what is not a sequence.

    Attributes:
        error: what ``tasks`` raised; None where all came.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._changed = threading.Condition()
        self._left: list[Task] = []
        self._comes = not isinstance(tasks, Sequence)
        self.error: BaseException | None = None
        if isinstance(tasks, Sequence):
            self._left = longest_first(tasks)
        else:
            threading.Thread(target=self._take_in, args=(tasks,), daemon=True).start()

    def _take_in(self, tasks: Iterable[Task]) -> None:
        try:
            for task in tasks:
                with self._changed:
                    if not self._comes:
                        return
                    self._left = longest_first([*self._left, task])
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised again where lines are taken)
            self.error = error
            self.close()
        else:
            with self._changed:
                self._comes = False
                self._changed.notify_all()

    def take(self, place: Callable[[Sequence[Task]], int | None]) -> Task | None:
        """Take the task that ``place`` chooses; None if there is none, or none is chosen."""
        with self._changed:
            chosen = place(self._left) if self._left else None
            return None if chosen is None else self._left.pop(chosen)

    def put_back(self, task: Task) -> None:
        """Put a task back, before the others."""
        with self._changed:
            self._left.insert(0, task)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a task is there, none will come, or the time is over; return whether there may be one."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or not self._comes, timeout_s)
            return bool(self._left) or self._comes

    def is_empty(self) -> bool:
        """Return whether no task is there and none will come."""
        with self._changed:
            return not (self._left or self._comes)

    def close(self) -> None:
        """Drop all tasks, and those that come."""
        with self._changed:
            self._left, self._comes = [], False
            self._changed.notify_all()


def _about_s(task: Task) -> float:
    return len(task.entrants) * (CANDIDATE_S + LAUNCHES * least_s(task))


def left_of(task: Task, lines: Iterable[Noted]) -> Task:
    """Return the rest of a task that broke off after these lines, with the known checks.

    Timings are dropped, since those that were not timed must race against the others.
    """
    checks = dict(task.checks)
    for journal, line in lines:
        if journal == "quarantine":
            task = task.without(line["candidate"])
        elif "check" in line:
            checks[line["candidate"]] = Check(**line["check"])
    return replace(task, checks=checks)


def finished(task: Task) -> Noted:
    """Return the line that ends a task."""
    return FINISHED, {"kernel": task.kernel, "problem": task.problem.key}
