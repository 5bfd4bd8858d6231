"""Compare the gradients of whole models: 8-bit floats, bfloat16 and float32, from the same weights and tokens.

What rounding changes in the forward is in all layers behind it, and so in the gradients of all before. A model of
random weights at real width makes it larger from layer to layer, in bfloat16 too; one that has learnt does so far less.
So the cosines say little alone: beside them are those of bfloat16 to float32, and of another batch to this one. The
gradient of one layer with its operands given is in :mod:`benchmarks.fp8_errors`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.fp8_errors import cosine

# The step between two comparisons.
LEARNING_RATE = 1e-5
# The gradients of another batch of tokens, in bfloat16.
OTHER_BATCH = "another-batch"
# A parameter's group: its layer, or itself outside of the layers.
_LAYER = re.compile(r"\blayers\.\d+\b")


class Cosines(NamedTuple):
    """Cosines of each parameter's gradients: of 8-bit floats and another batch to bfloat16, and of both to float32.

    Those to float32 are empty if it was not asked for.
    """

    fp8_to_bf16: Mapping[str, float]
    other_batch: Mapping[str, float]
    fp8_to_fp32: Mapping[str, float]
    bf16_to_fp32: Mapping[str, float]


def of_first_steps(model: Any, vocabulary: int, tokens: int, steps: int) -> Iterator[Cosines]:
    """Yield the cosines of each of the first steps, which are taken by the gradients of bfloat16.

    Args:
        model: a model of bfloat16 in training mode, whose layers are not converted; it is trained.
        vocabulary: random tokens are below it.
        tokens: of a step, in one sequence.
        steps: number of steps.
    """
    import torch

    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(step)
        ids, others = torch.randint(0, vocabulary, (2, 1, tokens), device=device, generator=generator)
        yield cosines(model, ids, others)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def cosines(model: Any, ids: Any, others: Any, *, to_fp32: bool = True) -> Cosines:
    """Return the cosines of a step on tokens ``ids``, and on those of another batch; the model stays as it is.

    Args:
        model: a model of bfloat16 in training mode, whose layers are not converted.
        ids, others: tokens [batch, sequence], which are the labels too.
        to_fp32: whether to compute the gradients of float32 too, by a copy of the model.
    """
    from tilekern.patch.fp8 import converted

    bf16 = _gradients(model, ids)
    other_batch = _compared(_gradients(model, others), bf16)
    with converted(model, "rowwise"):
        fp8 = _gradients(model, ids)
    to_bf16 = _compared(fp8, bf16)
    if not to_fp32:
        return Cosines(to_bf16, other_batch, {}, {})
    fp32 = _gradients(copy.deepcopy(model).float(), ids)
    return Cosines(to_bf16, other_batch, _compared(fp8, fp32), _compared(bf16, fp32))


def _gradients(model: Any, ids: Any) -> dict[str, Any]:
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    return {name: cosine(gradient, other[name]) for name, gradient in one.items()}


def group_of(name: str) -> str:
    """Return the layer of a parameter's name (``layers.3``), or the name without ``.weight`` outside of layers."""
    found = _LAYER.search(name)
    return found.group() if found else name.removesuffix(".weight").removeprefix("model.")
