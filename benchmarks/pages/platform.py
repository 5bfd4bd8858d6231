"""Write the page for people who run jobs and tunes: start-up and host time, tuning, and the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.environment import NO_GPU
from benchmarks.exchange import BENCHMARK as EXCHANGE
from benchmarks.exchange import SERVES
from benchmarks.pages.markdown import head, link, table
from benchmarks.pages.models import LAG, Step
from benchmarks.providers import OURS
from benchmarks.results import Results, shown
from benchmarks.sources import described

NAME = "platform.md"
_TEXT = """
Costs outside of the kernels. Figures are medians with half the distance between the quartiles. Figures of Python code
name the commit that they measured; figures of kernels have the digest of the kernels' source, and *stale* means that it
has changed since, and its machine code with it. The JSON files have more figures.
"""
# The figures shown of each benchmark: the page's title of each metric.
_START: Mapping[str, Mapping[str, str]] = {
    "startup": {
        "import": "`import tilekern`, without torch",
        "process": "whole process",
        "first_step_lag_cold": "first step over the second, empty compiler caches",
        "first_step_lag": "first step over the second, filled compiler caches",
        "first_launch": "first launch of a kernel",
        "lookup_and_first_launch": "lookup and first launch of a kernel",
    },
}
_HOST: Mapping[str, Mapping[str, str]] = {
    "host": {
        "launch": "bare launch of the forward's kernel",
        "allocation": "allocation of the results",
        "lookup": "lookup of a known problem",
        "forward_no_grad": "forward under `no_grad`",
        "forward": "forward with autograd",
        "forward_backward": "forward and backward",
    },
}
_TUNING: Mapping[str, Mapping[str, str]] = {
    "tune": {
        "whole_s": "whole tune",
        "plan_s": "its plan stage",
        "compile_s": "its compile stage",
        "measure_s": "its measure stage",
        "problems": "problems",
        "artifacts": "artifacts compiled",
        "timed": "candidates timed",
        "wrong": "candidates with a wrong result",
        "quarantined": "candidates quarantined",
    },
    "compile": {
        "seconds": "compile stage",
        "jobs": "compilers at once",
        "distinct_candidates": "distinct candidates",
        "tileiras_share": "share of the cores' time in the compiler",
        "share_of_linear": "speed, over that of one core times the cores",
    },
    "gpus": {
        "measure_on_one": "measure stage on one GPU",
        "measure_on_several": "measure stage on several GPUs",
        "gpus": "GPUs",
        "share_of_one": "time on several, over that on one",
    },
    "races": {
        "share_near_best": "choices within 1 % of the best",
        "share_repeated": "choices within 1 % of the next run's",
        "gpu_share_of_search": "GPU time, over that of cuda.tile's search",
        "wall_share_of_search": "wall time, over that of cuda.tile's search",
    },
    "regret": {
        "median_regret": "time of the predicted winner over the best, median",
        "p90_regret": "time of the predicted winner over the best, 90th percentile",
        "worst_regret": "time of the predicted winner over the best, worst",
    },
}
_CACHE: Mapping[str, Mapping[str, str]] = {
    "cache_scale": {
        "first_lookup": "first lookup of a process",
        "first_lookup_off_disk": "first lookup of a process, files not in memory",
        "lookup": "further lookup",
        "lookup_off_disk": "further lookup, files not in memory",
        "lookup_of_nearest": "lookup that ends at the nearest record",
        "start": "a job's start: import, layers, 40 lookups",
        "start_off_disk": "a job's start, files not in memory",
        "ls_filtered": "`cache_tools ls` with a filter, whole process",
        "verify": "`cache_tools verify`",
        "verify_rate": "rate of `cache_tools verify` on one core",
    },
}


_COUNTS = ("problems", "equal")
_LOSSES: Mapping[str, str] = {
    "median_loss": "median loss",
    "p90_loss": "90th percentile",
    "worst_loss": "worst",
}


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page by its file name."""
    parts = [
        head("Platform", _TEXT),
        _section("Start-up", everything, _START),
        _first_steps(everything),
        _section("Host time of one call", everything, _HOST),
        _section("Tuning", everything, _TUNING),
        _exchanges(everything),
        _section("Cache", everything, _CACHE),
    ]
    return {NAME: "\n".join(filter(None, parts))}


def _section(title: str, everything: Sequence[Results], shown_of: Mapping[str, Mapping[str, str]]) -> str:
    """Make a table over all runs of these benchmarks, with a column for each provider."""
    runs = [run for benchmark in shown_of for run in everything if run.benchmark == benchmark]
    rows = [row for run in runs for row in run.rows if row.metric in shown_of[run.benchmark]]
    peers = sorted({row.provider.split(" ")[0] for row in rows} - {OURS})
    lines = [line for run in runs for line in _lines(run, shown_of[run.benchmark], peers)]
    if not lines:
        return ""
    return f"## {title}\n\n" + table(("figure", "of", "GPU", "unit", OURS, *peers, "source", "data"), lines)


def _lines(run: Results, names: Mapping[str, str], peers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Make the lines of a run: one for each case and metric with a figure."""
    for case in run.cases():
        for metric, name in names.items():
            figures = [run.row(case, provider, metric) for provider in (OURS, *peers)]
            if any(figures):
                unit = next(row.unit for row in figures if row).replace("1", "-")
                yield name, case, _gpu(run), unit, *map(shown, figures), described(run, case), link(run)


def _first_steps(everything: Sequence[Results]) -> str:
    """Show first steps of whole models in runs of tilekern alone; each run's notes describe its conditions."""
    lines = []
    for run in everything:
        for case in run.cases() if run.benchmark == "train" else ():
            row = run.row(case, OURS, LAG)
            if row and not Step(run, case).peers:
                notes = " ".join(f"{note.rstrip('.')}." for note in run.run["notes"] if ": " not in note)
                lines.append((case, _gpu(run), run.run["toolkit"], shown(row), notes, described(run, case), link(run)))
    if not lines:
        return ""
    columns = ("training step", "GPU", "compiler", "first step over the second, s", "", "source", "data")
    return f"### First steps of whole models\n\n{table(columns, lines)}"


_OF_OTHERS = """
A GPU without a record of a problem runs that of the most similar GPU of its architecture. The loss is the time of that
GPU's winner over this GPU's own, less one, on problems that both were tuned for; equal winners lose nothing. With a
loss of up to {serves:.0f} % in the median the records serve; beyond that the GPUs are tuned apart.
"""


def _exchanges(everything: Sequence[Results]) -> str:
    """Show the loss of another GPU's records, over all problems and by family of kernels."""
    lines = []
    for run in everything:
        for case in run.cases() if run.benchmark == EXCHANGE else ():
            figures = {name: run.row(case, OURS, name) for name in (*_COUNTS, *_LOSSES)}
            counts = [f"{row.value:.0f}" for name in _COUNTS if (row := figures[name])]
            losses = [f"{100 * row.value:+.1f} %" for name in _LOSSES if (row := figures[name])]
            if counts and losses:
                of = (_gpu(run), str(run.run["records_of"]), case)
                lines.append((*of, *counts, *losses, described(run, case), link(run)))
    if not lines:
        return ""
    columns = ("GPU", "records of", "kernels", "problems", "equal winners", *_LOSSES.values(), "source", "data")
    return f"## Records of a similar GPU\n{_OF_OTHERS.format(serves=100 * SERVES)}\n{table(columns, lines)}"


def _gpu(run: Results) -> str:
    return "-" if run.run["gpu"] == NO_GPU else str(run.run["gpu"])
