"""Which candidate a compile worker takes next, such that no core waits for another at the end.

Candidates that differ in compiler hints alone are a batch: a worker that stays with one lowers its device function
once. Those that are expected to take long come first. How long is learnt on the way: a candidate takes about as long
as those of the same device function whose constants are most like its own. A batch that has much left gets more
workers, since the last one at work decides when the stage ends.

Candidates may be listed while others are compiled: thousands take a second to list, in which no core need wait.

Problems may have turns. Where some are measured while others are compiled, those of one kernel share one: kernels whose
candidates are soon compiled come first, so that the GPU has something to do, and the longest is last, with its longest
candidates at its start. Under a budget of time each problem has its own (:mod:`tilekern.tuning.budget`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilekern.kernels import spec_named
from tilekern.spec import Config
from tilekern.tuning.compile.typical import COMPILE_S, OTHER_S
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.plan import Named

# A batch at work is as urgent as one candidate when it has so many left for each worker, one more counted in.
HELP_FROM = 4


@dataclass
class Batch:
    """Candidates whose device function is lowered once, and what is known of the time of each."""

    function: object
    constants: tuple[object, ...]
    size: int
    turn: int = 0
    left: list[Candidate] = field(default_factory=list)
    workers: int = 0
    _likeness: float = -1.0
    _seconds: list[float] = field(default_factory=list)

    def learn(self, likeness: float, seconds: float) -> None:
        """Take in how long a candidate took; only those that were most like this batch's count."""
        if likeness > self._likeness:
            self._likeness, self._seconds = likeness, []
        if likeness == self._likeness:
            self._seconds.append(seconds)

    @property
    def urgency(self) -> tuple[int, int, float]:
        """Sorts batches; the greatest is to be taken next."""
        if not self._seconds:
            return -self.turn, 2, self.size / (1 + self.workers)
        each = sum(self._seconds) / len(self._seconds)
        return -self.turn, 1, each * len(self.left) / (1 + self.workers) / HELP_FROM if self.workers else each


class Order:
    """Hands out candidates, of those that it has taken in.

    Args:
        todo: the candidates; none of them is a library's call.
        turns: the turn of each problem; candidates of lower turns are all taken first. Problems that are not named have
            turn 0.
        is_over: set when no more candidates are to be compiled; what is at work is given up.
    """

    def __init__(
        self,
        todo: Iterable[Candidate],
        turns: Mapping[Named, int] | None = None,
        is_over: threading.Event | None = None,
    ) -> None:
        self._coming, self._turns = iter(todo), turns or {}
        self.is_over = is_over or threading.Event()
        self._batches: dict[object, Batch] = {}
        self._of: dict[str, Batch] = {}

    def __len__(self) -> int:
        """How many it has taken in so far."""
        return len(self._of)

    def take_in(self, most: int | None = None) -> int:
        """Take in more candidates, all that come where ``most`` is None; how many."""
        before = len(self)
        for item in itertools.islice(self._coming, most):
            function, _, constants = key = lowered_as(item)
            turn = self._turns.get((item.kernel, item.problem), 0)
            batch = self._batches.setdefault((turn, key), Batch(function, constants, _tile_elements(item.config), turn))
            batch.left.insert(0, item)
            self._of[item.artifact] = batch
        return len(self) - before

    def take(self, before: Candidate | None) -> Candidate | None:
        """The next candidate for a worker, or None where none is left and none comes.

        Args:
            before: what that worker had last, which it is done with.
        """
        batch = self._of[before.artifact] if before else None
        if batch is None or not batch.left:
            if batch:
                batch.workers -= 1
            batch = self._most_urgent()
            if batch is None:
                return None
            batch.workers += 1
        return batch.left.pop()

    def _most_urgent(self) -> Batch | None:
        """The batch to be taken next; where all are taken, of what comes."""
        while not (left := [batch for batch in self._batches.values() if batch.left]):
            if not self.take_in(1):
                return None
        return max(left, key=lambda batch: batch.urgency)

    def put_back(self, item: Candidate) -> None:
        """Have a candidate taken once more."""
        self._of[item.artifact].left.append(item)

    def learn(self, item: Candidate, seconds: float) -> None:
        """Take in how long a candidate took."""
        known = self._of[item.artifact]
        for batch in self._batches.values():
            if batch.function is known.function:
                same = sum(one == other for one, other in zip(batch.constants, known.constants, strict=True))
                batch.learn(math.inf if batch is known else same, seconds)


def turns_of(problems: Sequence[Named]) -> dict[Named, int]:
    """Return the turn of each problem: kernels whose candidates take the least to compile first, the longest last.

    Those that follow others come first: the others are timed with them. Nothing is listed for it: a kernel's time is
    taken as that of all points of its problems' spaces.
    """
    seconds: Counter[str] = Counter()
    for kernel, problem in problems:
        points = math.prod(map(len, spec_named(kernel).space.axes(problem).values()))
        seconds[kernel] += points * COMPILE_S.get(kernel, OTHER_S)  # type: ignore[assignment]
    follow = {follower.kernel for kernel in seconds if (follower := spec_named(kernel).follower)}
    kernels = sorted(seconds, key=lambda kernel: (kernel not in follow, seconds[kernel]))
    return {named: kernels.index(named[0]) for named in problems}


def lowered_as(item: Candidate) -> tuple[object, Hashable, tuple[object, ...]]:
    """The key of a candidate's lowering, the same for all of a batch: its device function, parameters and constants."""
    kernel = item.spec.device(item.problem, item.config)
    return item.backend.front_end_key(kernel), kernel.parameters, (*kernel.constants, item.variant)


def _tile_elements(config: Config) -> int:
    return math.prod(value for name, value in config.items() if name.startswith("tile_") and isinstance(value, int))
