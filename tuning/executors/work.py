"""What executors do with tasks: which goes first, what is left of one that was broken off, how its end is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tuning.executors import FINISHED
from tuning.process import Noted, least_s
from tuning.tasks import Task
from tuning.verifying import Check

# About how long a candidate takes whatever its size, in seconds, and how often it is launched: they order tasks only.
CANDIDATE_S, LAUNCHES = 0.02, 30


def longest_first(tasks: Sequence[Task]) -> list[Task]:
    """The tasks such that several GPUs which take one after another finish at about the same time."""
    return sorted(tasks, key=_about_s, reverse=True)


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
