"""The output of a tuning run and a dry run for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tilekern.tuning.terminal.console import out, sizes_of, table_console, table_for

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilekern.tuning.pipeline import Result
    from tilekern.tuning.predict.estimating import Count, PlanReport
    from tilekern.tuning.publishing import Winner


# How many problems that a budget left out are named; --json has all.
_LEFT_OUT = 8


def print_result(outcome: Result) -> None:
    """Print the table of winners, where there are any, then one line for each stage and where the results lie.

    Lines hold paths and commands, which are never wrapped.
    """
    console = table_console()
    if outcome.winners:
        console.print(_table(outcome, console))
    for stage, seconds in outcome.seconds.items():
        out(console, f"{stage}: {seconds:.1f} s{_details(outcome, stage)}")
    for note in outcome.notes:
        out(console, note)
    for line in _about_budget(outcome):
        out(console, line)
    if outcome.results:
        out(
            console,
            f"{len(outcome.winners)} records in {outcome.cache}; the same as one file: {outcome.results}",
        )
    for pack, records in outcome.packs.items():
        out(console, f"{records} records in {pack}")


def _about_budget(outcome: Result) -> Iterator[str]:
    """Lines on what a budget left out, and what serves it; the most valuable problems first."""
    if not outcome.budget_s:
        return
    spent = f"budget: {outcome.spent_s:.0f} s of {outcome.budget_s:g} s spent"
    left = outcome.left_out
    if not left:
        yield f"{spent}; nothing is left out"
        return
    finishing_s = sum(problem.seconds for problem in left)
    yield (
        f"{spent}; {len(left)} problems are left out, about {_duration(finishing_s)} more; the same command goes on "
        "with them"
    )
    for problem in left[:_LEFT_OUT]:
        yield f"left out: {problem.kernel} {problem.problem.key}: {problem.reason}, {problem.provenance} serves"
    if len(left) > _LEFT_OUT:
        yield f"left out: {len(left) - _LEFT_OUT} more; --json names all"


def print_plan(report: PlanReport) -> None:
    """Print the table of problems, then what rules points out, then one line for each stage's time."""
    console = table_console()
    console.print(_plan_table(report, console))
    if report.ruled_out():
        console.print(_reasons(report, console))
    for stage, found in report.estimates().items():
        out(console, f"{stage}: about {_duration(found.seconds)} ({found.basis})")
    for note in report.notes:
        out(console, note)
    out(console, "a dry run: nothing was written")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} minutes"


_PROBLEM = ("kernel", "problem")
_COUNTS = (("space", "ruled out"), ("candidates",), ("artifacts", "compiled"), ("to measure", "measured"))


def _plan_table(report: PlanReport, console: Console) -> Table:
    totals = report.totals()
    sums = ("space", "ruled_out", "candidates", "artifacts", "compiled", "to_measure", "settled")
    return table_for(
        console,
        f"the plan of {report.model} on {report.target.name} ({report.target.arch})",
        [_PROBLEM, *_COUNTS],
        map(_plan_row, report.counts),
        [name for group in _COUNTS for name in group],
        ["all", f"{totals['problems']} problems", *(str(totals[field]) for field in sums)],
    )


def _plan_row(item: Count) -> list[str]:
    ruled_out = sum(item.ruled_out.values())
    numbers = (item.space, ruled_out, item.candidates, item.artifacts, item.compiled, item.to_measure, item.settled)
    return [item.kernel, sizes_of(item.problem), *map(str, numbers)]


def _reasons(report: PlanReport, console: Console) -> Table:
    rows = [(kernel, str(number), reason) for (kernel, reason), number in report.ruled_out().items()]
    return table_for(console, "ruled out", [["kernel"], ["points"], ["because"]], rows, ["points"])


def _table(outcome: Result, console: Console) -> Table:
    title = f"{outcome.model} on {outcome.target.name} ({outcome.target.arch}), {outcome.toolkit['key']}"
    columns = [_PROBLEM, ["config"], ["time, us", "of roofline"], ["gain", "how"]]
    return table_for(console, title, columns, map(_row, outcome.winners), ["time, us", "of roofline", "gain"])


def _row(winner: Winner) -> list[str]:
    config = " ".join(f"{name}={value}" for name, value in winner.record.config.items() if value not in (0, False))
    return [
        winner.kernel,
        sizes_of(winner.problem),
        config,
        f"{winner.time_us:.1f}",
        f"{winner.roofline.bound} {100 * winner.share:.0f} %",
        f"{winner.gain:.2f}x",
        winner.record.provenance,
    ]


def _details(outcome: Result, stage: str) -> str:
    if stage == "compile" and outcome.compile:
        found = outcome.compile
        left = f", {found['open']} open" if found["open"] else ""
        share = f", {100 * found['tileiras_share']:.0f} % of the cores' time in tileiras" if found["compiled"] else ""
        failed = f"{found['failed']} failed{_because(found) if found['failed'] else ''}"
        return f" ({found['distinct']} distinct artifacts, {found['compiled']} new, {failed}{left}{share})"
    if stage == "measure" and outcome.measure:
        found = outcome.measure
        is_beside = outcome.compile and found["seconds"] > outcome.seconds["measure"]
        beyond = " beyond it" if is_beside else ""
        why = _because(found) if found["wrong"] or found["quarantined"] else ""
        return f"{beyond} ({found['timed']} timed, {found['wrong']} wrong, {found['quarantined']} in quarantine{why})"
    return ""


# How many reasons one line has room for; `status` and --json have all.
_REASONS = 3


def _because(found: Mapping[str, Any]) -> str:
    """The reasons of what failed, the commonest first, each with its number where there are several."""
    reasons = sorted(found["reasons"].items(), key=lambda item: -item[1])
    said = [f"{number} x {reason}" if len(reasons) > 1 else reason for reason, number in reasons[:_REASONS]]
    more = [f"{len(reasons) - _REASONS} other reasons"] if len(reasons) > _REASONS else []
    return f": {'; '.join([*said, *more])}" if said else ""
