"""Loads models: a GPU gets ready while the engine's modules are imported and the checkpoint is opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tilekern.errors import InputError
from tilekern.runtime.driver import Device
from tilekern.runtime.driver import device as device_numbered

if TYPE_CHECKING:
    from tilekern.inference.architectures import Architecture
    from tilekern.inference.checkpoints import Checkpoint
    from tilekern.inference.engine import Engine


def load(
    where: str | os.PathLike[str], *, dtype: str = "bfloat16", weight_dtype: str | None = None,
    context: int | None = None, cache: str = "static", cache_bytes: int | None = None, heads: int | None = None,
    device: Device | int = 0, gpus: int | Sequence[int] = 1,
) -> Engine:  # fmt: skip
    """Return the engine of a checkpoint.

    Args:
        where: a folder with config.json and safetensors, a state dict of minGPT's, or a hub id.
        dtype: ``bfloat16``, ``float16`` or ``float32``: of weights, activations and caches. Products of float32 are by
            TF32, with 10 bits of mantissa.
        weight_dtype: ``int8`` for weights of products in 8 bits, with a scale for each output; by default ``dtype``.
        context: the most tokens of a sequence; by default as many as the model was made for, at most 4096.
        cache: ``static``: a cache has room for ``context`` tokens of each sequence. ``paged``: sequences take pages of
            256 tokens as they grow, and give them back when they end.
        cache_bytes: the bytes of all pages, which are reserved at once; by default each call of ``generate`` has as
            many as its prompts and new tokens may need.
        heads: of a state dict of minGPT's, which does not say it; the sizes are then its tensors', and no config.json
            is read.
        device: the GPU, or its number.
        gpus: how many GPUs share the model, from ``device`` on; or their numbers, in place of ``device``. They must be
            of one kind, and divide the model's key heads and inner size evenly.

    Raises:
        InputError: there is no such checkpoint, the model is not served, or a tensor or a number is missing or wrong.
        CannotRun: there is no such GPU, the driver is missing or too old, or NCCL fails.
        ExtraMissing: several GPUs are asked for, and NCCL is not installed.
        CacheMiss: no record serves one of the kernels that lay out weights, and none may be compiled.
        DriverError: the GPU has too little memory.
    """
    numbers = _numbers(device, gpus)
    # The first use of a GPU takes the driver as long as all that is done meanwhile.
    with ThreadPoolExecutor(1, "tilekern-gpu") as other:
        devices = other.submit(lambda: [device_numbered(number) for number in numbers])
        from tilekern.inference import parallel
        from tilekern.inference import weights as layout
        from tilekern.inference.checkpoints import open_checkpoint
        from tilekern.inference.engine import Engine, check_cache
        from tilekern.inference.launches import Queued
        from tilekern.runtime.joint import JointStream

        if dtype not in layout.DTYPES:
            raise InputError(f"dtype must be one of {', '.join(layout.DTYPES)}, got {dtype!r:.40}")
        weight_dtype = weight_dtype or dtype
        if weight_dtype not in (dtype, layout.INT8):
            raise InputError(f"weight_dtype must be {layout.INT8} or that of dtype, {dtype}, got {weight_dtype!r:.40}")
        check_cache(cache, cache_bytes)
        with open_checkpoint(where) as checkpoint:
            architecture = _architecture(checkpoint, heads)
            parallel.part_of(architecture, len(numbers))  # so that a number of GPUs that cannot be is refused first
            gpus_of_model, int8 = devices.result(), weight_dtype == layout.INT8
            stream = JointStream(gpus_of_model) if len(numbers) > 1 else gpus_of_model[0].stream()
            if isinstance(stream, JointStream):
                weights = parallel.load(architecture, checkpoint.tensors, dtype, stream, int8=int8)
            else:
                weights = layout.load(architecture, checkpoint.tensors, dtype, Queued(stream), int8=int8)
    return Engine(architecture, weights, dtype, stream, context, cache=cache, cache_bytes=cache_bytes)


def _numbers(device: Device | int, gpus: int | Sequence[int]) -> Sequence[int]:
    """Return the numbers of the GPUs that a caller of :func:`load` names."""
    first = device.number if isinstance(device, Device) else device
    if type(first) is not int:
        raise InputError(f"device must be a GPU or its number, got {first!r:.40}")
    numbers = range(first, first + gpus) if type(gpus) is int else gpus
    if not isinstance(numbers, Sequence) or not numbers or any(type(number) is not int for number in numbers):
        raise InputError(f"gpus must be a whole number from 1 on, or a list of GPUs' numbers, got {gpus!r:.40}")
    if type(gpus) is not int and first:
        raise InputError(f"gpus lists the GPUs, so device must be left out, got {first}")
    return numbers


def _architecture(checkpoint: Checkpoint, heads: int | None) -> Architecture:
    """Return the model that a checkpoint's files describe."""
    from tilekern.inference import weights as layout
    from tilekern.inference.architectures import architecture_of, ends_of
    from tilekern.inference.json_files import read_json

    is_described = checkpoint.config and heads is None
    config = checkpoint.config if is_described else layout.config_of_state_dict(checkpoint.tensors, heads)
    architecture = architecture_of(config)
    # Models that were taught to converse end their answers by other ids than texts.
    more = checkpoint.folder / "generation_config.json"
    if checkpoint.config and more.is_file():
        ends = architecture.ends | ends_of(read_json(more), more.name)
        architecture = dataclasses.replace(architecture, ends=ends)
    return architecture
