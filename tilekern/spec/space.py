"""Search spaces: axes, and the constraints that a candidate must meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilekern.spec.points import Config, Problem, Value

if TYPE_CHECKING:
    from tilekern.spec.targets import Target


@dataclass(frozen=True)
class Constraint:
    """A condition that every candidate must meet, with the reason that a person reads when it does not."""

    reason: str
    holds: Callable[[Problem, Config, Target], bool]


# Seen on real GPUs with cuTile kernels, whatever the kernel.
DANGEROUS = (
    Constraint(
        "num_ctas=2 with occupancy=2 or more destroys the CUDA context on GPUs of 148 SMs and more",
        lambda problem, config, target: (
            not (int(config.get("num_ctas") or 1) > 1 and int(config.get("occupancy") or 1) > 1)
        ),
    ),
    Constraint(
        "occupancy 16 and more was seen to hang", lambda problem, config, target: int(config.get("occupancy") or 1) < 16
    ),
    Constraint(
        "thread block clusters need sm_90 or newer",
        lambda problem, config, target: int(config.get("num_ctas") or 1) == 1 or target.has_clusters,
    ),
)


@dataclass(frozen=True)
class Space:
    """A search space: axes that may depend on the problem, and constraints with reasons.

    ``beside`` are spaces with other axes whose configs are candidates too, for other implementations.
    """

    axes: Callable[[Problem], Mapping[str, Sequence[Value]]]
    constraints: tuple[Constraint, ...] = ()
    beside: tuple[Space, ...] = ()

    def of(self, problem: Problem, config: Config) -> Space | None:
        """Return the space with the axes of a config, this one or one beside it; None if there is none."""
        return next((one for one in (self, *self.beside) if one.axes(problem).keys() == config.keys()), None)

    def violated(self, problem: Problem, config: Config, target: Target) -> str | None:
        """Return the reason why ``config`` is not allowed, or None if it is."""
        for constraint in (*DANGEROUS, *(self.of(problem, config) or self).constraints):
            if not constraint.holds(problem, config, target):
                return constraint.reason
        return None

    def candidates(self, problem: Problem, target: Target) -> Iterator[Config]:
        """Return all allowed configs in a fixed order: that of the axes, the last one varying fastest."""
        for space in (self, *self.beside):
            axes, conditions = space.axes(problem), [one.holds for one in (*DANGEROUS, *space.constraints)]
            for values in itertools.product(*axes.values()):
                config = Config(dict(zip(axes, values, strict=True)))
                if all(holds(problem, config, target) for holds in conditions):
                    yield config
