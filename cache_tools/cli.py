"""The command line of ``python -m tilekern.cache_tools``: picks the command, and turns errors into exit codes.

This uses click because the import and first call of typer took half of the 0.4 s that `ls` may take.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

import click

from tilekern.cache import CacheError
from tilekern.errors import InputError, TilekernWarning
from tilekern.runtime.settings import check_settings
from tilekern.warning import DEPRECATED, HELP, fail, flush, invoke, shown_plainly, versioned

_COMMANDS = (
    "clear", "diff", "keygen", "ls", "pack", "prune", "pull", "push", "repository", "revoke", "show", "sign", "stats",
    "unpack", "verify", "wanted", "wheel", "why",
)  # fmt: skip
_FILES = {"add": "unpack"} | {name: name for name in _COMMANDS}


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each imported when it is first used, so that `ls` does not pay for the others.

    This is a mapping and not a group's ``get_command``, since click suggests its names for a mistyped one.
    """

    def __getitem__(self, name: str) -> click.Command:
        file = _FILES[name]
        command: click.Command = getattr(import_module(f"tilekern.cache_tools.commands.{file}"), file)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


@versioned
@click.group(commands=_Commands(), no_args_is_help=False, context_settings=HELP)
def app() -> None:
    """Look after a cache of tuned kernels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 if `verify` found something broken, 2 for bad input.

    Args:
        arguments: default those of the command line.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        check_settings()
        if any(word.partition("=")[0] == "--target" for word in words):
            DEPRECATED["--target"].tell()
        with shown_plainly():
            code = invoke(app, arguments, "python -m tilekern.cache_tools", hint=" (see --help)")
        flush()
        return code or 0
    except (CacheError, InputError, TilekernWarning) as error:  # a warning is raised under `python -W error`
        return fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        return fail("stopped", 130)
