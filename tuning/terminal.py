"""Output of the tuner's command line for people: tables, progress bars, and the outcome of runs and dry runs."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tilekern.warning import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task
    from rich.table import Table

    from tilekern.tuning.pipeline import Result, Tell
    from tilekern.tuning.predict.estimating import Count, PlanReport
    from tilekern.tuning.publishing import Winner
    from tilekern.tuning.sweep.plan import Named

# Where neither a terminal nor COLUMNS says how wide: in a pipe or a file.
PIPE_COLUMNS = 160
# In fewer columns than these, cells that belong together stand one below the other.
STACKED_BELOW = 140


def table_console() -> Console:
    """Return a console as wide as ``COLUMNS`` says, else as the terminal; 160 columns in a pipe.

    rich alone takes 80 for a plain terminal (``TERM=dumb``) whatever ``COLUMNS`` says, and in a pipe the width of the
    terminal of the error stream.
    """
    from rich.console import Console

    columns, lines = shutil.get_terminal_size((PIPE_COLUMNS, 24))
    # Names come from files, and what rich would take for markup in them is their own.
    return Console(width=columns, height=lines, markup=False, emoji=False)


def out(console: Console, line: str) -> None:
    """Print a line unwrapped, without control characters."""
    console.out(printable(line), highlight=False)


def sizes_of(problem: Mapping[str, object]) -> str:
    """Return a problem's values for a table: numbers and dtypes, and the names of flags that are on."""
    return " ".join(name if value is True else str(value) for name, value in problem.items() if value is not False)


def short(config: Mapping[str, object]) -> str:
    """Return a config for a table, without what is off."""
    return " ".join(f"{name}={value}" for name, value in config.items() if value not in (0, False))


def table_for(
    console: Console,
    title: str,
    columns: Sequence[Sequence[str]],
    rows: Iterable[Sequence[str]],
    right: Collection[str],
    footer: Sequence[str] = (),
) -> Table:
    """Make a table that also fits a console of 80 columns.

    Args:
        console: where it is printed.
        title: its title.
        columns: the columns' names, by what stands in one column where the console is narrow.
        rows: a cell for each name.
        right: the names of columns that are flushed right.
        footer: a cell for each name, or nothing.
    """
    from rich.table import Table

    groups = columns if console.width < STACKED_BELOW else [[name] for name in itertools.chain(*columns)]
    ends = list(itertools.accumulate(len(group) for group in groups))

    def stacked(cells: Sequence[str]) -> list[str]:
        shown = list(map(printable, cells))
        return ["\n".join(shown[end - len(group) : end]) for group, end in zip(groups, ends, strict=True)]

    table = Table(title=printable(title), show_footer=bool(footer))
    names, sums = stacked(list(itertools.chain(*columns))), stacked(footer) if footer else [""] * len(groups)
    for group, name, total in zip(groups, names, sums, strict=True):
        table.add_column(name, total, overflow="fold", justify="right" if group[0] in right else "left")
    for row in rows:
        table.add_row(*stacked(row))
    return table


PUBLISH = "publish"
_SPEED_OF_S = 600.0


@contextlib.contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Tell]:
    """Show a bar for each stage on the error stream; stages may run at the same time."""
    if quiet:
        yield lambda _stage, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Left(ProgressColumn):
        """The time that is left, once enough is done to tell."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            seconds = task.time_remaining
            return Text("" if seconds is None else f"so far, about {timedelta(seconds=round(seconds))} left")

    columns = (
        TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        Left(),
    )  # fmt: skip
    # A single candidate may take a minute, so the speed is that of a longer time than rich takes by default.
    progress = Progress(*columns, console=Console(stderr=True), speed_estimate_period=_SPEED_OF_S)
    bars: dict[str, Any] = {}
    lock = threading.Lock()

    def tell(stage: str, done: int, total: int) -> None:
        if stage == PUBLISH:  # which takes no time
            return
        with lock:  # stages that run at once tell from threads of their own
            if not bars:
                progress.start()  # not before: what fails first prints its one line alone
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=None)
        progress.update(bars[stage], completed=done, total=total or None)

    try:
        yield tell
    except BaseException:
        # A stage that failed at its start leaves nothing but its error.
        for bar in (task.id for task in progress.tasks if task.total is None):
            progress.remove_task(bar)
        raise
    finally:
        if bars:
            shown = progress if progress.tasks else progress.live  # a Progress ends with an empty line in a pipe
            progress.live.transient = not progress.tasks
            shown.stop()


# How many problems that have no record are named; --json has all.
_LEFT_OUT = 8


def print_result(outcome: Result) -> None:
    """Print the table of winners, then one line for each stage, and the paths of the results.

    Lines hold paths and commands, and are never wrapped.
    """
    console = table_console()
    if outcome.winners:
        title = f"{outcome.model} on {outcome.target.name} ({outcome.target.arch}), {outcome.toolkit['key']}"
        columns = [_PROBLEM, ["config"], ["time, us", "of roofline"], ["gain", "how"]]
        numbers = ["time, us", "of roofline", "gain"]
        rows = list(map(_row, outcome.winners))
        if any(winner.price for winner in outcome.winners):
            columns.append(["same bits"])
            numbers.append("same bits")
            for row, winner in zip(rows, outcome.winners, strict=True):
                row.append("-" if winner.price is None else f"{winner.price:.2f}x")
        console.print(table_for(console, title, columns, rows, numbers))
    for stage, seconds in outcome.seconds.items():
        out(console, f"{stage}: {seconds:.1f} s{_details(outcome, stage)}")
    for note in outcome.notes:
        out(console, note)
    for line in (*about_lost(outcome.lost), *_about_budget(outcome)):
        out(console, line)
    if outcome.results:
        out(
            console,
            f"{len(outcome.winners)} records in {outcome.cache}; the same as one file: {outcome.results}",
        )
    for pack, records in outcome.packs.items():
        out(console, f"{records} records in {pack}")


def about_lost(lost: Mapping[Named, str]) -> Iterator[str]:
    """Yield lines on the problems whose winner has lost an artifact."""
    if not lost:
        return
    yield f"{len(lost)} problems have no record, as an artifact of their winner is lost"
    for (kernel, problem), reason in itertools.islice(lost.items(), _LEFT_OUT):
        yield f"lost: {kernel} {problem.key}: {reason}"
    if len(lost) > _LEFT_OUT:
        yield f"lost: {len(lost) - _LEFT_OUT} more; --json names all"


def _about_budget(outcome: Result) -> Iterator[str]:
    """Yield lines on the problems that the budget left out, the most valuable first, and what serves them."""
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
    """Print the table of problems, then the rules that forbid configs, then the time of each stage."""
    console = table_console()
    console.print(_plan_table(report, console))
    if report.ruled_out():
        rows = [(kernel, str(number), reason) for (kernel, reason), number in report.ruled_out().items()]
        console.print(table_for(console, "ruled out", [["kernel"], ["points"], ["because"]], rows, ["points"]))
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


def _row(winner: Winner) -> list[str]:
    return [
        winner.kernel,
        sizes_of(winner.problem),
        short(winner.record.config),
        f"{winner.time_us:.1f}",
        f"{winner.roofline.bound} {100 * winner.share:.0f} %",
        f"{winner.gain:.2f}x",
        winner.record.provenance + (", in the step" if winner.in_step else ""),
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
    if stage == "step" and outcome.step:
        found = outcome.step
        others = f"{found['changed']} of them not the fastest in a row"
        return f" ({found['chosen']} kernels chosen in the step of a token, {others}; {found['tried']} others tried)"
    return ""


# How many reasons one line has room for; `status` and --json have all.
_REASONS = 3


def _because(found: Mapping[str, Any]) -> str:
    """Return the reasons of failures, the commonest first, each with its number if there are several."""
    reasons = sorted(found["reasons"].items(), key=lambda item: -item[1])
    said = [f"{number} x {reason}" if len(reasons) > 1 else reason for reason, number in reasons[:_REASONS]]
    more = [f"{len(reasons) - _REASONS} other reasons"] if len(reasons) > _REASONS else []
    return f": {'; '.join([*said, *more])}" if said else ""
