"""Measure the engine without torch beside its peers: logits, generated tokens, fresh processes; and its kernels.

Each model and part has a process of its own, and peers that take long to compile have further ones, which come last.

python -m benchmarks.inference JOB LINES

is such a process; JOB is a :class:`Job` as JSON, and LINES are as those of :mod:`benchmarks.decode`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.environment import facts, version_of
from benchmarks.inference_models import architecture_named, parameters_of
from benchmarks.jobs import Found, measure_in_turns, serve
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_since, with_sources
from benchmarks.train import Process, name_of
from tilekern.errors import InputError

BENCHMARK = "inference"
INT8 = f"{OURS}-int8"
# The ways to run a model, with what their times belong to; those that compile have processes of their own.
ENGINES = (OURS, INT8)
COMPILED = ("torch-compiled", "hf-compiled")
WAYS: Mapping[str, Sequence[str]] = {
    OURS: ("forward", "decode", "start", "kernels"),
    INT8: ("forward", "decode", "kernels"),
    "torch": ("forward", "start"),
    "torch-graph": ("forward", "decode"),
    "mingpt": ("forward",),
    "torch-compiled": ("forward",),
    "hf-compiled": ("decode",),
}
USUAL = tuple(way for way in WAYS if way != INT8)
PARTS = ("forward", "decode", "start", "kernels")
SMALL = tuple(f"mingpt-{size}" for size in ("nano", "tile-small", "micro", "tile-medium", "mini", "tile-large"))
# The models of each part if none is named.
MODELS: Mapping[str, Sequence[str]] = {
    "forward": ("gpt2", *SMALL),
    "decode": ("gpt2",),
    "start": ("gpt2",),
    "kernels": ("gpt2", "mingpt-tile-medium"),
}
# Sequences and tokens of a forward if none are named.
SHAPES: Mapping[str, Sequence[str]] = dict.fromkeys(SMALL, ("4x64",)) | {"mingpt-tile-medium": ("4x64", "8x128")}
USUAL_SHAPES = ("8x128",)
# Seconds that one process may take.
LIMIT_S = 300.0
Keep = Callable[[Results], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        model: a preset, or the path of a configuration.
        part: one of :data:`PARTS`.
        ways: of :data:`WAYS`.
        shapes: sequences and tokens of ``forward`` and of its kernels, as ``8x128``.
        batches: sequences that decode at once.
        contexts: tokens of a decoded sequence at its end.
        dtype: of activations, caches and weights that are not int8.
        samples: calls of each figure that are timed.
        seconds: for the calls of one case, after which there are fewer.
        device: where the peers are; on the CPU only tests measure.
    """

    model: str
    part: str = ""
    ways: Sequence[str] = USUAL
    shapes: Sequence[str] = ()
    batches: Sequence[int] = (1, 8, 64)
    contexts: Sequence[int] = (512,)
    dtype: str = "bfloat16"
    samples: int = 200
    seconds: float = 4.0
    device: str = "cuda"

    @property
    def label(self) -> str:
        """Return the model's name in the results."""
        return name_of(self.model)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return the sequences and tokens of a forward."""
        return [parsed(one) for one in self.shapes or SHAPES.get(self.model, USUAL_SHAPES)]


def parsed(shape: str) -> tuple[int, int]:
    """Return the sequences and tokens of ``8x128``.

    Raises:
        InputError: it is not of this form.
    """
    numbers = shape.strip().split("x")
    if len(numbers) != 2 or not all(one.isdecimal() and int(one) for one in numbers):
        raise InputError(f"a shape is SEQUENCESxTOKENS, for example 8x128; got {shape!r:.40}")
    return int(numbers[0]), int(numbers[1])


def full_name(way: str) -> str:
    """Return the name of a way in the results."""
    if way in ENGINES:
        return way
    return f"{way} {version_of('transformers' if way.startswith('hf') else 'torch')}"


def jobs_of(job: Job, models: Sequence[str], parts: Sequence[str], ways: Sequence[str]) -> list[Job]:
    """Return the jobs in their order: part by part, those of compiled ways at the end.

    Args:
        job: what all have in common.
        models: presets or paths; none stands for those of :data:`MODELS`.
        parts: of :data:`PARTS`.
        ways: of :data:`WAYS`.
    """
    quick, slow = [], []
    for part in parts:
        for model in models or MODELS[part]:
            mine = [way for way in ways if part in WAYS[way]]
            if first := tuple(way for way in mine if way not in COMPILED):
                quick.append(replace(job, model=model, part=part, ways=first))
            slow += [replace(job, model=model, part=part, ways=(way,)) for way in mine if way in COMPILED]
    return quick + slow


def measure(jobs: Sequence[Job], limit_s: float, keep: Keep, say: Say) -> Results:
    """Do jobs in their order.

    Args:
        jobs: see :func:`jobs_of`.
        limit_s: seconds for all; a process that is not done then is ended, and no further one begins.
        keep: called after each process with the results so far, so that an interrupted run keeps them.
        say: called with the current step.

    Raises:
        InputError: an unknown model, or nothing was measured.
    """
    results = Results(facts() | {"dtype": jobs[0].dtype})
    for model in dict.fromkeys(job.model for job in jobs):
        results.rows.extend(sizes_of(model))
    return measure_in_turns(
        results, jobs, _start, lambda job: f"{job.label} {job.part} by {', '.join(job.ways)}", limit_s, keep, say
    )  # fmt: skip


def sizes_of(model: str) -> Iterator[Row]:
    """Yield a model's sizes."""
    of = architecture_named(model)
    sizes = {"layers": of.layers, "width": of.width, "heads": of.heads, "kv_heads": of.kv_heads}
    sizes |= {"head_dim": of.head_dim, "inner": of.inner, "vocabulary": of.vocabulary}
    sizes |= {"positions": of.positions, "parameters": parameters_of(of)}
    for name, value in sizes.items():
        yield Row(BENCHMARK, f"{name_of(model)} sizes", OURS, name, value, "1")


def _start(job: Job) -> Process:
    return Process([sys.executable, "-m", "benchmarks.inference", json.dumps(asdict(job))], dict(os.environ), LIMIT_S)


def run(job: Job) -> Iterator[Found]:
    """Measure a job's part; yield rows and notes."""
    import torch

    from benchmarks import inference_fresh, inference_kernels, inference_parts

    found_by = {
        "forward": inference_parts.forward, "decode": inference_parts.decode, "start": inference_fresh.start,
        "kernels": inference_kernels.kernels,
    }  # fmt: skip
    if job.dtype == "float32":
        # Products of the engine are TF32's.
        torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        for found in found_by[job.part](job):
            if isinstance(found, Row) and not found.sources:  # a fresh process says its own
                yield from with_sources([found], kernels_since({}))
            else:
                yield found
    yield from doubts()


def prepare(job: Job) -> None:
    """Load the modules of a job, so that the waiting process is ready."""
    import torch  # noqa: F401

    from benchmarks import inference_fresh, inference_kernels, inference_parts  # noqa: F401

    if "hf-compiled" in job.ways:
        import transformers.models.auto.modeling_auto  # noqa: F401


def main(text: str, lines: str) -> None:
    """Do a job when told to; write what it finds."""
    serve(Job(**json.loads(text)), lines, prepare, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
