"""``python -m tilekern.tune refresh``: times old winners again after an upgrade, and shows what changed."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilekern.cache import FolderLayer, Layer, PackLayer, Record, Store, default_layers, user_root
from tilekern.cache.packs.pack import Pack
from tilekern.compile.toolchain import require_toolkit, toolkit
from tilekern.errors import InputError
from tilekern.spec.targets import Target, here, resolve
from tilekern.tuning.carrying import Carried, carry_over, held_in_cache, held_in_pack, write_to_cache, write_to_pack
from tilekern.tuning.compile.stage import jobs_of, wanted
from tilekern.tuning.measure.gpu import describe_gpu
from tilekern.tuning.options import FOLDER, File, tuner_command
from tilekern.tuning.pipeline import COMPILE, MEASURE, Options, Pipeline
from tilekern.tuning.refreshing import Change, Refresh, Survey, stale_json, survey
from tilekern.tuning.sweep.folder import folder_in
from tilekern.tuning.terminal import out, progress_bars, short, sizes_of, table_console, table_for
from tilekern.warning import tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass
class Outcome:
    """Outcome of a refresh, in the form of ``--json``."""

    target: Target
    toolkit: str | None
    driver: str | None
    changes: list[Change] = field(default_factory=list)
    stale: list[dict[str, Any]] = field(default_factory=list)
    current: int = 0
    compile: dict[str, Any] = field(default_factory=dict)
    measure: dict[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    cache: str | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        plain = {name: value for name, value in vars(self).items() if name not in ("target", "changes")}
        return {"target": self.target.describe(), **plain, "changes": [change.as_json() for change in self.changes]}


@tuner_command(short_help="Time old winners again after an upgrade, and say what changed.")
@click.option("--gpu", default="auto", show_default=True, help="Target: auto, B200, an arch, a key or sm_90:78.")
@click.option("--cache-dir", type=FOLDER, help="The cache to refresh.")
@click.option(
    "--pack", "packs", multiple=True, type=File(dir_okay=False),
    help="A pack to refresh, too; may be repeated.",
)  # fmt: skip
@click.option("--top", type=click.IntRange(min=0), default=3, show_default=True, help="Runners-up to time, too.")
@click.option("--sweep", type=FOLDER, help="The folder of the refresh; it can be copied to another machine.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile workers, up to 4 a core; one a core if not given.")
@click.option("--all", "everything", is_flag=True, help="Also time records of today's toolkit and driver.")
@click.option(
    "--same-code", is_flag=True,
    help="Time nothing; keep the figures of stale records whose machine code is the same.",
)  # fmt: skip
@click.option(
    "--same-calls", is_flag=True,
    help="With --same-code: promise that calls of libraries and composites are unchanged.",
)  # fmt: skip
@click.option(
    "--same-spaces", is_flag=True,
    help="With --same-code: promise that search spaces are unchanged, of which a refresh tried only a part.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of tables.")
def command(
    *, gpu: str, cache_dir: Path | None, packs: Sequence[Path], top: int, sweep: Path | None, jobs: int | None,
    everything: bool, same_code: bool, same_calls: bool, same_spaces: bool, as_json: bool,
) -> None:  # fmt: skip
    """Time the measured records of another toolkit or driver again: the old winner, its runners-up, the default.

    Without the GPU this only compiles; copy the folder to the GPU's machine and run refresh --sweep DIR. A refresh that
    was stopped goes on where it was. Records of another toolkit stay. Records of a kernel that was edited are listed;
    they need a whole tune.

    --same-code works on these, with or without a GPU. It compiles their artifacts anew, and writes each record whose
    machine code is the same as a record of today's source, with its figures. If only the search space changed, the
    record stays the best if the space has as many candidates as were tried. The parts of a composite may be in any of
    the named packs. These are written anew, and the cache if one is named or no pack is. No artifact holds a launch's
    number of blocks: after an edit of that, tune again.
    """
    if same_code:
        if gpu != "auto" or sweep or everything:
            raise InputError("--same-code takes all records; leave out --gpu, --sweep and --all")
        promises = {"same_calls": same_calls, "same_spaces": same_spaces}
        _same_code(cache_dir, packs, jobs, promises, as_json=as_json)
        return
    if same_calls or same_spaces:
        raise InputError("--same-calls and --same-spaces only work with --same-code; pass it too")
    store = Store(cache_dir or user_root())
    refresh, outcome = _planned(gpu, store, packs, top, sweep, everything=everything)
    if refresh is not None:
        _run(refresh, outcome, store, jobs, quiet=as_json)
    if as_json:
        click.echo(json.dumps(outcome.as_json(), indent=1))
    else:
        _print(outcome)


def _planned(
    gpu: str, store: Store, packs: Sequence[Path], top: int, folder: Path | None, *, everything: bool
) -> tuple[Refresh | None, Outcome]:
    """Return the refresh to work on, None if no record needs one, and what is known of it."""
    at_hand, tools = here(), toolkit()
    # Without a compiler here, a named folder comes from another machine.
    begun = Refresh(folder, carried=tools is None) if folder else None
    target = begun.sweep.target if begun is not None and begun.unfinished else resolve(gpu)
    is_here = at_hand is not None and at_hand.key == target.key
    driver = describe_gpu()["driver"] if is_here else None
    refresh = begun or Refresh(folder_in(store.root, f"refresh-{target.key}"))
    outcome = Outcome(target, tools.key if tools else None, driver, sweep=str(refresh.sweep.folder))
    # A folder of its own that an older toolkit began is begun anew; one that was named may have been carried here.
    if refresh.unfinished and (begun is not None or refresh.toolkit_key == outcome.toolkit):
        outcome.stale, outcome.current = refresh.stale, refresh.current
        return refresh, outcome
    for path in packs:
        Pack(path)  # one that is bad is an error here, where a lookup would leave it out
    layers: list[Layer] = [FolderLayer(store.root, str(store.root)), *map(PackLayer, packs)]
    found = survey(layers, target, outcome.toolkit, driver, top=top, everything=everything)
    outcome.stale, outcome.current = [stale_json(stale) for stale in found.stale], len(found.current)
    if found.unknown:
        names = ", ".join(sorted(found.unknown))
        outcome.notes.append(f"left out: {names}, of another version of tilekern or of your own (--specs MODULE)")
    if not found.outdated:
        outcome.sweep = None
        outcome.notes.append(_nothing(found, outcome))
        outcome.notes += _offer(layers, outcome, top)
        return None, outcome
    refresh.begin(found, target, outcome.toolkit)
    return refresh, outcome


def _nothing(found: Survey, outcome: Outcome) -> str:
    told = {"toolkit": outcome.toolkit, "driver": outcome.driver}
    others = " or ".join(f"another {name} than {value}" for name, value in told.items() if value)
    of = f"{len(found.current)} measured records, none of {others or 'another toolkit or driver'}"
    return f"nothing to refresh for {outcome.target.name}: {of}; --all takes all"


def _offer(looked_at: Sequence[Layer], outcome: Outcome, top: int) -> list[str]:
    """Return commands for further packs that serve this GPU by records of another toolkit or driver."""
    known = {layer.path.resolve() for layer in looked_at if isinstance(layer, PackLayer)}
    found: list[Path] = []
    count = 0
    for layer in default_layers(looking=True):
        if isinstance(layer, PackLayer) and layer.path.resolve() not in known:
            both = survey(
                [*looked_at, layer], outcome.target, outcome.toolkit, outcome.driver, top=top, everything=False
            )
            count += len(both.outdated)
            found += [layer.path] if both.outdated else []
    if not found:
        return []
    root = next(layer.root for layer in looked_at if isinstance(layer, FolderLayer))
    options = [["--pack", str(path)] for path in found] + [["--gpu", outcome.target.key], ["--cache-dir", str(root)]]
    command = shlex.join(["python", "-m", "tilekern.tune", "refresh", *itertools.chain(*options)])
    named = ", ".join(path.name for path in found)
    return [f"another toolkit or driver made {count} measured records of {named}; to refresh them: {command}"]


def _run(refresh: Refresh, outcome: Outcome, store: Store, jobs: int | None, *, quiet: bool) -> None:
    """Compile, and if the target is here, measure and publish."""
    sweep = refresh.sweep
    if outcome.toolkit != refresh.toolkit_key and outcome.toolkit is not None and any(wanted(sweep)):
        raise InputError(
            f"{sweep.folder} was begun with {refresh.toolkit_key}, and {outcome.toolkit} is installed here; "
            "give another folder"
        )
    stages = (COMPILE,) if outcome.driver is None else (COMPILE, MEASURE)
    with progress_bars(quiet=quiet) as tell_stage:
        done = Pipeline(sweep, store, Options(stages, jobs, only_measured=True), tell_stage).run()
    outcome.compile, outcome.measure = done.compile, done.measure
    if outcome.driver is None:
        outcome.notes.append(
            f"no {outcome.target.name} here: carry {sweep.folder} to one "
            f"and run python -m tilekern.tune refresh --sweep {shlex.quote(sweep.folder.name)}"
        )
        return
    outcome.changes = refresh.finish(done.winners)
    outcome.cache = str(store.root)


def _print(outcome: Outcome) -> None:
    console = table_console()
    if outcome.changes:
        console.print(_table(outcome, console))
        kept = sum(change.unchanged for change in outcome.changes)
        lost = sum(change.after is None for change in outcome.changes)
        out(
            console,
            f"{len(outcome.changes)} records timed again: {kept} keep their winner, "
            f"{len(outcome.changes) - kept - lost} have another, {lost} have none; {outcome.current} were of today",
        )
    for note in outcome.notes:
        out(console, note)
    for stale in outcome.stale:
        out(console, f"needs a whole tune: {stale['kernel']} {sizes_of(stale['problem'])}: {stale['reason']}")


_TIMES = (("then, us", "it now, us"), ("new, us", "change"))


def _table(outcome: Outcome, console: Console) -> Table:
    title = f"{outcome.target.name}, {outcome.toolkit or 'no toolkit here'}, driver {outcome.driver}"
    columns = [["kernel", "problem"], ["old winner", "new winner"], *_TIMES]
    return table_for(console, title, columns, map(_row, outcome.changes), [name for group in _TIMES for name in group])


def _row(change: Change) -> list[str]:
    after_us = change.after_us
    winner = short(change.after.config) if change.after else "none"
    return [
        change.before.kernel,
        sizes_of(change.before.problem),
        short(change.before.config),
        "the same" if change.unchanged else winner,
        f"{change.before_us:.1f}",
        change.reason if change.same_us is None else f"{change.same_us:.1f}",
        "" if after_us is None else f"{after_us:.1f}",
        "" if after_us is None else f"{100 * (after_us / change.before_us - 1):+.1f} %",
    ]


def _same_code(
    cache_dir: Path | None, packs: Sequence[Path], jobs: int | None, promises: dict[str, bool], *, as_json: bool
) -> None:  # fmt: skip
    """Carry over the records of packs, and of a cache if one is named or no pack is, and print the outcome."""
    tools = require_toolkit()
    places: list[dict[str, Any]] = []
    caches = [cache_dir or user_root()] if cache_dir or not packs else []
    every = [*map(held_in_pack, packs), *map(held_in_cache, caches)]
    with progress_bars(quiet=as_json) as tell_stage:
        progress = functools.partial(tell_stage, "compile")
        outcomes = carry_over(every, tools.key, jobs_of(jobs), **promises, progress=progress)
    for path, held, done in zip([*packs, *caches], every, outcomes, strict=True):
        unsigned = 0  # records that were signed before
        if done.carried and path in packs:
            unsigned = write_to_pack(path, held, done)
        elif done.carried:
            write_to_cache(Store(path), done)
        if not as_json:
            _print_carried(path, done, unsigned)
        places.append({
            "place": str(path),
            "carried": [{**_named(new), "fresh": done.fresh(new)} for _, (new, _) in done.carried],
            "stale": [{**_named(left.record), "reason": left.reason} for left in done.left],
            "current": done.current,
            "compiled": done.compiled,
            "unsigned": unsigned,
        })  # fmt: skip
    if as_json:
        click.echo(json.dumps({"toolkit": tools.key, "places": places}, indent=1))


def _named(record: Record) -> dict[str, Any]:
    return {"kernel": record.kernel, "problem": record.problem, "target": record.target["key"]}


def _print_carried(path: Path, done: Carried, unsigned: int) -> None:
    for left in done.left:
        tell(f"stale: {left.record.kernel} {sizes_of(left.record.problem)}: {left.reason}")
    tell(
        f"{path}: {len(done.carried)} records carried over, {len(done.left)} stay stale, {done.current} were of today; "
        f"{done.compiled} artifacts compiled"
    )
    if dated := sum(not done.fresh(new) for _, (new, _) in done.carried):
        tell(
            f"{dated} of them are not known to be the best: their space is another one, or a refresh tried a part of "
            "it; see --same-spaces"
        )
    if unsigned:
        tell(f"{unsigned} of them were signed; sign them again: python -m tilekern.cache_tools sign")
