"""Choose the candidate that a compile worker takes next, so that no core is idle at the end.

Candidates that differ only in compiler hints form a batch: a worker that stays with a batch lowers its device function
once. Batches that are expected to take long come first, by :data:`COMPILE_S` and the size of their tiles. A batch with
much left gets more workers.

Candidates may be listed while others are compiled, since listing thousands takes a second.

Problems may have turns. If problems are measured while others are compiled, those of one kernel share a turn: kernels
that compile fast come first, so that the GPU has work early, and the slowest comes last. Under a budget of time each
problem has its own turn (:mod:`tilekern.tuning.budget`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilekern.kernels import spec_named
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.plan import Named

# Core-seconds of an artifact if nothing is known about this machine: means over samples of Qwen3-8B's artifacts for the
# H200 and the B200, tileiras 13.4, on one core of an AMD EPYC. ``OTHER_S`` is their mean, for other kernels.
COMPILE_S = {
    "fused_add_rms_norm_backward": 0.49,
    "fused_add_rms_norm_forward": 0.41,
    "attention_delta": 0.29,
    "attention_dkdv": 2.02,
    "attention_dq": 1.30,
    "attention_forward": 3.34,
    "column_sum": 0.24,
    "cross_entropy_backward": 0.24,
    "cross_entropy_forward": 0.37,
    "cross_entropy_fused": 0.65,
    "matmul": 0.60,
    "qk_norm_rope_backward": 0.90,
    "qk_norm_rope_forward": 0.47,
    "rms_norm_backward": 0.37,
    "rms_norm_forward": 0.23,
    "rope": 0.55,
    "scale": 0.12,
    "swiglu_backward": 0.16,
    "swiglu_backward_remake": 0.17,
    "swiglu_forward": 0.13,
}
OTHER_S = 0.65
# A tile of this many elements is expected to take twice as long as a small one. Replayed from a stage of 516 artifacts,
# 2 workers are busy 99.9 % of the time, 8 workers 99.6 % and 16 workers 97.9 %.
LARGE_TILE = 16384
# A batch in progress is as urgent as one candidate if it has this many left for each of its workers plus one.
HELP_FROM = 4


@dataclass
class Batch:
    """Candidates that share one lowering, and the seconds that each is expected to take."""

    seconds: float
    turn: int = 0
    left: list[Candidate] = field(default_factory=list)
    workers: int = 0

    @property
    def urgency(self) -> tuple[int, float]:
        """Return a sort key; the batch with the greatest is taken next."""
        waiting_s = self.seconds * len(self.left) / (1 + self.workers) / HELP_FROM
        return -self.turn, waiting_s if self.workers else self.seconds


class Order:
    """Hands out candidates.

    Args:
        todo: the candidates, without library calls.
        turns: the turn of each problem, by default 0; all candidates of lower turns are taken first.
        is_over: set to stop; candidates at work are given up.
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
        """Return how many candidates were listed so far."""
        return len(self._of)

    def take_in(self, most: int | None = None) -> int:
        """List more candidates, by default all; return how many."""
        before = len(self)
        for item in itertools.islice(self._coming, most):
            turn = self._turns.get((item.kernel, item.problem), 0)
            tile = [value for name, value in item.config.items() if name.startswith("tile_") and isinstance(value, int)]
            seconds = COMPILE_S.get(item.kernel, OTHER_S) * (1 + math.prod(tile) / LARGE_TILE)
            batch = self._batches.setdefault((turn, lowered_as(item)), Batch(seconds, turn))
            batch.left.insert(0, item)
            self._of[item.artifact] = batch
        return len(self) - before

    def take(self, before: Candidate | None) -> Candidate | None:
        """Return the next candidate for a worker, or None if there are no more.

        Args:
            before: the worker's last candidate, which is finished.
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
        """Return the batch to take next; if none has candidates left, list more."""
        while not (left := [batch for batch in self._batches.values() if batch.left]):
            if not self.take_in(1):
                return None
        return max(left, key=lambda batch: batch.urgency)

    def put_back(self, item: Candidate) -> None:
        """Have a candidate taken again."""
        self._of[item.artifact].left.append(item)


def turns_of(problems: Sequence[Named]) -> dict[Named, int]:
    """Return the turn of each problem: kernels that compile fastest first.

    Followers come before all, since other kernels are timed with them. A kernel's time is estimated over all points of
    its problems' spaces, so that nothing must be listed.
    """
    seconds: Counter[str] = Counter()
    for kernel, problem in problems:
        points = math.prod(map(len, spec_named(kernel).space.axes(problem).values()))
        seconds[kernel] += points * COMPILE_S.get(kernel, OTHER_S)  # type: ignore[assignment]
    follow = {follower.kernel for kernel in seconds if (follower := spec_named(kernel).follower)}
    kernels = sorted(seconds, key=lambda kernel: (kernel not in follow, seconds[kernel]))
    return {named: kernels.index(named[0]) for named in problems}


def lowered_as(item: Candidate) -> tuple[object, Hashable, tuple[object, ...]]:
    """Return the key of a candidate's lowering, shared by a batch: its device function, parameters and constants."""
    kernel = item.spec.device(item.problem, item.config)
    return item.backend.front_end_key(kernel), kernel.parameters, (*kernel.constants, item.variant)
