"""Report on a sweep: an HTML page, and the same rows as CSV and JSON for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

from tilekern.cache.files import write_whole
from tilekern.errors import InputError
from tilekern.tuning.report.columns import problems_of
from tilekern.tuning.report.implementations import standings
from tilekern.tuning.report.rows import Report, Row, report_of

__all__ = ["Report", "Row", "as_csv", "as_html", "as_json", "report_of", "write_report", "write_text"]


FORMAT = 1
FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def as_json(report: Report) -> str:
    """Write one JSON object.

    It has ``format`` (1), ``model``, ``target``, ``gpu``, ``toolkits``, ``date``, ``implementations`` and ``rows``.
    Each of ``implementations`` has the fields of :class:`tilekern.tuning.report.implementations.Standing`. Each row is
    an object on a line of its own, with the fields of :class:`tilekern.tuning.report.rows.Row`; problem and config are
    objects. Unknown values are null. An infinite error is null too; the row's reason says so.
    """
    names = ("model", "target", "gpu", "toolkits", "date")
    head = {"format": FORMAT} | {name: getattr(report, name) for name in names}
    head |= {"implementations": [dataclasses.asdict(one) for one in standings(problems_of(report.rows))]}
    rows = []
    for row in report.rows:
        values = {name: getattr(row, name) for name in FIELDS}
        values |= {"problem": dict(row.problem), "config": dict(row.config)}
        infinite = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        rows.append(json.dumps(values | dict.fromkeys(infinite), allow_nan=False))
    lines = ",\n".join(rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'


def as_csv(report: Report) -> str:
    """Write a line with the names of the fields, then a line for each row.

    Problem and config are ``name=value`` pairs separated by commas. Unknown values are empty, flags are 0 or 1, an
    infinite error is ``inf``.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for row in report.rows:
        values = {name: getattr(row, name) for name in FIELDS}
        values |= {"problem": row.problem.key, "config": row.config.key}
        writer.writerow([int(value) if isinstance(value, bool) else value for value in values.values()])
    return text.getvalue()


def as_html(report: Report) -> str:
    """Return the page as one self-contained file.

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


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.csv``, ``report.json`` and ``report.html`` into a folder; return their paths.

    Raises:
        InputError: the folder cannot be written, or Bokeh is not installed; CSV and JSON are written then.
    """
    forms = {"report.csv": as_csv, "report.json": as_json, "report.html": as_html}
    return [write_text(folder / name, form(report)) for name, form in forms.items()]


def write_text(path: Path, text: str) -> Path:
    """Write a file of the report; return its path. A failure keeps the old file.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which is written to and not replaced
            path.write_text(text, encoding="utf-8", newline="")
        else:
            place = path.resolve()  # a link stays a link
            place.parent.stat()  # a missing folder is not made
            write_whole(place, text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path
