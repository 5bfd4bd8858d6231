"""The targets for speed on the H200, each as a function of one file of results: what was reached, and was it enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.kernels import COPY
from benchmarks.providers import OURS
from benchmarks.results import Results, Row, shown


@dataclass(frozen=True)
class Verdict:
    """One line of the report: what, on what, the target, the figure, whether it meets the target, the peers'."""

    what: str
    case: str
    target: str
    figure: str
    met: bool
    peers: str


@dataclass(frozen=True)
class Goal:
    """A line of the table of targets: its title, the benchmark that it reads, and its verdicts on results."""

    title: str
    benchmark: str
    judge: Callable[[Results], Iterator[Verdict]]


def _kernel_goal(op: str, metrics: Sequence[str], least_share: float, cases: Sequence[str] | None = None) -> Goal:
    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            if case.split(" ")[0] != op or (cases is not None and case not in cases):
                continue
            for metric in metrics:
                yield from _kernel_verdict(results, case, metric, least_share)

    return Goal(f"{op}: {', '.join(metrics)}", "kernels", judge)


def _kernel_verdict(results: Results, case: str, metric: str, least_share: float) -> Iterator[Verdict]:
    ours, share = results.row(case, OURS, metric), results.row(case, OURS, f"{metric}_share_of_copy")
    if ours is None or share is None:
        return
    peers = _peers(results, case, metric)
    best = min(peers, key=lambda row: row.value, default=None)
    # Equal within what the two medians leave open counts as no slower.
    slower = best is not None and ours.value - best.value > ours.spread + best.spread
    target = f"≥ {least_share:.0%} of a copy; no slower than the best peer"
    figure = f"{shown(ours)} us, {share.value:.1%} of a copy"
    met = share.value >= least_share and not slower
    yield Verdict(f"{case.split(' ', maxsplit=1)[0]} {metric}", case, target, figure, met, _listed(peers))


def _peers(results: Results, case: str, metric: str) -> list[Row]:
    found = [row for row in results.rows if (row.case, row.metric) == (case, metric)]
    return sorted((row for row in found if row.provider not in (OURS, COPY)), key=lambda row: row.value)


def _listed(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.provider} {shown(row)} {row.unit}".removesuffix(" 1") for row in rows) or "-"


def _host(results: Results) -> Iterator[Verdict]:
    for case in results.cases():
        plain, bare = results.row(case, OURS, "forward_no_grad"), results.row(case, "ct.launch", "launch")
        if plain and bare:
            ratio = plain.value / bare.value
            figure = f"{shown(plain)} us, {ratio:.2f} x {shown(bare)} us"
            peers = _listed(_peers(results, case, "forward_no_grad"))
            yield Verdict("forward under no_grad", case, "≤ 2.5 x a bare ct.launch", figure, ratio <= 2.5, peers)
        for metric in ("forward", "forward_backward"):
            ours, liger = results.row(case, OURS, metric), results.row(case, "liger-triton", metric)
            if ours and liger:
                figure = f"{shown(ours)} us, {ours.value / liger.value:.2f} of Liger's"
                peers = _listed(_peers(results, case, metric))
                met = ours.value <= 0.5 * liger.value
                yield Verdict(f"{metric} with autograd", case, "≤ half of Liger's", figure, met, peers)


def _at_most(benchmark: str, metric: str, limit: float, what: str, cases: str = "", target: str = "") -> Goal:
    """A goal that every case with the metric (whose name starts with ``cases``) is at most ``limit``."""

    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            row = results.row(case, OURS, metric)
            if row is not None and case.startswith(cases):
                unit = "" if row.unit == "1" else f" {row.unit}"
                peers = _listed(_peers(results, case, metric))
                wanted = target or f"≤ {limit:g}{unit}"
                yield Verdict(what, case, wanted, f"{shown(row)}{unit}", row.value <= limit, peers)

    return Goal(what, benchmark, judge)


def _at_least(benchmark: str, metric: str, limit: float, what: str) -> Goal:
    def judge(results: Results) -> Iterator[Verdict]:
        for case in results.cases():
            row = results.row(case, OURS, metric)
            if row is not None:
                yield Verdict(what, case, f"≥ {limit:g}", shown(row), row.value >= limit, "-")

    return Goal(what, benchmark, judge)


_NORMS = ("rms_norm 8192x4096", "rms_norm 32768x4096")
_BOTH = ("forward", "backward", "forward_backward")
GOALS = (
    _kernel_goal("rms_norm", ("forward",), 0.90, _NORMS),
    _kernel_goal("rms_norm", ("backward", "forward_backward"), 0.85, _NORMS),
    _kernel_goal("swiglu", _BOTH, 0.85),
    _kernel_goal("rope", _BOTH, 0.85),
    Goal("host time of one op call", "host", _host),
    _at_most(
        "startup", "first_step_lag", 0.3, "first step over the second, fresh process", target="≤ 0.3 s over the second"
    ),
    _at_least("compile", "tileiras_share", 0.8, "cores' time spent in tileiras"),
    _at_least("compile", "distinct_candidates", 150, "distinct candidates"),
    _at_most("host", "lookup", 3, "lookup of a known problem"),
    _at_most("startup", "first_launch", 2, "first load of a kernel"),
    _at_most("regret", "median_regret", 1.15, "predicted winner's regret, median"),
    _at_most("startup", "import", 50, "import tilekern, without torch"),
    _at_most("startup", "process", 0.4, "python -m cache_tools ls, whole process", cases="cache_tools ls"),
)
