"""``python -m tilekern.tune publish DIR``: makes records of what a sweep has measured, wherever that was."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from tilekern.cache import Store, user_root
from tilekern.cache.trust.policy import must_be_signed
from tilekern.errors import InputError
from tilekern.tuning.options import FOLDER, tuner_command
from tilekern.tuning.pipeline import Options, Pipeline, Result
from tilekern.tuning.sweep.folder import Sweep


@tuner_command(short_help="Make records of what a sweep has measured; needs no GPU.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--cache-dir", type=FOLDER, help="The cache to fill.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of tables.")
def command(folder: Path, cache_dir: Path | None, as_json: bool) -> None:
    """Make records of the problems that the sweep in DIR has measured, and fill the cache; needs no GPU or compiler.

    For a folder whose measuring run was stopped on a machine that is gone; a run that ends has published already. What
    another user or machine compiled or measured counts only if TILEKERN_TRUST is any, and records that rest on it are
    not yours: the policy signed does not load them. Problems without a measurement get no record, nor do those whose
    winner has lost an artifact; these are named. DIR/results.pack is written anew. Exit codes: 0 records were made; 2
    none could be.
    """
    from tilekern.tuning.terminal import print_result

    found = published(folder, Store(cache_dir or user_root()))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        print_result(found)


def published(folder: Path, store: Store) -> Result:
    """Install the measured winners of a sweep in a cache.

    Raises:
        InputError: the folder is not a sweep, others can write it, or it gives no record: nothing in it is measured,
            others measured it and the policy is ``signed``, it was measured of other sources of the kernels, or all
            winners have lost an artifact.
        tilekern.cache.CacheError: ``results.pack`` or the cache cannot be written.
    """
    sweep, quoted = Sweep(folder, finished=True), shlex.quote(str(folder))
    sweep.require_own()
    has_others = sweep.is_of_others
    if has_others and not must_be_signed():
        sweep = Sweep(folder, foreign=True)
    pipeline = Pipeline(sweep, store, Options(stages=(), only_measured=True))
    result = pipeline.result
    winners = pipeline.winners()
    planned = len(sweep.problems())
    lost = len(result.lost)
    if not (winners or lost) and has_others and sweep.is_own:
        raise InputError(
            f"TILEKERN_TRUST is signed, and others compiled or measured what is in {folder}; unpack a results.pack "
            "that its GPU host signed (--stages measure --sign KEY), or measure it here"
        )
    if not (winners or lost) and _is_of_other_kernels(sweep):
        raise InputError(
            f"what {folder} has measured is not of the kernels of this tilekern; publish it with the tilekern that "
            "measured it"
        )
    if not (winners or lost):
        raise InputError(f"no problem in {folder} is measured; run --stages measure --sweep {quoted} where the GPU is")
    pipeline.publish(winners)
    if others := [winner for winner in result.winners if (winner.kernel, winner.problem) in result.others]:
        first = others[0]
        result.notes.append(
            f"{len(others)} of {len(winners)} records rest on what others compiled or measured, and are not yours, the "
            f"first of {first.kernel} {first.problem.key}; --json says which are"
        )
    if unmeasured := planned - len(winners) - lost:
        result.notes.append(
            f"{unmeasured} of {planned} problems are not measured and have no record; --stages measure "
            f"--sweep {quoted} goes on with them where the GPU is"
        )
    return result


def _is_of_other_kernels(sweep: Sweep) -> bool:
    """Return whether all that is measured is of other sources than the kernels have here."""
    measured = sweep.measured()
    planned = (item.key for named in sweep.problems() for item in sweep.candidates(*named))
    return bool(measured) and measured.keys().isdisjoint(planned)
