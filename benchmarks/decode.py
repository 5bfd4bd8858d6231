"""Measure generation: products and attention of a token, whole steps, prompts and ``generate``, and a row's bits.

Each part and way of a whole model has a process of its own, since patches and torch.compile affect a whole process.

python -m benchmarks.decode JOB LINES

is that process; JOB is a :class:`Job` as JSON. Each line of LINES is an object with a ``kind``: ``ready``, ``row`` or
``note``, written at once, so that a process whose time is over leaves what it has measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import decode_models as models
from benchmarks import decode_ops as ops
from benchmarks.clock import clock_on
from benchmarks.decode_ops import inside
from benchmarks.environment import facts
from benchmarks.jobs import Found, measure_in_turns, serve
from benchmarks.kernels import Effort
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.served import doubts
from benchmarks.sources import kernels_since, with_sources
from benchmarks.train import Process, name_of
from tilekern.patch.stepping import auto_class
from tilekern.runtime import dispatch
from tilekern.tuning.plan.configs import config_named

# Each part with the ways of :data:`benchmarks.decode_models.WAYS` that have a process for it: those of products and
# attention take turns in one, and so do the two modes of a prompt and of the bits.
PARTS: Mapping[str, Sequence[str]] = {
    "products": (OURS,),
    "attention": (OURS,),
    "bits": (OURS,),
    "prompt": (OURS, "hf"),
    "step": tuple(models.WAYS),
    "generate": tuple(models.WAYS),
}
# Seconds that one process may take, most of them for torch.compile.
LIMIT_S = 300.0
Keep = Callable[[Results], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        model: a preset or the path of a configuration.
        part: a key of :data:`PARTS`.
        way: one of its ways.
        layers: how many layers the model keeps; 0 for all, and for some in ``bits``.
        batches: sequences that decode at once, and rows of products.
        contexts: keys of the attention alone.
        context: tokens of a decoded sequence, the new one included.
        prompt, new: tokens before and by ``generate``.
        tokens: tokens of the timed prompt.
        samples, seconds: see :class:`benchmarks.kernels.Effort`.
        device: where the model is; times on the CPU mean nothing.
    """

    model: str
    part: str = ""
    way: str = ""
    layers: int = 0
    batches: Sequence[int] = (1, 8, 64)
    contexts: Sequence[int] = (1024, 4096, 32768)
    context: int = 4096
    prompt: int = 512
    new: int = 128
    tokens: int = 8192
    samples: int = 20
    seconds: float = 1.0
    device: str = "cuda"

    @property
    def label(self) -> str:
        """Return the model's name in the results."""
        return name_of(self.model) + (f", {self.kept} layers," if self.kept else "")

    @property
    def kept(self) -> int:
        """Return how many layers the model keeps; 0 for all."""
        if self.layers or self.part != "bits":
            return self.layers
        return min(models.LAYERS, config_named(self.model)[1].get_text_config().num_hidden_layers)


def least_context(samples: int) -> int:
    """Return the fewest tokens of a decoded sequence, whose prompt has one at least."""
    return 1 + models.WARM_UP + models.STEPS * samples


def measure(job: Job, parts: Sequence[str], ways: Sequence[str], limit_s: float, keep: Keep, say: Say) -> Results:
    """Measure parts in their order.

    Args:
        job: the job of each process, without its part and way.
        parts: of :data:`PARTS`.
        ways: of :data:`benchmarks.decode_models.WAYS`.
        limit_s: seconds for all; a process that is not done then is ended, and no further one begins.
        keep: called after each process with the results so far, so that an interrupted run keeps them.
        say: called with the current step.

    Raises:
        InputError: an unknown model, or nothing was measured.
    """
    results = Results(facts() | {"model": name_of(job.model)})
    jobs = [replace(job, part=part, way=way) for part in parts for way in PARTS[part] if way in ways]
    return measure_in_turns(
        results, jobs, _start, lambda job: f"{job.part} by {job.way}", limit_s, keep, say
    )  # fmt: skip


def write_plan(path: Path, job: Job, parts: Sequence[str], gpu: str) -> None:
    """Write the plan of the problems that tilekern needs in ``products`` and ``attention``, in both modes.

    Raises:
        InputError: the model or the GPU is unknown, or no problem is needed.
    """
    from tilekern import trace

    config = config_named(job.model)[1]
    models.patch(OURS, config)
    with trace(path, gpu=gpu):
        ops.ask(config, parts, job.batches, job.contexts)


def _start(job: Job) -> Process:
    command = [sys.executable, "-m", "benchmarks.decode", json.dumps(asdict(job))]
    return Process(command, dict(os.environ), LIMIT_S)


def run(job: Job) -> Iterator[Found]:
    """Measure a job's part; yield rows and notes."""
    import torch

    with torch.no_grad():
        for found in _found(job):
            yield with_sources([found], kernels_since({}))[0] if isinstance(found, Row) else found
    yield from doubts()
    with inside():
        yield from doubts()
    for kernel, reason in dispatch.varying().items():
        yield f"tilekern.invariant(): rows of {kernel} may depend on others: {reason}"


def _found(job: Job) -> Iterator[Found]:
    config, effort = config_named(job.model)[1], Effort(job.samples, job.seconds)
    clock = clock_on(job.device)
    if job.part == "products":
        layers = job.layers or config.get_text_config().num_hidden_layers
        yield from ops.products(name_of(job.model), config, layers, job.batches, effort, clock, job.device)
        return
    if job.part == "attention":
        yield from ops.attention(
            name_of(job.model), config, job.batches, job.contexts, effort, clock, job.device
        )  # fmt: skip
        return
    model = models.made(job.way, config, job.kept, job.device)
    if job.part == "bits":
        yield from models.bits(model, job.label, job.batches, min(job.context, models.LONGEST))
    elif job.part == "prompt":
        yield from models.prefills(job.way, model, job.label, job.tokens, job.samples)
    elif job.part == "step":
        yield from models.steps(job.way, model, job.label, job.batches, job.context, job.samples, clock)
    else:
        yield from models.generated(job.way, model, job.label, job.batches, job.prompt, job.new, job.samples)


def prepare(job: Job) -> None:
    """Load the modules of a job and patch, so that the waiting process is ready."""
    config = config_named(job.model)[1]
    auto_class(config)._model_mapping[type(config)]
    models.patch(job.way, config)


def main(text: str, lines: str) -> None:
    """Do a job when told to; write what it finds."""
    serve(Job(**json.loads(text)), lines, prepare, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
