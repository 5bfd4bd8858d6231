"""``python -m tilekern.tune preflight MODEL``: lists the records that a job will need, and the missing ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tilekern.cache import user_root
from tilekern.spec.targets import resolve
from tilekern.tuning import preflight as checks
from tilekern.tuning.options import FOLDER, NAMES, PlanRequest, Seconds, plan_options, tuner_command
from tilekern.tuning.terminal import progress_bars
from tilekern.warning import tell

EXIT_MISSING = 3


@tuner_command(short_help="List the records that a job needs, and the missing ones.", epilog=NAMES)
@plan_options
@click.option("--gpu", default="auto", show_default=True, help="The job's: auto, B200, an arch, a key or sm_90:78.")
@click.option(
    "--need", type=click.Choice(checks.DEMANDS), default=checks.SERVED, show_default=True,
    help="How good a record must be: served by any record, exact (of the very bucket and GPU), or measured there.",
)  # fmt: skip
@click.option("--fix", is_flag=True, help="Build the missing records, and put them into the cache.")
@click.option(
    "--by", type=click.Choice(checks.WAYS), default=checks.TUNE, show_default=True,
    help="With --fix: tune, or compile the default configs.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option("--timeout", "timeout_s", type=Seconds(least=1), help="Seconds that one compile may take.")
@click.option("--gpus", type=click.IntRange(min=1), help="How many GPUs to measure on at most.")
@click.option("--cache-dir", type=FOLDER, help="The cache in place of the user's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of lines.")
def command(
    *, gpu: str, need: str, fix: bool, by: str, jobs: int | None, timeout_s: float | None, gpus: int | None,
    cache_dir: Path | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """List the records that a job of MODEL, or of several, will need, and those that its caches lack.

    MODEL is a preset (qwen3-8b), base (the presets, and sizes that are frequent in public configs), the path of a
    config.json or of a folder with one, a hub id, or a plan of tilekern.trace. Runs on any machine, and writes nothing
    without --fix, which measures if the GPU is here, and else predicts. With --invariant, each problem that has rows
    inside tilekern.invariant() must also have a kernel of one bit class, which only measuring finds. Exit codes: 0
    nothing is missing; 2 bad input; 3 records are missing; 4 --fix found no compiler.

    --json: model, target, need, invariant (with and without: how many problems that need a bit class have it; null
    if none needs one), complete (bool), counts (problems by state), provenances (of the records that serve), share
    (of the launches of the traced steps: percent, rounded down, with a record of any GPU or bucket that serves;
    launches, served, by_state, missing by kernel, and records: how many serve; null if no launches are known),
    problems and missing: lists of kernel, problem, bucketed (the sizes that a record of another bucket may serve),
    state (exact; nearest: another bucket's record serves; other_gpu: one of another GPU of the arch serves;
    missing), provenance (measured, predicted, default), serving (the record's address), layer, stale (a record of
    this very problem exists, but the kernel was edited), fresh (false: the search space has changed since), why
    (--fix failed), needs_class (the job needs a kernel of one bit class), bits (its class), varies (why no such
    kernel will run), launches (by the steps, or null), unused (a part of a composite whose winner launches others, so
    that it is not missing); cannot_fix (why --fix cannot build missing records on this
    machine, or null); notes.
    """
    request, target = PlanRequest.of(given), resolve(gpu)
    from tilekern.tuning.plan.choosing import plan_of

    found = checks.preflight_of(plan_of(request, target, cache_dir or user_root()), target, need, cache_dir)
    if fix and found.missing:
        checks.require_fixable(found, by)
        with progress_bars(quiet=as_json) as tell_stage:
            found = checks.fix(
                found, by, cache_dir=cache_dir, jobs=jobs, gpus=gpus, timeout_s=timeout_s, tell=tell_stage
            )
    tell(*(json.dumps(found.as_json(), indent=1).splitlines() if as_json else _told(found)))
    if found.missing:
        raise SystemExit(EXIT_MISSING)


def _told(found: checks.Preflight) -> list[str]:
    first = [found.cannot_fix] if found.cannot_fix else []
    counted = []
    for state, number in found.counts().items():
        how = ", ".join(f"{served} {name}" for name, served in found.provenances(state).items() if served)
        if number:
            counted.append(f"{number} {state.replace('_', ' ')}{f' ({how})' * bool(how)}")
    numbers = ", ".join(counted)
    lines = [*first, f"{found.model} on {found.target.name}: {len(found.needs)} problems: {numbers}", *found.notes]
    if share := checks.share_line(found):
        lines.append(share)
    if classes := found.invariant_counts():
        lines.append(f"tilekern.invariant(): {classes['with']} with a bit class, {classes['without']} without")
    behind = [need for need in found.needs if (need.fresh is False or need.is_stale) and need not in found.missing]
    lines += [f"served: {checks.line_of(need)}" for need in behind]
    if not found.missing:
        return [*lines, "nothing is missing"]
    lines += [f"missing: {checks.line_of(need)}" for need in found.missing]
    where = f"on a {found.target.name} " if found.cannot_fix else ""
    return [*lines, f"{len(found.missing)} missing; {where}--fix builds them, and so does python -m tilekern.tune"]
