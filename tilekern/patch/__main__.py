"""``python -m tilekern.patch``: the table with the status and the digests of what is installed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tilekern import __version__
from tilekern.errors import InputError, TilekernError, TilekernWarning
from tilekern.patch import list_patches
from tilekern.patch.families import FAMILIES
from tilekern.patch.forms import Module, patches_of
from tilekern.patch.installed import transformers_version
from tilekern.patch.registry import known_ops
from tilekern.warning import shown_plainly, tell


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
def command(folders: Sequence[Path]) -> None:
    """Print the table of patches: the status of each on the installed transformers, its op, digest and target.

    With folders, print the digests of unpacked transformers releases instead (each FOLDER holds transformers/), which
    are read and not imported.
    """
    if not folders:
        click.echo(f"transformers {transformers_version()}")
        for found in list_patches():
            line = f"{found.status:9} {found.patch.op:{_width()}} {found.digest} {found.patch.target} {found.reason}"
            click.echo(line.rstrip())
    for folder in folders:
        try:
            text = _of_release(folder)
        except OSError as error:
            raise InputError(
                f"{folder} is not an unpacked transformers release: {error.filename}: {error.strerror}"
            ) from None
        click.echo(text, nl=False)


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
    tell(f"tilekern.patch: {' '.join(message.split())}", err=True)
    return 2


def _width() -> int:
    return max(map(len, known_ops()))


def _of_release(folder: Path) -> str:
    """Find the code of one of the forms in an unpacked release, and the families it has no code for."""
    lines = [f"{folder}\n"]
    if not (folder / "transformers" / "models").is_dir():
        raise FileNotFoundError(errno.ENOENT, "it is not there", str(folder / "transformers" / "models"))
    for family in FAMILIES.values():
        path = folder / f"{family.module.replace('.', '/')}.py"
        if not path.exists():
            lines.append(f"{'missing':9} {'':{_width()}} {family.module} is not there\n")
            continue
        found = patches_of(Module(family.module, path.read_text(encoding="utf-8")), family.model_type)
        known = {patch.op for patch in found}
        lines += [f"{'known':9} {patch.op:{_width()}} {patch.digests[0]} {patch.target}\n" for patch in found]
        lines += [
            f"{'changed':9} {op:{_width()}} no code of {family.module} has a form that is known\n"
            for op in family.ops
            if op not in known
        ]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
