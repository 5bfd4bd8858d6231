"""``python -m tilekern.tune MODEL``: plans, compiles, measures, and fills the cache."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilekern.cache import Store, user_root
from tilekern.cache.trust.signing import SigningKey
from tilekern.errors import InputError
from tilekern.spec.targets import Target, resolve
from tilekern.tuning.commands import COMMANDS, command_named
from tilekern.tuning.compile.pool import start_server
from tilekern.tuning.compile.stage import default_jobs, jobs_of, settled
from tilekern.tuning.options import (
    FOLDER,
    NAMES,
    PLAN_OPTIONS,
    File,
    GroupedCommand,
    PlanRequest,
    Seconds,
    plan_options,
    tuner_command,
    words,
)
from tilekern.tuning.pipeline import (
    COMPILE,
    LOCAL,
    MEASURE,
    PLAN,
    STAGES,
    Options,
    Pipeline,
    Result,
    absence,
    described_toolkit,
    without_backends,
)
from tilekern.tuning.preflight import without_served
from tilekern.tuning.publishing import pack_paths
from tilekern.tuning.stopping import stopped_by
from tilekern.tuning.strategies import STRATEGIES
from tilekern.tuning.sweep.folder import Sweep, folder_in
from tilekern.tuning.terminal import progress_bars

if TYPE_CHECKING:
    from tilekern.tuning.plan.steps import Planned
    from tilekern.tuning.predict.estimating import PlanReport

_GROUPS = {
    "What to tune": ("gpu", "specs", *(name for name in PLAN_OPTIONS if name != "models"), "missing"),
    "How": ("stages", "dry_run", "jobs", "timeout_s", "budget_s", "strategy", "executor", "gpus"),
    "Where, and what is printed": ("sweep", "sign", "packs", "cache_dir", "as_json"),
}
# Some problem has no winner.
EXIT_INCOMPLETE = 3


class _Tune(GroupedCommand):
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
@click.option(
    "--missing", is_flag=True,
    help="Leave out what caches and packs have: measured records if the GPU is here, any of it otherwise.",
)  # fmt: skip
@click.option("--stages", default=",".join(STAGES), show_default=True, help="Which stages to run.")
@click.option("--dry-run", is_flag=True, help="Print the plan and its estimated time; write nothing.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(least=1), default=60.0, show_default=True,
    help="Seconds that one compile may take.",
)  # fmt: skip
@click.option(
    "--budget", "budget_s", type=Seconds(least=1), metavar="TIME",
    help="Wall time of the run, as 90s, 10m or 1.5h: the most gain per second first, no new work when it is over.",
)  # fmt: skip
@click.option("--strategy", default="race", show_default=True, help=f"How to measure: {', '.join(STRATEGIES)}.")
@click.option(
    "--executor", default=LOCAL, show_default=True, help="Where to compile and measure: local, ray, ray://HOST:PORT."
)
@click.option("--gpus", type=click.IntRange(min=1), help="How many GPUs to measure on at most.")
@click.option("--sweep", type=FOLDER, help="The sweep folder; it can be copied to another machine.")
@click.option(
    "--sign", type=File(), metavar="KEY",
    help="Sign what is handed on with this file of `cache_tools keygen`: artifacts, and results.pack.",
)  # fmt: skip
@click.option("--packs", type=FOLDER, help="A folder for packs, MODEL-GPU.pack with what each MODEL asks for.")
@click.option("--cache-dir", type=FOLDER, help="The cache to fill.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of tables.")
def command(*, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Tune the kernels of one MODEL or several for a GPU, and fill the cache.

    MODEL is a preset (qwen3-8b), base (the presets, and sizes that are frequent in public configs), the path of a
    config.json or of a folder with one, a hub id, or a plan of tilekern.trace. A model's training steps run on meta
    tensors, which compute nothing; the problems that they ask for are tuned, each once; with --engine, those that the
    engine without torch asks for, and the kernels of a token are chosen in its step on the GPU. Problems are measured
    while others are compiled. Without the GPU, winners are predicted. --stages measure takes the plan from the sweep
    folder, and needs the GPU. A run that was stopped, or whose --budget was spent, goes on where it was; SIGTERM, as of
    `timeout`, has it publish what is measured first. Lists have commas between. Exit codes: 2 bad input; 3 a problem
    has no winner, unless the budget left it out; 4 no compiler; 130 stopped by Ctrl-C; 143 by SIGTERM.
    """
    from tilekern.tuning.terminal import print_plan, print_result

    request = Request.of(given)
    with stopped_by(signal.SIGTERM):
        done = _dry_run(request) if dry_run else _run(request, quiet=as_json)
    if as_json:
        click.echo(json.dumps(done.as_json(), indent=1))
    elif isinstance(done, Result):
        print_result(done)
    else:
        print_plan(done)
    if isinstance(done, Result) and done.stop:
        raise SystemExit(done.stop.exit_code)
    if isinstance(done, Result) and not done.is_whole:
        raise SystemExit(EXIT_INCOMPLETE)


@dataclass(frozen=True)
class Request:
    """A run as requested: what to plan, how to work, and where."""

    plan: PlanRequest
    options: Options
    gpu: str
    sweep: Path | None
    packs: Path | None
    store: Store
    missing: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Request:
        """Read the options as click gives them.

        Raises:
            InputError: a list is empty or holds what its option does not know, or options do not go together.
        """
        stages = words(given["stages"], "--stages")
        how = ("jobs", "timeout_s", "budget_s", "strategy", "executor", "gpus")
        key = SigningKey(given["sign"]) if given["sign"] else None
        options = Options(stages, key=key, **{name: given[name] for name in how})
        plan = PlanRequest.of(given)
        if given["invariant"] and PLAN not in stages:
            raise InputError(
                "--invariant is an option of the stage plan, and the sweep folder keeps it; leave it out, and plan "
                "again if the folder was planned without it"
            )
        if given["packs"] and not {PLAN, MEASURE} <= set(stages):
            raise InputError("--packs needs a run that plans and measures; of another one take its results.pack")
        if given["missing"] and PLAN not in stages:
            raise InputError("--missing is an option of the stage plan; leave it out, the sweep folder has the plan")
        if given["missing"] and given["packs"]:
            raise InputError(
                "--packs writes what each model asks for, and --missing leaves out a part; make packs of a model by "
                "python -m tilekern.cache_tools pack --model"
            )
        store = Store(given["cache_dir"] or user_root())
        return cls(plan, options, given["gpu"], given["sweep"], given["packs"], store, given["missing"])

    def planned(self) -> tuple[Target, Planned]:
        """Return the target and its plan."""
        target = resolve(self.gpu)
        from tilekern.tuning.plan.choosing import plan_of

        planned = plan_of(self.plan, target, self.store.root)
        return target, without_served(planned, target, self.store.root) if self.missing else planned


def _run(request: Request, *, quiet: bool) -> Result:
    options, store = request.options, request.store
    if COMPILE in options.stages and options.executor == LOCAL:
        start_server()  # it loads its modules while the plan is made
    with progress_bars(quiet=quiet) as tell:
        if PLAN not in options.stages:
            return Pipeline(_given(request), store, options, tell).run()
        target, planned = request.planned()
        if request.missing and not planned.problems:
            return Result(planned.name, target, described_toolkit(), notes=list(planned.notes))
        packs = pack_paths(request.packs, planned.models, target) if request.packs else {}
        return Pipeline.of(planned, target, store, options, tell, folder=request.sweep, packs=packs).run()


def _dry_run(request: Request) -> PlanReport:
    """Return the plan and its cost; write, compile and measure nothing."""
    from tilekern.tuning.predict.estimating import report_on

    options, store = request.options, request.store
    if options.budget_s is not None:
        raise InputError("--budget limits a run; leave it out with --dry-run, which says how long all of it takes")
    if PLAN in options.stages:
        target, planned = request.planned()
        sweep = Sweep(request.sweep or folder_in(store.root, target.key))
        if sweep.folder.joinpath("sweep.json").exists() and sweep.target.key != target.key:
            raise InputError(f"{sweep.folder} holds a sweep for {sweep.target.name}, not {target.name}; give another")
        name, problems, notes, limits = planned.name, list(planned.problems), list(planned.notes), None
        tokens = planned.tokens
    else:
        sweep, notes = _given(request), []
        name, target, problems, limits = sweep.model, sweep.target, sweep.problems(), sweep.limits
        tokens = sweep.tokens
    if MEASURE in options.stages and tokens:
        notes = [*notes, f"the kernels of {len(tokens)} tokens are then chosen in their steps; no estimate counts that"]
    if COMPILE in options.stages:
        notes = [*notes, *without_backends(sweep, problems)]
    is_here = options.executor == LOCAL
    jobs = jobs_of(options.jobs) if is_here else options.jobs or default_jobs()
    absent = absence(target, options.stages) if is_here else None
    if not is_here:
        notes = [*notes, "the cluster was not asked what it has: --jobs and --gpus say what to count on"]
    gpus = options.gpus or 1
    if is_here and absent is None:
        from tilekern.tuning.measure.gpu import devices

        gpus = len(devices()[: options.gpus])
    return report_on(
        name, target, problems, sweep, jobs=jobs, gpus=gpus,
        strategy=options.strategy, root=Path(store.root), notes=[*notes, *([absent] if absent else [])], here=is_here,
        done=settled(sweep, options.timeout_s) if COMPILE in options.stages else None, limits=limits,
        overlapped=absent is None and {COMPILE, MEASURE} <= set(options.stages),
    )  # fmt: skip


def _given(request: Request) -> Sweep:
    """Return the sweep that an earlier run planned."""
    if request.sweep is None:
        raise InputError("stages after plan need the folder of a planned sweep: give --sweep DIR")
    # What the compile stage makes anew here it need not take from others.
    if COMPILE in request.options.stages:
        return Sweep(request.sweep)
    return Sweep.carried(request.sweep, signs=request.options.key is not None)
