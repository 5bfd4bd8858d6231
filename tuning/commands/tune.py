"""``python -m tilekern.tune MODEL``: plan, compile, measure, and fill the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilekern.cache import Store, user_root
from tilekern.cache.trust.policy import must_be_signed, own_seal
from tilekern.cache.trust.signing import SigningKey
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.targets import Target, here, resolve
from tilekern.tuning.commands import COMMANDS, command_named
from tilekern.tuning.options import (
    LOCAL,
    NAMES,
    PLAN_OPTIONS,
    RAY,
    STAGES,
    Folder,
    GroupedCommand,
    Request,
    Seconds,
    plan_options,
    tuner_command,
)
from tilekern.tuning.packs import pack_paths, write_packs
from tilekern.tuning.publishing import compiled_with, keep_winners, publish, why_not, winners
from tilekern.tuning.strategies import STRATEGIES, strategy_named
from tilekern.tuning.sweep.folder import RESULTS, Sweep, folder_in
from tilekern.tuning.sweep.plan import Named
from tilekern.tuning.terminal.outcome import Outcome
from tilekern.tuning.terminal.progress import progress_bar, progress_bars

if TYPE_CHECKING:
    from tilekern.tuning.compile.stage import Pool
    from tilekern.tuning.executors import Executor
    from tilekern.tuning.executors.cluster import ClusterExecutor
    from tilekern.tuning.measure.stage import MeasureSummary
    from tilekern.tuning.plan.steps import Planned
    from tilekern.tuning.predict.estimating import PlanReport

_GROUPS = {
    "What to tune": ("gpu", *(name for name in PLAN_OPTIONS if name != "models")),
    "How": ("stages", "dry_run", "jobs", "timeout_s", "strategy", "executor", "gpus"),
    "Where, and what is printed": ("sweep", "sign", "packs", "cache_dir", "as_json"),
}
MEASURED = "measured"
# Some problem has no winner.
EXIT_INCOMPLETE = 3
_FOLDER = Folder()


class _Tune(GroupedCommand):
    """The command whose help names the others."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both ways to begin."""
        super().format_usage(ctx, formatter)
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS] ...", prefix=" " * len("Usage: "))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, then the other commands."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Commands, each with a --help of its own"):
            formatter.write_dl([(name, command_named(name).get_short_help_str(limit=120)) for name in COMMANDS])


@tuner_command(cls=_Tune, groups=_GROUPS, epilog=NAMES)
@plan_options
@click.option("--gpu", default="auto", show_default=True, help="Target: auto, B200, an arch, a key or sm_90:78.")
@click.option("--stages", default=",".join(STAGES), show_default=True, help="Which stages to run.")
@click.option("--dry-run", is_flag=True, help="Print the plan, its counts and how long it would take; write nothing.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(least=1), default=60.0, show_default=True,
    help="Seconds that one compile may take.",
)  # fmt: skip
@click.option("--strategy", default="race", show_default=True, help=f"How to measure: {', '.join(STRATEGIES)}.")
@click.option(
    "--executor", default=LOCAL, show_default=True, help="Where to compile and measure: local, ray, ray://HOST:PORT."
)
@click.option("--gpus", type=click.IntRange(min=1), help="How many GPUs to measure on at most.")
@click.option("--sweep", type=_FOLDER, help="The sweep folder; it can travel.")
@click.option(
    "--sign", type=click.Path(path_type=Path), metavar="KEY",
    help="Sign what is handed on with this file of `cache_tools keygen`: artifacts, and results.pack.",
)  # fmt: skip
@click.option("--packs", type=_FOLDER, help="A folder for packs, MODEL-GPU.pack with what each MODEL asks for.")
@click.option("--cache-dir", type=_FOLDER, help="The cache to fill.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of tables.")
def command(*, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Tune the kernels of one MODEL or several for a GPU and fill the cache.

    MODEL is a preset (qwen3-8b), the path of a config.json or of a folder with one, or a hub id. Its training steps are
    run on meta tensors, where nothing is computed, and what they ask for is tuned, once for all models that do. A plan
    that tilekern.trace wrote stands in for a model, as MODEL or by --plan. With --stages measure alone the plan is
    taken from the sweep folder, and the GPU must be here. Else, without a GPU, the measure stage is left out and the
    winners are predicted. Where one run does both, problems are measured while others are compiled. A run that was
    stopped goes on where it was. Lists have commas between. The exit code is 3 where a problem has no winner.
    """
    request = Request.of(given)
    strategy_named(request.strategy)
    done = _dry_run(request) if dry_run else _run(request, quiet=as_json)
    if as_json:
        click.echo(json.dumps(done.as_json(), indent=1))
    else:
        from tilekern.tuning.terminal.printing import print_report

        print_report(done)
    if isinstance(done, Outcome) and not done.is_whole:
        raise SystemExit(EXIT_INCOMPLETE)


def _run(request: Request, *, quiet: bool) -> Outcome:
    from tilekern.tuning.compile.stage import jobs_of, start_server

    if "compile" in request.stages and request.executor == LOCAL:
        jobs_of(request.jobs)  # what is wrong with it is said before anything is written
        start_server()
    key = SigningKey(request.sign) if request.sign else None
    seconds: dict[str, float] = {}
    store = _store(request)
    if "plan" in request.stages:
        with _timed(seconds, "plan"):
            sweep, planned = _planned(request, store)
        notes = list(planned.notes)
    else:
        sweep, planned, notes = _given(request), None, []
    outcome = Outcome(sweep.model, sweep.target, _toolkit(), seconds, notes=notes)
    if "compile" in request.stages:
        outcome.notes += _without_cute(sweep, sweep.problems())
    packs = pack_paths(request.packs, planned.models, sweep.target) if request.packs and planned else {}
    sweep.require_own()
    if "compile" not in request.stages:
        outcome.notes += whose_artifacts(sweep)
    _check_writable(store, sweep)
    with _ready(request, sweep, outcome) as executor:
        _work(request, sweep, executor, store, outcome, quiet=quiet)
        if "compile" in request.stages and key:
            outcome.notes.append(f"signed {sweep.sign(key)} artifacts with key {key.public_key[:16]}")
        outcome.toolkit = compiled_with(sweep) or outcome.toolkit  # which need not be installed where it measures
    if "measure" in request.stages:
        _publish(outcome, sweep, store, packs, key)
    elif "compile" in request.stages:
        outcome.winners = [winner for winner, _ in winners(sweep, outcome.toolkit)]
        outcome.notes.append(f"carry {sweep.folder} to the target and run --stages measure --sweep {sweep.folder}")
    else:
        count = f"{len(sweep.problems())} problems are planned in {sweep.folder}"
        outcome.notes.append(f"{count}; go on with --stages compile,measure --sweep {sweep.folder}")
    if "compile" in request.stages or "measure" in request.stages:
        outcome.notes += _lacking(outcome, sweep)
    return outcome


def _work(
    request: Request, sweep: Sweep, executor: Executor | None, store: Store, outcome: Outcome, *, quiet: bool
) -> None:  # fmt: skip
    """Compile and measure, as far as the run does; both at once where it can."""
    compiles = "compile" in request.stages
    if compiles and executor and _has_room_for_both(request, sweep):
        _compile_and_measure(request, sweep, executor, store, outcome, quiet=quiet)
        return
    if compiles:
        _compile(request, sweep, outcome, quiet=quiet)
    if executor:
        _measure(request, sweep, executor, store, outcome, quiet=quiet)


def _compile(request: Request, sweep: Sweep, outcome: Outcome, *, quiet: bool) -> None:
    from tilekern.tuning.compile.stage import compile_all

    jobs, pool = _compilers(request, sweep)
    with _timed(outcome.seconds, "compile"), progress_bar("compile", quiet=quiet) as progress:
        summary = compile_all(sweep, jobs, request.timeout_s, progress, pool=pool)
    outcome.compile = dataclasses.asdict(summary)


def _measured(sweep: Sweep, done: MeasureSummary) -> dict[str, Any]:
    """What a measure stage did, and why candidates of its sweep are wrong or in quarantine."""
    checks = (line["check"] for line in sweep.measured().values() if not line.get("check", {}).get("passed", True))
    why = Counter(check.get("reason", "") for check in checks) + Counter(sweep.quarantined().values())
    return dataclasses.asdict(done) | {"reasons": dict(why)}


def _measure(
    request: Request, sweep: Sweep, executor: Executor, store: Store, outcome: Outcome, *, quiet: bool
) -> None:  # fmt: skip
    from tilekern.tuning.measure.stage import measure_all
    from tilekern.tuning.sweep.quarantine import shared

    bar = progress_bar("measure", quiet=quiet)
    with _timed(outcome.seconds, "measure"), shared(sweep, store.root), bar as progress:
        done = measure_all(sweep, executor, keep_winners, request.strategy, progress)
    outcome.measure = _measured(sweep, done)


def _compile_and_measure(
    request: Request, sweep: Sweep, executor: Executor, store: Store, outcome: Outcome, *, quiet: bool
) -> None:  # fmt: skip
    """Measure each problem as soon as it is compiled; what measuring takes beyond the last compile is its time."""
    from tilekern.tuning.compile.stage import Beside, CompileSummary, Compiling, compile_all
    from tilekern.tuning.measure.stage import measure_all
    from tilekern.tuning.sweep.quarantine import shared

    jobs, pool = _compilers(request, sweep, beside=True)
    bars = progress_bars(["compile", "measure"], quiet=quiet)
    with shared(sweep, store.root), bars as (tell_compile, tell_measure):

        def compile_beside(beside: Beside) -> CompileSummary:
            return compile_all(sweep, jobs, request.timeout_s, tell_compile, pool=pool, beside=beside)

        started = time.perf_counter()
        with Compiling(compile_beside) as compiling:
            done = measure_all(
                sweep, executor, keep_winners, request.strategy, tell_measure, coming=compiling.problems()
            )
            outcome.compile = dataclasses.asdict(compiling.summary())
    outcome.measure = _measured(sweep, done)
    outcome.seconds["compile"] = compiling.ended - started
    outcome.seconds["measure"] = time.perf_counter() - compiling.ended


def whose_artifacts(sweep: Sweep) -> Iterator[str]:
    """Say what becomes of artifacts that this run has not compiled and others have.

    Raises:
        InputError: none of them may be run, as the policy is ``signed`` or the run signs what comes of it.
    """
    compiled, others = sweep.compiled(), sweep.others
    if not others:
        return
    if not compiled:
        remedy = "sign it where it is compiled (--stages plan,compile --sign KEY), or compile it here"
        if must_be_signed():
            raise InputError(
                f"TILEKERN_TRUST is signed, and neither you compiled what is in {sweep.folder} nor a trust root signed "
                f"it; {remedy}"
            )
        raise InputError(
            f"--sign signs what is your own, and neither you compiled what is in {sweep.folder} nor a trust root "
            f"signed it; {remedy}"
        )
    if others == 1:
        whose = f"1 artifact in {sweep.folder} is by another, and no trust root signed it"
        yield f"{whose}: it is left out" if sweep.is_own else f"{whose}: its records are not signed either"
    else:
        whose = f"{others} artifacts in {sweep.folder} are by others, and no trust root signed them"
        yield f"{whose}: they are left out" if sweep.is_own else f"{whose}: their records are not signed either"


def _lacking(outcome: Outcome, sweep: Sweep) -> Iterator[str]:
    """Each problem that has no winner, or none that was measured where others were, and why."""
    won = {(winner.kernel, winner.problem): winner.record.provenance for winner in outcome.winners}
    outcome.is_whole = won.keys() >= set(sweep.problems())
    for kernel, problem in sweep.problems():
        how = won.get((kernel, problem))
        if how is None or (outcome.measure and how != MEASURED):
            what = "no winner" if how is None else "not measured"
            yield f"{what}: {kernel} {problem.key}: {why_not(sweep, kernel, problem)}"


def _without_cute(sweep: Sweep, problems: Iterable[Named]) -> Iterator[str]:
    """Say that kernels of CuTe DSL are left out, where there are some."""
    names = dict.fromkeys(kernel for kernel, _ in problems)
    able = sum(bool(spec_named(name).space.beside) for name in names)
    if able and not sweep.has_cute:
        yield (
            f"nvidia-cutlass-dsl is not installed: {able} of {len(names)} kernels are swept in cuTile alone "
            "(pip install 'tilekern[cute]')"
        )


def _dry_run(request: Request) -> PlanReport:
    """The plan and what it will cost; nothing is written, compiled or measured."""
    from tilekern.tuning.compile.stage import default_jobs, jobs_of, settled
    from tilekern.tuning.predict.estimating import report_on

    store = _store(request)
    if "plan" in request.stages:
        target, planned = _problems(request, store)
        sweep = _sweep(request, store, target)
        if sweep.folder.joinpath("sweep.json").exists() and sweep.target.key != target.key:
            raise InputError(f"{sweep.folder} holds a sweep for {sweep.target.name}, not {target.name}; give another")
        name, problems, notes, limits = planned.name, list(planned.problems), list(planned.notes), None
    else:
        sweep, notes = _given(request), []
        name, target, problems, limits = sweep.model, sweep.target, sweep.problems(), sweep.limits
    if "compile" in request.stages:
        notes = [*notes, *_without_cute(sweep, problems)]
    is_here = request.executor == LOCAL
    jobs = jobs_of(request.jobs) if is_here else request.jobs or default_jobs()
    absent = _absent(target, request.stages) if is_here else None
    if not is_here:
        notes = [*notes, "the cluster was not asked what it has: --jobs and --gpus say what to count on"]
    return report_on(
        name, target, problems, sweep, jobs=jobs, gpus=_gpus(request, absent is None),
        strategy=request.strategy, root=Path(store.root), notes=[*notes, *([absent] if absent else [])], here=is_here,
        done=settled(sweep, request.timeout_s) if "compile" in request.stages else None, limits=limits,
        overlapped=absent is None and {"compile", "measure"} <= set(request.stages),
    )  # fmt: skip


def _gpus(request: Request, at_hand: bool) -> int:
    """How many GPUs a dry run counts on: those of this host that the run would use, else the number that was given."""
    if request.executor != LOCAL or not at_hand:
        return request.gpus or 1
    from tilekern.tuning.measure.gpu import devices

    return len(devices()[: request.gpus])


def _absent(target: Target, stages: Sequence[str]) -> str | None:
    """Why a run cannot measure here, and what comes of it; None where the GPU here is the target."""
    at_hand = here()
    if at_hand is not None and at_hand.key == target.key:
        return None
    found = "no GPU here" if at_hand is None else f"the GPU here is a {at_hand.name}, not a {target.name}"
    if "measure" in stages and "compile" not in stages:
        return f"{found}: the measure stage runs on the target alone"
    return f"{found}: the measure stage is left out and the winners are predicted"


@contextlib.contextmanager
def _ready(request: Request, sweep: Sweep, outcome: Outcome) -> Iterator[Executor | None]:
    """The executor that measures, or None; on this host its processes load their modules while others compile."""
    if "measure" not in request.stages:
        yield None
    elif request.executor != LOCAL:
        cluster = _cluster(request, sweep)
        if "compile" in request.stages:
            _check_gpus(cluster, sweep.target)
        yield cluster
    elif "compile" in request.stages and (absent := _absent(sweep.target, request.stages)):
        outcome.notes.append(absent)
        yield None
    else:
        from tilekern.tuning.executors.local import LocalExecutor

        with LocalExecutor(sweep.cache, request.gpus) as executor:
            yield executor


def _check_gpus(cluster: ClusterExecutor, target: Target) -> None:
    """Raise at once what the measure stage would find out when all is compiled."""
    try:
        cluster.require_gpu(target)
    except InputError as error:
        raise InputError(f"{error}; to compile alone give --stages plan,compile") from None


def _has_room_for_both(request: Request, sweep: Sweep) -> bool:
    """Whether compilers have a CPU while all GPUs measure: on a cluster each GPU holds one, and would wait for them."""
    return request.executor == LOCAL or _cluster(request, sweep).spare_cores(sweep.target) > 0


def _compilers(request: Request, sweep: Sweep, *, beside: bool = False) -> tuple[int, Pool]:
    """How many candidates to compile at once, and where: on the CPUs of the cluster that measures, or else here.

    Args:
        request: the run.
        sweep: its sweep.
        beside: whether the cluster measures at the same time.
    """
    from tilekern.tuning.compile.stage import compile_in_order, jobs_of

    if request.executor == LOCAL:
        return jobs_of(request.jobs), compile_in_order
    cluster = _cluster(request, sweep)
    cores = cluster.spare_cores(sweep.target) if beside else cluster.cores
    return jobs_of(request.jobs, cores), cluster.compile_in_order


def _cluster(request: Request, sweep: Sweep) -> ClusterExecutor:
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--executor {request.executor} needs Ray: pip install 'tilekern[cluster]'")
    from tilekern.tuning.executors.cluster import ClusterExecutor

    return ClusterExecutor(None if request.executor == RAY else request.executor, sweep.cache, request.gpus)


def _publish(
    outcome: Outcome, sweep: Sweep, store: Store, packs: Mapping[Path, Planned], key: SigningKey | None
) -> None:  # fmt: skip
    found = list(winners(sweep, outcome.toolkit))
    if not found:
        if not (problems := sweep.problems()):
            raise InputError(f"{sweep.folder} plans no problem; run --stages plan for a model that has some")
        kernel, problem = problems[0]
        raise InputError(
            f"no candidate compiled and passed its check; of {kernel} {problem.key}: "
            f"{why_not(sweep, kernel, problem)}; python -m tilekern.tune status {sweep.folder} has the others"
        )
    outcome.winners = [winner for winner, _ in found]
    pack = sweep.folder / RESULTS
    publish(found, pack, store, own=sweep.is_own, key=key)
    outcome.results, outcome.cache = str(pack), str(store.root)
    outcome.packs = write_packs(packs, found, key)


def _store(request: Request) -> Store:
    return Store(request.cache_dir or user_root())


def _given(request: Request) -> Sweep:
    """The sweep that an earlier run planned."""
    if request.sweep is None:
        raise InputError("stages after plan need the folder of a planned sweep: give --sweep DIR")
    # What the compile stage makes anew here it need not take from others.
    if "compile" in request.stages:
        return Sweep(request.sweep)
    return Sweep.carried(request.sweep, signs=request.sign is not None)


def _sweep(request: Request, store: Store, target: Target) -> Sweep:
    """The run's sweep: in the cache's root a folder for each target, so that a run that was stopped is found again."""
    return Sweep(request.sweep or folder_in(store.root, target.key))


def _planned(request: Request, store: Store) -> tuple[Sweep, Planned]:
    target, planned = _problems(request, store)
    sweep = _sweep(request, store, target)
    sweep.begin(target, planned.name, planned.problems)
    return sweep, planned


def _problems(request: Request, store: Store) -> tuple[Target, Planned]:
    """The target, and what is planned for it."""
    target = resolve(request.gpu)
    from tilekern.tuning.plan.choosing import plan_of

    return target, plan_of(request.plan, target, store.root)


def _toolkit() -> dict[str, str]:
    from tilekern.compile.toolchain import toolkit

    found = toolkit()
    return found.describe() if found else {"key": "none", "tileiras": "none", "cuda_tile": "none"}


def _check_writable(store: Store, sweep: Sweep) -> None:
    for folder in (Path(store.root), sweep.folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror}; give another --cache-dir or --sweep") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"cannot write {folder}; give another --cache-dir or --sweep")
    own_seal(b"")  # so that what cannot be sealed is said before hours are spent on it


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - started
