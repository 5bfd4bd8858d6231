"""Find the kernels that ops launch right after the kernels of a race, to time them together.

See :class:`tilekern.spec.Follower`. A follower's config is the fastest that the sweep knows. It has as many rows as a
candidate has blocks, which the plan does not know, so it is taken from the nearest problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tilekern.kernels import spec_named
from tilekern.spec import Follower, KernelSpec, Problem
from tilekern.tuning.measure.tasks import Entrant
from tilekern.tuning.strategies.lineup import ranked

if TYPE_CHECKING:
    from tilekern.tuning.measure.stage import Settled


def followers(settled: Settled, racing: Sequence[Entrant]) -> dict[int, Entrant]:
    """Return the followers of a problem's candidates by their number of blocks, if the sweep has compiled any.

    Args:
        settled: the sweep's checks and timings.
        racing: the candidates; at least one.
    """
    first = racing[0].candidate
    follower = first.spec.follower
    if follower is None:
        return {}
    found: dict[int, Entrant] = {}
    kernel, sm_count = spec_named(follower.kernel), settled.target.sm_count
    for blocks in {entrant.candidate.blocks(sm_count) for entrant in racing if entrant.is_aligned} - {0}:
        behind = problem_behind(follower, first.problem, blocks)
        if behind is None:
            continue
        near = nearest(settled.problems(kernel.name), kernel, kernel.bucketed(behind))
        one = next(filter(None, (_best(settled, kernel.name, problem) for problem in near)), None)
        if one is not None:
            found[blocks] = one
    return found


def problem_behind(follower: Follower, problem: Problem, blocks: int) -> Problem | None:
    """Return a follower's problem, with real sizes, behind so many blocks; None if it does not follow them."""
    dimensions = follower.dimensions(problem, blocks)
    return None if dimensions is None else spec_named(follower.kernel).problem(**dimensions)


def inputs_behind(spec: KernelSpec, problem: Problem, left: Any) -> dict[str, Any]:
    """Return the inputs of a follower: the array that the kernel before it leaves, and its own numbers."""
    import torch

    given = spec.inputs(problem, None, "meta")
    [name] = (name for name, value in given.items() if isinstance(value, torch.Tensor))
    return given | {name: left}


def nearest(problems: Iterable[Problem], spec: KernelSpec, wanted: Problem) -> list[Problem]:
    """Return the problems that differ from the one that is wanted in bucketed sizes alone, the nearest first."""
    sizes = [d.name for d in spec.dimensions if d.kind == "bucketed"]
    same = [one for one in problems if one.but(**{name: wanted[name] for name in sizes}) == wanted]
    return sorted(same, key=lambda one: sum(abs(math.log2(one[name] / wanted[name])) for name in sizes))


def _best(settled: Settled, kernel: str, problem: Problem) -> Entrant | None:
    """Return the fastest timed candidate, or else the first compiled one."""
    running = {entrant.key: entrant for entrant in settled.entrants(kernel, problem) if entrant.is_aligned}
    timings = {key: line["timing"] for key, line in settled.right(running).items() if "timing" in line}
    return running[ranked(timings)[0]] if timings else next(iter(running.values()), None)
