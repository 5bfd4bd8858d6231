"""Collect a sweep's facts on each candidate in one flat row, for the report's CSV, JSON and page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilekern.compile.cubin import Resources
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, Config, Problem
from tilekern.spec.targets import Target
from tilekern.tuning.measure.stage import identity
from tilekern.tuning.predict.launch_costs import resident_blocks
from tilekern.tuning.predict.ranking import Prediction, ranking
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.publishing import Winner, winners
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, Candidate
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import Named

LEFT_OUT = "its race left it out: it is predicted far slower, or the search did not come to it"
# The states of a candidate, the best first.
STATUSES = ("timed", "checked", "compiled", "duplicate", "planned", "wrong", "quarantined", "failed", "open")


@dataclass(frozen=True)
class Row:
    """One candidate of a sweep. A field is None if it is unknown or has no meaning.

    Attributes:
        kernel: name of the spec.
        problem: sizes, dtypes and flags, in the order of the spec's dimensions.
        number: index of the candidate in its problem's list, from 0.
        config: the point of the space.
        variant: ``aligned``, or ``generic`` for the artifact that every record has besides its winner's.
        library: whether a library runs it, so that it has no artifact.
        default: whether it is the spec's default config, the reference of gains.
        winner: whether the problem's record would name it.
        status: one of :data:`STATUSES`. ``planned``: not compiled yet. ``failed``: the compiler gave up.
            ``open``: a temporary failure kept it from being compiled.
            ``compiled``: compiled (or a library's), not run yet. ``duplicate``: the same machine code and grid as
            candidate ``same_as``, so it is not run. ``wrong``: it did not pass its check. ``quarantined``: it crashed
            or hung. ``checked``: right, not timed. ``timed``: right, and measured on the GPU.
        reason: why it is ``failed``, ``wrong`` or ``quarantined``, or ``checked`` if its race was run without it.
        same_as: ``number`` of the candidate that represents a ``duplicate``.
        provenance: the source of ``time_us``, ``measured`` or ``predicted``. Predicted times are given only in problems
            without any timing.
        time_us: measured median or predicted time, microseconds.
        measured_us: median of the timings, microseconds.
        spread_us: half the distance between the quartiles of the timings, microseconds.
        samples: number of timings; a candidate dropped early has few.
        earlier_race: whether the timings come from a race before the problem's last one: only candidates of the same
            race compete, since clocks drift between races.
        predicted_us: the cost model's time, microseconds.
        share_of_roofline: the time at the roofline over ``time_us``: of a copy of the bytes that must move, or of the
            operations at the peak of products of the dtype, whichever is longer; as the records have it.
        gain_over_default: ``time_us`` of the default config over this one's; more than 1 is faster.
        bound: ``memory`` or ``arithmetic``: which of the two bounds the problem on this target.
        gigabytes_per_s: bytes that must move over ``time_us``, 1e9 bytes a second.
        teraflops: floating-point operations over ``time_us``, 1e12 a second.
        registers: 32-bit registers of a thread.
        stack_bytes: local memory of a thread; more than 0 means spills or indexed register arrays.
        shared_bytes: shared memory of a block.
        threads: threads of a block.
        code_bytes: machine code.
        resident_blocks: blocks that fit on one SM of the target at once.
        relative_error: norm of the error over the norm of the reference; infinite if a result is not a number.
        elementwise_error: largest error over the largest element of the reference; infinite likewise.
    """

    kernel: str
    problem: Problem
    number: int
    config: Config
    variant: str
    library: bool
    default: bool
    winner: bool
    status: str
    reason: str | None = None
    same_as: int | None = None
    provenance: str | None = None
    time_us: float | None = None
    measured_us: float | None = None
    spread_us: float | None = None
    samples: int | None = None
    earlier_race: bool | None = None
    predicted_us: float | None = None
    share_of_roofline: float | None = None
    gain_over_default: float | None = None
    bound: str | None = None
    gigabytes_per_s: float | None = None
    teraflops: float | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    code_bytes: int | None = None
    resident_blocks: int | None = None
    relative_error: float | None = None
    elementwise_error: float | None = None


@dataclass(frozen=True)
class Report:
    """The rows of a sweep, and their origin.

    Attributes:
        model: the planned model.
        target: key, name, architecture and number of SMs of the target.
        gpu: GPU, driver and torch of the measurements; empty if there are none.
        toolkits: keys of the compilers that made the artifacts.
        date: when the last run on the sweep began, in UTC, as ISO 8601; empty if there was none.
        rows: the candidates, problem by problem, in the order of the plan.
        lost: problems without a winner because an artifact of it is lost, and which artifact.
    """

    model: str
    target: Mapping[str, Any]
    gpu: Mapping[str, Any]
    toolkits: tuple[str, ...]
    date: str
    rows: tuple[Row, ...]
    lost: Mapping[Named, str] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """Return whether anything was timed."""
        return any(row.measured_us is not None for row in self.rows)

    @property
    def counts(self) -> Counter[str]:
        """Count the candidates of each status."""
        return Counter(row.status for row in self.rows)


def report_of(sweep: Sweep) -> Report:
    """Report on a sweep folder, whatever stage it is in.

    Raises:
        InputError: the folder holds no sweep.
    """
    journals = _Journals.of(sweep)
    toolkits = {line["toolkit"]["key"] for line in journals.compiled.values() if "toolkit" in line}
    lost: dict[Named, str] = {}
    won = {(winner.kernel, winner.problem): winner for winner, _ in winners(sweep, {"key": "none"}, lost=lost)}
    rows = [row for named in sweep.problems() for row in _rows_of_problem(sweep, *named, journals, won.get(named))]
    date = max((run["started"] for run in sweep.runs()), default="")
    toolkit = tuple(sorted(toolkits))
    return Report(sweep.model, sweep.target.describe(), sweep.gpu(), toolkit, date, tuple(rows), lost)


@dataclass(frozen=True)
class _Journals:
    target: Target
    compiled: Mapping[str, dict[str, Any]]
    measured: Mapping[str, dict[str, Any]]
    quarantined: Mapping[str, str]
    races: Mapping[tuple[str, str], str]
    untimed: Container[str]

    @classmethod
    def of(cls, sweep: Sweep) -> _Journals:
        found = sweep.races().values()
        races = {(line["kernel"], line["problem"]): line["race"] for line in found}
        untimed = {key for line in found for key in line["untimed"]}
        return cls(sweep.target, sweep.compiled(), sweep.measured(), sweep.quarantined(), races, untimed)

    def line(self, item: Candidate) -> Mapping[str, Any]:
        return LIBRARY_LINE if item.is_library else self.compiled.get(item.artifact, {"status": "planned"})

    def check(self, item: Candidate) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.measured.get(item.key, {}).get("check", {})
        return found

    def timing(self, item: Candidate) -> Mapping[str, Any]:
        """Return the timing of a right candidate."""
        found: Mapping[str, Any] = self.measured.get(item.key, {}).get("timing", {})
        return found if self.check(item).get("passed") else {}


def _rows_of_problem(
    sweep: Sweep, kernel: str, problem: Problem, journals: _Journals, winner: Winner | None
) -> Iterator[Row]:
    items = sweep.candidates(kernel, problem)
    config = spec_named(kernel).default(problem, journals.target)
    default = next((item for item in items if item.variant == ALIGNED and item.config == config), None)
    predictions = {item.key: found for item, found in ranking(sweep, kernel, problem, journals.target)}
    how = "measured" if any(journals.timing(item) for item in items) else "predicted"
    times = {
        item.key: journals.timing(item).get("median_us")
        if how == "measured"
        else _predicted_us(predictions.get(item.key))
        for item in items
    }
    default_us, least_us = _yardsticks(winner, how, times[default.key] if default else None)
    first: dict[Any, int] = {}
    for number, item in enumerate(items):
        time_us = times[item.key]
        won = winner is not None and item.variant == ALIGNED and dict(item.config) == winner.record.config
        yield Row(
            kernel, problem, number, item.config, item.variant, item.is_library, item is default, won,
            time_us=_rounded(time_us), provenance=None if time_us is None else how,
            share_of_roofline=_ratio(least_us, time_us), gain_over_default=_ratio(default_us, time_us),
            bound=roofline(kernel, problem, journals.target).bound,
            gigabytes_per_s=_rounded(item.spec.bytes_moved(problem) / time_us / 1e3) if time_us else None,
            teraflops=_rounded(item.spec.flops(problem) / time_us / 1e6) if time_us else None,
            **_state(item, number, journals, first), **_measurement(item, journals),
            **_compile_facts(item, journals, predictions.get(item.key)),
        )  # fmt: skip


def _yardsticks(winner: Winner | None, how: str, default_us: float | None) -> tuple[float | None, float | None]:
    """Return the times of the default config and at the roofline, where known.

    They come from the record: the candidate that was timed in place of the default, and the copy of its race.
    """
    if winner is None or winner.record.provenance != how:
        return default_us, None
    facts = winner.record.measurement or winner.record.prediction or {}
    return facts.get("default_us", default_us), 1e6 * winner.roofline.seconds


def _predicted_us(prediction: Prediction | None) -> float | None:
    """Return microseconds; None if no block fits on an SM, for which the model says infinity."""
    return 1e6 * prediction.seconds if prediction and math.isfinite(prediction.seconds) else None


def _state(item: Candidate, number: int, journals: _Journals, first: dict[Any, int]) -> dict[str, Any]:
    """Return status, reason and twin of a candidate; ``first`` collects the numbers of those that run."""
    line, check = journals.line(item), journals.check(item)
    if line["status"] != "ok":
        return {"status": line["status"], "reason": line.get("reason")}
    if item.key in journals.quarantined:
        return {"status": "quarantined", "reason": journals.quarantined[item.key]}
    same_as = first.setdefault(identity(item, dict(line), journals.target), number)
    if check:
        right = "timed" if journals.timing(item) else "checked"
        left_out = LEFT_OUT if right == "checked" and item.key in journals.untimed else None
        return {"status": right if check["passed"] else "wrong", "reason": check.get("reason", left_out)}
    return {"status": "compiled"} if same_as == number else {"status": "duplicate", "same_as": same_as}


def _measurement(item: Candidate, journals: _Journals) -> dict[str, Any]:
    timing, check = journals.timing(item), journals.check(item)
    race = journals.measured.get(item.key, {}).get("race")
    return {
        "earlier_race": race != journals.races.get((item.kernel, item.problem.key)) if timing else None,
        "measured_us": timing.get("median_us"),
        "spread_us": timing.get("spread_us"),
        "samples": timing.get("samples"),
        "relative_error": check.get("relative_error"),
        "elementwise_error": check.get("elementwise_error"),
    }


def _compile_facts(item: Candidate, journals: _Journals, prediction: Prediction | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"predicted_us": _rounded(_predicted_us(prediction))}
    found = journals.line(item).get("resources")
    if found is not None:
        names = ("registers", "stack_bytes", "shared_bytes", "threads", "code_bytes")
        facts |= {name: found[name] for name in names}
        facts["resident_blocks"] = resident_blocks(Resources(**found), journals.target)
    return facts


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 4) if above and below else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
