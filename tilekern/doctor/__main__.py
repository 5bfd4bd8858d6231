"""The command line of the doctor."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from tilekern.doctor import examine
from tilekern.errors import InputError
from tilekern.warning import command_line, fail, flush


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line, to be printed as one line."""
        raise InputError(message)


@command_line("python -m tilekern.doctor")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 nothing is wrong, 1 something is, 2 bad input."""
    parser = _Parser(
        prog="python -m tilekern.doctor",
        description="Report what is installed (GPU, driver, torch, compilers), which caches are read, what would serve "
        "MODEL, and what is wrong. Exit codes: 0 nothing is wrong, 1 something is, 2 bad input.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, the path of a config.json, or a hub id")
    parser.add_argument("--gpu", default="auto", help="the GPU: auto, B200, an architecture, a key or sm_90:78")
    parser.add_argument(
        "--autocast", action="store_true", help="MODEL trains weights of float32 under autocast: Trainer(bf16=True)"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document instead of lines")
    try:
        given = parser.parse_args(arguments)
        report = examine(given.model, given.gpu, autocast=given.autocast)
    except ValueError as error:
        return fail(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a path may have letters outside the terminal's encoding
    width = shutil.get_terminal_size((100, 24)).columns
    print(json.dumps(report.document, indent=1) if given.as_json else report.text(width))  # noqa: T201
    flush()
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
