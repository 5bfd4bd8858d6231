"""The report on a sweep: a page to look at, and the same rows as CSV and JSON."""

from __future__ import annotations

from pathlib import Path

from tilekern.cache.files import write_whole
from tilekern.errors import InputError
from tilekern.tuning.report.dumps import as_csv, as_json
from tilekern.tuning.report.rows import Report, Row, report_of
from tilekern.tuning.sweep.folder import Sweep

__all__ = ["Report", "Row", "as_csv", "as_html", "as_json", "report_of", "write_report", "write_text"]


def as_html(report: Report) -> str:
    """The page that holds all it needs.

    Raises:
        InputError: Bokeh, the extra ``report``, is not installed.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise InputError(
            "the HTML report needs Bokeh, which is not installed; install it with: pip install 'tilekern[report]' "
            "(CSV and JSON work without it)"
        ) from None
    from tilekern.tuning.report.page import as_html as drawn

    return drawn(report)


def write_report(sweep: Sweep, folder: Path) -> list[Path]:
    """Write ``report.csv``, ``report.json`` and ``report.html`` into a folder; their paths.

    Raises:
        InputError: the sweep or the folder is not usable, or Bokeh is not installed; CSV and JSON are written then.
    """
    report = report_of(sweep)
    forms = {"report.csv": as_csv, "report.json": as_json, "report.html": as_html}
    return [write_text(folder / name, form(report)) for name, form in forms.items()]


def write_text(path: Path, text: str) -> Path:
    """Write a file of the report; its path. A failure leaves the file that was there.

    Raises:
        InputError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which is written to and not replaced
            path.write_text(text, encoding="utf-8", newline="")
        else:
            place = path.resolve()  # a link stays one
            place.parent.stat()  # a folder that is not there is not made
            write_whole(place, text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path
