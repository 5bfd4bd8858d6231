"""Make the result pages: pure functions of the JSON files and of the kernels' source, one page for each audience."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.pages import decoding, fp8, longest, maintainers, models, ops, platform
from benchmarks.pages.markdown import PLOTS
from benchmarks.results import Results
from tilekern.errors import InputError

PAGES = ROOT / "docs" / "results"


def files_of(everything: Sequence[Results]) -> dict[str, str]:
    """Return the text of each page and plot, by its path below the folder of pages."""
    found: dict[str, str] = {}
    for module in (models, decoding, fp8, longest, ops, platform, maintainers):
        for name, text in module.page(everything).items():
            path = name if name.endswith(".md") else f"{PLOTS}/{name}"
            found[path] = text.rstrip() + "\n"
    return found


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write pages and plots into a folder, and remove the plots of earlier reports.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in (folder / PLOTS).glob("*.svg"):
            if f"{PLOTS}/{path.name}" not in files:
                path.unlink()
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror}") from None
