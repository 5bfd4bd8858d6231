"""What ops launch right behind the kernels of a race (:class:`tilekern.spec.Follower`): it is timed with them.

A follower's config is the fastest that the sweep knows by then. It has as many rows as a candidate has blocks, which no
plan of problems knows, so it is taken from the nearest problem; candidates of all of them are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilekern.kernels import spec_named
from tilekern.spec import KernelSpec, Problem
from tuning.measure.tasks import Entrant
from tuning.strategies.selection import ranked

if TYPE_CHECKING:
    from tuning.measure.stage import Settled


def followers(settled: Settled, spec: KernelSpec, problem: Problem, racing: Sequence[Entrant]) -> dict[int, Entrant]:
    """What follows candidates with so many blocks; nothing where the sweep has not compiled any of it.

    Args:
        settled: what the sweep knows.
        spec: of the candidates.
        problem: theirs.
        racing: the candidates.
    """
    if spec.follower is None:
        return {}
    found: dict[int, Entrant] = {}
    kernel = spec_named(spec.follower.kernel)
    sm_count = settled.target.sm_count
    for blocks in {blocks_of(entrant, problem, sm_count) for entrant in racing if entrant.is_aligned} - {0}:
        wanted = kernel.bucketed(kernel.problem(**spec.follower.dimensions(problem, blocks)))
        one = next(filter(None, (_best(settled, kernel.name, near) for near in _near(settled, kernel, wanted))), None)
        if one is not None:
            found[blocks] = one
    return found


def blocks_of(entrant: Entrant, problem: Problem, sm_count: int) -> int:
    """The grid of a candidate; 0 where a library runs it."""
    if entrant.candidate.is_library:
        return 0
    return entrant.candidate.spec.device(problem, entrant.candidate.config).grid(problem, sm_count)


def _near(settled: Settled, spec: KernelSpec, wanted: Problem) -> list[Problem]:
    """The sweep's problems that differ from the one that is wanted in bucketed sizes alone, the nearest first."""
    sizes = [d.name for d in spec.dimensions if d.kind == "bucketed"]
    same = [one for one in settled.problems(spec.name) if one.but(**{name: wanted[name] for name in sizes}) == wanted]
    return sorted(same, key=lambda one: sum(abs(math.log2(one[name] / wanted[name])) for name in sizes))


def _best(settled: Settled, kernel: str, problem: Problem) -> Entrant | None:
    """The fastest candidate that was timed, or else the first that is compiled."""
    running = {entrant.key: entrant for entrant in settled.entrants(kernel, problem) if entrant.is_aligned}
    timings = {key: line["timing"] for key, line in settled.right(running).items() if "timing" in line}
    return running[ranked(timings)[0]] if timings else next(iter(running.values()), None)
