"""Entry point of ``python -m tilekern.cache_tools`` and of ``tilekern-cache``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from tilekern.warning import command_line


@command_line("python -m tilekern.cache_tools")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code, as :func:`tilekern.cache_tools.cli.main` does."""
    from tilekern.cache_tools.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    # A command ends before there is anything to collect; collections take a fifth of a walk over a thousand records.
    gc.disable()
    sys.exit(main())
