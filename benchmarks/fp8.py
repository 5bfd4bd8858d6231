"""Measure whether training by 8-bit floats is right: errors of each layer, gradients of whole models, curves of loss.

- ``errors``: what rounding changes in each linear layer, beside float64 (:mod:`benchmarks.fp8_errors`)
- ``gradients``: cosines to bfloat16 and float32 in the first steps (:mod:`benchmarks.fp8_gradients`)
- ``curves``: small models on a real text, and the errors of their layers at the end (:mod:`benchmarks.fp8_curves`)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import facts
from benchmarks.fp8_curves import (
    BESIDE,
    TRAININGS,
    Sizes,
    compared,
    configs,
    distance,
    patched,
    smoothed,
    text,
    train,
)
from benchmarks.fp8_errors import TORCH, Figures, eight, errors_of, operands_of
from benchmarks.fp8_gradients import OTHER_BATCH, Cosines, cosines, group_of, of_first_steps
from benchmarks.models import make_model
from benchmarks.providers import FP8, OURS
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_since, with_sources
from benchmarks.train import name_of
from tilekern.tuning.plan.configs import config_named

BENCHMARK = "fp8"
PARTS = ("errors", "gradients", "curves")
# Cosines below this are counted, and this many of the least are named.
NEAR, NAMED = 0.99, 5
Say = Callable[[str], None]
Keep = Callable[[Results], None]


@dataclass(frozen=True)
class Job:
    """What is measured: ``layers`` of ``model`` by a sequence of ``tokens``, and small models in ``steps``.

    ``first_steps`` is the number of steps whose gradients are compared. ``layers`` 0 means all.
    """

    model: str = "qwen3-8b"
    layers: int = 4
    tokens: int = 4096
    first_steps: int = 3
    steps: int = 2000
    sizes: Sizes = field(default_factory=Sizes)
    device: str = "cuda"

    @property
    def label(self) -> str:
        """Return the name of the model and its tokens in the results."""
        return f"{name_of(self.model)} {self.tokens} tokens" + (f", {self.layers} layers" if self.layers else "")


def measure(job: Job, parts: Iterable[str], keep: Keep, say: Say) -> Results:
    """Measure parts of a job.

    Args:
        job: what is measured.
        parts: of :data:`PARTS`.
        keep: called after each model with the results so far, so that an interrupted run keeps them.
        say: called with the current step.

    Raises:
        InputError: the model is unknown, has no layer for 8-bit floats, or the GPU has none.
    """
    results = Results(facts() | {"model": name_of(job.model), "steps": job.steps, "curves": {}})
    notes = results.run["notes"]
    measures = {"errors": _errors, "gradients": _gradients, "curves": _curves}
    for part in parts:
        for rows in measures[part](job, results.run, say):
            results.rows.extend(with_sources(rows, kernels_since({})))
            keep(results)
    results.run["calls"] = _calls()
    notes.extend(doubts())
    return results


def _calls() -> dict[str, dict[str, int]]:
    """Return the counters of the kernels for 8-bit floats; calls inside of CUDA graphs count once."""
    import tilekern

    return {kernel: counts for kernel, counts in tilekern.stats().items() if kernel.startswith("fp8_")}


def _errors(job: Job, _: Mapping[str, Any], say: Say) -> Iterator[list[Row]]:
    import torch

    say(f"errors: {job.label}")
    model = _model(job)
    generator = torch.Generator(job.device).manual_seed(0)
    ids = torch.randint(0, _vocabulary(job), (1, job.tokens), device=job.device, generator=generator)
    for name, operands in operands_of(model, ids):
        yield list(_rows(f"errors {job.label}: {name.removeprefix('model.')}", errors_of(operands)))


def _model(job: Job) -> Any:
    return make_model(config_named(job.model)[1], job.layers, device=job.device)


def _vocabulary(job: Job) -> int:
    return int(config_named(job.model)[1].get_text_config().vocab_size)


def _rows(case: str, figures: Figures) -> Iterator[Row]:
    for provider, found in figures.items():
        for metric, value in found.items():
            yield Row(BENCHMARK, case, provider, metric, round(value, 6), "1")


def _gradients(job: Job, run: Mapping[str, Any], say: Say) -> Iterator[list[Row]]:
    say(f"gradients: {job.label}, {job.first_steps} steps")
    found = of_first_steps(_model(job), _vocabulary(job), job.tokens, job.first_steps)
    for step, one in enumerate(found, 1):
        case = f"gradients {job.label}, step {step}"
        run["notes"].append(_least(case, one))
        yield list(gradient_rows(case, one))


def _least(case: str, found: Cosines) -> str:
    least = sorted(found.fp8_to_bf16.items(), key=lambda item: item[1])[:NAMED]
    return f"{case}: the least cosines to bfloat16 are {', '.join(f'{name} {value:.4f}' for name, value in least)}"


def gradient_rows(case: str, found: Cosines) -> Iterator[Row]:
    """Return the rows of a step: over all parameters, and the least of each layer."""
    pairs = (
        (FP8, "bf16", found.fp8_to_bf16), (OTHER_BATCH, "bf16", found.other_batch), (FP8, "fp32", found.fp8_to_fp32),
        (TORCH, "fp32", found.bf16_to_fp32),
    )  # fmt: skip
    for provider, other, all_of in (pair for pair in pairs if pair[2]):
        groups: dict[str, list[float]] = {}
        for name, value in all_of.items():
            groups.setdefault(group_of(name), []).append(value)
        values = list(all_of.values())
        for metric, value in (
            (f"least_cosine_to_{other}", min(values)),
            (f"median_cosine_to_{other}", statistics.median(values)),
            (f"far_from_{other}", sum(value < NEAR for value in values)),
        ):
            yield Row(BENCHMARK, case, provider, metric, round(value, 6), "1")
        if provider != OTHER_BATCH:
            for group, some in groups.items():
                yield Row(BENCHMARK, f"{case}: {group}", provider, f"least_cosine_to_{other}", round(min(some), 6), "1")


def _curves(job: Job, run: dict[str, Any], say: Say) -> Iterator[list[Row]]:
    with patched():
        for name, config in configs(job.sizes).items():
            case = f"curves {name}, {job.steps} steps"
            found, points = {}, {}
            for provider in TRAININGS:
                say(f"{case}: {provider}")
                found[provider], model = train(config, provider, job.steps, job.sizes, job.device)
                points[provider] = smoothed(found[provider].losses)
                if provider == OURS:
                    yield [*_of_trained(model, f"{name} after {job.steps} steps", job, run)]
                del model
            run["curves"][case] = {provider: [round(loss, 5) for loss in some] for provider, some in points.items()}
            kinds = dict.fromkeys(layer.rpartition(".")[2] for layer in found[FP8].converted)
            run["notes"].append(f"{case}: 8-bit floats in {len(found[FP8].converted)} layers: {', '.join(kinds)}")
            yield [
                Row(BENCHMARK, case, provider, metric, round(value, 5), unit)
                for provider, curve in found.items()
                for metric, value, unit in (
                    ("loss", statistics.fmean(compared(points[provider])), "nat"),
                    ("held_out_loss", curve.held_out, "nat"),
                    ("step_ms", curve.step_ms, "ms"),
                    *(
                        [("distance", distance(points[provider], points[BESIDE[provider]]), "nat")]
                        if provider in BESIDE
                        else []
                    ),
                )
            ]


def _of_trained(model: Any, what: str, job: Job, run: Mapping[str, Any]) -> Iterator[Row]:
    """Return the rows of a trained model on its text: the worst figures of its layers, and its gradients."""
    rows, others = text(job.sizes.length, job.device)[0].split(job.sizes.sequences)[:2]
    worst: dict[str, dict[str, float]] = {}
    for _, operands in operands_of(model, rows):
        for provider, found in errors_of(operands).items():
            mine = worst.setdefault(provider, {})
            for metric, value in found.items():
                choose = min if metric.endswith("cosine") else max
                mine[metric] = choose(value, mine.get(metric, value))
    yield from _rows(f"errors {what}: worst of all layers", worst)
    gradients = cosines(model, rows, others, to_fp32=False)
    run["notes"].append(_least(f"gradients {what}", gradients))
    yield from gradient_rows(f"gradients {what}", gradients)


def write_plan(path: Path, job: Job, parts: Iterable[str], gpu: str) -> None:
    """Write the plan of the problems that tilekern needs in parts of a job.

    Raises:
        InputError: the model or the GPU is unknown.
    """
    from tilekern import trace

    with trace(path, gpu=gpu):
        if {"errors", "gradients"} & set(parts):
            _ask(make_model(config_named(job.model)[1], job.layers, device="meta"), 1, job.tokens)
        if "curves" in parts:
            with patched():
                for config in configs(job.sizes).values():
                    _ask(make_model(config, 0, OURS, "meta"), job.sizes.sequences, job.sizes.length)


def _ask(model: Any, sequences: int, length: int) -> None:
    """Do on meta tensors what is done with a model: steps, products of its layers, and forwards without gradients."""
    import torch

    from tilekern.fp8 import convert
    from tilekern.patch.stepping import Batch

    batch = Batch(sequences, length)
    for _, operands in operands_of(model, batch.inputs()["input_ids"]):
        eight(operands)
    for is_fp8 in (False, True):
        if is_fp8:
            convert(model)
        batch.backward(model)
        with torch.no_grad():
            model(**batch.inputs())
