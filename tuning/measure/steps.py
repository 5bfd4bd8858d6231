"""The step that a measuring process is at, told to its parent through shared memory.

Announcing costs no system call, so it may be done for every launch, and what was announced outlives the process.
"""

from __future__ import annotations

import ctypes
from multiprocessing.context import BaseContext

from tilekern.tuning.measure.tasks import Task, on
from tilekern.tuning.sweep.lines import COPY

# Steps that are no candidate's: the start of the process, of CUDA, making inputs and references, deciding who runs,
# queueing the launches of a round.
START, CUDA, INPUTS, STRATEGY, QUEUE = "start", "start of CUDA", "inputs", "strategy", "queue"
_COMMON = (START, CUDA, INPUTS, STRATEGY, QUEUE, COPY)


class Steps:
    """The step that one process is at; made by its parent and handed to it."""

    def __init__(self, context: BaseContext) -> None:
        # How many steps were begun, and which one is at work.
        self._memory = context.RawArray(ctypes.c_uint64, 2)
        self._names: tuple[str, ...] = _COMMON
        self._places = {name: place for place, name in enumerate(_COMMON)}

    def follow(self, task: Task) -> None:
        """Name steps by a task: each side calls it before the task's first step."""
        self._names = (*_COMMON, *(entrant.key for entrant in task.entrants))
        self._places = {name: place for place, name in enumerate(self._names)}
        for name in task.timed:
            self._places |= {on(entrant.key, name): self._places[entrant.key] for entrant in task.entrants}

    def begin(self, name: str) -> None:
        """Announce a step: one of those above, the copy, or an entrant's key, whichever inputs it is on."""
        self._memory[1] = self._places[name]
        self._memory[0] += 1

    @property
    def begun(self) -> int:
        """How many steps were begun."""
        return int(self._memory[0])

    @property
    def name(self) -> str:
        """The step at work."""
        return self._names[self._memory[1]]
