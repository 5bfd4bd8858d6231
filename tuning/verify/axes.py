"""Which axes of a kernel's arrays count the rows that it computes one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilekern.spec import KernelSpec, Problem
from tilekern.tuning.verify.adversarial import drawn


@dataclass(frozen=True)
class Axes:
    """Which axes of each array count rows, in the order of the dimensions; none for an array that all rows share."""

    dimensions: tuple[str, ...]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, spec: KernelSpec, problem: Problem, device: str, names: tuple[str, ...]) -> Axes | None:
        """Find the axes by the arrays' shapes at several sizes; None if a result has no row for each row."""

        def shapes(sizes: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
            at = problem.but(**sizes)
            made = drawn(spec, at, device)
            given = {name: tuple(x.shape) for name, x in made.items() if isinstance(x, torch.Tensor)}
            numbers = {name: x for name, x in made.items() if name not in given}
            return given, {name: shape for name, (shape, _) in spec.outputs(at, 1).items()}, numbers

        few = dict.fromkeys(names, 3)
        base, more = shapes(few), {name: shapes(few | {name: 5}) for name in names}
        # A number that depends on the sizes ties results to them.
        if any(other[2] != base[2] for other in more.values()):
            return None
        found: list[dict[str, tuple[int, ...]]] = [{}, {}]
        for side, axes in enumerate(found):
            for array, shape in base[side].items():
                counted = []
                for name in names:
                    other = more[name][side][array]
                    grown = [axis for axis, size in enumerate(shape) if size != other[axis]]
                    if len(grown) > 1 or any((shape[axis], other[axis]) != (3, 5) for axis in grown):
                        return None
                    counted += grown
                # An array by some of the sizes alone ties rows to their places.
                if len(counted) not in (0, len(names)):
                    return None
                axes[array] = tuple(counted)
        inputs, outputs = found
        if not any(inputs.values()) or not all(outputs.values()):
            return None
        return cls(names, inputs, outputs)


def as_rows(value: Any, axes: tuple[int, ...]) -> Any:
    """Return an array as [rows, ...]."""
    return value.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1)


def as_array(rows: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """Return rows as an array whose axes count them."""
    return rows.unflatten(0, shape).movedim(tuple(range(len(axes))), axes).contiguous()


def index_of(place: int, shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the index of a row in an array whose axes count rows."""
    at: dict[int, int] = {}
    for axis, size in zip(reversed(axes), reversed(shape), strict=True):
        place, at[axis] = divmod(place, size)
    return tuple(at.get(axis, slice(None)) for axis in range(max(axes) + 1))
