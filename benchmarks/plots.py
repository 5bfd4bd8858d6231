"""Plots over token counts, made from a results file and nothing else: throughput, memory and latency, a line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import COPY
from benchmarks.providers import OURS
from benchmarks.results import Results, Row, read_results

# (metric, title) of the panels of a row.
TRAIN_PANELS = (("tokens_per_s", "throughput"), ("peak_gib", "peak memory"), ("step_s", "latency of a step"))
SWEEP_PANELS = (
    ("forward_backward_rate", "throughput, forward and backward"),
    ("extra_peak", "memory above inputs and gradients"),
    ("forward_backward", "latency, forward and backward"),
)
_TOKENS = re.compile(r"^(.*?) ?\b(\d+) tokens\b(.*)$")
# The provider's own colour in every plot, in the order of first appearance; tilekern has its own.
_OURS_COLOUR = "#0b6e4f"
_COLOURS = ("#4c78a8", "#f58518", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#8c8c8c")
_MARKERS = "svD^P*Xv"
Series = dict[str, list[tuple[int, float]]]


def draw(path: Path) -> Path | None:
    """Draw a results file as a PNG beside it; None where it holds nothing over token counts.

    Raises:
        ImportError: matplotlib is not installed.
        InputError: the file is not in the form.
    """
    results = read_results(path)
    rows = panels_of(results)
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 0.8 + 3.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    looks = _looks(results)
    for line, panels in zip(axes, rows, strict=True):
        for axis, (title, unit, series) in zip(line, panels, strict=True):
            _panel(axis, title, unit, series, looks)
    figure.suptitle(f"{results.run.get('model', results.benchmark)} on {results.run['gpu']}", fontsize=13)
    lines = {line.get_label(): line for axis in axes.flat for line in axis.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, frameon=False)
    out = path.with_suffix(".png")
    # Without the date and the version of matplotlib the same figures make the same file.
    figure.savefig(out, dpi=110, metadata={"Software": None})
    return out


def panels_of(results: Results) -> list[list[tuple[str, str, Series]]]:
    """Rows of panels (title, unit, points by provider): one row of a training run, one for each op of a sweep."""
    if results.benchmark == "train":
        wanted, groups = TRAIN_PANELS, [("", results.rows)]
    elif results.benchmark == "kernels_sweep":
        wanted, groups = SWEEP_PANELS, _by_op(results)
    else:
        return []
    panels = [[_series(name, title, metric, rows) for metric, title in wanted] for name, rows in groups]
    lengths = {tokens for line in panels for _, _, series in line for points in series.values() for tokens, _ in points}
    return panels if len(lengths) > 1 else []


def _by_op(results: Results) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        groups.setdefault(row.case.split(" ", maxsplit=1)[0], []).append(row)
    return list(groups.items())


def _series(name: str, title: str, metric: str, rows: Sequence[Row]) -> tuple[str, str, Series]:
    series: Series = {}
    unit = ""
    for row in rows:
        found = _TOKENS.match(row.case)
        if row.metric == metric and found:
            series.setdefault(row.provider, []).append((int(found[2]), row.value))
            unit = row.unit
    return f"{name}: {title}" if name else title, unit, {who: sorted(points) for who, points in series.items()}


def _looks(results: Results) -> dict[str, dict[str, Any]]:
    """How each provider is drawn; tilekern over all others, and strongest."""
    peers = [who for who in dict.fromkeys(row.provider for row in results.rows) if who not in (OURS, COPY)]
    looks = {
        who: {"color": _COLOURS[n % len(_COLOURS)], "marker": _MARKERS[n % len(_MARKERS)], "lw": 1.3, "ms": 4}
        for n, who in enumerate(peers)
    }
    looks[COPY] = {"color": "#8c8c8c", "ls": ":", "lw": 1.2}
    looks[OURS] = {"color": _OURS_COLOUR, "marker": "o", "lw": 3.2, "ms": 7, "zorder": 5}
    return looks


def _panel(axis: Any, title: str, unit: str, series: Series, looks: dict[str, dict[str, Any]]) -> None:
    lengths = sorted({tokens for points in series.values() for tokens, _ in points})
    for who, points in series.items():
        axis.plot([tokens for tokens, _ in points], [value for _, value in points], label=who, **looks[who])
    axis.set_title(title, fontsize=10)
    if not series:
        axis.set_axis_off()
        return
    axis.set_xlabel("tokens")
    axis.set_ylabel(unit)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(tokens) for tokens in lengths])
    axis.minorticks_off()
    if unit == "us":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.25)
