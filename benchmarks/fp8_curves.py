"""Train small models on this repository's documentation, byte by byte: losses by bfloat16 and by 8-bit floats.

Each model trains from the same weights with two orders of the batches, by bfloat16 and by 8-bit floats. Rounding and
the order of batches change where a training goes, so one curve against another tells little. How far the two orders of
bfloat16 are apart says which distance means nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.models import make_model
from benchmarks.providers import FP8, OURS
from benchmarks.results import Results

OTHER_ORDER, FP8_OTHER_ORDER = (f"{who}-other-order" for who in (OURS, FP8))
# The trainings of a model: the order of its batches, and whether layers are converted.
TRAININGS = {OURS: (1, False), OTHER_ORDER: (2, False), FP8: (1, True), FP8_OTHER_ORDER: (2, True)}
# The training that the distance of another is to.
BESIDE = {OTHER_ORDER: OURS, FP8: OURS, FP8_OTHER_ORDER: OTHER_ORDER}
LEARNING_RATE = 1e-3
VOCABULARY = 256
# Points of a curve, each the mean of as many steps; and the part of them by which curves are compared.
POINTS, COMPARED = 48, 0.25
# One in as many sequences is held out, and as many batches of them are read at the end.
_HELD_OUT, _HELD_BATCHES = 10, 16
_HEAD = 64


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small model, and of its batches: ``sequences`` of ``length`` bytes."""

    hidden: int = 256
    layers: int = 4
    sequences: int = 4
    length: int = 256


@dataclass(frozen=True)
class Curve:
    """A training: the loss of each step, that of held-out text at the end, and the milliseconds of a step."""

    losses: list[float]
    held_out: float
    step_ms: float
    converted: list[str]


def configs(sizes: Sizes) -> dict[str, Any]:
    """Return the configurations of a small model of each family, by the family's name."""
    import transformers

    heads = sizes.hidden // _HEAD
    common = {
        "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "num_attention_heads": heads,
        "num_key_value_heads": max(2, heads // 2), "head_dim": _HEAD, "vocab_size": VOCABULARY,
        "max_position_embeddings": sizes.length, "tie_word_embeddings": False, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    wide = {"intermediate_size": 3 * sizes.hidden}
    experts = {"intermediate_size": sizes.hidden, "num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "qwen3": transformers.Qwen3Config(**common, **wide),
        "llama": transformers.LlamaConfig(**common, **wide),
        "gpt-oss": transformers.GptOssConfig(**common, **experts, sliding_window=sizes.length // 2),
    }


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Apply all patches, as a user of 8-bit floats has them, and undo them."""
    import tilekern

    tilekern.apply(experts=True)
    try:
        yield
    finally:
        tilekern.reset()


def text(length: int, device: str) -> tuple[Any, Any]:
    """Return sequences of bytes [count, length] to train with, and those that are held out, every tenth."""
    import torch

    pages = sorted((ROOT / "docs").glob("*.md"))
    found = torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
    rows = found[: len(found) // length * length].view(-1, length).long().to(device)
    is_held = torch.arange(len(rows), device=device) % _HELD_OUT == 0
    return rows[~is_held], rows[is_held]


def train(config: Any, provider: str, steps: int, sizes: Sizes, device: str) -> tuple[Curve, Any]:
    """Train a small model as one of :data:`TRAININGS`, by AdamW; return its curve, and the model.

    The rate rises for a twentieth of the steps and then falls to a tenth of :data:`LEARNING_RATE`. On a GPU steps are
    replayed from CUDA graphs, since they would wait for the host.
    """
    import torch

    import tilekern
    from tilekern.fp8 import convert
    from tilekern.patch.graphs import ungraphed

    order, is_fp8 = TRAININGS[provider]
    model = make_model(config, 0, OURS, device)
    names = convert(model) if is_fp8 else []
    is_gpu = device == "cuda"
    if is_gpu:
        tilekern.graphed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=is_gpu)
    rising = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rising) * (1 - 0.9 * step / steps)
    )
    rows, held = text(sizes.length, device)
    losses = torch.empty(steps, device=device)
    started = time.perf_counter()
    for step, ids in zip(range(steps), _batches(rows, sizes.sequences, order), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses[step] = loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    found = losses.tolist()  # waits for the GPU
    step_ms = 1000 * (time.perf_counter() - started) / steps
    if is_gpu:
        ungraphed(model)
    return Curve(found, _held_out(model, held, sizes.sequences), step_ms, names), model


def _batches(rows: Any, count: int, order: int) -> Iterator[Any]:
    """Yield batches of sequences for ever, all of them before one comes again, in an order by this seed."""
    import torch

    generator = torch.Generator().manual_seed(order)
    while True:
        shuffled = torch.randperm(len(rows), generator=generator).to(rows.device)
        for first in range(0, len(rows) - count + 1, count):
            yield rows[shuffled[first : first + count]]


def _held_out(model: Any, rows: Any, count: int) -> float:
    import torch

    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for ids in rows.split(count)[:_HELD_BATCHES]]
    return float(torch.stack(losses).mean())


def smoothed(losses: list[float]) -> list[float]:
    """Return the means of the steps of each point of a curve."""
    window = max(1, len(losses) // POINTS)
    return [sum(losses[n : n + window]) / window for n in range(0, len(losses) - window + 1, window)]


def compared(points: list[float]) -> list[float]:
    """Return the last points, by which curves are compared."""
    return points[-max(1, round(COMPARED * len(points))) :]


def distance(one: list[float], other: list[float]) -> float:
    """Return the mean distance of two smoothed curves over their last quarter."""
    pairs = list(zip(compared(one), compared(other), strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def distances(results: Results, case: str) -> tuple[float, float] | None:
    """Return a model's distance of 8-bit floats to bfloat16, the mean over the orders, and that of two orders."""
    ours = [row.value for who in (FP8, FP8_OTHER_ORDER) if (row := results.row(case, who, "distance"))]
    other = results.row(case, OTHER_ORDER, "distance")
    return (sum(ours) / len(ours), other.value) if ours and other else None
