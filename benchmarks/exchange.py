"""Measure what it costs to use another GPU's records: its winners beside this GPU's, timed here.

GPUs of one architecture run each other's code, and a lookup without a record of the GPU takes the most similar one's.
For each problem that both GPUs have a measured record of, both winners are timed on the GPU here, in interleaved rounds
as a tune times its candidates, each with the kernel that its op launches behind it. The loss is the time of the other
GPU's winner over this GPU's, less one; below zero the other GPU's is faster here. Equal winners lose nothing, and are
not timed. The artifacts are those of the records, so that no compiler is needed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import msgspec

from benchmarks.environment import facts, require_gpu
from benchmarks.providers import OURS
from benchmarks.regret import percentile
from benchmarks.results import ALL, Results, Row
from benchmarks.sources import digests
from tilekern.cache import Artifact, Hit, Layer, default_layers
from tilekern.compile.library import libraries_here, library_of
from tilekern.errors import InputError
from tilekern.kernels import all_specs, spec_named
from tilekern.runtime.dispatch import find
from tilekern.runtime.requirements import unmet
from tilekern.spec import ALIGNED, Config, Problem
from tilekern.spec.targets import Target, resolve
from tilekern.tuning.measure.bench import Bench
from tilekern.tuning.measure.followers import problem_behind
from tilekern.tuning.measure.gpu import serve_any_size
from tilekern.tuning.measure.tasks import Entrant, Task, on
from tilekern.tuning.measure.timing import Stopwatch, Timing
from tilekern.tuning.strategies import Lineup
from tilekern.tuning.strategies.race import exhaustive
from tilekern.tuning.strategies.runner import GpuRunner, Several
from tilekern.tuning.sweep.candidates import LIBRARY_LINE, Candidate

BENCHMARK = "exchange"
# A median loss up to this means that the records of the other GPU serve.
SERVES = 0.03
# A problem is not begun with fewer seconds left.
LEAST_S = 5.0
MEASURED = "measured"


@dataclass(frozen=True)
class Pair:
    """The measured records of a problem on two GPUs: ``own`` of the GPU here, ``other`` of the one to compare with."""

    kernel: str
    problem: Problem
    own: Hit
    other: Hit

    @property
    def case(self) -> str:
        """Return the problem's name."""
        return f"{self.kernel} {self.problem.key}"

    @property
    def family(self) -> str:
        """Return the module or package of :mod:`tilekern.kernels` that the kernel is in."""
        return spec_named(self.kernel).module.removeprefix("tilekern.kernels.").partition(".")[0]

    @cached_property
    def is_equal(self) -> bool:
        """Whether both winners are the same config, with the same code."""
        own, other = (artifact_of(self.kernel, self.problem, hit) for hit in (self.own, self.other))
        same_code = own is other or (own is not None and other is not None and own.sha256 == other.sha256)
        return self.own.record.config == self.other.record.config and same_code


@dataclass(frozen=True)
class Effort:
    """Rounds of a problem, the GPU seconds after which there are fewer, and the seconds of the whole run."""

    rounds: int
    problem_s: float
    whole_s: float


def other_gpu(name: str, target: Target) -> Target:
    """Return the GPU whose records are compared.

    Raises:
        InputError: it is unknown, the GPU here, or of another architecture, whose code does not run here.
    """
    other = resolve(name)
    if other.key == target.key:
        raise InputError(f"--from {name}: that is the GPU here; name another one of {target.arch}")
    if other.arch != target.arch:
        raise InputError(
            f"--from {name}: code of {other.arch} does not run on {target.name}, which is of {target.arch}"
        )
    return other


def pairs(target: Target, other: Target, layers: Sequence[Layer]) -> list[Pair]:
    """Return the problems that both GPUs have a fresh, measured record of, one of each family in turn.

    The order spreads what a time limit leaves out. Each record is the one that a job on its GPU would find.
    """
    found: dict[str, list[Pair]] = {}
    for kernel, problem in sorted(_known(other, layers), key=lambda named: (named[0], named[1].key)):
        spec = spec_named(kernel)
        hits = [find(spec, problem, gpu, layers=layers) for gpu in (target, other)]
        if all(hit and hit.exact_target and hit.exact_bucket and hit.record.provenance == MEASURED for hit in hits):
            pair = Pair(kernel, problem, *hits)  # type: ignore[arg-type]
            found.setdefault(pair.family, []).append(pair)
    return [pair for turn in zip_longest(*found.values()) for pair in turn if pair is not None]


def _known(target: Target, layers: Sequence[Layer]) -> set[tuple[str, Problem]]:
    """Return the problems that layers have any record of on a GPU; those of kernels that are gone are left out."""
    places = [(layer, toolkit) for layer in layers for toolkit in layer.toolkits(target.key)]
    return {
        (kernel, problem)
        for kernel, spec in all_specs().items()
        for layer, toolkit in places
        for fields in layer.problems(target.key, toolkit, kernel)
        if (problem := spec.problem_of(fields)) is not None
    }


def measure(
    gpu: str, effort: Effort, kernels: Sequence[str] = (), keep: Callable[[str, Results], None] = lambda *_: None
) -> Results:
    """Time the winners of another GPU beside those of the GPU here.

    Args:
        gpu: the other GPU.
        effort: how long.
        kernels: names of the kernels to compare; all if empty.
        keep: called after each timed problem with its name and the results so far.

    Raises:
        InputError: there is no GPU here or its driver is too old, the other GPU's code does not run here, or no problem
            has records of both.
    """
    until = time.monotonic() + effort.whole_s
    target = require_gpu()
    if wrong := unmet():
        raise InputError(wrong)
    other, layers = other_gpu(gpu, target), default_layers(looking=True)
    found = [pair for pair in pairs(target, other, layers) if not kernels or pair.kernel in kernels]
    if not found:
        raise InputError(f"no problem has a fresh, measured record of {target.name} and of {other.name} in the caches")
    serve_any_size()
    watch = Stopwatch(target.l2_bytes)
    watch.warm_clocks()
    run = facts() | {"records_of": other.name}
    losses: dict[str, float | None] = {pair.case: 0.0 if pair.is_equal else None for pair in found}
    rows: list[Row] = []
    for pair in (pair for pair in found if not pair.is_equal):
        if until - time.monotonic() < LEAST_S:
            run["notes"].append(f"{pair.case}: no time was left")
            continue
        timings = _timed(pair, target, layers, watch, effort)
        if isinstance(timings, str):
            run["notes"].append(f"{pair.case}: {timings}")
            continue
        more = rows_of(pair, timings)
        losses[pair.case] = more[-1].value
        rows += more
        keep(pair.case, Results(run, [*rows, *summary(found, losses)]))
    return Results(run, [*rows, *summary(found, losses)])


def _timed(
    pair: Pair, target: Target, layers: Sequence[Layer], watch: Stopwatch, effort: Effort
) -> tuple[Timing, Timing] | str:
    """Return the timings of this GPU's winner and the other's; or why there are none."""
    import torch

    try:
        return _raced(pair, target, layers, watch, effort)
    except torch.AcceleratorError:
        raise  # the CUDA context is gone
    except torch.OutOfMemoryError:
        return "its inputs do not fit into this GPU's memory"
    except Exception as error:  # noqa: BLE001 (what a launch can raise is open, and the other problems go on)
        return f"{type(error).__name__}: {error}"
    finally:
        # Launches refer to each other, and keep the arrays of a finished problem alive.
        gc.collect()
        torch.cuda.empty_cache()


def _raced(
    pair: Pair, target: Target, layers: Sequence[Layer], watch: Stopwatch, effort: Effort
) -> tuple[Timing, Timing] | str:
    entrants = [entrant_of(pair.kernel, pair.problem, hit) for hit in (pair.own, pair.other)]
    for entrant in entrants:
        library = library_of(entrant.candidate.config)
        if library is not None and library not in libraries_here():
            return f"{library}, which runs a winner, is not here"
    behind = _behind(pair.kernel, pair.problem, entrants, target, layers)
    racing = [*zip(entrants, (pair.own, pair.other), strict=True), *behind.values()]
    cubins = {one.compiled["sha256"]: hit.load(ALIGNED) for one, hit in racing if "sha256" in one.compiled}
    own, other = entrants
    task = Task(
        pair.kernel, pair.problem, target, (own, other), cubins, own.key, timed=spec_named(pair.kernel).timed,
        followers={blocks: entrant for blocks, (entrant, _) in behind.items()},
    )  # fmt: skip
    bench = Bench(task)
    # A composite's parts have records of its own sizes, not of those that a check takes.
    for entrant in (entrant for entrant in entrants if not entrant.candidate.is_library):
        if not (check := bench.check(entrant)).passed:
            return f"{entrant.candidate.config.key} is wrong here: {check.reason}"
    launches = {entrant.key: bench.prepare(entrant) for entrant in entrants}
    launches |= {on(entrant.key, name): bench.prepare(entrant, name) for entrant in entrants for name in task.timed}
    runner = GpuRunner(watch, launches, bench.load_code, bench.refresh(), in_a_row=bench.in_a_row)
    several = Several(runner, (own.key, other.key), task.timed)
    timings = exhaustive(several, Lineup((own.key, other.key), own.key), effort.rounds, 1e6 * effort.problem_s)
    return timings[own.key], timings[other.key]


def artifact_of(kernel: str, problem: Problem, hit: Hit) -> Artifact | None:
    """Return the artifact of a record's winner; None for a library's call, whose record has that of the best kernel."""
    way = spec_named(kernel).implement(problem, Config(hit.record.config))
    return hit.record.artifacts[ALIGNED] if way.makes_artifact else None


def entrant_of(kernel: str, problem: Problem, hit: Hit) -> Entrant:
    """Return a record's winner as a candidate of a race."""
    config, artifact = Config(hit.record.config), artifact_of(kernel, problem, hit)
    if artifact is None:
        return Entrant(Candidate(kernel, problem, config, ALIGNED, ""), LIBRARY_LINE)
    line = {
        "status": "ok",
        "sha256": artifact.sha256,
        "symbol": artifact.symbol,
        "assumptions": artifact.assumptions,
        "launch": None if artifact.launch is None else msgspec.to_builtins(artifact.launch),
    }
    return Entrant(Candidate(kernel, problem, config, ALIGNED, artifact.sha256), line)


def _behind(
    kernel: str, problem: Problem, entrants: Iterable[Entrant], target: Target, layers: Sequence[Layer]
) -> dict[int, tuple[Entrant, Hit]]:
    """Return the kernels launched behind candidates by their number of blocks, as this GPU's records have them.

    None if a record is missing, so that candidates are timed alike.
    """
    follower = spec_named(kernel).follower
    found: dict[int, tuple[Entrant, Hit]] = {}
    for blocks in {entrant.candidate.blocks(target.sm_count) for entrant in entrants} - {0}:
        wanted = None if follower is None else problem_behind(follower, problem, blocks)
        if follower is None or wanted is None:
            continue
        spec = spec_named(follower.kernel)
        hit = find(spec, spec.bucketed(wanted), target, layers=layers)
        if hit is None or artifact_of(spec.name, spec.bucketed(wanted), hit) is None:
            return {}
        found[blocks] = entrant_of(spec.name, spec.bucketed(wanted), hit), hit
    return found


def rows_of(pair: Pair, timings: tuple[Timing, Timing]) -> list[Row]:
    """Return the rows of a problem: both times, and last the loss."""
    own, other = timings
    sources = digests([pair.kernel])
    loss = round(other.median_us / own.median_us - 1, 5)
    return [
        Row(BENCHMARK, pair.case, OURS, "own", round(own.median_us, 3), "us", round(own.spread_us, 3), sources),
        Row(BENCHMARK, pair.case, OURS, "other", round(other.median_us, 3), "us", round(other.spread_us, 3), sources),
        Row(BENCHMARK, pair.case, OURS, "loss", loss, "1", sources=sources),
    ]


def summary(found: Sequence[Pair], losses: Mapping[str, float | None]) -> list[Row]:
    """Return the rows over all problems and over each family, the families with most problems first.

    They have the number of problems whose loss is known, of those with equal winners among them, and the median, 90th
    percentile and worst of the losses. ``losses`` are by case, None for a problem that was not timed.
    """
    families: dict[str, list[Pair]] = {}
    for pair in found:
        families.setdefault(pair.family, []).append(pair)
    in_order = sorted(families.items(), key=lambda item: (-len(item[1]), item[0]))
    return [row for case, some in ((ALL, list(found)), *in_order) for row in _summary(case, some, losses)]


def _summary(case: str, found: Sequence[Pair], losses: Mapping[str, float | None]) -> list[Row]:
    known = [loss for pair in found if (loss := losses[pair.case]) is not None]
    if not known:
        return []
    sources = digests(pair.kernel for pair in found)
    figures = {
        "problems": len(known),
        "equal": sum(pair.is_equal for pair in found),
        "median_loss": round(statistics.median(known), 5),
        "p90_loss": round(percentile(known, 90), 5),
        "worst_loss": round(max(known), 5),
    }
    return [Row(BENCHMARK, case, OURS, name, float(value), "1", sources=sources) for name, value in figures.items()]
