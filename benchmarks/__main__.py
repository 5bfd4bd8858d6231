"""Run ``python -m benchmarks``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer

from benchmarks.cli import app
from tilekern.errors import InputError, ToolchainMissing
from tilekern.tuning.stopping import Stopped, stopped_by
from tilekern.warning import command_line, shown_plainly

# The base class of usage errors in click, or in the copy of click that newer releases of typer contain.
_UsageError: Any = typer.BadParameter.__base__


@command_line("python -m benchmarks")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    It is 0, 2 for bad input, 4 if the compiler is missing, 130 for Ctrl-C, 143 for SIGTERM, as ``timeout`` sends it;
    then no process that was started goes on.
    """
    try:
        with shown_plainly(), stopped_by(signal.SIGTERM):
            return app(args=arguments, prog_name="benchmarks", standalone_mode=False) or 0
    except ToolchainMissing as error:
        return _fail(str(error), 4)
    except InputError as error:
        return _fail(str(error), 2)
    except _UsageError as error:
        return _fail(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130)
    except Stopped as stopped:
        return _fail(f"stopped by {stopped}", stopped.exit_code)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
