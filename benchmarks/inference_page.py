"""Draw a run of the engine's benchmark as one HTML file, by the library of the tuner's report."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.embed import json_item
from bokeh.models import BasicTicker, ColumnDataSource, FactorRange, FixedTicker, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure

from benchmarks.goals import GOALS
from benchmarks.inference import BENCHMARK
from benchmarks.inference_fresh import LOAD, STEPS
from benchmarks.inference_kernels import KERNEL, OF_SIZES, WHOLE
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from tilekern.errors import InputError
from tilekern.tuning.report.document import NO_SCRIPTS, document, table_rows

# By the names of providers without versions. On light and on dark ground these can be told apart by any eye.
_COLOURS = {
    OURS: "#009e73",
    f"{OURS}-int8": "#56b4e9",
    "torch": "#d55e00",
    "torch-graph": "#cc79a7",
    "torch-compiled": "#e69f00",
    "mingpt": "#999999",
    "hf-compiled": "#0072b2",
}
_PARTS = ("#009e73", "#56b4e9", "#e69f00", "#cc79a7", "#999999")
# The figures of a distribution, each with its mark.
_MARKS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "_min": ("least", "|", {"marker": "dash", "angle": 1.5708}),
    "": ("median", "●", {"marker": "circle"}),
    "_p95": ("95th percentile", "◆", {"marker": "diamond"}),
    "_p99": ("99th percentile", "■", {"marker": "square"}),
    "_max": ("most", "✕", {"marker": "x"}),
}
_DECODED = re.compile(r"(?P<model>.*) decode, batch (?P<batch>\d+), context (?P<context>\d+)")
# Of logarithmic axes.
_TICKS = [digit * 10.0**power for power in range(-4, 8) for digit in (1, 2, 5)]
_BAR, _FRAME = 26, 64  # pixels of a bar, and of a plot around its bars
_STYLE = """\
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #595959; --line: #d0d0d0; --ground: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --faint: #a5a5a5; --line: #444444; --ground: #16181b }
}
body { color: var(--ink); background: var(--ground); max-width: 1400px }
dt, .note { color: var(--faint) }
h2 { font-size: 1.2rem; margin: 2rem 0 .3rem }
p { margin: .2rem 0 .6rem; max-width: 60rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 540px), 1fr)); gap: 1rem 1.5rem }
.plots figure { margin: 0; min-width: 0 }
figcaption { font-weight: 600; font-size: .95rem }
figcaption span { font-weight: 400; font-size: .85rem; margin-left: 1rem; display: inline-block }
figcaption i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .35em }
.wide { overflow-x: auto }
.notice { color: #1a1a1a }
table { border-collapse: collapse; margin: 0 0 .6rem; font-size: .9rem }
th, td { border-bottom: 1px solid var(--line); padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top }
td.number, th.number { text-align: right }
summary { cursor: pointer; margin: .4rem 0 }
"""
# The plots' texts and lines follow the page's colours, also when these change.
_START = """\
const dark = matchMedia("(prefers-color-scheme: dark)")
const paint = () => {
  const style = getComputedStyle(document.documentElement)
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim())
  const colours = {
    text_color: ink, axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line,
    major_tick_line_color: line, minor_tick_line_color: null, grid_line_color: line, outline_line_color: line,
    label_text_color: ink,
  }
  for (const shown of Bokeh.documents) {
    for (const model of shown.all_models) {
      for (const [name, colour] of Object.entries(colours)) {
        if (name in model.properties) model[name] = colour
      }
    }
  }
}
dark.addEventListener("change", paint)
paint()
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: its title, a line about it, plots, and HTML behind them."""

    title: str
    about: str
    plots: Sequence[figure] = ()
    behind: str = ""


def as_html(results: Results) -> str:
    """Return the page of a run; the same results always give the same text.

    Raises:
        InputError: the results are of another benchmark.
    """
    if results.benchmark != BENCHMARK:
        raise InputError(f"the page is of results of `inference`; these are of `{results.benchmark}`")
    items: list[Any] = []
    parts = [f"<dl>{_facts(results)}</dl>", NO_SCRIPTS]
    for section in filter(None, (make(results) for make in _SECTIONS)):
        parts.append(f"<h2>{html.escape(section.title)}</h2>\n<p>{section.about}</p>")
        places = []
        for plot in section.plots:
            name = f"plot-{len(items)}"
            items.append(json_item(plot, name))
            caption = html.escape(plot.name) + "".join(
                f'<span><i style="background: {colour}"></i>{html.escape(key)}</span>' for key, colour in plot.tags
            )
            places.append(f'<figure><figcaption>{caption}</figcaption><div id="{name}"></div></figure>')
        parts.append(f'<div class="plots">{"".join(places)}</div>{section.behind}')
    title = f"The engine without torch on {results.run['gpu']}"
    return document(title, "\n".join(parts), items, _STYLE, _START, components=("bokeh",))


def _facts(results: Results) -> str:
    run = results.run
    facts = {
        "GPU": run["gpu"], "driver": run["driver"], "toolkit": run["toolkit"], "torch": run["torch"],
        "dtype": run.get("dtype", ""), "date": run["date"].replace("T", " ").replace("+00:00", " UTC"),
        "commit": run["commit"][:12],
    }  # fmt: skip
    lines = "".join(f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items() if value)
    if run["notes"]:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in run["notes"])
        said = f"<details><summary>{len(run['notes'])}</summary><ul>{notes}</ul></details>"
        lines += f"<dt>notes</dt><dd>{said}</dd>"
    return lines


def _targets(results: Results) -> Section | None:
    """Make a table of the targets that the run judges."""
    verdicts = [verdict for goal in GOALS if goal.benchmark == BENCHMARK for verdict in goal.judge(results)]
    if not verdicts:
        return None
    lines = [
        ("met" if one.met else "missed", one.what, one.case, one.target, one.figure, one.peers) for one in verdicts
    ]
    heads = "", "what", "case", "target", "measured", "peers"
    return Section("Targets", "", behind=_table(heads, lines))


def _whole(results: Results) -> Section | None:
    plots = list(_distributions(results, "forward_ms"))
    about = f"Time of a call, calls behind each other: {_legend()}. The number beside a name is the median."
    return Section("Logits of whole sequences", about, plots) if plots else None


def _tokens(results: Results) -> Section | None:
    endings = {"token_ms": ": a token", "step_ms": ": a step on the GPU"}
    plots = [plot for metric, ending in endings.items() for plot in _distributions(results, metric, ending)]
    about = (
        "One token of each sequence: as <code>generate</code> yields it, by the host's clock, and a step of the graph, "
        f"by the GPU's: {_legend()}."
    )
    return Section("Generated tokens", about, plots) if plots else None


def _legend() -> str:
    return ", ".join(f"{sign} {html.escape(name)}" for name, sign, _ in _MARKS.values())


def _distributions(results: Results, metric: str, ending: str = "") -> Iterator[figure]:
    """Draw the times of each case, a line for each provider."""
    for case in results.cases():
        rows = results.figures(case, metric)
        if not rows:
            continue
        names = [f"{_short(row)}  {_digits(row.value)}" for row in rows]
        plot = _plot(f"{case}{ending}", "ms", len(rows), FactorRange(*names[::-1]), log=True)
        columns: dict[str, Sequence[Any]] = {
            "name": names, "provider": [row.provider for row in rows], "colour": [_colour(_short(row)) for row in rows]
        }  # fmt: skip
        for end in (*_MARKS, "_samples"):
            columns[f"ms{end}"] = [_value(results, case, row.provider, f"{metric}{end}") for row in rows]
        source = ColumnDataSource(columns)
        plot.segment("ms_min", "name", "ms_max", "name", source=source, color="colour", line_width=2, line_alpha=0.6)
        drawn = [
            plot.scatter(
                f"ms{end}", "name", source=source, color="colour", size=12 if end in ("", "_min") else 8, **look
            )
            for end, (_, _, look) in _MARKS.items()
        ]
        tips = [(name, f"@ms{end}{{0,0.[0000]}} ms") for end, (name, _, _) in _MARKS.items()]
        plot.add_tools(HoverTool(renderers=drawn, tooltips=[("", "@provider"), *tips, ("samples", "@ms_samples")]))
        yield plot


def _throughput(results: Results) -> Section | None:
    plots = [*_rates_of_models(results), *_rates_of_batches(results)]
    about = "Tokens of all sequences in a second: those that are read by a forward, and those that are generated."
    return Section("Throughput", about, plots) if plots else None


def _rates_of_models(results: Results) -> Iterator[figure]:
    """Draw tokens a second of whole sequences: a line for each case, a point for each provider."""
    cases = [case for case in results.cases() if results.figures(case, "forward_ms")]
    if not cases:
        return
    names = {case: case.replace(" forward,", "") for case in cases}
    lines = FactorRange(*list(names.values())[::-1])
    plot = _plot("Whole sequences", "thousand tokens a second", len(cases), lines, log=True)
    # Labels of thousands are wide.
    plot.xaxis.ticker = FixedTicker(ticks=[tick for tick in _TICKS if f"{tick:e}"[0] != "2"])
    providers = _providers(results, cases, "tokens_per_s")
    for who in providers:
        found = [(names[case], row) for case in cases if (row := results.row(case, who, "tokens_per_s"))]
        values, at = [row.value / 1000 for _, row in found], [name for name, _ in found]
        points = plot.scatter(values, at, size=11, color=_colour(who))
        plot.add_tools(
            HoverTool(renderers=[points], tooltips=[("", f"{who}, @y"), ("thousand tokens a second", "@x{0,0}")])
        )
    plot.tags = _keys(providers, map(_colour, providers))
    yield plot


def _rates_of_batches(results: Results) -> Iterator[figure]:
    """Draw generated tokens a second over batches, for each model and context."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for case in results.cases():
        if (match := _DECODED.fullmatch(case)) and results.figures(case, "tokens_per_s"):
            groups.setdefault((match["model"], match["context"]), []).append((match["batch"], case))
    for (model, context), cases in groups.items():
        batches = [batch for batch, _ in cases]
        plot = _plot(f"{model}, context {context}", "", 6, None, log=False, x_range=FactorRange(*batches), log_y=True)
        plot.xaxis.axis_label, plot.yaxis.axis_label = "sequences", "tokens a second"
        providers = _providers(results, [case for _, case in cases], "tokens_per_s")
        for who in providers:
            found = [(batch, row) for batch, case in cases if (row := results.row(case, who, "tokens_per_s"))]
            at, values = [batch for batch, _ in found], [row.value for _, row in found]
            colour = _colour(who)
            plot.line(at, values, color=colour, line_width=2)
            points = plot.scatter(at, values, size=9, color=colour)
            tips = [("", f"{who}, batch @x"), ("tokens a second", "@y{0,0.0}")]
            plot.add_tools(HoverTool(renderers=[points], tooltips=tips))
        plot.tags = _keys(providers, map(_colour, providers))
        yield plot


def _fresh(results: Results) -> Section | None:
    plots = [*_starts(results), *_sizes(results)]
    about = (
        "From a process's start to its first result, with all kernels in the cache and without loading the weights, "
        "and the import of torch alone. Megabytes of files: tilekern without packs of models, what it needs, and the "
        "artifacts of the model's kernels."
    )
    return Section("A fresh process, and what is installed", about, plots) if plots else None


def _starts(results: Results) -> Iterator[figure]:
    steps = [step for step in STEPS if step != LOAD]
    cases = [case for case in results.cases() if results.row(case, OURS, "without_load_s")]
    lines = {case: [_value(results, case, OURS, f"{step}_s") for step in steps] for case in cases}
    for case in results.cases():
        for row in results.figures(case, "import_s"):
            if not row.provider.startswith(OURS):
                lines[f"import {row.provider}"] = [0.0, row.value, 0.0, 0.0]
    if lines:
        yield _stacked("Seconds without loading weights", "s", steps, lines)


def _sizes(results: Results) -> Iterator[figure]:
    parts = ["tilekern", "dependencies", "artifacts"]
    cases = [case for case in results.cases() if results.row(case, OURS, "all_mb")]
    lines = {case: [_value(results, case, OURS, f"{part}_mb") for part in parts] for case in cases}
    if lines:
        yield _stacked("Megabytes on disk", "MB", parts, lines)


def _stacked(title: str, unit: str, parts: Sequence[str], lines: Mapping[str, Sequence[float]]) -> figure:
    """Draw a bar for each line, of parts behind each other."""
    names = {name: f"{name}  {_digits(sum(values))}" for name, values in lines.items()}
    plot = _plot(title, unit, len(lines), FactorRange(*list(names.values())[::-1]), log=False)
    ends = dict.fromkeys(lines, 0.0)
    for number, (part, colour) in enumerate(zip(parts, _PARTS, strict=False)):
        left = [ends[name] for name in lines]
        for name, values in lines.items():
            ends[name] += values[number]
        bars = plot.hbar(
            y=list(names.values()), left=left, right=[ends[name] for name in lines], height=0.7, color=colour,
            line_color=None,
        )  # fmt: skip
        bars.data_source.data["took"] = [values[number] for values in lines.values()]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=[("", f"@y, {part}"), (unit, "@took{0.000}")]))
    plot.x_range.start, plot.tags = 0, _keys(parts, _PARTS)
    return plot


def _kernels(results: Results) -> Section | None:
    """Draw the kernels of each graph, those of one name together; and list them with their sizes."""
    plots, lines = [], []
    for whole in [case for case in results.cases() if case.endswith(f"{KERNEL}{WHOLE}")]:
        graph = whole.removesuffix(f"{KERNEL}{WHOLE}")
        for row in results.figures(whole, "step_us"):
            kinds = list(_kinds(results, graph, row.provider))
            plots.append(_taken(graph, row, _value(results, whole, row.provider, "gaps_us"), kinds))
            for kernel, sizes, launches, took in kinds:
                figures = f"{launches:.0f}", f"{took / launches:.2f}", f"{took:.1f}", f"{took / row.value:.1%}"
                lines.append((f"{graph}, {_short(row)}", kernel, sizes, *figures))
    if not plots:
        return None
    heads = "graph", "kernel", "sizes", "launches", "µs of a launch", "µs of a step", "share"
    table = _table(heads, lines, numbers=4)
    behind = f"<details><summary>All kernels with their sizes</summary>{table}</details>"
    about = "Microseconds of a step, by the profiler; behind a name, how often the kernel runs in one step."
    return Section("What each kernel takes", about, plots, behind)


def _kinds(results: Results, graph: str, who: str) -> Iterator[tuple[str, str, float, float]]:
    """Yield each kernel of a graph with its sizes, launches and microseconds of a step."""
    for case in results.cases():
        kernel, of_sizes, sizes = case.removeprefix(f"{graph}{KERNEL}").partition(OF_SIZES)
        if case.startswith(f"{graph}{KERNEL}") and of_sizes and results.row(case, who, "step_us"):
            yield kernel, sizes, _value(results, case, who, "launches"), _value(results, case, who, "step_us")


def _taken(graph: str, whole: Row, gaps_us: float, kinds: Sequence[tuple[str, str, float, float]]) -> figure:
    taken: dict[str, list[float]] = {}
    for kernel, _, launches, took in kinds:
        found = taken.setdefault(kernel, [0.0, 0.0])
        found[0], found[1] = found[0] + launches, found[1] + took
    ordered = sorted(taken.items(), key=lambda item: item[1][1])
    names = [f"{kernel}, {launches:.0f} x" for kernel, (launches, _) in ordered] + ["gaps between kernels"]
    values = [took for _, (_, took) in ordered] + [gaps_us]
    title = f"{graph}, {_short(whole)}: {whole.value:.0f} µs"
    names, values = [names[-1], *names[:-1]], [values[-1], *values[:-1]]
    plot = _plot(title, "µs", len(names), FactorRange(*names), log=False)
    colours = ["#999999", *[_colour(_short(whole))] * len(ordered)]
    bars = plot.hbar(y=names, left=0, right=values, height=0.7, color=colours)
    plot.x_range.start = 0
    plot.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@y"), ("µs of a step", "@right{0.0}")]))
    return plot


def _models(results: Results) -> Section | None:
    """Make a table of the models' layers and sizes."""
    cases = [case for case in results.cases() if results.row(case, OURS, "parameters")]
    if not cases:
        return None
    names = [row.metric for row in results.rows if row.case == cases[0]]
    lines = []
    for case in cases:
        figures = (f"{_value(results, case, OURS, name):,.0f}" for name in names)
        lines.append((case.removesuffix(" sizes"), *figures))
    heads = ("model", *(name.replace("_", " ") for name in names))
    return Section("Layers and sizes", "", behind=_table(heads, lines, numbers=len(names)))


_SECTIONS: tuple[Callable[[Results], Section | None], ...] = (
    _targets, _whole, _throughput, _tokens, _fresh, _kernels, _models
)  # fmt: skip


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a table that scrolls by itself where it is too wide; its last columns may be numbers."""
    rows = table_rows(map(html.escape, heads), lines)
    for tag in ("td", "th") if numbers else ():
        rows = re.sub(
            rf"((?:<{tag}>[^<]*</{tag}>){{{numbers}}})</tr>",
            lambda found, tag=tag: found[0].replace(f"<{tag}>", f'<{tag} class="number">'),  # type: ignore[misc]
            rows,
        )
    return f'<div class="wide"><table>{rows}</table></div>'


def _plot(
    title: str, unit: str, lines: int, y_range: FactorRange | None, *, log: bool, log_y: bool = False, **more: Any
) -> figure:
    plot = figure(
        name=title, height=_FRAME + _BAR * lines, sizing_mode="stretch_width",
        x_axis_type="log" if log else "auto", y_axis_type="log" if log_y else "auto", x_axis_label=unit or None,
        tools="save", toolbar_location=None, background_fill_alpha=0, border_fill_alpha=0,
        **(more | ({} if y_range is None else {"y_range": y_range})),
    )  # fmt: skip
    plot.axis.axis_label_text_font_size = plot.axis.major_label_text_font_size = "12px"
    plot.axis.axis_label_text_font_style = "normal"
    for axis, is_log in ((plot.xaxis, log), (plot.yaxis, log_y)):
        if is_log:
            axis.formatter = NumeralTickFormatter(format="0,0.[000]")
            axis.ticker = FixedTicker(ticks=_TICKS)
    if not log and y_range is not None:
        plot.xaxis.ticker = BasicTicker(desired_num_ticks=5)
    if y_range is not None:
        plot.ygrid.visible = False
    return plot


def _providers(results: Results, cases: Sequence[str], metric: str) -> list[str]:
    return list(dict.fromkeys(_short(row) for case in cases for row in results.figures(case, metric)))


def _value(results: Results, case: str, who: str, metric: str) -> float:
    row = results.row(case, who, metric)
    return 0.0 if row is None else row.value


def _short(row: Row) -> str:
    return row.provider.split(" ")[0]


def _colour(who: str) -> str:
    return _COLOURS.get(who, "#999999")


def _keys(names: Iterable[str], colours: Iterable[str]) -> list[list[str]]:
    """Return what a plot's colours stand for, as its tags; the page shows them above it, where they wrap."""
    return [list(pair) for pair in zip(names, colours, strict=False)]


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
