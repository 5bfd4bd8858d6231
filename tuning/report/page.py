"""Write the report as one self-contained HTML file, which opens from disk without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.layouts import column, grid, row
from bokeh.models import ColumnDataSource, CustomJS, GroupFilter, LayoutDOM
from bokeh.models.widgets import Div, Select

from tilekern.tuning.report.columns import candidate_columns, frontier_columns, problem_columns, problems_of
from tilekern.tuning.report.document import NO_SCRIPTS, document, table_rows
from tilekern.tuning.report.implementations import standings
from tilekern.tuning.report.plots import candidate_plots, overview_plots
from tilekern.tuning.report.rows import STATUSES, Report, Row
from tilekern.tuning.report.tables import candidate_table, overview_table

# Width between the usual margins of A4 and Letter in landscape, in CSS pixels.
_PAPER_WIDTH = 960
_STYLE = """\
body { color: #1a1a1a; max-width: 1500px }
.implementations { border-collapse: collapse; margin: 0 0 1rem }
.implementations th, .implementations td { padding: .1rem 1rem .1rem 0; text-align: left }
.implementations caption { color: #595959; text-align: left }
.printed { display: none }
@page { size: landscape }
@media print {
  body { margin: 0; max-width: none }
  .printed { display: table; border-collapse: collapse; font-size: 8pt; width: 100% }
  .printed th, .printed td { border-bottom: 1px solid #bbb; padding: 2px 4px; text-align: left }
}
"""
_BODY = f"""\
{{notice}}
<dl>{{facts}}</dl>
{{implementations}}
{NO_SCRIPTS}
<div id="report"></div>
<table class="printed">{{winners}}</table>
"""
_NOTICE = """<p class="notice" role="note">\
Nothing was measured: all times are predicted from compile-time facts, with no GPU.</p>"""
# A plot is drawn for the width of the screen; only the style sheets know the paper's width.
_FOR_PAPER = f"""
const report = document.getElementById("report")
addEventListener("beforeprint", () => {{
  const {{width}} = report.getBoundingClientRect()
  report.style.width = `${{width}}px`
  report.style.zoom = {_PAPER_WIDTH} / width
}})
addEventListener("afterprint", () => report.removeAttribute("style"))
"""
_CHOOSE = """
candidates.selected.indices = []
heading.text = problems.data.heading[Number(problem.value)]
"""
_TAKE_LINE = "if (cb_obj.indices.length) problem.value = problems.data.problem_id[cb_obj.indices[0]]"


def as_html(report: Report) -> str:
    """Return the page; the same report always gives the same text."""
    problems = problems_of(report.rows)
    body = _BODY.format(
        notice="" if report.is_measured else _NOTICE, facts=_facts(report), implementations=_implementations(problems),
        winners=_printed(problems),
    )  # fmt: skip
    title = f"Tuning of {report.model} on {report.target['name']}"
    items = [json_item(_layout(problems), "report")]
    return document(title, body, items, _STYLE, _FOR_PAPER, components=("bokeh", "bokeh-widgets", "bokeh-tables"))


def _layout(problems: Sequence[Sequence[Row]]) -> LayoutDOM:
    winners = ColumnDataSource(problem_columns(problems))
    candidates = ColumnDataSource(candidate_columns(problems))
    steps = ColumnDataSource(frontier_columns(problems))
    options: list[Any] = list(zip(winners.data["problem_id"], winners.data["name"], strict=True))
    choice = Select(title="problem", value="0", options=options, sizing_mode="stretch_width", name="problem")
    chosen = GroupFilter(column_name="problem_id", group="0")
    first = next(iter(winners.data["heading"]), "The plan names no problem.")
    heading = Div(text=first, render_as_text=True, name="heading", sizing_mode="stretch_width")
    choice.js_link("value", chosen, "group")
    shared = {"problem": choice, "problems": winners, "candidates": candidates, "heading": heading}
    choice.js_on_change("value", CustomJS(args=shared, code=_CHOOSE))
    winners.selected.js_on_change("indices", CustomJS(args={"problem": choice, "problems": winners}, code=_TAKE_LINE))
    status, text, table = candidate_table(candidates, chosen)
    return column(
        _section("All problems: the winners"),
        Div(text="A click on a line or a point chooses that problem below. A click on a head sorts."),
        overview_table(winners),
        _pairs(overview_plots(winners)),
        _section("One problem: its candidates"),
        choice, heading, _pairs(candidate_plots(candidates, steps, chosen)), row(status, text), table,
        sizing_mode="stretch_width",
    )  # fmt: skip


def _section(title: str) -> Div:
    return Div(text=f'<h2 style="font-size: 1.2rem; margin: 1rem 0 0">{title}</h2>')


def _pairs(plots: Sequence[LayoutDOM]) -> LayoutDOM:
    return grid([list(plots[at : at + 2]) for at in range(0, len(plots), 2)], sizing_mode="stretch_width")


def _facts(report: Report) -> str:
    target, counts = report.target, report.counts
    states = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    facts = {
        "model": report.model,
        "target": f"{target['name']}, {target['arch']}, {target['sm_count']} SMs",
        "GPU": report.gpu.get("gpu", "none"),
        "driver": report.gpu.get("driver", "none"),
        "torch": report.gpu.get("torch", "none"),
        "toolkit": ", ".join(report.toolkits) or "none",
        "date": report.date.replace("T", " ").replace("+00:00", " UTC") or "none",
        "candidates": f"{len(report.rows)}: {states}",
    }
    return "".join(f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items())


def _implementations(problems: Sequence[Sequence[Row]]) -> str:
    """Make a table of how often each implementation of a kernel won; empty if no two raced."""
    lines = [
        (one.kernel, one.implementation, f"{one.won} of {one.raced}", f"{one.ahead:.3f} x" if one.ahead else "")
        for one in standings(problems)
    ]
    if not lines:
        return ""
    caption = "<caption>Implementations that raced each other</caption>"
    body = table_rows(("kernel", "implementation", "won", "ahead of the next, median"), lines)
    return f'<table class="implementations">{caption}{body}</table>'


def _printed(problems: Sequence[Sequence[Row]]) -> str:
    """Make a table of the winners for paper, which cannot scroll."""
    columns = problem_columns(problems)
    heads = {"name": "problem", "winner": "winner", "time_text": "time", "worth_text": "worth"}
    return table_rows(heads.values(), zip(*(columns[name] for name in heads), strict=True))
