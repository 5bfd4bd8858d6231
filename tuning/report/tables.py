"""Make the page's tables: the winners of all problems, and the candidates of the chosen problem."""

from __future__ import annotations

from typing import Any

from bokeh.models import CDSView, ColumnDataSource, CustomJS, CustomJSFilter, Filter
from bokeh.models.widgets import DataTable, HTMLTemplateFormatter, NumberFormatter, Select, TableColumn, TextInput

from tilekern.tuning.report.rows import STATUSES

ANY = "any"
_MOST_LINES, _LINE_HEIGHT = 14, 25
# Indices of the rows with the wanted status and config.
_MATCHES = """
const words = text.value_input.toLowerCase().split(/\\s+/).filter((word) => word)
const {status: states, config, role} = source.data
return Array.from(states.keys()).filter((i) => {
  const all = `${config[i]} ${role[i]}`.toLowerCase()
  return (status.value === any || states[i] === status.value) && words.every((word) => all.includes(word))
})
"""


def overview_table(problems: ColumnDataSource) -> DataTable:
    """Make a line for each problem, with its winner."""
    return _table(
        problems, CDSView(), "winners",
        [
            _text("kernel", "kernel", 155), _text("problem", "problem", 310), _text("winner", "winner", 315),
            _text("provenance", "time is", 75), _number("time_us", "time, µs", "0,0.00", 75),
            _number("spread_us", "± µs", "0.00", 55), _number("share_of_roofline", "roofline", "0.0%", 65),
            _number("gain_over_default", "gain", "0.000", 60), _text("bound", "bound by", 75),
            _number("gigabytes_per_s", "GB/s", "0,0", 60), _number("teraflops", "TFLOP/s", "0,0.0", 65),
            _number("candidates", "candidates", "0", 75), _number("lost", "lost", "0", 50),
        ],
    )  # fmt: skip


def candidate_table(candidates: ColumnDataSource, chosen: Filter) -> tuple[Select, TextInput, DataTable]:
    """Make the table of the chosen problem's candidates, with a choice of the status and a search in the configs."""
    states: list[Any] = [ANY, *(status for status in STATUSES if status in candidates.data["status"])]
    status = Select(title="status", value=ANY, options=states, width=160, name="status")
    text = TextInput(
        title="config contains", value_input="", placeholder="tile_n=1024 tma=True", width=320, name="search"
    )
    matches = CustomJSFilter(args={"status": status, "text": text, "any": ANY}, code=_MATCHES)
    for widget, change in ((status, "value"), (text, "value_input")):
        widget.js_on_change(change, CustomJS(args={"matches": matches}, code="matches.change.emit()"))
    table = _table(
        candidates, CDSView(filter=chosen & matches), "candidates",
        [
            _number("number", "#", "0", 40), _text("status", "status", 80), _text("role", "role", 90),
            _text("short_config", "config", 375, full="config"), _number("time_us", "time, µs", "0,0.00", 75),
            _number("spread_us", "± µs", "0.00", 50), _number("samples", "samples", "0", 65),
            _number("predicted_us", "predicted, µs", "0,0.00", 90),
            _number("share_of_roofline", "roofline", "0.0%", 65),
            _number("gain_over_default", "gain", "0.000", 60),
            _number("registers", "registers", "0", 65), _number("stack_bytes", "stack, B", "0", 60),
            _number("shared_bytes", "shared, B", "0,0", 70), _number("resident_blocks", "blocks/SM", "0", 75),
            _text("remark", "remark", 150),
        ],
    )  # fmt: skip
    return status, text, table


def _table(source: ColumnDataSource, view: CDSView, name: str, columns: list[TableColumn]) -> DataTable:
    """Make a sortable table; on paper, columns wider than the page in total would be cut off."""
    lines = min(_MOST_LINES, len(source.data[columns[0].field]))
    return DataTable(
        source=source, view=view, columns=columns, name=name, height=_LINE_HEIGHT * (lines + 2),
        sizing_mode="stretch_width", index_position=None, reorderable=False, autosize_mode="none",
        styles={"break-inside": "avoid"},
    )  # fmt: skip


def _text(field: str, title: str, width: int, full: str = "value") -> TableColumn:
    """Make a column of texts, cut off if too long; the browser shows the ``full`` text over the cell."""
    formatter = HTMLTemplateFormatter(template=f'<span title="<%- {full} %>"><%- value %></span>')
    return TableColumn(field=field, title=title, width=width, formatter=formatter)


def _number(field: str, title: str, shape: str, width: int) -> TableColumn:
    formatter = NumberFormatter(format=shape, text_align="right", nan_format="")
    return TableColumn(field=field, title=title, width=width, formatter=formatter)
