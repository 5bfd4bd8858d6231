"""The door to tuning: ``python -m tilekern.tune MODEL``. Everything behind it lives in ``tilekern.tuning``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the tuner's command line; the exit code."""
    from tilekern.tuning.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
