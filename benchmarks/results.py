"""Read and write results: ``{"run": {date, gpu, driver, toolkit, torch, commit, ...}, "rows": [...]}``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tilekern.errors import InputError

# The name of the case for figures over all cases of a run.
ALL = "all problems"
RUN_FIELDS = ("date", "gpu", "driver", "toolkit", "torch", "commit")
_TEXTS = ("benchmark", "case", "provider", "metric", "unit")


@dataclass(frozen=True)
class Row:
    """One figure of a provider in a case.

    Attributes:
        spread: half the distance between the quartiles, in ``unit``; 0 if there is one sample.
        sources: the kernels of tilekern that ran, each with the digest of its source; empty for peers, and in files
            that were written before digests were recorded.
    """

    benchmark: str
    case: str
    provider: str
    metric: str
    value: float
    unit: str
    spread: float = 0.0
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The rows of one run, and its environment.

    Attributes:
        run: date, GPU, versions and commit; ``run["notes"]`` lists omissions and their reasons.
        rows: the figures; rows are added and removed, never replaced.
        file: path of the JSON file below the folder of all results; empty for results that were not read from one.
    """

    run: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    file: str = field(default="", compare=False)
    _groups: dict[tuple[str, str], list[Row]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def benchmark(self) -> str:
        """Return the benchmark of the rows."""
        return self.rows[0].benchmark if self.rows else "none"

    def row(self, case: str, provider: str, metric: str) -> Row | None:
        """Return the row of a case, provider and metric; the provider's version may be omitted."""
        found = self.figures(case, metric)
        return next((row for row in found if provider in (row.provider, row.provider.split(" ")[0])), None)

    def figures(self, case: str, metric: str) -> list[Row]:
        """Return the rows of a case and metric, one for each provider."""
        if sum(map(len, self._groups.values())) != len(self.rows):
            self._groups.clear()
            for row in self.rows:
                self._groups.setdefault((row.case, row.metric), []).append(row)
        return list(self._groups.get((case, metric), ()))

    def cases(self) -> list[str]:
        """Return the cases in the order of the rows."""
        return list(dict.fromkeys(row.case for row in self.rows))


def write_results(path: Path, results: Results) -> None:
    """Check results and write them; make the folder.

    Raises:
        InputError: the format is wrong, or the file cannot be written.
    """
    document = {"run": results.run, "rows": [_written(row) for row in results.rows]}
    _check(document, str(path))
    lines = ",\n".join("  " + json.dumps(row) for row in document["rows"])
    run = json.dumps(results.run, indent=1).replace("\n", "\n ")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{\n "run": {run},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _written(row: Row) -> dict[str, Any]:
    """Return the fields of a row; ``sources`` only if there are any."""
    return {name: value for name, value in asdict(row).items() if name != "sources" or value}


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        InputError: the file cannot be read, or its format is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as results: {error}") from None
    _check(document, str(path))
    return Results(document["run"], [Row(**row) for row in document["rows"]])


def read_folder(folder: Path) -> list[Results]:
    """Return all results below a folder, in the order of their paths."""
    paths = sorted(folder.rglob("*.json"))
    return [replace(read_results(path), file=path.relative_to(folder).as_posix()) for path in paths]


def _check(document: Any, where: str) -> None:
    if not isinstance(document, dict) or set(document) != {"run", "rows"}:
        raise InputError(f"{where}: results are an object of run and rows")
    run, rows = document["run"], document["rows"]
    if not isinstance(run, dict) or not isinstance(rows, list):
        raise InputError(f"{where}: run must be an object and rows a list")
    for name in RUN_FIELDS:
        if not isinstance(run.get(name), str) or not run[name]:
            raise InputError(f"{where}: run must say its {name} as text, got {run.get(name)!r}")
    for number, row in enumerate(rows):
        _check_row(row, f"{where}: row {number}")


def _check_row(row: Any, where: str) -> None:
    names = [one.name for one in fields(Row)]
    if not isinstance(row, dict) or set(row) | {"sources"} != set(names):
        raise InputError(f"{where} must have exactly {', '.join(names)}, got {row!r:.200}")
    for name in _TEXTS:
        if not isinstance(row[name], str) or not row[name]:
            raise InputError(f"{where}: {name} must be text, got {row[name]!r}")
    sources = row.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise InputError(f"{where}: sources must map kernels to digests, got {sources!r:.200}")
    for name in ("value", "spread"):
        number = row[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"{where}: {name} must be a finite number, got {number!r}")


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print rows: one line for each case and metric, one column for each provider."""
    from rich.console import Console
    from rich.table import Table

    rows = list(rows)
    providers = list(dict.fromkeys(row.provider for row in rows))
    table = Table("case", "metric", "unit", *providers, title=title)
    for (case, metric, unit), found in _by_line(rows).items():
        table.add_row(case, metric, unit, *(shown(found.get(provider)) for provider in providers))
    Console(width=max(120, 44 + 22 * len(providers))).print(table)


def _by_line(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.case, row.metric, row.unit), {})[row.provider] = row
    return lines


def shown(row: Row | None) -> str:
    """Return a figure as text: at least four digits, and its spread."""
    if row is None:
        return "-"
    value = f"{row.value:,.0f}" if abs(row.value) >= 10_000 else f"{row.value:.4g}"
    spread = f"{row.spread:,.0f}" if row.spread >= 100 else f"{row.spread:.2g}"
    return f"{value} ± {spread}" if row.spread else value
