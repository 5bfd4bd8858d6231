"""Fit the cost model's weights to a measured sweep: ``python -m benchmarks.fit_cost_model SWEEP``.

This prints the weights of :mod:`tilekern.tuning.predict.cost_model`; it needs numpy, the model itself does not. The
error is measured on the logarithm of the time. Candidates near the best of their problem count most. The error that all
candidates of a problem share counts less than the differences between them, since the model is for ranking. The fit
uses the method of Levenberg and Marquardt (Marquardt 1963, doi:10.1137/0111030), with the weights' logarithms as
parameters, so that none becomes negative.

Three regrets are printed: on the fitted problems, on problems that were left out of the fit (one in eight at a time),
and on whole kernels that were left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.regret import percentile, timed_candidates
from tilekern.compile.cubin import Resources
from tilekern.errors import InputError
from tilekern.spec import LibraryCall
from tilekern.tuning.predict import cost_model
from tilekern.tuning.predict.cost_model import Weights
from tilekern.tuning.predict.launch_costs import Costs
from tilekern.tuning.predict.ranking import code_in, costs_of, predict, predict_library
from tilekern.tuning.predict.roofline import roofline
from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep

# A candidate this much (natural logarithm) behind its problem's best counts 1/e of it in the fit, and never less
# than the floor; the error that a problem's candidates share counts by this share.
_NEAR, _FLOOR, _SHARED = 0.1, 0.02, 0.2
# How firmly parameters are held where the data say little: the weights' logarithms near their start, traits near 0.
_HOLD, _HOLD_TRAITS = 1.5e-4, 6e-4
_STEPS, _DIFFERENCE = 40, 1e-4
_FOLDS = 8
KINDS = {"MEMORY": cost_model.MEMORY, "PRODUCTS": cost_model.PRODUCTS}
# The start of the fit, which also holds parameters that the data determine weakly: roughly the hardware's figures.
START = {
    "MEMORY": {
        "copy": 1.0, "intake": 0.5, "issue": 0.4, "access": 0.4, "local": 1.0, "boxes": 0.5, "latency": 1.0,
        "chain": 3.0, "barriers": 0.5, "blocks": 0.14, "start": 0.37,
    },
    "PRODUCTS": {"products": 1.2, "operands": 0.37, "steps": 0.37, "local": 1.0, "start": 0.37},
}  # fmt: skip
START_OVERHEAD_S, START_NORM = 2e-6, 3.0


@dataclass(frozen=True)
class Sample:
    """A measured candidate: its costs and the name of its kind's weights; None and "" of a library's."""

    candidate: Candidate
    seconds: float
    spills: bool
    bonus: float
    costs: Costs | None
    kind: str

    @property
    def problem(self) -> str:
        """Return the problem's name."""
        return f"{self.candidate.kernel} {self.candidate.problem.key}"


def samples_of(sweep: Sweep) -> list[Sample]:
    """Return the measured candidates of a sweep, one for each distinct code and grid."""
    target, compiled = sweep.target, sweep.compiled()
    found = []
    for kernel, problem in sweep.problems():
        for item, timing in timed_candidates(sweep, kernel, problem).values():
            costs, kind = None, ""
            if item.is_library:
                said = predict_library(item, target)
            else:
                line = compiled[item.artifact]
                code, resources = code_in(line), Resources(**line["resources"])
                said = predict(item, resources, target, code)
                if code is None or not math.isfinite(said.seconds):
                    continue
                costs, weights = costs_of(item, resources, target, code)
                kind = next(name for name, known in KINDS.items() if known is weights)
            found.append(Sample(item, timing["median_us"] / 1e6, said.spills, said.bonus, costs, kind))
    return found


class _Fit:
    """The least-squares problem of one kind of kernel."""

    def __init__(self, kind: str, samples: Sequence[Sample]) -> None:
        start = dataclasses.replace(
            KINDS[kind], terms=START[kind], traits=dict.fromkeys(KINDS[kind].traits, 0.0),
            overhead_s=START_OVERHEAD_S, norm=START_NORM,
        )  # fmt: skip
        self._start, costs = start, [sample.costs for sample in samples if sample.costs is not None]
        self._terms, self._traits = list(start.terms), list(start.traits)
        self._serial = np.array([name in start.serial for name in self._terms])
        self._counted = np.array([[cost.terms[name] for name in self._terms] for cost in costs])
        self._marks = np.array([[cost.traits[name] for name in self._traits] for cost in costs])
        self._measured = np.log([sample.seconds for sample in samples])
        _, self._groups = np.unique([sample.problem for sample in samples], return_inverse=True)
        best: Any = np.full(self._groups.max() + 1, np.inf)
        np.minimum.at(best, self._groups, self._measured)
        self._share = np.exp((best[self._groups] - self._measured) / _NEAR) + _FLOOR
        self._totals = np.bincount(self._groups, self._share)

    def solve(self) -> Weights:
        """Return the weights of the least error."""
        begin = np.array([
            *(math.log(weight) for weight in self._start.terms.values()),
            math.log(1e6 * self._start.overhead_s), math.log(self._start.norm - 1), *self._start.traits.values(),
        ])  # fmt: skip
        traits = len(self._traits)
        hold = np.r_[np.full(len(begin) - traits, _HOLD), np.full(traits, _HOLD_TRAITS)] * self._share.sum()
        held_at = np.r_[begin[: len(begin) - traits], np.zeros(traits)]
        found: Any = begin
        damping = 1e-2
        error, residual = self._error(found, held_at, hold)
        for _ in range(_STEPS):
            slopes = self._weighed(self._slopes(found))
            normal = slopes.T @ slopes + np.diag(hold)
            pull = slopes.T @ residual - hold * (found - held_at)
            for _ in range(6):
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull).clip(-1, 1)
                tried, left = self._error(found + step, held_at, hold)
                if tried < error:
                    break
                damping *= 4
            else:
                break
            gained = error - tried
            found, error, residual, damping = found + step, tried, left, max(damping / 3, 1e-6)
            if gained < 1e-6 * error:
                break
        return self._weights(found)

    def _error(self, at: Any, held_at: Any, hold: Any) -> tuple[float, Any]:
        residual = self._weighed((self._measured - self._logarithms(at))[:, None])[:, 0]
        return float(residual @ residual + ((at - held_at) ** 2 * hold).sum()), residual

    def _weighed(self, columns: Any) -> Any:
        """Reduce the part that a problem's candidates share, and multiply by the root of each candidate's weight."""
        sums = [np.bincount(self._groups, column * self._share) for column in columns.T]
        common = np.stack(sums, 1) / self._totals[:, None]
        return (columns - (1 - _SHARED) * common[self._groups]) * np.sqrt(self._share)[:, None]

    def _logarithms(self, at: Any) -> Any:
        """Return logarithms of :meth:`tilekern.tuning.predict.cost_model.Weights.seconds` for all samples at once."""
        count = len(self._terms)
        weighed, norm = self._counted * np.exp(at[:count]), 1 + math.exp(at[count + 1])
        work = (weighed[:, ~self._serial] ** norm).sum(1) + weighed[:, self._serial].sum(1) ** norm
        return np.log(1e-6 * math.exp(at[count]) + work ** (1 / norm)) + self._marks @ at[count + 2 :]

    def _slopes(self, at: Any) -> Any:
        here, steps = self._logarithms(at), np.eye(len(at)) * _DIFFERENCE
        return np.stack([(self._logarithms(at + step) - here) / _DIFFERENCE for step in steps], 1)

    def _weights(self, at: Any) -> Weights:
        count = len(self._terms)
        rounded = [float(f"{math.exp(value):.3g}") for value in at[: count + 1]]
        return dataclasses.replace(
            self._start,
            terms=dict(zip(self._terms, rounded, strict=False)),
            traits=dict(zip(self._traits, (round(float(value), 3) for value in at[count + 2 :]), strict=True)),
            overhead_s=rounded[count] / 1e6,
            norm=round(1 + math.exp(at[count + 1]), 3),
        )


def fit(samples: Sequence[Sample]) -> dict[str, Weights]:
    """Fit the weights of each kind, by its name; a kind without samples keeps its weights."""
    of_kind = {kind: [sample for sample in samples if sample.kind == kind] for kind in KINDS}
    return {kind: _Fit(kind, of_kind[kind]).solve() if of_kind[kind] else now for kind, now in KINDS.items()}


def predicted(samples: Sequence[Sample], weights: dict[str, Weights], sweep: Sweep) -> list[float]:
    """Return the predicted seconds of each sample."""
    return [
        weights[sample.kind].seconds(sample.costs)
        if sample.costs is not None
        else predict_library(sample.candidate, sweep.target).seconds
        for sample in samples
    ]


def left_out(
    samples: Sequence[Sample], sweep: Sweep, groups: Collection[Any], group_of: Callable[[Sample], Any]
) -> list[float]:
    """Return the predicted seconds of each sample by weights that were fitted without its group."""
    found: dict[int, float] = {}
    for group in groups:
        rest = [sample for sample in samples if group_of(sample) != group]
        inside = [sample for sample in samples if group_of(sample) == group]
        found |= dict(zip(map(id, inside), predicted(inside, fit(rest), sweep), strict=True))
    return [found[id(sample)] for sample in samples]


def regrets(samples: Sequence[Sample], seconds: Sequence[float]) -> dict[str, float]:
    """Return by problem the time of the candidate that ranks first over the best time."""
    problems = defaultdict(list)
    for sample, said in zip(samples, seconds, strict=True):
        problems[sample.problem].append(((sample.spills, said * (1 - sample.bonus)), sample.seconds))
    return {name: min(rows)[1] / min(time for _, time in rows) for name, rows in problems.items()}


def library_ratios(samples: Sequence[Sample], sweep: Sweep) -> dict[str, tuple[float, int]]:
    """Return the median ratios to the roofline of plain and composite library calls, after subtracting the overhead."""
    found = defaultdict(list)
    for sample in samples:
        item = sample.candidate
        if item.is_library:
            call = item.spec.implement(item.problem, item.config)
            least_s = roofline(item.kernel, item.problem, sweep.target).seconds
            kind = "COMPOSITE" if isinstance(call, LibraryCall) and call.composite else "LIBRARY"
            found[kind].append((sample.seconds - cost_model.LIBRARY_OVERHEAD_S) / least_s)
    return {kind: (statistics.median(ratios), len(ratios)) for kind, ratios in found.items()}


def summary(name: str, found: Collection[float]) -> str:
    """Return a line of regrets."""
    middle, high = statistics.median(found), percentile(found, 90)
    return f"{name}: median {middle:.3f}, 90th percentile {high:.3f}, worst {max(found):.3f}"


def main() -> None:
    """Print the weights and their regrets."""
    parser = argparse.ArgumentParser(description="Fit the cost model's weights to a measured sweep.")
    parser.add_argument("sweep", type=Path, help="the sweep folder")
    sweep = Sweep.carried(parser.parse_args().sweep)
    try:
        samples = samples_of(sweep)
    except InputError as error:
        parser.error(str(error))
    if not samples:
        parser.error(f"{sweep.folder} holds no measurements; run --stages measure on its GPU first")
    weights = fit(samples)
    for kind, found in weights.items():
        of_kind = [sample for sample in samples if sample.kind == kind]
        print(f"{kind}: {len(of_kind)} candidates of {len({sample.problem for sample in of_kind})} problems\n  {found}")
    for kind, (ratio, count) in library_ratios(samples, sweep).items():
        print(f"{kind}: {ratio:.3f} of the roofline's time, {count} calls")
    names = list(dict.fromkeys(sample.problem for sample in samples))
    folds = {name: place % _FOLDS for place, name in enumerate(names)}
    kernels = sorted({sample.candidate.kernel for sample in samples})
    seconds = predicted(samples, weights, sweep)
    now = predicted(samples, KINDS, sweep)
    print(summary("weights in the source", regrets(samples, now).values()))
    print(summary("fitted, on the same problems", regrets(samples, seconds).values()))
    by_problem = left_out(samples, sweep, range(_FOLDS), lambda sample: folds[sample.problem])
    print(summary("problems left out", regrets(samples, by_problem).values()))
    by_kernel = left_out(samples, sweep, kernels, lambda sample: sample.candidate.kernel)
    print(summary("kernels left out", regrets(samples, by_kernel).values()))
    alone = regrets(samples, by_kernel)
    inside = regrets(samples, seconds)
    for kernel in kernels:
        ratios = [said / s.seconds for s, said in zip(samples, seconds, strict=True) if s.candidate.kernel == kernel]
        low, middle, high = (percentile(ratios, share) for share in (10, 50, 90))
        mine = [value for name, value in inside.items() if name.startswith(f"{kernel} ")]
        out = [value for name, value in alone.items() if name.startswith(f"{kernel} ")]
        print(
            f"  {kernel}: regret {statistics.median(mine):.3f} ({max(mine):.3f} at worst), left out "
            f"{statistics.median(out):.3f} ({max(out):.3f}); "
            f"predicted over measured {middle:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
