"""Train a model of each family, tilekern against its peers: two layers at real width, or a whole small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results
from benchmarks.train import Keep, Say, measure_jobs
from benchmarks.training import Job

BENCHMARK = "train_families"
WARM_UP = 2
# Hugging Face and Liger use the faster of SDPA's libraries on this GPU; the unpatched model is also run with the other.
_SDPA = (OURS, "hf-sdpa-flash", "hf-sdpa-cudnn", "liger-triton-cudnn", "torch.compile-layers-cudnn")
# SDPA has no soft cap.
_CAPPED = (
    OURS, "hf-eager", "hf-flex", "hf-flash", "liger-triton-eager", "liger-triton-flex", "torch.compile-layers-eager",
    "torch.compile-layers-flex",
)  # fmt: skip
# transformers passes sinks only to its eager attention and to FlexAttention.
_SINKS = (
    OURS, "hf-eager", "hf-flex", "liger-triton-eager", "liger-triton-flex", "torch.compile-layers-eager",
    "torch.compile-layers-flex",
)  # fmt: skip
# With a mask for its window SDPA chooses by itself.
_WINDOWED = (
    OURS, "hf-sdpa", "hf-flex", "hf-flash", "liger-triton-sdpa", "liger-triton-flex", "torch.compile-layers",
    "torch.compile-layers-flex",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model of a family and how it is trained: ``layers`` and ``sequence`` are 0 for all and for one sequence."""

    model: str
    providers: Sequence[str] = _SDPA
    layers: int = 2
    tokens: int = 4096
    sequence: int = 0


# Liger has no patch for GPT-2.
_OF_GPT_2 = (OURS, "hf-sdpa-flash", "hf-sdpa-cudnn", "torch.compile-layers", "torch.compile-layers-cudnn")
FAMILIES: Mapping[str, Family] = {
    family.model: family
    for family in (
        Family("llama-3-8b"),
        Family("qwen2.5-7b"),
        Family("gemma-2-9b", _CAPPED),
        Family("mistral-7b"),
        Family("gemma-3-12b", _WINDOWED),
        Family("phi-4"),
        Family("qwen2.5-vl-7b"),
        Family("olmo-2-7b"),
        Family("gpt-oss-20b", _SINKS),
        Family("qwen3-30b-a3b"),
        Family("gpt2", _OF_GPT_2, layers=0, tokens=8192, sequence=1024),
    )
}


def measure(
    families: Sequence[Family], providers: Sequence[str], steps: int, keep: Keep, say: Say, device: str = "cuda"
) -> Results:  # fmt: skip
    """Train each family with its providers that are in ``providers``; with all if that is empty.

    Args:
        families: the families to train, in this order.
        providers: names of :data:`benchmarks.trainers.TRAINERS`.
        steps: timed steps of each.
        keep, say: see :func:`benchmarks.train.measure`.
        device: the device to run on.

    Raises:
        InputError: nothing took a step.
    """
    run = facts() | {"models": [family.model for family in families], "warm_up": WARM_UP}
    jobs = [
        Job(one, family.model, family.layers, (family.tokens,), (steps,), WARM_UP, device, sequence=family.sequence)
        for family in families
        for one in family.providers
        if one in (providers or family.providers)
    ]
    return measure_jobs(jobs, run, BENCHMARK, keep, say)[0]
