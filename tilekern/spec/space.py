"""Search spaces: axes, the conditions that a candidate must meet, and what is left of all points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilekern.spec.points import Config, Problem, Value

if TYPE_CHECKING:
    from tilekern.spec.targets import Target


@dataclass(frozen=True)
class Constraint:
    """A condition that every candidate must meet, with the reason that a person reads when it does not.

    The result of ``holds`` must follow from the problem, the target and the axes that it looks at: points that agree in
    these are not shown to it again.
    """

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
        lambda problem, config, target: int(config.get("num_ctas") or 1) == 1 or target.capability >= 90,
    ),
)


class _Watched(Config):
    """A config that notes which axis was looked at, the deepest of them; what sees all of it has looked at all."""

    __slots__ = ("_depths", "_known", "deepest")

    def __init__(self, values: dict[str, Value]) -> None:
        self._known = values
        self._depths = {name: depth for depth, name in enumerate(values)}
        self.deepest = -1

    def __getitem__(self, name: str) -> Any:
        value = self._known[name]
        self.deepest = max(self.deepest, self._depths[name])
        return value

    def __hash__(self) -> int:
        return hash(self.config)

    def __eq__(self, other: object) -> bool:
        return self.config == other

    @property
    def _values(self) -> dict[str, Value]:  # type: ignore[override]
        self.deepest = len(self._known) - 1
        return self._known

    @property
    def config(self) -> Config:
        """The config itself."""
        return Config(self._values)


class _Odometer:
    """Counts through the values of axes, the last one fastest; ``places`` is None when it has come round."""

    def __init__(self, axes: Sequence[Sequence[Value]]) -> None:
        self._axes = axes
        self.places: list[int] | None = [0] * len(axes) if all(axes) else None

    def values(self) -> Iterator[Value]:
        """The value of each axis."""
        return (axis[place] for axis, place in zip(self._axes, self.places or (), strict=True))

    def turn(self, axis: int) -> None:
        """Go to the next value of an axis, those before it following on, those after it from their first."""
        assert self.places is not None
        while axis >= 0 and self.places[axis] + 1 == len(self._axes[axis]):
            axis -= 1
        if axis < 0:
            self.places = None
        else:
            self.places[axis:] = [self.places[axis] + 1] + [0] * (len(self.places) - axis - 1)


@dataclass(frozen=True)
class Space:
    """A search space: axes that may depend on the problem, and constraints with reasons.

    ``beside`` are spaces with other axes whose configs are candidates too, for other implementations.
    """

    axes: Callable[[Problem], Mapping[str, Sequence[Value]]]
    constraints: tuple[Constraint, ...] = ()
    beside: tuple[Space, ...] = ()

    def of(self, problem: Problem, config: Config) -> Space | None:
        """The space that has the axes of a config: this one, or one of those beside it; None where none has them."""
        return next((one for one in (self, *self.beside) if one.axes(problem).keys() == config.keys()), None)

    def violated(self, problem: Problem, config: Config, target: Target) -> str | None:
        """The reason why ``config`` is not allowed, or None where it is."""
        for constraint in (*DANGEROUS, *(self.of(problem, config) or self).constraints):
            if not constraint.holds(problem, config, target):
                return constraint.reason
        return None

    def candidates(self, problem: Problem, target: Target) -> Iterator[Config]:
        """All allowed configs, in a fixed order: that of the axes, the last one running fastest.

        What a constraint turns down for the values of some axes, it turns down whatever the axes after these hold, so
        none of those is looked at.
        """
        for space in (self, *self.beside):
            yield from space._allowed(problem, target)

    def _allowed(self, problem: Problem, target: Target) -> Iterator[Config]:
        axes = self.axes(problem)
        conditions = [constraint.holds for constraint in (*DANGEROUS, *self.constraints)]
        odometer = _Odometer(list(axes.values()))
        while odometer.places is not None:
            point = _Watched(dict(zip(axes, odometer.values(), strict=True)))
            for holds in conditions:
                point.deepest = -1
                if not holds(problem, point, target):
                    odometer.turn(point.deepest)
                    break
            else:
                yield point.config
                odometer.turn(len(axes) - 1)
