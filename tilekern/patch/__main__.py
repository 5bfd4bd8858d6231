"""``python -m tilekern.patch``: which patches fit the transformers that is installed, or that lies in a folder."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tilekern import __version__
from tilekern.errors import InputError, TilekernError, TilekernWarning
from tilekern.patch import list_patches
from tilekern.patch.families import FAMILIES, Family
from tilekern.patch.forms import Module, patches_of
from tilekern.patch.installed import Found, transformers_version
from tilekern.patch.registry import check_choice, check_ops, known_ops
from tilekern.runtime.settings import check_settings
from tilekern.runtime.switches import EXPERTS, FORMS, OPS
from tilekern.warning import shown_plainly, tell


class Row(NamedTuple):
    """A patch and its state; ``target`` is a dotted path, and ``reason`` is empty where the patch fits."""

    status: str
    op: str
    model_type: str
    target: str
    digest: str | None
    reason: str


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--model", "models", multiple=True, metavar="TYPE", help="Only of this model type, as llama; repeatable.")
@click.option("--op", "ops", multiple=True, help=f"Only of this op: {', '.join((*OPS, EXPERTS))}; repeatable.")
@click.option("--all", "everything", is_flag=True, help="A line for each patch in place of counts by op.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, which has the digests.")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
def command(
    folders: Sequence[Path], models: Sequence[str], ops: Sequence[str], everything: bool, as_json: bool
) -> None:  # fmt: skip
    """Say which patches fit the installed transformers: by op how many, and those that do not; or those of a model.

    With folders, say it of unpacked transformers releases instead (each FOLDER holds transformers/), which are read and
    not imported: a line for each patch, with the digest of what it replaces.

    --json: a list, of each release its transformers (version or folder) and patches: status (applied, available; known
    in a folder; changed, missing), op, model_type, target, digest, reason.
    """
    check_settings()
    for model in models:
        check_choice(model, FORMS[0])
    check_ops(ops)

    def asked(rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.model_type in (models or [row.model_type]) and row.op in (ops or [row.op])]

    releases = {str(folder): asked(_read(folder)) for folder in folders}
    if not folders:
        families: Sequence[str | None] = models or [None]
        read = [found for family in families for found in list_patches(family)]
        releases = {transformers_version(): asked(map(_row, read))}
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


def _row(found: Found) -> Row:
    patch = found.patch
    return Row(found.status, patch.op, patch.model_type, patch.target, found.digest, found.reason)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each patch."""
    for row in rows:
        path = ".".join(row.target.rsplit(".", 2)[-2:])
        yield f"{row.status:9} {row.op:{_width()}} {row.model_type:20} {row.reason or path}"


def _digests(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f"{row.status:9} {row.op:{_width()}} {f'{row.digest} {row.target}' if row.digest else row.reason}"


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    """By op, how many families it is patched in; then what does not fit."""
    fits = [row for row in rows if row.status in ("applied", "available")]
    for op in dict.fromkeys(row.op for row in rows):
        families = {row.model_type for row in fits if row.op == op}
        applied = {row.model_type for row in fits if row.op == op and row.status == "applied"}
        yield f"{op:{_width()}} {len(families):4} families{f', applied in {len(applied)}' if applied else ''}"
    others = [row for row in rows if row not in fits]
    yield from _lines(others)
    number = len({row.model_type for row in rows})
    yield f"{number} families, {len(rows)} patches, {len(others)} do not fit; --model TYPE or --all lists them"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code, 2 for bad input."""
    try:
        with shown_plainly():
            command.main(args=arguments, prog_name="python -m tilekern.patch", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        return _fail(error.format_message())
    except (TilekernError, TilekernWarning) as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of a pipe has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(message: str) -> int:
    tell(f"tilekern: {' '.join(message.split())}", err=True)
    return 2


def _width() -> int:
    return max(map(len, known_ops()))


def _read(folder: Path) -> list[Row]:
    """Find the code of one of the forms in an unpacked release, and the families it has no code for.

    Raises:
        InputError: the folder is not such a release.
    """
    try:
        if not (folder / "transformers" / "models").is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is not there", str(folder / "transformers" / "models"))
        return [row for family in FAMILIES.values() for row in _of_family(family, folder)]
    except OSError as error:
        raise InputError(
            f"{folder} is not an unpacked transformers release: {error.filename}: {error.strerror}"
        ) from None


def _of_family(family: Family, folder: Path) -> Iterator[Row]:
    path = folder / f"{family.module.replace('.', '/')}.py"
    if not path.exists():
        yield Row("missing", "", family.model_type, family.module, None, f"{family.module} is not there")
        return
    found = patches_of(Module(family.module, path.read_text(encoding="utf-8")), family.model_type)
    for patch in found:
        yield Row("known", patch.op, family.model_type, patch.target, patch.digests[0], "")
    for op in family.ops:
        if op not in {patch.op for patch in found}:
            reason = f"no code of {family.module} has a form that is known"
            yield Row("changed", op, family.model_type, family.module, None, reason)


if __name__ == "__main__":
    sys.exit(main())
