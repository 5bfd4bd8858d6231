"""Write the page for maintainers: targets, misses and reasons, a step's time by parts, and each file's environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.environment import NO_GPU
from benchmarks.goals import GOALS, Goal, Verdict
from benchmarks.pages.markdown import head, link, table
from benchmarks.profiling import TOTAL
from benchmarks.providers import OURS
from benchmarks.results import ALL, RUN_FIELDS, Results, shown
from benchmarks.sources import described

NAME = "maintainers.md"
UNEXPLAINED = "not explained yet"
_MISSES = Path(__file__).parents[1] / "misses.md"
# The GPU of the targets, and no GPU.
_WITH_TARGETS = ("H200", NO_GPU)
_TEXT = """
Targets, and why figures miss them. The explanations are written by hand in
[misses.md](../../benchmarks/misses.md), everything else is made from the JSON files. *Stale* means that the source of
the kernels that a figure measured has changed since.
"""
_DOUBT = "and not measured"


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page by its file name."""
    parts = [head("Targets and misses", _TEXT)]
    for gpu in _WITH_TARGETS:
        if mine := [run for run in everything if run.run["gpu"] == gpu]:
            parts += _targets("No GPU" if gpu == NO_GPU else gpu, mine, gpu != NO_GPU)
    parts += [_steps(everything), _sustained(everything), _strategies(everything), _runs(everything)]
    return {NAME: "\n".join(filter(None, parts))}


def _targets(name: str, mine: Sequence[Results], has_gpu: bool) -> list[str]:
    judged = [
        (goal, run, verdict) for goal in GOALS for run in mine if run.benchmark == goal.benchmark
        for verdict in goal.judge(run)
    ]  # fmt: skip
    met = sum(verdict.met for *_, verdict in judged)
    parts = [f"## {name}: {met} of {len(judged)} figures meet their targets\n"]
    if judged:
        parts.append(_summary([verdict for *_, verdict in judged]))
    if missed := [(run, verdict) for _, run, verdict in judged if not verdict.met]:
        parts += [f"### Misses on {name}\n", *_misses(missed)]
    reached = {goal.title for goal, *_ in judged}
    missing = [_named(goal) for goal in GOALS if goal.needs_gpu == has_gpu and goal.title not in reached]
    if missing:
        parts.append(f"Not measured here: {'; '.join(missing)}.\n")
    return parts


def _named(goal: Goal) -> str:
    return f"{goal.title} ({goal.target})" if goal.target else goal.title


def _summary(verdicts: Sequence[Verdict]) -> str:
    """Make a line for each target: the number of its figures that meet it."""
    all_of, met = (Counter((one.what, one.target) for one in some) for some in (verdicts, filter(_is_met, verdicts)))
    lines = [(what, target, f"{met[what, target]} of {count}") for (what, target), count in all_of.items()]
    return table(("figure", "target", "met"), lines)


def _is_met(verdict: Verdict) -> bool:
    return verdict.met


def _misses(missed: Sequence[tuple[Results, Verdict]]) -> list[str]:
    """Put misses that share an explanation in one table, with the explanation below it."""
    why = explanations()
    groups: dict[str, list[tuple[Results, Verdict]]] = {}
    for run, verdict in missed:
        groups.setdefault(why.get((verdict.what, verdict.case), UNEXPLAINED), []).append((run, verdict))
    parts = []
    for text, found in groups.items():
        lines = [
            (one.what, one.case, one.target, one.figure, one.peers, described(run, one.case), link(run))
            for run, one in found
        ]
        columns = ("figure", "of", "target", "tilekern", "peers", "source", "data")
        parts += [table(columns, lines), f"{text[0].upper()}{text[1:].rstrip('.')}.\n"]
    return parts


def explanations() -> dict[tuple[str, str], str]:
    """Return the texts of ``misses.md`` by the figure and the case that their headings name."""
    found: dict[tuple[str, str], str] = {}
    for paragraph in _MISSES.read_text(encoding="utf-8").split("\n\n## ")[1:]:
        headings, _, text = paragraph.partition("\n\n")
        for heading in headings.split("\n## "):
            what, _, case = heading.partition(" | ")
            found[what, case] = " ".join(text.split())
    return found


def _steps(everything: Sequence[Results]) -> str:
    """Split a training step's time: a line for each profile, its parts in percent, and the floor."""
    runs = [run for run in everything if run.benchmark == "train_profile"]
    ending = " share"
    parts = sorted({row.metric.removesuffix(ending) for run in runs for row in run.rows if row.metric.endswith(ending)})
    lines = []
    for run in runs:
        for case in run.cases():
            shares = [run.row(case, OURS, f"{part}{ending}") for part in parts]
            times = [run.row(case, OURS, f"{name} ms") for name in (TOTAL, "floor")]
            cells = [*(f"{row.value:.1%}" if row else "-" for row in shares), *map(shown, times)]
            lines.append((case, str(run.run["gpu"]), *cells, described(run, case), link(run)))
    if not lines:
        return ""
    text = "The floor is every matrix product as fast as it is alone, and attention and the optimizer as measured.\n"
    columns = ("step", "GPU", *parts, "whole step, ms", "floor, ms", "source", "data")
    return "\n".join(["## Where a training step's time goes\n", text, table(columns, lines)])


def _sustained(everything: Sequence[Results]) -> str:
    """Show rates that a GPU holds for seconds: a line for each kind of work."""
    lines = []
    for run in (run for run in everything if run.benchmark == "sustained"):
        for case, provider in dict.fromkeys((row.case, row.provider) for row in run.rows):
            rate, *others = (
                run.row(case, provider, one) for one in ("rate", "power_w", "power_limit_w", "sm_clock_mhz")
            )
            what = f"{shown(rate)} {rate.unit}" if rate else "-"
            lines.append(
                (case, provider, str(run.run["gpu"]), what, *map(shown, others), described(run, case), link(run))
            )
    if not lines:
        return ""
    columns = ("work", "provider", "GPU", "rate", "power, W", "limit, W", "clock, MHz", "source", "data")
    return f"## Rates held for seconds\n\n{table(columns, lines)}"


def _strategies(everything: Sequence[Results]) -> str:
    """Render the tuner's strategies on the same candidates, a line for each state of the GPU."""
    lines = []
    for run in (run for run in everything if run.benchmark == "strategies"):
        for case, provider in dict.fromkeys((row.case, row.provider) for row in run.rows if row.case.startswith(ALL)):
            figures = (run.row(case, provider, name) for name in ("gpu", "wall", "regret", "worst_regret"))
            lines.append((case, provider, str(run.run["gpu"]), *map(shown, figures), described(run, case), link(run)))
    if not lines:
        return ""
    text = (
        "The time that a race of every problem takes once, and how much slower its choices are than the best by an "
        "independent measurement: the mean over problems, and the worst choice.\n"
    )
    columns = (
        "GPU's state",
        "strategy",
        "GPU",
        "GPU time, ms",
        "wall time, ms",
        "mean loss, %",
        "worst, %",
        "source",
        "data",
    )
    return "\n".join(["## Strategies of the tuner\n", text, table(columns, lines)])


def _runs(everything: Sequence[Results]) -> str:
    """Make a line for each file: its environment, and the number of doubts in its notes."""
    commits = {str(run.run["commit"])[:7] for run in everything}
    lines = []
    for run in everything:
        notes = run.run["notes"]
        facts = (str(run.run[name])[:7] if name == "commit" else str(run.run[name]) for name in RUN_FIELDS)
        doubts = sum(_DOUBT in note for note in notes)
        lines.append((link(run), run.benchmark, *facts, str(len(notes)), str(doubts)))
    text = (
        f"{_count(everything, 'file')} of {_count(commits, 'commit')}. A release has all of them from one commit. "
        "The last two columns count the notes in the file, and those notes that name a config that was used "
        f"{_DOUBT}.\n"
    )
    columns = ("file", "benchmark", *RUN_FIELDS, "notes", "not measured")
    return "\n".join(["## Runs\n", text, table(columns, lines)])


def _count(things: Iterable[object], name: str) -> str:
    number = len(list(things))
    return f"{number} {name}{'' if number == 1 else 's'}"
