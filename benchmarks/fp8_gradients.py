"""Compare the gradients of whole models: 8-bit floats, bfloat16 and float32, from the same weights and tokens.

An error of a layer's product is in all layers behind it, and in the gradients of all before, so cosines fall with the
number of layers, and those of bfloat16 too. The gradient of one layer with its operands given is in
:mod:`benchmarks.fp8_errors`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.fp8_errors import cosine

# The step between two comparisons.
LEARNING_RATE = 1e-5
# A parameter's group: its layer, or itself outside of the layers.
_LAYER = re.compile(r"\blayers\.\d+\b")


class Cosines(NamedTuple):
    """Cosines of each parameter's gradients in a step: of 8-bit floats to both others, and between those."""

    fp8_to_bf16: Mapping[str, float]
    fp8_to_fp32: Mapping[str, float]
    bf16_to_fp32: Mapping[str, float]


def cosines(model: Any, vocabulary: int, tokens: int, steps: int) -> Iterator[Cosines]:
    """Yield the cosines of each of the first steps, which are taken by the gradients of bfloat16.

    Args:
        model: a model of bfloat16 in training mode, whose layers are not converted; it is trained.
        vocabulary: random tokens are below it.
        tokens: of a step, in one sequence.
        steps: number of steps.
    """
    import torch

    from tilekern.patch.fp8 import converted

    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(step)
        ids = torch.randint(0, vocabulary, (1, tokens), device=device, generator=generator)
        bf16 = _gradients(model, ids)
        with converted(model, True):
            fp8 = _gradients(model, ids)
        to_bf16 = _compared(fp8, bf16)
        fp32 = _gradients(copy.deepcopy(model).float(), ids)
        yield Cosines(to_bf16, _compared(fp8, fp32), _compared(bf16, fp32))
        del fp8, fp32
        for name, parameter in model.named_parameters():
            parameter.grad = bf16[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


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
