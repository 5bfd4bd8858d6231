"""``python -m tilekern.patch``: the table with the status and the digests of what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tilekern import __version__
from tilekern.errors import InputError, TilekernError, TilekernWarning
from tilekern.patch import list_patches
from tilekern.patch.digests import digest_in
from tilekern.patch.installed import transformers_version
from tilekern.patch.registry import patches
from tilekern.warning import shown_plainly


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
    click.echo(f"tilekern.patch: {' '.join(message.split())}", err=True)
    return 2


def _width() -> int:
    return max(len(patch.op) for patch in patches())


def _of_release(folder: Path) -> str:
    lines = [f"{folder}\n"]
    for patch in patches():
        text = (folder / f"{patch.module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for path, known in ((patch.attribute, patch.digests), *patch.relies_on):
            try:
                digest = digest_in(text, path)
                lines.append(f"{'known' if digest in known else 'changed':9} {patch.op:{_width()}} {digest} {path}\n")
            except ValueError as error:
                lines.append(f"{'missing':9} {patch.op:{_width()}} {error}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
