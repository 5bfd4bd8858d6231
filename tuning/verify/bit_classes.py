"""The bit class of a candidate: two candidates of a class give a row the same bits, whatever rows are around it.

Generation computes a token's row among 1 to 64 others, training among thousands. Where both run kernels of one class,
their probabilities are equal, and not only near.

A spec is judged if each of its results has a row for each row of its inputs. The same few rows are given to each
candidate of each bucket: spread over its largest number of rows, among its smallest with gaps in memory between rows,
and next to one another between rows of NaN. The class is a digest of their results.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilekern.spec import KernelSpec, Problem, bucket
from tilekern.tuning.verify.adversarial import drawn
from tilekern.tuning.verify.canaries import bits
from tilekern.tuning.verify.cases import Case

# The rows whose bits are compared.
ROWS = 8
_DIGITS = 16
# Two counts of rows that tell arrays of rows from others.
_COUNTS = (3, 5)


@dataclass(frozen=True)
class Placed:
    """Inputs in which some of the rows stand at some places.

    Attributes:
        case: the inputs; it has no right results.
        rows: which of the rows, in their order.
        places: where they are among the case's rows.
    """

    case: Case
    rows: Sequence[int]
    places: Sequence[int]


class BitClasses:
    """The rows of one problem, placed among others.

    Args:
        spec: the spec.
        problem: the problem; its sizes are the largest of its bucket.
        device: where arrays are made, as torch names it.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, device: str) -> None:
        self._spec, self._problem, self._device = spec, problem, device

    @functools.cached_property
    def dimension(self) -> str | None:
        """The dimension that counts rows; None if results are not by rows, or need not repeat."""
        spec, problem = self._spec, self._problem
        bucketed = [d.name for d in spec.dimensions if d.kind == "bucketed"]
        if len(bucketed) != 1 or not problem.get("deterministic", True):
            return None
        inputs, outputs = [], []
        for count in _COUNTS:
            at = problem.but(**{bucketed[0]: count})
            made = drawn(spec, at, self._device)
            inputs.append({name: tuple(x.shape) for name, x in made.items() if isinstance(x, torch.Tensor)})
            outputs.append({name: shape for name, (shape, _) in spec.outputs(at, 1).items()})
        by_rows = _by_rows(*inputs)
        is_of_rows = by_rows is not None and any(by_rows.values())
        results = _by_rows(*outputs) if is_of_rows else None
        return bucketed[0] if results and all(results.values()) else None

    def placements(self) -> Iterator[list[Placed]]:
        """Yield lists of inputs; each list has all rows once."""
        if self.dimension is None:
            return
        largest = self._problem[self.dimension]
        smallest = bucket(largest) // 2 + 1 if largest > 1 else 1
        yield list(self._spread("largest of the bucket", largest, range(ROWS)))
        yield list(self._spread("smallest of the bucket", smallest, range(ROWS)[::-1], padded=True))
        if largest > ROWS:
            first = (largest - ROWS) // 3
            places = range(first, first + ROWS)
            yield [self._placed("between NaN", largest, range(ROWS), places, filler=torch.nan)]

    def _spread(self, name: str, count: int, rows: Sequence[int], *, padded: bool = False) -> Iterator[Placed]:
        for first in range(0, ROWS, count):
            some = rows[first : first + count]
            places = [number * (count - 1) // max(1, len(some) - 1) for number in range(len(some))]
            yield self._placed(name, count, some, places, padded=padded)

    def _placed(
        self, name: str, count: int, rows: Sequence[int], places: Sequence[int], *, filler: float = 1.25,
        padded: bool = False,
    ) -> Placed:  # fmt: skip
        """Return inputs of ``count`` rows; those between are some of the rows times a number."""
        assert self.dimension is not None
        made: dict[str, Any] = {}
        order = torch.arange(count, device=self._device) * 5 % ROWS
        at = torch.tensor(list(places), device=self._device)
        for array, value in self._given.items():
            if not self._is_of_rows[array]:
                made[array] = value
                continue
            made[array] = value[order]
            if value.is_floating_point():
                made[array] *= filler
            made[array][at] = value[list(rows)]
        return Placed(Case(name, self._problem.but(**{self.dimension: count}), made, {}, padded=padded), rows, places)

    @functools.cached_property
    def _given(self) -> dict[str, Any]:
        """The inputs of the rows alone; the same for all buckets of a problem."""
        assert self.dimension is not None
        return drawn(self._spec, self._problem.but(**{self.dimension: ROWS}), self._device)

    @functools.cached_property
    def _is_of_rows(self) -> dict[str, bool]:
        assert self.dimension is not None
        at = self._problem.but(**{self.dimension: _COUNTS[0]})
        fewer = drawn(self._spec, at, self._device)
        return {
            name: isinstance(x, torch.Tensor) and tuple(x.shape) != tuple(fewer[name].shape)
            for name, x in self._given.items()
        }


def digest_of(results: Iterable[tuple[Placed, Mapping[str, Any]]]) -> str:
    """Return the digest of the rows' results, of one list of placements.

    Args:
        results: each placement, and the outputs of a launch on it by name.
    """
    held: list[bytes] = [b""] * ROWS
    for placed, outputs in results:
        for name in sorted(outputs):
            found = bits(outputs[name][list(placed.places)].contiguous()).cpu()
            for row, values in zip(placed.rows, found, strict=True):
                held[row] += values.numpy().tobytes()
    return hashlib.sha256(b"".join(held)).hexdigest()[:_DIGITS]


def _by_rows(few: Mapping[str, tuple[int, ...]], more: Mapping[str, tuple[int, ...]]) -> dict[str, bool] | None:
    """Return which arrays have a row for each of the counts, by their shapes at both; None if others depend on it."""
    found = {}
    for name, shape in few.items():
        other = more[name]
        is_row = [size != wide for size, wide in zip(shape, other, strict=True)]
        if any(is_row[1:]) or (is_row and is_row[0] and (shape[0], other[0]) != _COUNTS):
            return None
        found[name] = bool(is_row and is_row[0])
    return found
