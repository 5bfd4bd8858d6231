"""The output of a tuning run and a dry run for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuning.terminal.console import table_console, table_for
from tuning.terminal.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tuning.predict.estimating import Count, PlanReport
    from tuning.publishing import Winner


def print_report(done: Outcome | PlanReport) -> None:
    """Print what a run did, or what a dry run found."""
    if isinstance(done, Outcome):
        _print_outcome(done)
    else:
        _print_plan(done)


def _print_outcome(outcome: Outcome) -> None:
    """The table of winners, where there are any, then one line for each stage and where the results lie.

    Lines hold paths and commands: ``out`` never wraps them.
    """
    console = table_console()
    if outcome.winners:
        console.print(_table(outcome, console))
    for stage, seconds in outcome.seconds.items():
        console.out(f"{stage}: {seconds:.1f} s{_details(outcome, stage)}", highlight=False)
    for note in outcome.notes:
        console.out(note, highlight=False)
    if outcome.results:
        console.out(
            f"{len(outcome.winners)} records in {outcome.cache}; the same as one file: {outcome.results}",
            highlight=False,
        )
    for pack, records in outcome.packs.items():
        console.out(f"{records} records in {pack}", highlight=False)


def _print_plan(report: PlanReport) -> None:
    """The table of problems, then what rules points out, then one line for each stage's time."""
    console = table_console()
    console.print(_plan_table(report, console))
    if report.ruled_out():
        console.print(_reasons(report, console))
    for stage, found in report.estimates().items():
        console.out(f"{stage}: about {_duration(found.seconds)} ({found.basis})", highlight=False)
    for note in report.notes:
        console.out(note, highlight=False)
    console.out("a dry run: nothing was written", highlight=False)


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
    return [item.kernel, " ".join(map(str, item.problem.values())), *map(str, numbers)]


def _reasons(report: PlanReport, console: Console) -> Table:
    rows = [(kernel, str(number), reason) for (kernel, reason), number in report.ruled_out().items()]
    return table_for(console, "ruled out", [["kernel"], ["points"], ["because"]], rows, ["points"])


def _table(outcome: Outcome, console: Console) -> Table:
    title = f"{outcome.model} on {outcome.target.name} ({outcome.target.arch}), {outcome.toolkit['key']}"
    columns = [_PROBLEM, ["config"], ["time, us", "of roofline"], ["gain", "how"]]
    return table_for(console, title, columns, map(_row, outcome.winners), ["time, us", "of roofline", "gain"])


def _row(winner: Winner) -> list[str]:
    config = " ".join(f"{name}={value}" for name, value in winner.record.config.items() if value not in (0, False))
    return [
        winner.kernel,
        " ".join(str(value) for value in winner.problem.values()),
        config,
        f"{winner.time_us:.1f}",
        f"{winner.roofline.bound} {100 * winner.share:.0f} %",
        f"{winner.gain:.2f}x",
        winner.record.provenance,
    ]


def _details(outcome: Outcome, stage: str) -> str:
    if stage == "compile" and outcome.compile:
        found = outcome.compile
        left = f", {found['open']} open" if found["open"] else ""
        share = f", {100 * found['tileiras_share']:.0f} % of the cores' time in tileiras" if found["compiled"] else ""
        return (
            f" ({found['distinct']} distinct artifacts, {found['compiled']} new, {found['failed']} failed{left}{share})"
        )
    if stage == "measure" and outcome.measure:
        found = outcome.measure
        is_beside = outcome.compile and found["seconds"] > outcome.seconds["measure"]
        beyond = " beyond it" if is_beside else ""
        return f"{beyond} ({found['timed']} timed, {found['wrong']} wrong, {found['quarantined']} in quarantine)"
    return ""
