"""The door of ``python -m tilekern.cache_tools`` and of ``tilekern-cache``."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import click

from tilekern.cache import CacheError
from tilekern.cache_tools.cli import app
from tilekern.errors import InputError, TilekernWarning
from tilekern.runtime.settings import check_settings
from tilekern.warning import shown_plainly, tell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 where `verify` found something broken, 2 for bad input.

    Args:
        arguments: those of the command line where not given.
    """
    try:
        check_settings()
        with shown_plainly():
            code = app.main(args=arguments, prog_name="python -m tilekern.cache_tools", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except (CacheError, InputError, TilekernWarning) as error:  # a warning is raised under `python -W error`
        return _fail(str(error))
    except click.ClickException as error:
        return _fail(f"{error.format_message()} (see --help)")
    except (click.Abort, KeyboardInterrupt):
        return _fail("stopped", code=130)
    except BrokenPipeError:
        # The reader of a pipe has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _fail(message: str, code: int = 2) -> int:
    tell(f"tilekern: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    # A command is over before there is anything to collect; a walk over a thousand records spends a fifth on it.
    gc.disable()
    sys.exit(main())
