"""Write the page for users of single ops: each op and its peers, over token counts and at fixed sizes, with a plot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from benchmarks.experts import BENCHMARK as EXPERTS
from benchmarks.experts import KEPT, WAITS
from benchmarks.kernels import COPY, PRODUCTS
from benchmarks.pages.charts import Panel, bars, lines
from benchmarks.pages.markdown import by_gpu, head, links, plot, slug, table
from benchmarks.providers import OURS
from benchmarks.results import Results, Row, shown
from benchmarks.sources import described

NAME = "ops.md"
_SWEEP, _FIXED = "kernels_sweep", "kernels"
_TIME, _MEMORY, _SHARE = "forward_backward", "extra_peak", "forward_backward_share_of_copy"
_LAYERS = "experts"
_WAITED = re.compile(r": (\S+) \S+ waits for the GPU")
_LEFT_OUT = re.compile(r"(?:^|: )(\S+)(?: [\d.]\S*)? left out: (.*)")
_TEXT = """
GPU time of each op's forward and backward together, in bfloat16 unless the size says otherwise. tilekern and its peers
took turns in one run, each checked against float64 first. Times are medians in microseconds, with half the distance
between the quartiles.

- **speed-up**: the fastest peer's time over tilekern's.
- **memory**: the peak in MiB above the inputs and the gradients.
- **of a copy**: time of a copy of the bytes that the op must move, over tilekern's; "-" for ops bound by arithmetic.
- **source**: the digest of the source of the kernels that ran. *Stale* means that this source has changed since.

The JSON files below each table also have the forward and the backward alone, rates, and every peer's figure.
"""


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page and its plots, by file name."""
    parts, files = [head("Ops", _TEXT)], dict[str, str]()
    for gpu, results in by_gpu(everything).items():
        mine = [run for run in results if run.benchmark in (_SWEEP, _FIXED, EXPERTS)]
        if not mine:
            continue
        names = sorted({case.split(" ")[0] for run in mine if run.benchmark != EXPERTS for case in run.cases()})
        ops = {name: [part for run in mine if (part := _part(run, name)).cases] for name in names}
        if layers := [_Part(run, run.cases()) for run in mine if run.benchmark == EXPERTS]:
            ops[_LAYERS] = layers
        parts += [f"## {gpu}\n", _overview(gpu, ops)]
        for op, found in ops.items():
            text, plots = _section(gpu, op, found)
            parts.append(text)
            files |= plots
    return {NAME: "\n".join(parts), **files}


class _Part:
    """The cases of one op in one run."""

    def __init__(self, run: Results, cases: list[str]) -> None:
        self.run, self.cases = run, cases
        self.sweeps = run.benchmark == _SWEEP
        if self.sweeps:
            self.cases = sorted(cases, key=_tokens)

    def size(self, case: str) -> str:
        """Return the size of a case, without the op's name."""
        if self.run.benchmark == EXPERTS:
            return case
        size = case.partition(" ")[2]
        return f"{size.removesuffix(' tokens')} tokens of {self.run.run['model']}" if self.sweeps else size

    def rows(self, case: str, metric: str = _TIME) -> list[Row]:
        """Return the figures of all providers, the lowest first."""
        return sorted(self.run.figures(case, metric), key=lambda row: row.value)

    def best_peer(self, case: str) -> Row | None:
        """Return the lowest time of a peer; tilekern and providers that are only a yardstick do not count."""
        peers = [row for row in self.rows(case) if row.provider not in (COPY, PRODUCTS)]
        return next((row for row in peers if not row.provider.startswith(OURS)), None)


def _part(run: Results, op: str) -> _Part:
    return _Part(run, [case for case in run.cases() if run.benchmark != EXPERTS and case.split(" ")[0] == op])


def _tokens(case: str) -> int:
    return int(case.split(" ")[1])


def _overview(gpu: str, ops: dict[str, list[_Part]]) -> str:
    """Make a line for each op: its longest sequence, or the first of its fixed sizes."""
    found = []
    for op, parts in ops.items():
        part = next((part for part in parts if part.sweeps), parts[0])
        case = part.cases[-1 if part.sweeps else 0]
        ours, peer = part.run.row(case, OURS, _TIME), part.best_peer(case)
        name = f"[{op}](#{_anchor(gpu, op)})"
        cells = (shown(ours), f"{shown(peer)} ({peer.provider})" if peer else "-", _ratio(ours, peer))
        found.append((name, part.size(case), *cells, described(part.run, case)))
    return table(("op", "size", "tilekern, us", "fastest peer, us", "speed-up", "source"), found)


def _heading(gpu: str, op: str) -> str:
    return f"{'a layer of experts' if op == _LAYERS else op} on {gpu}"


def _anchor(gpu: str, op: str) -> str:
    return re.sub(r"[^\w -]", "", _heading(gpu, op).lower()).replace(" ", "-")


def _section(gpu: str, op: str, parts: Sequence[_Part]) -> tuple[str, dict[str, str]]:
    """Return the text of an op, and its plots."""
    text, plots = [f"### {_heading(gpu, op)}\n"], {}
    swept, fixed = [part for part in parts if part.sweeps], [part for part in parts if not part.sweeps]
    parts = [*swept, *fixed]
    for part in swept:
        name = f"{slug(gpu, op)}.svg"
        plots[name] = _over_tokens(f"{op}, forward and backward, {part.run.run['model']} on {gpu}", part)
        text.append(plot(name, f"{op} over tokens"))
    if op == _LAYERS:
        for model in dict.fromkeys(case.split(" ")[0] for part in parts for case in part.cases):
            name = f"{slug(gpu, op, model)}.svg"
            plots[name] = _of_layers(f"A layer of experts of {model} on {gpu}", model, parts)
            text.append(plot(name, f"a layer of experts of {model}"))
    elif fixed and not swept:
        name = f"{slug(gpu, op)}.svg"
        plots[name] = _at_sizes(_heading(gpu, op), fixed)
        text.append(plot(name, f"{op} at fixed sizes"))
    columns = ["size", "tilekern, us", "fastest peer, us", "speed-up", "memory, MiB: tilekern, peer", "of a copy"]
    more = [f"kept for the backward, GiB: {OURS}, transformers", f"waits: {OURS}, transformers"]
    is_layer = op == _LAYERS
    body = [_line(part, case, is_layer) for part in parts for case in part.cases]
    text.append(table((*columns, *(more if is_layer else ()), "source"), body))
    runs = [part.run for part in parts]
    text += [_remarks(op, runs), f"Data: {links(runs)}\n"]
    return "\n".join(filter(None, text)), plots


def _line(part: _Part, case: str, is_layer: bool) -> tuple[str, ...]:
    run = part.run
    ours, peer = run.row(case, OURS, _TIME), part.best_peer(case)
    memory = [run.row(case, row.provider, _MEMORY) if row else None for row in (ours, peer)]
    share = run.row(case, OURS, _SHARE)
    more = [_both(run, case, metric) for metric in (KEPT, WAITS)] if is_layer else []
    return (
        part.size(case), shown(ours) if ours else _why_missing(run, case),
        f"{shown(peer)} ({peer.provider})" if peer else "-", _ratio(ours, peer),
        ", ".join(f"{row.value:,.0f}" if row else "-" for row in memory),
        f"{share.value:.0%}" if share else "-", *more, described(run, case),
    )  # fmt: skip


def _both(run: Results, case: str, metric: str) -> str:
    return ", ".join(shown(run.row(case, name, metric)) for name in (OURS, "transformers"))


def _why_missing(run: Results, case: str) -> str:
    """Return the error because of which tilekern has no figure."""
    for note in run.run["notes"]:
        found = _LEFT_OUT.search(note)
        if found and found[1] == OURS and note.startswith(case):
            return found[2]
    return "-"


def _ratio(ours: Row | None, peer: Row | None) -> str:
    return f"{peer.value / ours.value:.2f} x" if ours and peer else "-"


def _remarks(op: str, runs: Iterable[Results]) -> str:
    """Return the runs' notes on omitted providers, and on times that include the host's work."""
    left_out: dict[str, str] = {}
    waited: dict[str, None] = {}
    for run in runs:
        for note in run.run["notes"]:
            if run.benchmark != EXPERTS and note.split(" ")[0] != op:
                continue
            if found := _LEFT_OUT.search(note):
                left_out.setdefault(found[1].rstrip(","), found[2])
            elif found := _WAITED.search(note):
                waited.setdefault(found[1])
    lines = [f"- {name} was left out: {why[:160]}" for name, why in left_out.items()]
    if waited:
        lines.append(f"- The host waits for the GPU in {', '.join(waited)}: the time includes the host's work.")
    return "".join(f"{line}\n" for line in lines)


def _over_tokens(title: str, part: _Part) -> str:
    labels, cases = [str(_tokens(case)) for case in part.cases], [(part, case) for case in part.cases]
    return lines(title, [_panel("time", "us", labels, cases, _TIME), _panel("memory", "MiB", labels, cases, _MEMORY)])


def _of_layers(title: str, model: str, parts: Sequence[_Part]) -> str:
    """Draw a panel for each number of tokens, with bars for each way to train the layer."""
    cases = [(part, case) for part in parts for case in part.cases if case.split(" ")[0] == model]
    panels = []
    for tokens in sorted({_tokens(case) for _, case in cases}):
        mine = [(part, case) for part, case in cases if _tokens(case) == tokens]
        labels = [case.partition(", ")[2] for _, case in mine]
        panels.append(_panel(f"{tokens} tokens", "us", labels, mine, _TIME))
    return bars(title, panels)


def _at_sizes(title: str, parts: Sequence[_Part]) -> str:
    cases = [(part, case) for part in parts for case in part.cases]
    labels = [part.size(case).replace(" ", "\n") for part, case in cases]
    return bars(title, [_panel("time", "us", labels, cases, _TIME), _panel("memory", "MiB", labels, cases, _MEMORY)])


def _panel(title: str, unit: str, labels: Sequence[str], cases: Sequence[tuple[_Part, str]], metric: str) -> Panel:
    """Draw all providers' figures of a metric over these cases."""
    names = dict.fromkeys(row.provider for part, case in cases for row in part.rows(case, metric))
    series = {
        name: [row.value if (row := part.run.row(case, name, metric)) else None for part, case in cases]
        for name in names
    }
    return Panel(title, unit, labels, series)
