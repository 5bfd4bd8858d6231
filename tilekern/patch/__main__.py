"""``python -m tilekern.patch``: list the patches that fit the installed transformers, or releases in folders."""

from __future__ import annotations

import sys

from tilekern.warning import command_line


@command_line("python -m tilekern.patch")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for bad input."""
    from tilekern.patch.listing import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
