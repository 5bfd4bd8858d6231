"""Write the page on training by 8-bit floats: curves of loss, gradients of the first steps, errors of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fp8 import BENCHMARK, NEAR
from benchmarks.fp8_curves import BESIDE, COMPARED, FP8_OTHER_ORDER, OTHER_ORDER, distances
from benchmarks.fp8_errors import COLUMNS, TORCH
from benchmarks.fp8_gradients import OTHER_BATCH
from benchmarks.pages.charts import Panel, lines
from benchmarks.pages.markdown import by_gpu, head, link, plot, slug, table
from benchmarks.providers import FP8, OURS
from benchmarks.results import Results, Row
from benchmarks.sources import described

NAME = "fp8.md"
_NONE = "No run is recorded yet: `python -m benchmarks fp8` on a GPU.\n"
_TEXT = f"""
Whether [8-bit floats](../fp8.md) train as bfloat16 does. `python -m benchmarks fp8` measures it.

- **curves**: small models that learn this documentation byte by byte, from the same weights, with two orders of the
  batches, each in bfloat16 and by 8-bit floats (in earlier runs with the first alone). Points are means of some steps
  each, and losses those of the last {COMPARED:.0%} of them. The distance is the mean over these points: of 8-bit floats
  to bfloat16 with the same order, and of the two orders in bfloat16, which it should not exceed. The latter has the
  difference of the batches in it. Losses of held-out text, after the last step, have not.
- **gradients**: the cosine of the angle between a parameter's gradients, from the same weights and tokens. What
  rounding changes in the forward is in all layers behind it. A model of random weights at real width makes it larger
  from layer to layer, in bfloat16 too; the small models at the end of their curves do so far less. The median to
  another batch is the cosine of two batches' gradients in bfloat16.
- **errors**: the norm of the difference over the norm, of the operands x, weight and dy (the gradient of a layer's
  result) when they are rounded, and of the three products beside float64. *Flushed* is the share of numbers that become
  zero in the turned matrix, which has one scale. *By column* has a scale for each of its rows instead, which no kernel
  does.
"""
_ERRORS = ("x_error", "weight_error", "dy_error")
_PRODUCTS = ("y_error", "dx_error", "dweight_error")
_FLUSHED = ("x_flushed", "weight_flushed", "dy_flushed")
# The curves' names in plots.
_CURVES = {
    OURS: "bfloat16", OTHER_ORDER: "bfloat16, other order", FP8: "8-bit floats",
    FP8_OTHER_ORDER: "8-bit floats, other order",
}  # fmt: skip
# The labels below a curve.
_LABELS = 4


def page(everything: Sequence[Results]) -> dict[str, str]:
    """Return the page and its plots, by file name."""
    files: dict[str, str] = {}
    parts = [head("Do 8-bit floats train as bfloat16 does?", _TEXT)]
    gpus = {gpu: [run for run in runs if run.benchmark == BENCHMARK] for gpu, runs in by_gpu(everything).items()}
    for gpu, runs in gpus.items():
        for run in runs:
            parts.append(f"## {gpu}, {run.run['model']}\n")
            parts += filter(None, (_curves(run), *_plots(gpu, run, files), _gradients(run), _errors(run)))
    return {NAME: "\n".join(parts if any(gpus.values()) else [*parts, _NONE]), **files}


def _cases(run: Results, part: str) -> list[str]:
    return [case for case in run.cases() if case.startswith(f"{part} ")]


def _curves(run: Results) -> str:
    lines_of = []
    for case in _cases(run, "curves"):
        losses = [
            ", ".join(_figure(row) for who in orders if (row := run.row(case, who, metric)))
            for metric in ("loss", "held_out_loss")
            for orders in ((OURS, OTHER_ORDER), (FP8, FP8_OTHER_ORDER))
        ]
        apart = distances(run, case)
        cells = (*(f"{each:.4f}" for each in apart), "yes" if apart[0] <= apart[1] else "**no**") if apart else "---"
        lines_of.append((case.removeprefix("curves "), *losses, *cells, described(run, case), link(run)))
    columns = (
        "model", "loss, bfloat16: two orders", "8-bit", "held-out loss, bfloat16", "8-bit", "distance, 8-bit",
        "two orders", "within", "source", "data",
    )  # fmt: skip
    return f"### Curves\n\n{table(columns, lines_of)}" if lines_of else ""


def _figure(row: Row | None) -> str:
    return f"{row.value:.4f}" if row else "-"


def _plots(gpu: str, run: Results, files: dict[str, str]) -> list[str]:
    """Draw the losses of each model, and the distances of pairs of them; return the lines that show the plots."""
    shown = []
    for case, points in run.run["curves"].items():
        what = case.removeprefix("curves ")
        count, steps = len(points[OURS]), run.run["steps"]
        every = max(1, count // _LABELS)
        labels = [f"{steps * (n + 1) // count:,}" if (n + 1) % every == 0 else "" for n in range(count)]
        apart = {
            _CURVES[who]: [abs(a - b) or None for a, b in zip(losses, points[BESIDE[who]], strict=True)]
            for who, losses in points.items()
            if who in BESIDE
        }
        panels = [
            Panel("loss of a byte", "nat", labels, {_CURVES[who]: some for who, some in points.items()}, is_log=True),
            Panel("distance", "nat", labels, apart, is_log=True),
        ]
        name = f"{slug(gpu, 'fp8', what)}.svg"
        files[name] = lines(f"{what} on one {gpu}: bfloat16 and 8-bit floats", panels)
        shown.append(plot(name, f"Losses of {what}"))
    return shown


def _gradients(run: Results) -> str:
    """Make a line for each step and each trained model, and for each layer of the first step."""
    lines_of = []
    for case in _cases(run, "gradients"):
        step, _, group = case.removeprefix("gradients ").partition(": ")
        if group and not step.endswith(" step 1"):
            continue
        far = run.row(case, FP8, "far_from_bf16")
        cosines = (
            run.row(case, FP8, "least_cosine_to_bf16"), run.row(case, FP8, "median_cosine_to_bf16"),
            run.row(case, OTHER_BATCH, "median_cosine_to_bf16"), run.row(case, FP8, "least_cosine_to_fp32"),
            run.row(case, TORCH, "least_cosine_to_fp32"),
        )  # fmt: skip
        cells = (*map(_figure, cosines), f"{far.value:.0f}" if far else "-")
        lines_of.append((f"{step}{f', {group}' if group else ''}", *cells, described(run, case), link(run)))
    columns = (
        "gradients of", "least, 8-bit to bfloat16", "median", "median, another batch", "least, 8-bit to float32",
        "least, bfloat16 to float32",
        f"parameters below {NEAR}", "source", "data",
    )  # fmt: skip
    return f"### Gradients\n\n{table(columns, lines_of)}" if lines_of else ""


def _errors(run: Results) -> str:
    lines_of = []
    for case in _cases(run, "errors"):
        operands = [_percent(run.row(case, FP8, metric)) for metric in _ERRORS]
        products = [
            ", ".join(_percent(run.row(case, who, metric)) for who in (FP8, TORCH, *by_column))
            for metric, by_column in zip(_PRODUCTS, ((), (COLUMNS,), (COLUMNS,)), strict=True)
        ]
        lost = ", ".join(_percent(run.row(case, FP8, metric)) for metric in _FLUSHED)
        lines_of.append((case.removeprefix("errors "), *operands, *products, lost, described(run, case), link(run)))
    columns = (
        "layer", "x, %", "weight, %", "dy, %", "result, %: 8-bit, bfloat16", "dx, %: 8-bit, bfloat16, by column",
        "dweight, %: 8-bit, bfloat16, by column", "flushed, %: x, weight, dy", "source", "data",
    )  # fmt: skip
    return f"### Errors of each layer\n\n{table(columns, lines_of)}" if lines_of else ""


def _percent(row: Row | None) -> str:
    return f"{100 * row.value:.3g}" if row else "-"
