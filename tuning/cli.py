"""Command line of ``python -m tilekern.tune``: picks the command, and turns errors into exit codes."""

from __future__ import annotations

import sys

import click

from tilekern.cache import CacheError
from tilekern.errors import TilekernError, TilekernWarning, ToolchainMissing, did_you_mean
from tilekern.runtime.settings import check_settings
from tilekern.tuning.commands import COMMANDS, command_named
from tilekern.tuning.plan.configs import MODEL_IS, UnknownModel, require_model_name
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.stopping import Stopped
from tilekern.warning import fail, flush, invoke, shown_plainly

EXIT_INPUT, EXIT_TOOLCHAIN, EXIT_INTERRUPTED = 2, 4, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 bad input, 4 no compiler, 130 Ctrl-C, 143 SIGTERM."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given and given[0] in COMMANDS else None
    try:
        check_settings()
        with shown_plainly():
            if name is None and given and not given[0].startswith("-"):
                # Said before the options are read, which may be those of the command that was meant.
                require_model_name(given[0])
            prog_name = " ".join(["python -m tilekern.tune", *([name] if name else [])])
            invoke(command_named(name or "tune"), given[1:] if name else given, prog_name)
        flush()
    except (click.Abort, KeyboardInterrupt, Stopped) as stop:
        code = stop.exit_code if isinstance(stop, Stopped) else EXIT_INTERRUPTED
        return fail("stopped; what was finished is kept, the next run goes on from there", code)
    except (TilekernError, TilekernWarning, CacheError) as error:  # a warning is raised under `python -W error`
        text = _neither(error.word) if name is None and isinstance(error, UnknownModel) else str(error)
        return fail(text, EXIT_TOOLCHAIN if isinstance(error, ToolchainMissing) else EXIT_INPUT)
    return 0


def _neither(word: str) -> str:
    if word in COMMANDS:
        return f"{word} is a command, which stands before its options: python -m tilekern.tune {word} ..."
    meant = did_you_mean(word, [*COMMANDS, *PRESETS]) or "."
    return f"unknown command or model {word!r}{meant} Commands are {', '.join(COMMANDS)}; a model is {MODEL_IS}"
