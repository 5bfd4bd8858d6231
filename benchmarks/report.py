"""RESULTS.md: a pure function of the JSON files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.environment import NO_GPU
from benchmarks.explanations import EXPLAINED, UNEXPLAINED
from benchmarks.goals import GOALS, Goal, Verdict
from benchmarks.results import ALL, RUN_FIELDS, Results, Row, shown

_HEAD = """# Results

Made by `python -m benchmarks report` from the JSON files in `benchmarks/results/`; edit nothing here.
GPU times are medians with half the distance between the quartiles; tilekern and its peers took turns in one run.
"A copy" is a device-to-device copy of the bytes that the op must move (each input read once, each output written once).
"""


def render(everything: Sequence[Results]) -> str:
    """The report on these results."""
    parts = [_HEAD]
    for gpu in dict.fromkeys(results.run["gpu"] for results in everything):
        mine = [results for results in everything if results.run["gpu"] == gpu]
        parts += [
            f"## {'No GPU' if gpu == NO_GPU else gpu}\n",
            *_targets(mine, gpu != NO_GPU),
            "### All figures\n",
            *(_figures(results) for results in mine),
        ]
    parts += ["## Runs\n", _runs(everything)]
    return "\n".join(parts).rstrip() + "\n"


def _targets(mine: Sequence[Results], has_gpu: bool) -> Iterator[str]:
    judged = [(goal, verdict) for goal in GOALS for results in _of(mine, goal) for verdict in goal.judge(results)]
    met = sum(verdict.met for _, verdict in judged)
    yield f"### Targets: {met} of {len(judged)} figures meet theirs\n"
    if judged:
        lines = [_line(verdict) for _, verdict in judged]
        yield _table(("what", "on", "target", "tilekern", "met", "peers"), lines)
    missed = [verdict for _, verdict in judged if not verdict.met]
    if missed:
        yield "### Misses, and why\n"
        yield "".join(f"- **{v.what}, {v.case}**: {EXPLAINED.get((v.what, v.case), UNEXPLAINED)}\n" for v in missed)
    due = [goal for goal in GOALS if goal.needs_gpu == has_gpu]
    missing = [goal.title for goal in due if goal not in [one for one, _ in judged]]
    if missing:
        yield f"Not measured here: {'; '.join(missing)}.\n"


def _of(mine: Sequence[Results], goal: Goal) -> list[Results]:
    return [results for results in mine if results.benchmark == goal.benchmark]


def _line(verdict: Verdict) -> tuple[str, ...]:
    met = "yes" if verdict.met else "**no**"
    return verdict.what, verdict.case, verdict.target, verdict.figure, met, verdict.peers


def _figures(results: Results) -> str:
    """The rows of a run, a line for each case and metric, a column for each provider; of many problems their sums."""
    chosen = [row for row in results.rows if row.case == ALL] or results.rows
    more = len(results.cases()) - 1 if chosen is not results.rows else 0
    providers = list(dict.fromkeys(row.provider for row in chosen))
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in chosen:
        lines.setdefault((row.case, row.metric, row.unit), {})[row.provider] = row
    body = [(*key, *(shown(found.get(provider)) for provider in providers)) for key, found in lines.items()]
    said = [*results.run.get("notes", []), *([f"{more} problems are in the JSON file, each by itself"] if more else [])]
    notes = "".join(f"- {note}\n" for note in said)
    title = f"#### {results.benchmark} ({results.run['date']})\n"
    return "\n".join([title, _table(("case", "metric", "unit", *providers), body), *([notes] if notes else [])])


def _runs(everything: Sequence[Results]) -> str:
    lines = [(results.benchmark, *(results.run[name] for name in RUN_FIELDS)) for results in everything]
    return _table(("benchmark", *RUN_FIELDS), lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
