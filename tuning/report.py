"""What a tuning run prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tuning.commands.tune import Outcome
    from tuning.publishing import Winner


def print_outcome(outcome: Outcome) -> None:
    """The table of winners, then one line for each stage and where the results lie."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(_table(outcome))
    for stage, seconds in outcome.seconds.items():
        console.print(f"{stage}: {seconds:.1f} s{_details(outcome, stage)}", highlight=False)
    for note in outcome.notes:
        console.print(note, highlight=False)
    if outcome.results:
        console.print(
            f"{len(outcome.winners)} records in {outcome.cache}; the same as one file: {outcome.results}",
            highlight=False,
        )


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"{outcome.model} on {outcome.target.name} ({outcome.target.arch}), {outcome.toolkit['key']}")
    for name in ("kernel", "problem", "config"):
        table.add_column(name, overflow="fold")
    for name in ("time, us", "of a copy", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("how")
    for winner in outcome.winners:
        table.add_row(*_row(winner))
    return table


def _row(winner: Winner) -> list[str]:
    config = " ".join(f"{name}={value}" for name, value in winner.record.config.items() if value not in (0, False))
    return [
        winner.kernel,
        " ".join(str(value) for value in winner.problem.values()),
        config,
        f"{winner.time_us:.1f}",
        f"{100 * winner.share:.0f} %",
        f"{winner.gain:.2f}x",
        winner.record.provenance,
    ]


def _details(outcome: Outcome, stage: str) -> str:
    if stage == "compile" and outcome.compile:
        found = outcome.compile
        share = f", {100 * found['tileiras_share']:.0f} % of the cores' time in tileiras" if found["compiled"] else ""
        return f" ({found['distinct']} distinct artifacts, {found['compiled']} new, {found['failed']} failed{share})"
    if stage == "measure" and outcome.measure:
        found = outcome.measure
        return f" ({found['timed']} timed, {found['wrong']} wrong, {found['quarantined']} in quarantine)"
    return ""
