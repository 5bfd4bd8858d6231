"""Choose kernels of a step one problem at a time, by the time of the whole step; it touches no device.

The last blocks of a launch leave room for the first ones of the next. How much, and how early, depends on the shape of
the blocks, which shows in the step and not in launches of one kernel in a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tilekern.errors import TilekernError
from tilekern.tuning.sweep.plan import Named

Kernel = TypeVar("Kernel")
_Timed_contra = TypeVar("_Timed_contra", contravariant=True)
# So many samples of each of two steps are compared.
_SAMPLES = 25
# Two graphs of equal launches differ by about half as much: their arrays lie elsewhere.
_LEAST_GAIN = 0.002


class StepFailed(TilekernError):  # noqa: N818 (the name says the state)
    """A step that could not be captured or run, and why."""


class Meter(Protocol[_Timed_contra]):
    """Times a step by the kernels that some of its problems have."""

    def samples(self, ways: Sequence[Mapping[Named, _Timed_contra]], count: int) -> list[list[float]]:
        """Return ``count`` times of the step in each of some ways, in us, taken in turn.

        Raises:
            StepFailed: one of the ways cannot run.
        """

    def launched(self, way: Mapping[Named, _Timed_contra]) -> Collection[Named]:
        """Return the problems that the step launches in a way: a kernel's config can decide what follows it.

        Raises:
            StepFailed: the way cannot run.
        """


@dataclass(frozen=True)
class Choice(Generic[Kernel]):
    """What a step chose for a problem.

    Attributes:
        named: the problem.
        kernel: its kernel.
        token_us: the step's time with it.
        otherwise_us: that with the kernel that the problem had before; the same where that is kept.
        tried: how many others there were.
        failed: why some of them could not run.
    """

    named: Named
    kernel: Kernel
    token_us: float
    otherwise_us: float
    tried: int
    failed: tuple[str, ...] = ()


def choose(
    meter: Meter[Kernel], given: Mapping[Named, Kernel], others: Mapping[Named, Sequence[Kernel]],
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Choice[Kernel]]:  # fmt: skip
    """Yield a choice for each problem of ``others`` that the step launches, in their order.

    Later choices are made with the earlier ones.

    Another kernel is chosen if it makes the step faster by more than the spread, twice: of several, one may have been
    lucky, and a graph that is captured again has its arrays elsewhere.

    Args:
        meter: times the step.
        given: the kernels to begin with, of these problems and of others.
        others: the kernels to try for each problem.
        is_over: asked before each measurement; no choice is made for a problem that is at work then.

    Raises:
        StepFailed: the step cannot run with the kernels to begin with, or not any more; earlier choices hold.
    """
    way = dict(given)
    (first,) = meter.samples([way], _SAMPLES)
    token_us = statistics.median(first)

    def gain(named: Named, kernel: Kernel) -> tuple[float, float, float]:
        now, other = meter.samples([way, way | {named: kernel}], _SAMPLES)
        return saved(now, other), statistics.median(now), statistics.median(other)

    for named, kernels in others.items():
        if named not in meter.launched(way):
            continue
        gains: dict[int, float] = {}
        failed: list[str] = []
        for number, kernel in enumerate(kernels):
            if is_over():
                return
            try:
                gained, token_us, _ = gain(named, kernel)
            except StepFailed as error:
                failed.append(str(error))
                meter.launched(way)  # raises if it was not the candidate
            else:
                gains[number] = gained
        chosen, before_us = way[named], token_us
        for number in sorted((number for number in gains if gains[number]), key=lambda one: -gains[one]):
            if is_over():
                return
            try:
                gained, now_us, other_us = gain(named, kernels[number])
            except StepFailed as error:
                failed.append(str(error))
                meter.launched(way)
                continue
            if gained:
                chosen, before_us, token_us = kernels[number], now_us, other_us
                break
        way[named] = chosen
        yield Choice(named, chosen, token_us, before_us, len(kernels), tuple(failed))


def saved(now: Sequence[float], other: Sequence[float]) -> float:
    """Return by how much another step is faster, in the unit of the samples; 0 if the samples do not show it.

    Samples at one place were taken one after the other, so that a change of clocks is in both. Their differences must
    be larger than their own spread, the range of their middle half.
    """
    differences = [before - after for before, after in zip(now, other, strict=True)]
    low, median, high = statistics.quantiles(differences, n=4)
    return median if median > max(high - low, _LEAST_GAIN * statistics.median(now)) else 0.0
