"""Compare the tuner's strategies on the same candidates: the time that each takes, and the quality of its choices.

Each strategy times the candidates of a problem several times, in turn with the others, on a GPU that rested before and
on a GPU that matrix products keep at its power limit. Then the chosen candidates and those close to the best run in
many interleaved rounds, independent of the strategies, each round in another order. A candidate's true time is the
median over these rounds of its share of the round; the regret is its excess over the best.
"""

from __future__ import annotations

import gc
import os
import random
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import facts, require_gpu
from benchmarks.power import PowerMeter
from benchmarks.races import NEAR, Field, right
from benchmarks.results import ALL, Results, Row
from tilekern.errors import InputError
from tilekern.tuning.measure.followers import followers
from tilekern.tuning.measure.gpu import check_gpu, serve_any_size
from tilekern.tuning.measure.stage import Settled, is_composite
from tilekern.tuning.measure.timing import Stopwatch
from tilekern.tuning.strategies import WON, Lineup, Runner, strategy_named
from tilekern.tuning.sweep.folder import Sweep

BENCHMARK = "strategies"
RESTED, HOT = "rested", "at the power limit"
# Seconds that the GPU rests or is heated before a strategy begins; while a strategy runs, the GPU is heated again after
# this many seconds, for the same time.
BEFORE_S, AGAIN_S = 0.4, 0.05
# Candidates further from the best than this after a few rounds are judged only if they were chosen.
GLANCE_ROUNDS, CLOSE = 7, 1.06


@dataclass(frozen=True)
class Effort:
    """The runs of each strategy, and the judging rounds, with the GPU seconds after which there are fewer."""

    repeats: int = 3
    rounds: int = 200
    seconds: float = 2.0


@dataclass(frozen=True)
class Choice:
    """A strategy's choice, with the GPU time and the wall time that it took."""

    key: str
    gpu_us: float
    wall_us: float


class Heated:
    """A runner on a GPU that is heated before it begins and repeatedly between rounds."""

    def __init__(self, runner: Runner, heat: Callable[[float], None]) -> None:
        self._runner, self._heat = runner, heat
        heat(BEFORE_S)
        self.heated_s, self._at = 0.0, time.perf_counter()

    @property
    def spent_us(self) -> float:
        """Return the GPU time so far, without the heating."""
        return self._runner.spent_us

    def round(self, keys: Sequence[str]) -> list[float]:
        """Take a sample of each key in microseconds."""
        if (began := time.perf_counter()) - self._at > AGAIN_S:
            self._heat(AGAIN_S)
            self._at = time.perf_counter()
            self.heated_s += self._at - began
        return self._runner.round(keys)


def measure(
    folder: Path, kernels: Collection[str], names: Sequence[str], effort: Effort, limit_s: float,
    keep: Callable[[str, Results], None] = lambda *_: None,
) -> Results:  # fmt: skip
    """Compare strategies on the problems of a compiled sweep.

    Composites are left out, and so are candidates that were measured and found wrong.

    Args:
        folder: the sweep folder, compiled for the GPU at hand.
        kernels: names of the kernels to time; all if empty.
        names: the strategies.
        effort: how thorough the comparison is.
        limit_s: skip problems that are expected to end later than this many seconds from now.
        keep: called after each problem with its name and the results so far.

    Raises:
        InputError: there is no GPU, it is another model, or the folder has no compiled problem.
    """
    require_gpu()
    started = time.perf_counter()
    sweep = Sweep.carried(folder)
    check_gpu(sweep.target)
    os.environ["TILEKERN_CACHE_DIR"] = str(sweep.cache)
    serve_any_size()
    watch = Stopwatch(sweep.target.l2_bytes)
    watch.warm_clocks()
    heat, settled = _heater(), Settled(sweep, names[0])
    results, choices = Results(facts()), list[Row]()
    wanted = [(kernel, problem) for kernel, problem in sweep.problems() if not kernels or kernel in kernels]
    longest_s = 0.0
    for kernel, problem in wanted:
        case, began = f"{kernel} {problem.key}", time.perf_counter()
        if began - started + longest_s > limit_s:
            results.run["notes"].append(f"{case} and what comes after it: no time was left")
            break
        candidates = right(sweep, kernel, problem, unchecked=True)
        if len(candidates) < 2 or is_composite(kernel, problem, (entrant.candidate.config for entrant in candidates)):
            continue
        try:
            behind = followers(settled, candidates)
            rows, notes = _in_both_states(
                case, Field(sweep, watch, kernel, problem, candidates, behind), heat, names, effort
            )
        except RuntimeError as error:
            rows, notes = [], [f"{case}: {type(error).__name__}: {str(error).splitlines()[0]}"]
        choices += rows
        results.run["notes"] += notes
        gc.collect()  # launches in reference cycles keep a problem's arrays alive
        results = Results(results.run, [*choices, *summary(choices)])
        keep(case, results)
        longest_s = max(longest_s, time.perf_counter() - began)
    if not choices:
        sweep_option = f"--sweep {shlex.quote(str(folder))}"
        raise InputError(f"{folder} holds no compiled candidates; run --stages plan,compile {sweep_option}")
    return results


def _heater() -> Callable[[float], None]:
    """Return a function that runs matrix products of random numbers back to back for some seconds."""
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)

    def heat(seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(8):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize()

    return heat


def _in_both_states(
    case: str, field: Field, heat: Callable[[float], None], names: Sequence[str], effort: Effort
) -> tuple[list[Row], list[str]]:
    rows, notes = [], []

    def rested() -> Runner:
        time.sleep(BEFORE_S)
        return field.runner()

    for state, fresh in ((RESTED, rested), (HOT, lambda: Heated(field.runner(), heat))):
        began = time.perf_counter()
        with PowerMeter() as meter:
            state_rows, state_notes = compared(f"{case}, {state}", fresh, field.lineup, names, effort)
            if draw := meter.between(began, time.perf_counter()):
                notes.append(f"{case}, {state}: {draw.watts:.0f} W, {draw.sm_mhz:.0f} MHz")
        rows += state_rows
        notes += state_notes
    return rows, notes


def compared(
    case: str, fresh: Callable[[], Runner], lineup: Lineup, names: Sequence[str], effort: Effort
) -> tuple[list[Row], list[str]]:
    """Return the rows of one problem in one state of the GPU, and a text on each strategy's choice.

    Args:
        case: the problem and the state.
        fresh: makes a runner that has not run yet.
        lineup: the candidates.
        names: the strategies.
        effort: how thorough the comparison is.
    """
    choices: dict[str, list[Choice]] = {name: [] for name in names}
    for repeat in range(effort.repeats):
        for name in random.Random(repeat).sample(names, len(names)):
            runner, began = fresh(), time.perf_counter()
            timings = strategy_named(name)(runner, lineup)
            wall_s = time.perf_counter() - began - getattr(runner, "heated_s", 0.0)
            [winner] = [key for key, timing in timings.items() if timing.left == WON]
            choices[name].append(Choice(winner, runner.spent_us, 1e6 * wall_s))
    times_us = judged(fresh(), lineup, {choice.key for chosen in choices.values() for choice in chosen}, effort)
    best = min(times_us, key=times_us.__getitem__)
    rows, notes = [], [f"{case}: best {best} {times_us[best]:.2f} us of {len(times_us)} judged"]
    for name, chosen in choices.items():
        regrets = [100 * (times_us[choice.key] / times_us[best] - 1) for choice in chosen]
        figures = {
            "gpu": ([choice.gpu_us / 1000 for choice in chosen], "ms"),
            "wall": ([choice.wall_us / 1000 for choice in chosen], "ms"),
            "regret": (regrets, "%"),
            "time": ([times_us[choice.key] for choice in chosen], "us"),
        }
        for metric, (values, unit) in figures.items():
            half_range = (max(values) - min(values)) / 2
            rows.append(
                Row(BENCHMARK, case, name, metric, round(statistics.fmean(values), 4), unit, round(half_range, 4))
            )
        rows.append(Row(BENCHMARK, case, name, "worst_regret", round(max(regrets), 4), "%"))
        near = sum(regret <= 100 * (NEAR - 1) for regret in regrets) / len(regrets)
        rows.append(Row(BENCHMARK, case, name, "share_near_best", round(near, 4), "1"))
        counts = Counter(choice.key for choice in chosen)
        notes.append(f"{case}: {name} chose " + ", ".join(f"{key} ({count})" for key, count in counts.items()))
    return rows, notes


def judged(runner: Runner, lineup: Lineup, chosen: Collection[str], effort: Effort) -> dict[str, float]:
    """Return the true times in microseconds of the chosen candidates and of those close to the best, by key."""
    glance = _interleaved(runner, lineup.keys, GLANCE_ROUNDS)
    best = min(glance.values())
    keys = [key for key in lineup.keys if key in chosen or glance[key] <= CLOSE * best]
    return _interleaved(runner, keys, effort.rounds, 1e6 * effort.seconds)


def _interleaved(runner: Runner, keys: Sequence[str], rounds: int, most_us: float = float("inf")) -> dict[str, float]:
    """Return the times by key: medians of a sample over the mean of its round, times the median of these means."""
    shares: dict[str, list[float]] = {key: [] for key in keys}
    means: list[float] = []
    runner.round(keys)  # loads their code
    started_us, shuffle = runner.spent_us, random.Random(0)
    while len(means) < rounds and (runner.spent_us - started_us < most_us or len(means) < rounds // 8):
        order = shuffle.sample(keys, len(keys))
        samples = runner.round(order)
        means.append(statistics.fmean(samples))
        for key, sample in zip(order, samples, strict=True):
            shares[key].append(sample / means[-1])
    mean = statistics.median(means)
    return {key: mean * statistics.median(values) for key, values in shares.items()}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the rows over all problems in each state of the GPU: sums of times, mean and worst regret."""
    total = []
    for state in (RESTED, HOT):
        for name in dict.fromkeys(row.provider for row in rows):
            mine = [row for row in rows if row.provider == name and row.case.endswith(state)]
            by_metric = {metric: [row.value for row in mine if row.metric == metric] for metric in _TOTALS}
            for metric, combine in _TOTALS.items():
                if values := by_metric[metric]:
                    unit = next(row.unit for row in mine if row.metric == metric)
                    value = round(combine(values), 4)
                    total.append(Row(BENCHMARK, f"{ALL}, {state}", name, metric, value, unit))
    return total


_TOTALS: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu": sum,
    "wall": sum,
    "regret": statistics.fmean,
    "worst_regret": max,
    "share_near_best": statistics.fmean,
}
