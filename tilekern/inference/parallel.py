"""A model that several GPUs share: which part of each tensor a GPU has, and how it comes there.

Each GPU has some heads of attention and some inner numbers of the MLP, or of each expert, so it computes a part of what
they add to the residual stream. The parts are summed over the GPUs
(:meth:`tilekern.inference.launches.Launches.add_up`), and all have the same residual stream again. The head is shared
by its rows. Embeddings, norms and routers are whole on each GPU. A bias of a sum counts on the first GPU; the others
have zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tilekern.arrays import Array
from tilekern.errors import InputError
from tilekern.inference import weights as layout
from tilekern.inference.architectures import Architecture
from tilekern.inference.host_tensors import HostTensor, size_bytes
from tilekern.inference.launches import Launches, Queued, joined
from tilekern.inference.weights import INT8, Source, Weights
from tilekern.runtime.joint import JointStream

# Biases of sums over the inner numbers of all GPUs.
_ADDED_ONCE = (".output.bias", ".down.bias")


def part_of(architecture: Architecture, gpus: int) -> Architecture:
    """Return what one of several GPUs has of a model.

    Raises:
        InputError: they cannot share its heads and inner numbers evenly.
    """
    kv_heads, inner = architecture.kv_heads, architecture.inner
    shared = math.gcd(kv_heads, inner)
    if shared % gpus:
        counts = [str(count) for count in range(1, shared + 1) if shared % count == 0]
        raise InputError(
            f"{gpus} GPUs cannot share {kv_heads} key heads and an inner size of {inner} evenly; "
            f"the number of GPUs must be {' or '.join(counts)}"
        )
    return dataclasses.replace(
        architecture, heads=architecture.heads // gpus, kv_heads=kv_heads // gpus, inner=inner // gpus, gpus=gpus
    )


def load(
    architecture: Architecture, tensors: Mapping[str, HostTensor], dtype: str, stream: JointStream, *,
    int8: bool = False,
) -> Weights:  # fmt: skip
    """Copy to each GPU of a stream its part of a checkpoint; see :func:`tilekern.inference.weights.load`.

    Raises:
        InputError: a tensor is missing, has no use, or has another shape or dtype, or the GPUs cannot share it evenly.
        DriverError: a GPU has no memory left for them.
    """
    queues = [Queued(lane) for lane in stream.each]
    parts = load_parts(architecture, tensors, dtype, queues, int8=int8)
    arrays = {key: joined([part[key] for part in parts], stream) for key in parts[0]}
    return layout.assembled(part_of(architecture, len(queues)), arrays)


def load_parts(
    architecture: Architecture, tensors: Mapping[str, HostTensor], dtype: str, gpus: Sequence[Launches], *,
    int8: bool = False,
) -> list[dict[str, Array]]:  # fmt: skip
    """Copy to each GPU its part of a checkpoint, tensor by tensor, and return the arrays of each by their names.

    A GPU gets no more of a tensor than its part, but for those that the first quantises whole.
    """
    sources = layout.sources_of(architecture, tensors)
    part = part_of(architecture, len(gpus))
    part_sources = layout.stored_by(part, **layout.form_of(architecture, tensors))
    arrays: list[dict[str, Array]] = [{} for _ in gpus]
    for key, source in sources.items():
        is_quantized, wanted = int8 and layout.is_quantized(architecture, key), part_sources[key]
        if is_quantized and wanted.shape[1:] != source.shape[1:]:
            _put_columns(key, source, wanted.shape, tensors, gpus, arrays)
            continue
        for number, (launches, to) in enumerate(zip(gpus, arrays, strict=True)):
            mine = _tensors_of(key, wanted, tensors, number)
            if is_quantized:
                to[key], to[f"{key}.scale"] = layout.put_quantized(wanted, mine, launches)
            else:
                to[key] = layout.put(wanted, mine, dtype, launches)
    if architecture.tied and part.head_rows < part.vocabulary:
        rows, width = part.head_rows, part.width
        for number, to in enumerate(arrays):
            to["head"] = to["embedding"].view((rows, width), offset=number * rows * width)
    return arrays


def _put_columns(
    key: str, source: Source, shape: tuple[int, ...], tensors: Mapping[str, HostTensor], gpus: Sequence[Launches],
    arrays: Sequence[dict[str, Array]],
) -> None:  # fmt: skip
    """Quantise a weight on the first GPU, as a scale is that of a whole row, and copy to each GPU its columns."""
    found, found_scale = layout.put_quantized(source, tensors, gpus[0])
    whole, scales = HostTensor(key, INT8, source.shape, memoryview(found.read())), found_scale.read()
    for number, (launches, to) in enumerate(zip(gpus, arrays, strict=True)):
        to[key], to[f"{key}.scale"] = launches.array(shape, INT8), launches.array(found_scale.shape, "float32")
        to[key].write(_cut(whole, shape, number).data)
        to[f"{key}.scale"].write(scales)


def _tensors_of(key: str, wanted: Source, tensors: Mapping[str, HostTensor], number: int) -> dict[str, HostTensor]:
    """Return a GPU's parts of the tensors of an array."""
    # GPT-2 has q, k and v in one tensor.
    sections = 3 if ".projections." in key and len(wanted.names) == 1 else 1
    found = {
        name: _cut(tensors[name], shape, number, sections)
        for name, shape in zip(wanted.names, wanted.shapes, strict=True)
    }
    if number and key.endswith(_ADDED_ONCE):
        return {name: dataclasses.replace(x, data=memoryview(bytes(x.data.nbytes))) for name, x in found.items()}
    return found


def _cut(tensor: HostTensor, shape: tuple[int, ...], number: int, sections: int = 1) -> HostTensor:
    """Return a GPU's part of a tensor, along the axis of which a part is shorter, and of each equal section of it."""
    axis = next((axis for axis, size in enumerate(shape) if size != tensor.shape[axis]), None)
    if axis is None:
        return tensor
    unit = size_bytes(tensor.dtype, shape[axis + 1 :])
    count, step = shape[axis] // sections * unit, tensor.shape[axis] // sections * unit
    starts = range(number * count, size_bytes(tensor.dtype, tensor.shape), step)
    runs = [tensor.data[start : start + count] for start in starts]
    return HostTensor(tensor.name, tensor.dtype, shape, runs[0] if len(runs) == 1 else memoryview(b"".join(runs)))
