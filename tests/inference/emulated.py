"""A GPU for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of its SMs."""

import ctypes
import math

import torch

from tilekern.arrays import Array
from tilekern.runtime import driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8")}


def tensor_of(array):
    """An array's elements as a tensor that shares their memory."""
    if not isinstance(array, Array):
        return array
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    item = TORCH[array.dtype].itemsize
    if 0 in array.shape:
        return torch.empty(array.shape, dtype=TORCH[array.dtype])
    raw = (ctypes.c_char * (reach * item)).from_address(array.address)
    return torch.frombuffer(raw, dtype=TORCH[array.dtype]).as_strided(array.shape, array.strides)


class Interpreted(InterpretedPlan):
    """A plan of the default config, which is interpreted when the stream runs, or when its graph does."""

    capturing = None

    def queue(self, stream, *arguments):  # noqa: ARG002
        # A graph knows addresses alone, so memory that is dropped serves later launches of a capture.
        seen = [tensor_of(argument) for argument in arguments]

        def run():
            self.launch(0, *seen)

        run() if Interpreted.capturing is None else Interpreted.capturing.append(run)


class Recorded:
    """A graph: launches in their order, and the memory of their arrays."""

    def __init__(self, launches, memory):
        self._launches, self._memory = launches, memory

    def launch(self, stream):  # noqa: ARG002
        for run in self._launches:
            run()


def capture(stream, body):
    Interpreted.capturing, stream.captured = launches, memory = [], driver.GraphMemory(stream)
    try:
        body()
    finally:
        Interpreted.capturing = stream.captured = None
    return Recorded(launches, memory)


def interpreted(spec, device, target, problem):
    config = spec.default(problem, INTERPRETED)
    if spec.is_library(problem, config):
        config = spec.generic(problem)
    implementation = spec.device(problem, config)
    return Interpreted(implementation, config, implementation.grid(problem, INTERPRETED.sm_count))


def read(array):
    """A contiguous array's elements, when its stream has come so far."""
    assert math.prod(array.shape)
    return tensor_of(array).clone()
