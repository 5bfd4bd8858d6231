"""Define the tasks of a measuring process, and its current step.

Tasks are plain data that travels between processes and machines. Steps are announced through shared memory: that costs
no system call, so each launch may be announced, and the announcement outlives the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any

from tilekern.spec import ALIGNED, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.lines import COPY
from tilekern.tuning.verify.check import Check

# Steps that belong to no candidate: the start of the process, of CUDA, making inputs and references, deciding which
# candidates run, queueing the launches of a round.
START, CUDA, INPUTS, STRATEGY, QUEUE = "start", "start of CUDA", "inputs", "strategy", "queue"
_COMMON = (START, CUDA, INPUTS, STRATEGY, QUEUE, COPY)


def on(key: str, variation: str) -> str:
    """Name an entrant's launch on other inputs."""
    return f"{key} on {variation}"


@dataclass(frozen=True)
class Entrant:
    """A candidate with its compiled artifact's journal line."""

    candidate: Candidate
    compiled: dict[str, Any]

    @property
    def key(self) -> str:
        """Return the candidate's key."""
        return self.candidate.key

    @property
    def is_aligned(self) -> bool:
        """Return whether it can win; the generic variant is only checked."""
        return self.candidate.variant == ALIGNED


@dataclass(frozen=True)
class Task:
    """One problem to measure, with all data for it.

    ``entrants`` without an entry in ``checks`` are checked; those that pass are timed by ``strategy``. The entrant of
    key ``stay``, the default, is always timed. ``cubins`` holds the artifacts by sha256, ``predicted`` seconds by the
    entrants' keys. ``careful`` asks for one launch at a time, so that a fault has one culprit; ``frugal``, for a
    battery that makes its cases anew for each candidate, after the GPU ran out of memory. ``timed`` names the
    variations of the spec's inputs that are timed too. ``followers`` holds the kernels that are launched and timed
    right after a candidate, by the candidate's number of blocks. ``invariant`` has the fastest of each bit class stand
    the whole battery, so that it may be the invariant kernel. ``confirms`` has all entrants stand the whole battery,
    and times none.
    """

    kernel: str
    problem: Problem
    target: Target
    entrants: tuple[Entrant, ...]
    cubins: Mapping[str, bytes]
    stay: str
    checks: Mapping[str, Check] = field(default_factory=dict)
    strategy: str = "race"
    predicted: Mapping[str, float] = field(default_factory=dict)
    careful: bool = False
    frugal: bool = False
    timed: tuple[str, ...] = ()
    followers: Mapping[int, Entrant] = field(default_factory=dict)
    invariant: bool = False
    confirms: bool = False

    def without(self, key: str) -> Task:
        """Return the task without an entrant."""
        return replace(self, entrants=tuple(entrant for entrant in self.entrants if entrant.key != key))

    def entrant(self, key: str) -> Entrant | None:
        """Return the entrant of a key, or None."""
        return next((entrant for entrant in self.entrants if entrant.key == key), None)


class Steps:
    """The current step of one process; its parent makes this object and hands it over."""

    def __init__(self, context: BaseContext) -> None:
        # How many steps have begun, and which one is current.
        self._memory = context.RawArray(ctypes.c_uint64, 2)
        self._names: tuple[str, ...] = _COMMON
        self._places = {name: place for place, name in enumerate(_COMMON)}

    def follow(self, task: Task) -> None:
        """Name steps by a task; each side calls this before the task's first step."""
        self._names = (*_COMMON, *(entrant.key for entrant in task.entrants))
        self._places = {name: place for place, name in enumerate(self._names)}
        for name in task.timed:
            self._places |= {on(entrant.key, name): self._places[entrant.key] for entrant in task.entrants}

    def begin(self, name: str) -> None:
        """Announce a step: one of those above, the copy, or an entrant's key, on whichever inputs."""
        self._memory[1] = self._places[name]
        self._memory[0] += 1

    @property
    def begun(self) -> int:
        """Return how many steps have begun."""
        return int(self._memory[0])

    @property
    def name(self) -> str:
        """Return the current step."""
        return self._names[self._memory[1]]
