"""The command line of ``python -m tilekern.tune``: which command is meant, and what its errors mean to a shell."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

import click

from tilekern.cache import CacheError
from tilekern.errors import TilekernError, TilekernWarning, ToolchainMissing
from tilekern.warning import shown_plainly

# Words that are no model but a command of their own, in the module of that name; each is imported when it is meant.
COMMANDS: tuple[str, ...] = ("preflight", "refresh", "report", "serve", "status")
EXIT_INPUT, EXIT_TOOLCHAIN, EXIT_INTERRUPTED = 2, 4, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code: 2 bad input, 4 no compiler, 130 Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given and given[0] in COMMANDS else None
    try:
        with shown_plainly():
            _module(name or "tune").command.main(
                args=given[1:] if name else given,
                prog_name=" ".join(["python -m tilekern.tune", *([name] if name else [])]),
                standalone_mode=False,
            )
        sys.stdout.flush()
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_INPUT)
    except BrokenPipeError:
        # The reader of a pipe has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", EXIT_INPUT)
    except (click.Abort, KeyboardInterrupt):
        return _fail("stopped; what was finished is kept, the next run goes on from there", EXIT_INTERRUPTED)
    except (TilekernError, TilekernWarning, CacheError) as error:  # a warning is raised under `python -W error`
        return _fail(str(error), EXIT_TOOLCHAIN if isinstance(error, ToolchainMissing) else EXIT_INPUT)
    return 0


def _module(name: str) -> ModuleType:
    return import_module(f"tuning.commands.{name}")


def _fail(message: str, code: int) -> int:
    print(f"tilekern.tune: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    return code
