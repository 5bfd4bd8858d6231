"""Write the page for users: the training speed of whole models, compared with peers, on each GPU."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.families import BENCHMARK as FAMILIES
from benchmarks.pages.charts import Panel, bars
from benchmarks.pages.markdown import by_gpu, head, link, plot, slug, table
from benchmarks.parallel import BENCHMARK as PARALLEL
from benchmarks.parallel import LOSS_ON_ONE
from benchmarks.providers import GRAPHS, IN_8_BITS, OURS, is_in_bfloat16
from benchmarks.results import Results, Row
from benchmarks.sources import described

NAME = "models.md"
SPEED, MEMORY, LAG, HOST, GPU = "tokens_per_s", "peak_gib", "first_step_lag_s", "host_s", "gpu_s"
# What stands for tilekern in the overview, the first that was measured.
_EAGER = (OURS, f"{OURS}-torch-adamw")
_TRAINING = ("train", FAMILIES, PARALLEL)
_PANELS = ((SPEED, "throughput", "tokens/s"), (MEMORY, "peak memory", "GiB"), (LAG, "first step over the second", "s"))
_TEXT = """
Training steps of whole models: forward, backward and optimizer step in bfloat16, on random weights and tokens, batch 1
unless the tokens say `8 x 1024`. Each trainer has a process of its own, and the attention that is fastest for it on
this GPU.

- **speed-up**: tilekern's tokens per second, in eager steps or captured ones, whichever is faster, over those of the
  fastest peer in bfloat16. Figures are medians of the timed steps. `tilekern-torch-adamw` stands for tilekern where
  only torch's optimizer was measured.
- **captured**: `tilekern-graphs`, which replays its steps from CUDA graphs ([`tilekern.graphed`](../graphs.md)), with
  torch's AdamW; with tilekern's it is `tilekern-graphs-adamw`.
- **8 bits**: `tilekern-fp8` or `tilekern-fp8-graphs`, whichever is faster: linear layers by [8-bit
  floats](../fp8.md), eager or captured, and the speed-up over the fastest peer of any dtype, in the newest
  run that has them. torchao's rowwise 8-bit floats, compiled by layer, are such a peer where they were measured.
- **peak memory**: the most that torch had allocated during the steps.
- **first step**: seconds by which the first step takes longer than the second: compiling, autotuning and loading. A
  process goes through the token counts of one file in rising order, so only the lowest is its first step. Peers that
  keep compiled code on disk may have it from an earlier run.
- **host**, **GPU**: the time until the host has queued a step, and the time that the GPU works at one. If the host's is
  longer, the GPU waits for it.
- **source**: the digest of the source of the kernels that ran. *Stale* means that this source has changed since.

`tilekern` has gradients that are the same, bit for bit, in every run; `tilekern-nondeterministic` has not.
"""
_TWO_LAYERS = """
These models have two layers at real width. Embedding and head are as large as in the whole model, so they are a far
larger part of the step. The figures compare kernels; they do not say how fast the whole model trains.
"""


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page and its plots, by file name."""
    parts, files = [head("Is it faster for me?", _TEXT)], {}
    for gpu, results in by_gpu(everything).items():
        training = [run for run in results if run.benchmark in _TRAINING]
        whole, some_layers = _of_models(training)
        if not (whole or some_layers):
            continue
        parts.append(f"## {gpu}\n")
        if whole:
            parts.append(_overview(whole))
        else:
            parts.append("No whole model has been measured on this GPU.\n")
        for model, steps in whole.items():
            name = f"{slug(gpu, model)}.svg"
            files[name] = _chart(f"Training {model} on one {gpu}", steps)
            parts += [f"### {model} on {gpu}\n", plot(name, f"Training {model}"), _details(steps)]
        if some_layers:
            parts += [f"### Two layers only, on {gpu}\n", _TWO_LAYERS.strip() + "\n", _two_layers(some_layers)]
    return {NAME: "\n".join(parts), **files}


class Step:
    """The rows of one training step: a model, the tokens of a step, and the run that measured it."""

    def __init__(self, run: Results, case: str) -> None:
        self.run, self.case = run, case
        self.model, _, self.rest = case.partition(" ")
        self.tokens = self.rest.replace(" tokens", "", 1)
        trainers = {row.provider for row in run.rows if row.case == case}
        self.peers = sorted(name for name in trainers if not name.startswith(OURS))
        self.compares = bool(self.peers) and not trainers.isdisjoint(_EAGER)
        # The newest measurement of the step that has 8-bit floats, with peers of their run.
        self.in_8_bits = self

    @property
    def order(self) -> tuple[int, str]:
        """Sort a model's steps by their tokens."""
        return max(map(int, re.findall(r"\d+", self.rest.partition(" tokens")[0]))), self.rest

    def row(self, provider: str, metric: str) -> Row | None:
        """Return the figure of a trainer."""
        return self.run.row(self.case, provider, metric)

    def fastest(self, providers: Iterable[str]) -> Row | None:
        """Return the speed of the fastest of some trainers."""
        found = [row for name in providers if (row := self.row(name, SPEED))]
        return max(found, key=lambda row: row.value, default=None)

    def trainers(self) -> list[str]:
        """Return all trainers, the fastest first."""
        return [row.provider for row in sorted(self.run.figures(self.case, SPEED), key=lambda row: -row.value)]

    def fastest_peer(self, *, in_8_bits: bool) -> str | None:
        """Return the fastest trainer that is not tilekern, of any dtype or of bfloat16 alone."""
        peers = [name for name in self.peers if in_8_bits or is_in_bfloat16(name)]
        return next((name for name in self.trainers() if name in peers), None)


def _of_models(training: Iterable[Results]) -> tuple[dict[str, list[Step]], list[Step]]:
    """Return steps of whole models by model, and steps of models with few layers.

    Runs without a peer, or without tilekern's eager steps, compare nothing and are ignored. The newest other run of a
    step counts, and for 8-bit floats the newest that has them.
    """
    newest: dict[str, Step] = {}
    for run in sorted(training, key=lambda run: str(run.run["date"])):
        for step in (Step(run, case) for case in run.cases()):
            if step.compares:
                older = newest.get(step.case, step).in_8_bits
                if step.fastest(IN_8_BITS) is None and older.fastest(IN_8_BITS):
                    step.in_8_bits = older
                newest[step.case] = step
    whole: dict[str, list[Step]] = {}
    few = []
    for step in sorted(newest.values(), key=lambda step: (step.model, step.order)):
        if " layers" in step.rest:
            few.append(step)
        else:
            whole.setdefault(step.model, []).append(step)
    return whole, few


def _overview(whole: dict[str, list[Step]]) -> str:
    columns = (
        "model", "tokens of a step", "tilekern, tokens/s", "captured, tokens/s", "fastest peer, tokens/s", "speed-up",
        "8 bits, tokens/s", "speed-up of 8 bits", "peak memory, GiB: tilekern, peer", "first step, s: tilekern, peer",
        "source",
    )  # fmt: skip
    steps = [step for steps in whole.values() for step in steps]
    return f"{_medians(steps)}\n\n{table(columns, [_overview_line(step) for step in steps])}"


def _medians(steps: Sequence[Step]) -> str:
    """Say the medians of the speed-ups of bfloat16 and of 8-bit floats."""
    said = []
    for dtype, speed_up in (("bfloat16", _speed_up), ("8-bit floats", _of_8_bits)):
        if found := [ratio for ratio in map(speed_up, steps) if ratio is not None]:
            worst = f"{len(found)} steps, at worst {min(found):.2f} x"
            said.append(f"{statistics.median(found):.2f} x in {dtype} ({worst})")
    return f"Median speed-up: {', '.join(said)}." if said else ""


def _overview_line(step: Step) -> tuple[str, ...]:
    peer = step.fastest_peer(in_8_bits=False)
    speeds = _pair(step, peer, SPEED)
    cell = f"{_whole(speeds[1])} ({peer})" if peer else "-"
    return (
        step.model, step.tokens, _whole(speeds[0]), _whole(step.fastest(GRAPHS)), cell, _times(_speed_up(step)),
        _whole(step.in_8_bits.fastest(IN_8_BITS)), _times(_of_8_bits(step)),
        ", ".join(_figure(row, ".1f") for row in _pair(step, peer, MEMORY)),
        ", ".join(_figure(row, ".2f") for row in _pair(step, peer, LAG)),
        described(step.run, step.case),
    )  # fmt: skip


def _pair(step: Step, peer: str | None, metric: str) -> tuple[Row | None, Row | None]:
    ours = next(filter(None, (step.row(name, metric) for name in _EAGER)), None)
    return ours, step.row(peer, metric) if peer else None


def _speed_up(step: Step) -> float | None:
    """Return the speed-up of the faster of eager and captured steps."""
    eager, peer = _pair(step, step.fastest_peer(in_8_bits=False), SPEED)
    ours = [row for row in (eager, step.fastest(GRAPHS)) if row]
    return _ratio(max(ours, key=lambda row: row.value, default=None), peer)


def _of_8_bits(step: Step) -> float | None:
    step = step.in_8_bits
    peer = step.fastest_peer(in_8_bits=True)
    return _ratio(step.fastest(IN_8_BITS), step.row(peer, SPEED) if peer else None)


def _details(steps: Sequence[Step]) -> str:
    """Make a line for each step and trainer."""
    lines = []
    for step in (each for whole in steps for each in dict.fromkeys((whole, whole.in_8_bits))):
        for name in step.trainers():
            source = described(step.run, step.case) if name.startswith(OURS) else "-"
            times = (_milliseconds(step.row(name, HOST)), _milliseconds(step.row(name, GPU)))
            figures = (_whole(step.row(name, SPEED)), *times, _figure(step.row(name, MEMORY), ".1f"))
            lines.append((step.tokens, name, *figures, _figure(step.row(name, LAG), ".2f"), source, link(step.run)))
        lines += [
            (step.tokens, name, "out of memory", "-", "-", "-", "-", "-", link(step.run))
            for name in _without_room(step)
        ]
    columns = (
        "tokens of a step", "trainer", "tokens/s", "host, ms", "GPU, ms", "peak memory, GiB", "first step, s", "source",
        "data",
    )  # fmt: skip
    return table(columns, lines)


def _without_room(step: Step) -> list[str]:
    """Return the trainers that ran out of memory at this step, according to the run's notes."""
    begin = f"{step.case}: "
    notes = [note for note in step.run.run.get("notes", []) if note.startswith(begin) and "out of memory" in note]
    return [note.removeprefix(begin).split(" ")[0] for note in notes]


def _chart(title: str, steps: Sequence[Step]) -> str:
    """Draw throughput, memory and first step: a bar for each trainer at each number of tokens."""
    labels = [step.tokens.replace(", ", "\n") for step in steps]
    trainers = list(dict.fromkeys(name for step in steps for name in step.trainers()))
    panels = [
        Panel(what, unit, labels, {name: [_value(step.row(name, metric)) for step in steps] for name in trainers})
        for metric, what, unit in _PANELS
    ]
    return bars(title, panels)


def _two_layers(steps: Sequence[Step]) -> str:
    """Make a line for each step; models on several GPUs also show their loss and one GPU's loss."""
    columns = (
        "model", "tilekern, tokens/s", "captured, tokens/s", "fastest peer, tokens/s", "speed-up", "8 bits, tokens/s",
        "speed-up of 8 bits", "peak memory, GiB: tilekern, peer", "first step, s: tilekern, peer",
        "loss, and on one GPU", "source", "data",
    )  # fmt: skip
    lines = []
    for step in steps:
        _, _, *rest, source = _overview_line(step)
        losses = [step.row(OURS, metric) for metric in ("loss", LOSS_ON_ONE)]
        loss = ", ".join(f"{row.value:.4f}" for row in losses if row) if losses[1] else "-"
        lines.append((step.case.replace(", 2 layers", ""), *rest, loss, source, link(step.run)))
    return table(columns, lines)


def fastest(run: Results, case: str | None, family: str) -> Row | None:
    """Return the row of a trainer's fastest variant; for tilekern the default's: its variants are choices."""
    rows = [row for row in run.rows if row.metric == SPEED and case in (None, row.case)]
    variants = () if family == OURS else (f"{family}-",)
    mine = [row for row in rows if row.provider.split(" ")[0] == family or row.provider.startswith(variants)]
    return max(mine, key=lambda row: row.value, default=None)


def _ratio(ours: Row | None, peer: Row | None) -> float | None:
    return ours.value / peer.value if ours and peer else None


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _whole(row: Row | None) -> str:
    return f"{round(row.value):,}" if row else "-"


def _figure(row: Row | None, form: str) -> str:
    return format(row.value, form) if row else "-"


def _milliseconds(row: Row | None) -> str:
    return f"{1000 * row.value:.1f}" if row else "-"


def _value(row: Row | None) -> float | None:
    return row.value if row else None
