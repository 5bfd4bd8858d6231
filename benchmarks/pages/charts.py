"""Draw charts as SVG text: panels side by side, each with bars or lines of providers over the same labels.

The same figures make the same text on every machine, so the charts are checked in and compared by a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

from benchmarks.providers import OURS

_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 58, 46
_LINE, _LETTER = 18, 6.3
# The most points of a line that are marked.
_MARKED = 16
_GREY = "#8c8c8c"
# A provider has the colour of the longest of these prefixes of its name.
_COLOURS = {
    OURS: "#0b6e4f",
    "hf": "#4c78a8",
    "transformers": "#4c78a8",
    "torch": "#4c78a8",
    "torch.compile": "#f58518",
    "torch-grouped": "#9d755d",
    "liger-triton": "#e45756",
    "liger-cutile": "#b279a2",
    "liger-cutedsl": "#ff9da6",
    "quack": "#9d755d",
    "tilegym": "#72b7b2",
    "sdpa-flash": "#e45756",
    "sdpa-cudnn": "#b279a2",
    "trl": "#eeca3b",
    "bfloat16": "#4c78a8",
    "8-bit": "#f58518",
}


@dataclass(frozen=True)
class Panel:
    """One diagram: the values of each provider at each label, None if missing; lines may be on a logarithmic scale."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    is_log: bool = False


def bars(title: str, panels: Sequence[Panel]) -> str:
    """Return a chart with a group of bars at each label."""
    return _chart(title, panels, _bars, lambda _: False)


def lines(title: str, panels: Sequence[Panel]) -> str:
    """Return a chart with a line for each provider; times are on a logarithmic scale."""
    return _chart(title, panels, _lines, lambda panel: panel.is_log or panel.unit == "us")


_Drawn = Callable[[Panel, "_Axes", Mapping[str, "_Look"]], Iterator[str]]


@dataclass(frozen=True)
class _Look:
    colour: str
    opacity: float
    dashes: str


@dataclass(frozen=True)
class _Axes:
    """A panel's position, and the scale from its values to heights."""

    left: float
    low: float
    high: float
    scale: Literal["linear", "log"]
    count: int

    def y(self, value: float) -> float:
        if self.scale == "log":
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = value / self.high
        return _TOP + _HEIGHT * (1 - share)

    @property
    def step(self) -> float:
        """Return the width of a label's slot."""
        return (_WIDTH - _LEFT - _RIGHT) / self.count

    def x(self, number: int) -> float:
        """Return the middle of a label's slot."""
        return self.left + _LEFT + self.step * (number + 0.5)


def _chart(title: str, panels: Sequence[Panel], drawn: _Drawn, is_log: Callable[[Panel], bool]) -> str:
    providers = list(dict.fromkeys(name for panel in panels for name in panel.series))
    providers.sort(key=lambda name: name != OURS)
    looks = _looks(providers)
    width = _WIDTH * len(panels)
    parts = [_text(width / 2, 20, title, size=14, weight="bold")]
    for number, panel in enumerate(panels):
        axes = _axes(panel, _WIDTH * number, is_log(panel))
        parts += [*_frame(panel, axes), *drawn(panel, axes, looks)]
    rows = list(_legend(providers, looks, width))
    height = _TOP + _HEIGHT + _BOTTOM + _LINE * len(rows) + 6
    parts += [part for row in rows for part in row]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'{head} font-family="sans-serif" font-size="11" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _looks(providers: Sequence[str]) -> dict[str, _Look]:
    """Return colours by provider; a second provider of the same colour is paler and dashed."""
    looks: dict[str, _Look] = {}
    for name in providers:
        beginning = max((one for one in _COLOURS if name.startswith(one)), key=len, default="")
        colour = _COLOURS.get(beginning, _GREY)
        again = sum(look.colour == colour for look in looks.values())
        looks[name] = _Look(colour, (1.0, 0.55, 0.3)[min(again, 2)], ("", "5 3", "2 2")[min(again, 2)])
    return looks


def _axes(panel: Panel, left: float, is_log: bool) -> _Axes:
    values = [value for series in panel.series.values() for value in series if value is not None]
    top = max(values, default=1.0)
    if is_log and values and min(values) > 0:
        return _Axes(left, 0.8 * min(values), 1.25 * top, "log", len(panel.labels))
    return _Axes(left, 0.0, 1.08 * top if top > 0 else 1.0, "linear", len(panel.labels))


def _frame(panel: Panel, axes: _Axes) -> Iterator[str]:
    """Draw the title, the grid with its numbers, and the labels."""
    begin, end = axes.left + _LEFT, axes.left + _WIDTH - _RIGHT
    yield _text((begin + end) / 2, _TOP - 12, f"{panel.title}, {panel.unit}" if panel.unit else panel.title, size=12)
    for value in _ticks(axes):
        y = axes.y(value)
        yield f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke="#dddddd"/>'
        yield _text(begin - 5, y + 4, _number(value), anchor="end")
    for number, label in enumerate(panel.labels):
        for row, part in enumerate(label.split("\n")):
            yield _text(axes.x(number), _TOP + _HEIGHT + 15 + 13 * row, part)


def _ticks(axes: _Axes) -> list[float]:
    if axes.scale == "log":
        powers = range(math.floor(math.log10(axes.low)), math.ceil(math.log10(axes.high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        within = [value for value in found if axes.low <= value <= axes.high]
        return within if len(within) <= 7 else [value for value in within if f"{value:e}"[0] == "1"]
    rough = axes.high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    return [number * step for number in range(int(axes.high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _bars(panel: Panel, axes: _Axes, looks: Mapping[str, _Look]) -> Iterator[str]:
    names = [name for name in looks if name in panel.series]
    bar = 0.84 * axes.step / max(1, len(names))
    for label in range(len(panel.labels)):
        for place, name in enumerate(names):
            value = panel.series[name][label]
            if value is None:
                continue
            x, y, look = axes.x(label) - 0.42 * axes.step + bar * place, axes.y(max(value, 0.0)), looks[name]
            said = f"<title>{escape(name)}: {value:.5g}</title>"
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(bar - 1, 1):.1f}" height="{_TOP + _HEIGHT - y:.1f}" '
                f'fill="{look.colour}" fill-opacity="{look.opacity:g}">{said}</rect>'
            )


def _lines(panel: Panel, axes: _Axes, looks: Mapping[str, _Look]) -> Iterator[str]:
    # Tilekern is drawn last, over all others.
    for name in [*(name for name in looks if name != OURS), OURS]:
        points = [(axes.x(n), axes.y(v)) for n, v in enumerate(panel.series.get(name, ())) if v is not None]
        if not points:
            continue
        look, thickness = looks[name], 3 if name == OURS else 1.5
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield (
            f'<path d="M{path}" fill="none" stroke="{look.colour}" stroke-width="{thickness}" '
            f'stroke-opacity="{look.opacity:g}" stroke-dasharray="{look.dashes}"/>'
        )
        for x, y in points if len(points) <= _MARKED else ():
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{thickness + 0.5:g}" fill="{look.colour}"/>'


def _legend(providers: Sequence[str], looks: Mapping[str, _Look], width: float) -> Iterator[list[str]]:
    """Draw rows of names, each with its colour."""
    row: list[str] = []
    x, y = 20.0, _TOP + _HEIGHT + _BOTTOM + 6.0
    for name in providers:
        wide = 20 + _LETTER * len(name) + 16
        if row and x + wide > width:
            yield row
            row, x, y = [], 20.0, y + _LINE
        look = looks[name]
        row.append(
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" fill="{look.colour}" '
            f'fill-opacity="{look.opacity:g}"/>'
        )
        row.append(_text(x + 19, y, name, anchor="start"))
        x += wide
    if row:
        yield row


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11, weight: str = "") -> str:
    more = (f' font-size="{size}"' if size != 11 else "") + (f' font-weight="{weight}"' if weight else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
