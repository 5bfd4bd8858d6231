"""Budget of time: which problems a run begins first, and when it begins no more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilekern.cache import PROVENANCES, Hit, Layer
from tilekern.kernels import spec_named
from tilekern.runtime.dispatch import find
from tilekern.spec import Problem
from tilekern.spec.targets import Target
from tilekern.tuning.compile.stage import settled
from tilekern.tuning.measure.followers import nearest, problem_behind
from tilekern.tuning.predict.estimating import artifact_s, compile_rates, problem_s
from tilekern.tuning.predict.gains import GAINS, OTHER_GAIN
from tilekern.tuning.predict.roofline import launch_s
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import Named


class Budget:
    """Wall time that a run may take.

    Args:
        seconds: the budget.
        began: when the run began, by ``time.monotonic``.

    Attributes:
        spent: set when no more work is to be begun, as long as :meth:`counted` is entered.
    """

    def __init__(self, seconds: float, began: float) -> None:
        self.seconds, self._began = seconds, began
        self.spent = threading.Event()

    @property
    def used_s(self) -> float:
        """Return how long ago the run began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def counted(self, share: float = 1.0) -> Iterator[threading.Event]:
        """Set an event when a share of the remaining time has passed; the whole of it sets :attr:`spent`."""
        event = self.spent if share == 1 else threading.Event()
        timer = threading.Timer(max(0.0, share * (self.seconds - self.used_s)), event.set)
        timer.daemon = True
        timer.start()
        try:
            yield event
        finally:
            timer.cancel()


@dataclass(frozen=True)
class Worth:
    """Expected gain and cost of tuning a problem.

    Attributes:
        gain_s: seconds that a training step saves: launches of a step x time of a launch x plausible gain.
        cost_s: seconds to compile and measure what is left of it; 0 where nothing is.
    """

    gain_s: float
    cost_s: float

    @property
    def rank(self) -> tuple[float, float]:
        """Return the sort key: the most gain per second first, equals by cost."""
        return (-self.gain_s / self.cost_s if self.cost_s else float("-inf")), self.cost_s


def turns_by_gain(worths: Mapping[Named, Worth], target: Target) -> dict[Named, int]:
    """Return the turn of each problem: the most gain per second first.

    A kernel that is timed together with the one behind it (:class:`tilekern.spec.Follower`) comes after that one.
    """
    order: dict[Named, None] = {}
    for kernel, problem in sorted(worths, key=lambda named: worths[named].rank):
        if (follower := spec_named(kernel).follower) is not None:
            behind = spec_named(follower.kernel)
            same = [other for name, other in worths if name == behind.name]
            wanted = problem_behind(follower, problem, target.sm_count)
            for first in nearest(same, behind, behind.bucketed(wanted))[:1] if wanted else ():
                order.setdefault((behind.name, first))
        order.setdefault((kernel, problem))
    return {named: turn for turn, named in enumerate(order)}


def worths_of(
    sweep: Sweep, served: Mapping[Named, Hit | None], *, jobs: int, gpus: int, timeout_s: float, sweeps: Sequence[Sweep]
) -> dict[Named, Worth]:
    """Estimate the worth of each problem of a sweep.

    Args:
        sweep: the sweep; what its journals know costs nothing.
        served: the record that a job finds for each problem today; one that cannot be bettered leaves nothing to gain.
        jobs: compile workers.
        gpus: GPUs that measure; 0 where winners are predicted.
        timeout_s: wall seconds that one compile may take.
        sweeps: those whose journals say how long a compile takes here.
    """
    done, rates = settled(sweep, timeout_s), compile_rates(sweeps)
    raced = {(race["kernel"], race["problem"]) for race in sweep.races().values()}
    launches, goal = sweep.launches, "measured" if gpus else "predicted"
    found = {}
    for kernel, problem in sweep.problems():
        items = sweep.candidates(kernel, problem)
        todo = len({item.artifact for item in items if not item.is_library} - done)
        cost_s = todo * artifact_s(kernel, rates) / jobs
        if gpus and (todo or (kernel, problem.key) not in raced):
            cost_s += problem_s(kernel, problem, len(items), sweep.target) / gpus
        # Of a plan that counts launches, those without a count are asked for only if another config wins.
        times = launches.get((kernel, problem), 0 if launches else 1)
        share = 0.0 if is_as_good(served.get((kernel, problem)), goal) else GAINS.get(kernel, OTHER_GAIN)
        found[kernel, problem] = Worth(times * launch_s(kernel, problem, sweep.target) * share, cost_s)
    return found


def served_by(problems: Sequence[Named], target: Target, layers: Sequence[Layer]) -> dict[Named, Hit | None]:
    """Return the record that a lookup of each problem finds; None if a call would miss."""
    return {(kernel, problem): find(spec_named(kernel), problem, target, layers=layers) for kernel, problem in problems}


def is_as_good(hit: Hit | None, goal: str) -> bool:
    """Return whether a record is of this very problem and GPU, of today's space, and as well chosen as the goal."""
    if hit is None or not (hit.exact_target and hit.exact_bucket and hit.fresh):
        return False
    return PROVENANCES.index(hit.record.provenance) <= PROVENANCES.index(goal)


@dataclass(frozen=True)
class LeftOut:
    """A problem that the budget did not finish.

    Attributes:
        kernel: the spec's name.
        problem: its values.
        reason: ``not compiled``, or ``not measured``.
        provenance: of the record that serves it now: ``predicted`` where all of it was compiled, else of what the
            caches had before (``measured``, ``predicted``, ``default``); ``default`` where they have nothing, since a
            first call then compiles the default config.
        seconds: what finishing it is estimated to take.
    """

    kernel: str
    problem: Problem
    reason: str
    provenance: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return the problem as ``--json`` prints it."""
        return {**vars(self), "problem": dict(self.problem), "seconds": round(self.seconds, 1)}
