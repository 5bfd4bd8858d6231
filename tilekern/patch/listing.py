"""The command line of ``python -m tilekern.patch``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tilekern.errors import InputError
from tilekern.patch import list_patches
from tilekern.patch.differences import differences
from tilekern.patch.families import FAMILIES, Family
from tilekern.patch.installed import version_of
from tilekern.patch.matching import Module, patches_of, path_of
from tilekern.patch.registry import check_choice, check_ops, home_of, known_ops
from tilekern.runtime.settings import check_settings
from tilekern.runtime.switches import EXPERTS, FORMS, OF_MODELS
from tilekern.warning import HELP, flush, invoke, shown_plainly, versioned


class Row(NamedTuple):
    """A patch and its state; ``target`` is a dotted path, and ``reason`` is empty if the patch fits."""

    status: str
    op: str
    model_type: str
    target: str
    digest: str | None
    reason: str


@versioned
@click.command(context_settings=HELP)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="TYPE",
    help="Only this model type, e.g. llama, or the module of another model, e.g. mine.modeling_mine; repeatable. For "
    'families that are not tested, prints what forms="any" patches.',
)
@click.option("--op", "ops", multiple=True, help=f"Only this op: {', '.join((*OF_MODELS, EXPERTS))}; repeatable.")
@click.option("--all", "everything", is_flag=True, help="Print a line for each patch, not counts by op.")
@click.option("--diff", is_flag=True, help="Print how code without a known form differs from the nearest one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with the digests.")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
def command(
    folders: Sequence[Path], models: Sequence[str], ops: Sequence[str], everything: bool, diff: bool, as_json: bool
) -> None:  # fmt: skip
    """Print which patches fit the installed transformers: counts by op and the misfits, or the patches of a model.

    With folders, print this for unpacked transformers releases (each FOLDER contains transformers/), which are read and
    not imported: a line for each patch, with the digest of what it replaces.

    --json: a list, with the transformers (version or folder) and patches of each release: status (applied, available;
    known in a folder; changed, missing), op, model_type, target, digest, reason.
    """
    check_settings()
    for model in models:
        if not home_of(model):
            check_choice(model, FORMS[0])
    check_ops(ops)
    families = [FAMILIES.get(model) or Family(model, ()) for model in models] or list(FAMILIES.values())

    def asked(rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.op in (ops or [row.op])]

    if diff:
        places: Sequence[Path | None] = folders or [None]
        for folder in places:
            for family in families:
                path = _path(family, folder)
                if path is not None:
                    for line in differences(family, path, ops):
                        click.echo(line)
        return
    releases = {str(folder): asked(_read(folder, families)) for folder in folders}
    if not folders:
        asked_for: Sequence[str | None] = models or [None]
        found = [found for model in asked_for for found in list_patches(model)]
        rows = [Row(x.status, x.patch.op, x.patch.model_type, x.patch.target, x.digest, x.reason) for x in found]
        releases = {version_of("transformers"): asked(rows)}
    if as_json:
        document = [
            {"transformers": name, "patches": [row._asdict() for row in rows]} for name, rows in releases.items()
        ]
        click.echo(json.dumps(document, indent=1))
        return
    for name, rows in releases.items():
        click.echo(name if folders else f"transformers {name}")
        for line in _digests(rows) if folders else _lines(rows) if everything or models else _counts(rows):
            click.echo(line)
        if models and not rows:
            click.echo(f"no code of {', '.join(models)} has a form that is known")


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each patch."""
    for row in rows:
        path = ".".join(row.target.rsplit(".", 2)[-2:])
        yield f"{row.status:9} {row.op:{_width()}} {row.model_type:20} {row.reason or path}"


def _digests(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f"{row.status:9} {row.op:{_width()}} {f'{row.digest} {row.target}' if row.digest else row.reason}"


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the number of families by op, then the patches that do not fit."""
    fits = [row for row in rows if row.status in ("applied", "available")]
    for op in dict.fromkeys(row.op for row in rows):
        families = {row.model_type for row in fits if row.op == op}
        applied = {row.model_type for row in fits if row.op == op and row.status == "applied"}
        yield f"{op:{_width()}} {len(families):4} families{f', applied in {len(applied)}' if applied else ''}"
    others = [row for row in rows if row not in fits]
    yield from _lines(others)
    number = len({row.model_type for row in rows})
    more = "--diff shows why, --all lists all" if others else "--model TYPE or --all lists them"
    yield f"{number} families, {len(rows)} patches, {len(others)} do not fit; {more}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for bad input."""
    with shown_plainly():
        invoke(command, arguments, "python -m tilekern.patch")
    flush()
    return 0


def _width() -> int:
    return max(map(len, known_ops()))


def _path(family: Family, folder: Path | None) -> Path | None:
    """Return the file of a family's code in an unpacked release, or in the installed one.

    Raises:
        InputError: the folder does not contain a release.
    """
    if folder is None:
        return path_of(family.module)
    if not (folder / "transformers" / "models").is_dir():
        raise InputError(f"{folder} is not an unpacked transformers release: transformers/models is missing")
    path = folder / f"{family.module.replace('.', '/')}.py"
    return path if path.exists() else None


def _read(folder: Path, families: Iterable[Family]) -> Iterator[Row]:
    """Yield the code of a known form in an unpacked release, and the families in which some is missing."""
    for family in families:
        path = _path(family, folder)
        if path is None:
            yield Row("missing", "", family.model_type, family.module, None, f"{family.module} is not there")
            continue
        found = patches_of(Module(family.module, path.read_text(encoding="utf-8")), family.model_type)
        for patch in found:
            yield Row("known", patch.op, family.model_type, patch.target, patch.digests[0], "")
        for op in family.ops:
            if op not in {patch.op for patch in found}:
                reason = f"no code of {family.module} has a form that is known"
                yield Row("changed", op, family.model_type, family.module, None, reason)
