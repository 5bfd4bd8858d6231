"""Compare the tuner's race with an exhaustive sweep and cuda.tile's own search, on candidates that passed their checks.

Each problem is raced twice, and cuda.tile's search runs once. Then an exhaustive sweep judges the choices. All
candidates, except those that are soon far behind, run in five times as many rounds as the search takes. Candidates
close to the best run in many more rounds, so that chance does not choose the best of them; their times there are
corrected for clock drift. The search and a race of the same candidates also run alone, to measure the GPU time of each:
launches and flushes of the L2 cache. The search's warm-up runs count, its flushes count with our measured time, and its
gaps between launches do not count. The wall clock's time, with gaps and the host's work, is reported too.
"""

from __future__ import annotations

import gc
import math
import os
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import facts, require_gpu, version_of
from benchmarks.providers import OURS
from benchmarks.results import ALL, Results, Row
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec import Problem
from tilekern.tuning.measure.bench import Bench
from tilekern.tuning.measure.followers import followers
from tilekern.tuning.measure.gpu import check_gpu, serve_any_size
from tilekern.tuning.measure.stage import Settled, entrants
from tilekern.tuning.measure.tasks import Entrant, Task
from tilekern.tuning.measure.timing import Stopwatch, Timing
from tilekern.tuning.predict.ranking import ranking
from tilekern.tuning.strategies import WON, Lineup, Runner, race
from tilekern.tuning.strategies.runner import GpuRunner
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import COPY

BENCHMARK = "races"
SEARCH = f"cuda.tile {version_of('cuda-tile')}"
NEAR = 1.01
# A candidate slower than the best by more than this factor after this many rounds leaves the sweep: it cannot win.
FAR, GLANCE_ROUNDS = 1.3, 5
# Candidates within this factor of the best after the sweep, and the chosen ones, run in the deciding rounds.
CLOSE = 1.05
# Warm-up runs of each candidate in cuda.tile's search.
WARM_UP_RUNS = 3


@dataclass(frozen=True)
class Effort:
    """The runs of candidates close to the best: rounds, and the GPU seconds after which there are fewer."""

    rounds: int
    seconds: float


def measure(
    folder: Path, kernels: Collection[str], effort: Effort, keep: Callable[[str, Results], None] = lambda *_: None
) -> Results:
    """Race the problems of a measured sweep.

    Args:
        folder: the sweep folder, measured on the GPU at hand.
        kernels: names of the kernels whose problems are raced; all if empty.
        effort: the effort of the judging sweep.
        keep: called after each problem with its name and the results so far.

    Raises:
        InputError: there is no GPU, it is another model, or the folder has no measurements.
    """
    require_gpu()
    sweep = Sweep.carried(folder)
    check_gpu(sweep.target)
    os.environ["TILEKERN_CACHE_DIR"] = str(sweep.cache)  # where composites find their parts
    serve_any_size()
    watch = Stopwatch(sweep.target.l2_bytes)
    watch.warm_clocks()
    results, rows, settled = Results(facts()), list[Row](), Settled(sweep, "race")
    for kernel, problem in sweep.problems():
        found = right(sweep, kernel, problem) if not kernels or kernel in kernels else []
        if found:
            rows += Field(sweep, watch, kernel, problem, found, followers(settled, found)).rows(effort)
            gc.collect()  # launches in reference cycles keep a problem's arrays alive
            results = Results(results.run, [*rows, *summary(rows)])
            keep(f"{kernel} {problem.key}", results)
    if not rows:
        sweep_option = f"--sweep {shlex.quote(str(folder))}"
        raise InputError(f"{folder} holds nothing that was measured and right; run --stages measure {sweep_option}")
    return results


def right(sweep: Sweep, kernel: str, problem: Problem, *, unchecked: bool = False) -> list[Entrant]:
    """Return the candidates that passed their checks, the best predicted first; ``unchecked`` adds unchecked ones."""
    measured = sweep.measured()
    order = {item.key: place for place, (item, _) in enumerate(ranking(sweep, kernel, problem, sweep.target))}
    running = entrants(kernel, problem, sweep.target, sweep.compiled(), sweep.quarantined())
    checks = {key: line.get("check", {}) for key, line in measured.items()}
    passed = [e for e in running if e.is_aligned and checks.get(e.key, {}).get("passed", unchecked)]
    return sorted(passed, key=lambda entrant: order.get(entrant.key, len(order)))


class Field:
    """The candidates of one problem, ready to run."""

    def __init__(
        self, sweep: Sweep, watch: Stopwatch, kernel: str, problem: Problem, found: list[Entrant],
        behind: dict[int, Entrant],
    ) -> None:  # fmt: skip
        hashes = {one.compiled["sha256"] for one in (*found, *behind.values()) if "sha256" in one.compiled}
        cubins = {name: sweep.cubin(name) for name in hashes}
        self._task = Task(kernel, problem, sweep.target, tuple(found), cubins, stay=found[0].key, followers=behind)
        self._bench, self._watch, self._case = Bench(self._task), watch, f"{kernel} {problem.key}"
        self._launches = {entrant.key: self._bench.prepare(entrant) for entrant in found} | {COPY: self._bench.copy()}
        spec = spec_named(kernel)
        default = next((e.key for e in found if e.candidate.config == spec.default(problem, sweep.target)), None)
        self._predicted = {item.key: said.seconds for item, said in ranking(sweep, kernel, problem, sweep.target)}
        keys = tuple(entrant.key for entrant in found)
        self.lineup = Lineup(keys, default, (COPY,), predicted=self._predicted)

    def runner(self) -> GpuRunner:
        """Return a runner that has not run yet."""
        bench = self._bench
        return GpuRunner(self._watch, self._launches, bench.load_code, bench.refresh(), in_a_row=bench.in_a_row)

    def rows(self, effort: Effort) -> list[Row]:
        """Return the results of the races and the search."""
        with_code = [entrant for entrant in self._task.entrants if not entrant.candidate.is_library]
        searched, rows = self._beside_search(with_code) if with_code else (None, [])
        fields = [self.lineup.keys, [entrant.key for entrant in with_code]]
        times, figures = judged(self._case, self.runner, self.lineup, effort, fields, [searched] if searched else [])
        if searched is None:
            return figures
        best = min(times[key] for key in fields[1] if key in times)
        return [*figures, *rows, Row(BENCHMARK, self._case, SEARCH, "quality", round(times[searched] / best, 5), "1")]

    def _beside_search(self, found: list[Entrant]) -> tuple[str, list[Row]]:
        """Return the choice of cuda.tile's search, and the GPU times of it and of a race over the same candidates."""
        runner, started = self.runner(), time.perf_counter()
        race.run(runner, Lineup(tuple(entrant.key for entrant in found), predicted=self._predicted))
        ours_s = time.perf_counter() - started
        flush_us = self._flush_us()
        started = time.perf_counter()
        search = self._search(found)
        theirs_s = time.perf_counter() - started
        busy_us = sum((one.num_samples + WARM_UP_RUNS) * (one.mean_us + flush_us) for one in search.successes)
        return str(search.best.config), [
            Row(BENCHMARK, self._case, OURS, "gpu", round(runner.spent_us / 1000, 4), "ms"),
            Row(BENCHMARK, self._case, OURS, "wall", round(1000 * ours_s, 4), "ms"),
            Row(BENCHMARK, self._case, SEARCH, "gpu", round(busy_us / 1000, 4), "ms"),
            Row(BENCHMARK, self._case, SEARCH, "wall", round(1000 * theirs_s, 4), "ms"),
        ]

    def _flush_us(self) -> float:
        queued = self._watch.queue([lambda: None] * 20).events
        queued[-1].end.synchronize()
        return statistics.median(events.spent_us - events.time_us for events in queued)

    def _search(self, found: list[Entrant]) -> Any:
        import torch
        from cuda.tile.tune import exhaustive_search

        spec, problem, sms = spec_named(self._task.kernel), self._task.problem, self._task.target.sm_count
        devices = {entrant.key: spec.device(problem, entrant.candidate.config) for entrant in found}
        grids = {key: (device.grid(problem, sms),) for key, device in devices.items()}
        arguments = {entrant.key: self._bench.arguments(entrant) for entrant in found}
        launched = {entrant.key: _Kept(self._bench.kernel(entrant)) for entrant in found}
        stream = torch.cuda.current_stream()
        return exhaustive_search(list(devices), stream, grids.get, launched.get, arguments.get, quiet=True)


class _Kept:
    """A prebuilt kernel that cuda.tile's search takes unchanged: other hints would make another kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def replace_hints(self) -> Any:
        """Return the kernel itself."""
        return self._kernel


def judged(
    case: str, fresh: Callable[[], Runner], lineup: Lineup, effort: Effort,
    fields: Sequence[Sequence[str]] = (), others: Collection[str] = (),
) -> tuple[dict[str, float], list[Row]]:  # fmt: skip
    """Judge two races by an exhaustive sweep; return close candidates' times over the winner's, by key, and the rows.

    Args:
        case: the problem's name.
        fresh: makes a runner that knows nothing yet.
        lineup: the candidates.
        effort: the runs of candidates close to the best.
        fields: sets of keys that each have a best one; by default one of all keys. An empty set has no best.
        others: keys that something else chose, to be judged too.
    """
    outcomes = [race.run(fresh(), lineup) for _ in range(2)]
    chosen = [_winner(timings) for timings in outcomes]
    close = _close(fresh, lineup.keys, [field for field in fields if field] or [lineup.keys], {*chosen, *others})
    decided = race.exhaustive(fresh(), Lineup(close), effort.rounds, 1e6 * effort.seconds)
    times = {key: 1 + (timing.behind or 0.0) for key, timing in decided.items()}
    best = min(times.values())
    first, second = (times[key] for key in chosen)
    figures = {
        "quality": first / best,
        "quality_again": second / best,
        "repeated": max(first, second) / min(first, second),
        "rounds": float(decided[close[0]].samples),
    }
    return times, [Row(BENCHMARK, case, OURS, name, round(value, 5), "1") for name, value in figures.items()]


def _close(
    fresh: Callable[[], Runner], keys: Sequence[str], fields: Sequence[Sequence[str]], chosen: Collection[str]
) -> tuple[str, ...]:
    """Return the chosen keys and those that may be the best of a field; the second sweep omits far slower ones."""
    for rounds, most in ((GLANCE_ROUNDS, FAR), (race.LEAST_ROUNDS, CLOSE)):
        swept = race.exhaustive(fresh(), Lineup(tuple(keys)), rounds)
        times = {key: 1 + (timing.behind or 0.0) for key, timing in swept.items()}
        bests = [(min(times[key] for key in field if key in times), field) for field in fields]
        near = {key for best, field in bests for key in field if times.get(key, math.inf) <= most * best}
        keys = [key for key in keys if key in near or key in chosen]
    return tuple(keys)


def _winner(timings: Mapping[str, Timing]) -> str:
    return next(key for key, timing in timings.items() if timing.left == WON)


def summary(rows: list[Row]) -> list[Row]:
    """Return the rows over all problems: shares near the best, repeated shares, and shares of the search's time."""
    found: dict[tuple[bool, str], list[float]] = {}
    for row in rows:
        found.setdefault((row.provider == OURS, row.metric), []).append(row.value)
    ours = found[True, "quality"] + found[True, "quality_again"]
    shares = {"share_near_best": _share_near(ours), "share_repeated": _share_near(found[True, "repeated"])}
    total = [Row(BENCHMARK, ALL, OURS, name, round(value, 4), "1") for name, value in shares.items()]
    for name in ("gpu", "wall"):
        if theirs := found.get((False, name)):
            value = sum(found[True, name]) / sum(theirs)
            total.append(Row(BENCHMARK, ALL, OURS, f"{name}_share_of_search", round(value, 4), "1"))
    if theirs := found.get((False, "quality")):
        peer = next(row.provider for row in rows if row.provider != OURS)
        total.append(Row(BENCHMARK, ALL, peer, "share_near_best", round(_share_near(theirs), 4), "1"))
    return total


def _share_near(ratios: list[float]) -> float:
    return sum(ratio <= NEAR for ratio in ratios) / len(ratios)
