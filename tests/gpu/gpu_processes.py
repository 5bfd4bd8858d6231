"""Start processes, and judge how they end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def path_of(*first: Path) -> str:
    """Where Python looks: in these folders first, or in this checkout, then where this process was told to."""
    return os.pathsep.join([*map(str, first or (ROOT,)), *filter(None, [os.environ.get("PYTHONPATH")])])


def clean_environment(*first: Path) -> dict[str, str]:
    """The environment without tilekern's settings; imports come from these folders first, or from this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TILEKERN_")}
    return kept | {"PYTHONPATH": path_of(*first)}


def counts_of_graphs() -> list[str]:
    """What the graphs of this process's models have counted."""
    from tilekern.patch.graphs import _models, graphs_of

    return [str(found) for model in _models for found in graphs_of(model).values()]


def ended(
    script: Path | str, *arguments: str, start: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script of this checkout that has come to its end, which may take five minutes."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *start, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path_of(), **environment}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
