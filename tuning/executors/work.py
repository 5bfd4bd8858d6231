"""What executors do with tasks: who takes which, what is left of one that was broken off, how its end is said.

Problems of one family share the cases about values and the screening of code, so a GPU stays with a family while it has
problems left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from tilekern.kernels import spec_named
from tuning.executors import FINISHED
from tuning.measure.process import Noted, least_s
from tuning.measure.tasks import Task
from tuning.verify.check import Check, odd_problem

# About how long a candidate takes whatever its size, in seconds, and how often it is launched: they order tasks only.
CANDIDATE_S, LAUNCHES = 0.02, 30


# A kernel and the sizes at which its candidates are screened.
Family = tuple[str, str]


def family(task: Task) -> Family:
    """Equal for tasks that share what a measuring process works out."""
    return task.kernel, odd_problem(spec_named(task.kernel), task.problem).key


def longest_first(tasks: Sequence[Task]) -> list[Task]:
    """The tasks such that several GPUs which take them by :func:`place_of_next` finish at about the same time.

    Families come in the order of the time that all of their tasks take, and their tasks in the order of their own.
    """
    whole_s: Counter[Family] = Counter()
    for task in tasks:
        whole_s[family(task)] += _about_s(task)  # type: ignore[assignment]
    return sorted(tasks, key=lambda task: (whole_s[family(task)], family(task), _about_s(task)), reverse=True)


def place_of_next(waiting: Sequence[Task], mine: Family | None, others: Container[Family | None]) -> int:
    """The place of the task that a GPU takes next.

    Args:
        waiting: the tasks that nobody has taken, the longest first; at least one.
        mine: the family of the task that the GPU was at.
        others: those of the tasks that other GPUs are at.
    """
    families = [family(task) for task in waiting]
    if mine in families:
        return families.index(mine)
    return next((place for place, found in enumerate(families) if found not in others), 0)


def _about_s(task: Task) -> float:
    return len(task.entrants) * (CANDIDATE_S + LAUNCHES * least_s(task))


def left_of(task: Task, lines: Iterable[Noted]) -> Task:
    """What is left of a task that was broken off after these lines: known checks are not made again.

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
    """The line that says that a task has come to its end."""
    return FINISHED, {"kernel": task.kernel, "problem": task.problem.key}
