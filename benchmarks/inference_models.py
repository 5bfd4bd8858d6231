"""Models for the engine and its peers: random weights that all share, the engine's layout of them, and torch's models.

Weights are views of a few random numbers in the host's memory, which repeat after a prime number of elements. The
engine lays them out as those of a checkpoint; no file is written, so that a large model takes seconds.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from tilekern.inference import weights as layout
from tilekern.inference.architectures import Architecture, architecture_of
from tilekern.inference.engine import Engine
from tilekern.inference.host_tensors import HostTensor
from tilekern.inference.launches import Queued
from tilekern.runtime.driver import Stream
from tilekern.tuning.plan.configs import config_of, fields_named

# A prime, so that no row of a weight is like its neighbours.
PERIOD = 16_777_213
STD, STD_OF_NORMS = 0.02, 0.1
# Between the beginnings of tensors in the random numbers.
_STRIDE = 1_000_003
Tensors = Mapping[str, HostTensor]


@functools.cache
def fields_of(model: str) -> Mapping[str, Any]:
    """Return the fields of a model's config.json; see :func:`tilekern.tuning.plan.configs.fields_named`."""
    return fields_named(model)[1]


def architecture_named(model: str) -> Architecture:
    """Return the engine's description of a model.

    Raises:
        InputError: no such model, or the engine does not run it.
    """
    return architecture_of(fields_of(model))


def parameters_of(architecture: Architecture) -> int:
    """Return the number of a model's weights."""
    sources = layout.stored_by(architecture).values()
    return sum(math.prod(shape) for source in sources for shape in source.shapes)


def random_tensors(architecture: Architecture, dtype: str) -> Tensors:
    """Return a checkpoint's tensors with random numbers, by the names of minGPT, Llama or Qwen3.

    Weights of norms are around 1, everything else around 0.

    Args:
        architecture: the model.
        dtype: of the tensors.
    """
    import torch

    start = "transformer." if architecture.kind == "gpt2" else ""
    shapes = {
        name: shape
        for source in layout.stored_by(architecture, start=start).values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    largest = max(map(math.prod, shapes.values()))
    period = min(PERIOD, largest)
    drawn = torch.randn(period, generator=torch.Generator().manual_seed(0))
    around_1 = _bytes_of((1 + STD_OF_NORMS * drawn[: architecture.width + architecture.head_dim]).to(_torch(dtype)))
    around_0 = _bytes_of((STD * drawn).to(_torch(dtype)).repeat(2 + largest // period))
    item, found = layout_bytes(dtype), {}
    for number, (name, shape) in enumerate(shapes.items()):
        is_norm = len(shape) == 1 and name.endswith("weight")
        data, first = (around_1, 0) if is_norm else (around_0, number * _STRIDE % period * item)
        found[name] = HostTensor(name, dtype, shape, data[first : first + math.prod(shape) * item])
    return found


def layout_bytes(dtype: str) -> int:
    """Return the bytes of a number."""
    return int(_torch(dtype).itemsize)


def engine_of(
    architecture: Architecture, tensors: Tensors, dtype: str, stream: Stream, *, int8: bool = False
) -> Callable[[int | None], Engine]:  # fmt: skip
    """Lay weights out as ``load`` does; return a function that makes engines of them for the most tokens of a sequence.

    Raises:
        CacheMiss: a kernel that lays weights out is missing.
        DriverError: the GPU has too little memory.
    """
    weights = layout.load(architecture, tensors, dtype, Queued(stream), int8=int8)
    return lambda context: Engine(architecture, weights, dtype, stream, context)


def write_checkpoint(folder: Path, model: str, tensors: Tensors) -> None:
    """Write a folder that ``load`` reads: config.json and model.safetensors."""
    (folder / "config.json").write_text(json.dumps(dict(fields_of(model))), encoding="utf-8")
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data)


_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def mingpt_of(architecture: Architecture, tensors: Tensors, device: str, way: Any) -> Any:
    """Return GPT-2 in torch with these weights, for inference."""
    import torch

    from benchmarks.mingpt import MinGPT

    dtype = next(iter(tensors.values())).dtype
    sizes = architecture.layers, architecture.heads, architecture.width
    with torch.device("meta"):
        model = MinGPT(sizes, architecture.vocabulary, architecture.positions, way).to(_torch(dtype))
    states = {name: tensor.to(device) for name, tensor in _on_host(tensors).items()}
    if architecture.tied:
        states["lm_head.weight"] = states["transformer.wte.weight"]
    model.load_state_dict(states, strict=False, assign=True)
    ones = torch.ones(architecture.positions, architecture.positions, dtype=_torch(dtype), device=device)
    for block in model.transformer["h"]:
        block.attn.bias = ones.tril()[None, None]
    return model.eval()


def hf_of(model: str, architecture: Architecture, tensors: Tensors, device: str) -> Any:
    """Return transformers' model with these weights and SDPA, for inference."""
    import torch

    from benchmarks.mingpt import state_of

    dtype = _torch(next(iter(tensors.values())).dtype)
    made = make_model(config_of(fields_of(model), model), 0, "sdpa", device).to(dtype).eval()
    states = _on_host(tensors)
    if architecture.kind == "gpt2":
        states = state_of(states)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(states[name])
    return made


def _on_host(tensors: Tensors) -> dict[str, Any]:
    """Return the tensors as torch's, which share their memory."""
    import torch

    return {
        name: torch.frombuffer(tensor.data, dtype=_torch(tensor.dtype)).view(tensor.shape)
        for name, tensor in tensors.items()
    }


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.view(torch.uint8).numpy())


def _torch(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)
