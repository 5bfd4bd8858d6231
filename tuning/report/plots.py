"""Draw the page's plots: the winners of all problems, and the candidates of the chosen problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import CDSView, ColumnDataSource, Filter, GroupFilter, HoverTool, NumeralTickFormatter, TapTool
from bokeh.models.annotations import Slope, Span, Title
from bokeh.palettes import Colorblind
from bokeh.plotting import figure

from tilekern.tuning.report.columns import MARKS

# Colours of Okabe and Ito, which people with any colour vision can distinguish; shapes differ too, for print.
_BLUE, _ORANGE, _GREY = Colorblind[8][0], Colorblind[8][5], "#767676"
_LOOKS: dict[str, dict[str, Any]] = {
    "measured": {"marker": "circle", "size": 7, "fill_color": _BLUE, "line_color": _BLUE, "fill_alpha": 0.55},
    "predicted": {"marker": "circle", "size": 7, "fill_color": None, "line_color": _BLUE},
    "default": {"marker": "square", "size": 11, "fill_color": _GREY, "line_color": "black"},
    "winner": {"marker": "star", "size": 18, "fill_color": _ORANGE, "line_color": "black"},
}
_HEIGHT = 340


def _tips(first: str, *others: str) -> str:
    """Hover's template: an @ stands before a column's name, and the column's text is escaped."""
    lines = [f"<b>@{first}</b>", *(f"@{name}" for name in others)]
    return f'<div style="max-width: 30em">{"<br>".join(lines)}</div>'


_CANDIDATE_TIPS = _tips("config", "time_text", "worth_text", "cost_text", "role")
_PROBLEM_TIPS = _tips("name", "winner", "time_text", "worth_text")


def overview_plots(problems: ColumnDataSource) -> list[figure]:
    """Plot each problem's winner: the share of the roofline and the gain over the default config, against its time."""
    x = "winner's time, µs" if "measured" in problems.data["provenance"] else "winner's predicted time, µs"
    share = _plot("Share of roofline of the winners", x, "time at the roofline / time", "share", log_x=True)
    gain = _plot("Gain of the winners over the default", x, "default's time / time", "gain", log_x=True)
    for plot, y in ((share, "share_of_roofline"), (gain, "gain_over_default")):
        points = {how: GroupFilter(column_name="provenance", group=how) for how in ("measured", "predicted")}
        drawn = [
            _points(plot, problems, how, chosen, x="time_us", y=y)
            for how, chosen in points.items()
            if how in problems.data["provenance"]
        ]
        plot.add_layout(_line_at(1))
        _finish(plot, drawn, _PROBLEM_TIPS)
    return [share, gain]


def candidate_plots(candidates: ColumnDataSource, frontier: ColumnDataSource, chosen: Filter) -> list[figure]:
    """Plot the chosen problem's candidates: times, registers and share of roofline by time, predicted by measured time.

    The last plot exists only if anything was measured.

    Args:
        candidates: columns of :func:`tilekern.tuning.report.columns.candidate_columns`.
        frontier: columns of :func:`tilekern.tuning.report.columns.frontier_columns`.
        chosen: filters the rows of the chosen problem by their ``problem_id``.
    """
    is_measured = np.isfinite(candidates.data["measured_us"]).any()
    y = "time, µs" if is_measured else "predicted time, µs"
    times = _plot("Every candidate's time", "place by time", y, "times", log_y=True)
    costs = _plot("Registers against time, with the frontier", "registers", y, "registers", log_y=True)
    spread, steps = CDSView(filter=chosen), CDSView(filter=chosen)
    times.segment("rank", "low_us", "rank", "high_us", source=candidates, view=spread, color=_GREY, line_width=1.5)
    costs.segment("x0", "y0", "x1", "y1", source=frontier, view=steps, color="black", line_dash="dashed")
    share = _plot("Share of roofline", "blocks that fit on an SM", "time at the roofline / time", "roofline")
    share.add_layout(_line_at(1))
    drawings = [(times, "rank", "time_us"), (costs, "registers", "time_us"),
                (share, "resident_blocks", "share_of_roofline")]  # fmt: skip
    if is_measured:
        models = _plot("Predicted against measured", "predicted, µs", "measured, µs", "models", log_x=True, log_y=True)
        models.add_layout(Slope(gradient=1, y_intercept=0, line_color=_GREY, line_dash="dashed"))
        drawings.append((models, "predicted_us", "measured_us"))
    for plot, x_field, y_field in drawings:
        marks = [mark for mark in reversed(MARKS) if mark in candidates.data["mark"]]
        drawn = [
            _points(plot, candidates, mark, chosen & GroupFilter(column_name="mark", group=mark), x=x_field, y=y_field)
            for mark in marks
        ]
        _finish(plot, drawn, _CANDIDATE_TIPS)
    return [plot for plot, _, _ in drawings]


def _plot(title: str, x: str, y: str, name: str, *, log_x: bool = False, log_y: bool = False) -> figure:
    plot = figure(
        title=Title(text=title, text_font_size="15px"), name=name, height=_HEIGHT, sizing_mode="stretch_width",
        x_axis_label=x, x_axis_type="log" if log_x else "linear",
        y_axis_label=y, y_axis_type="log" if log_y else "linear",
        tools="pan,box_zoom,wheel_zoom,reset,save", styles={"break-inside": "avoid"},
    )  # fmt: skip
    plot.axis.axis_label_text_font_size = plot.axis.major_label_text_font_size = "13px"
    for axis, is_log in ((plot.xaxis, log_x), (plot.yaxis, log_y)):
        if is_log:
            axis.formatter = NumeralTickFormatter(format="0,0.[00]")
    return plot


def _line_at(value: float) -> Span:
    return Span(location=value, dimension="width", line_color=_GREY, line_dash="dashed")


def _points(plot: figure, source: ColumnDataSource, mark: str, chosen: Filter, *, x: str, y: str) -> Any:
    return plot.scatter(x, y, source=source, view=CDSView(filter=chosen), legend_label=mark, name=mark, **_LOOKS[mark])


def _finish(plot: figure, drawn: Sequence[Any], tips: str) -> None:
    plot.add_tools(HoverTool(renderers=list(drawn), tooltips=tips), TapTool(renderers=list(drawn)))
    plot.toolbar.logo = None
    plot.toolbar.active_scroll = None
    if drawn:
        plot.add_layout(plot.legend[0], "above")
        plot.legend.update(orientation="horizontal", click_policy="hide", border_line_color=None, margin=0, padding=2)
