"""The report as CSV and as JSON: the rows as they are, for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from typing import Any

from tilekern.tuning.report.columns import problems_of
from tilekern.tuning.report.implementations import standings
from tilekern.tuning.report.rows import Report, Row

FORMAT = 1
FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def as_json(report: Report) -> str:
    """One JSON object.

    It has ``format`` (1), ``model``, ``target``, ``gpu``, ``toolkits``, ``date``, ``implementations`` and ``rows``.
    Each of ``implementations`` has the fields of :class:`tilekern.tuning.report.implementations.Standing`. Each row is
    an object on a line of its own, with the fields of :class:`tilekern.tuning.report.rows.Row`; problem and config are
    objects. Unknown values are null, and so is an infinite error, whose reason says that it is.
    """
    names = ("model", "target", "gpu", "toolkits", "date")
    head = {"format": FORMAT} | {name: getattr(report, name) for name in names}
    head |= {"implementations": [dataclasses.asdict(one) for one in standings(problems_of(report.rows))]}
    rows = ",\n".join(json.dumps(_object(row), allow_nan=False) for row in report.rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'


def _object(row: Row) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in FIELDS}
    values |= {"problem": dict(row.problem), "config": dict(row.config)}
    infinite = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return values | dict.fromkeys(infinite)


def as_csv(report: Report) -> str:
    """A line for each row under a line of the fields' names; problem and config as ``name=value`` with commas between.

    Unknown values are empty, flags are 0 or 1, an infinite error is ``inf``.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for row in report.rows:
        values = {name: getattr(row, name) for name in FIELDS}
        values |= {"problem": row.problem.key, "config": row.config.key}
        writer.writerow([int(value) if isinstance(value, bool) else value for value in values.values()])
    return text.getvalue()
