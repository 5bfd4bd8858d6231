"""A GPU for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of its SMs."""

import ctypes
import math

import torch

from tilekern.arrays.views import TYPESTRS
from tilekern.runtime import driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {typestr: getattr(torch, name) for name, typestr in TYPESTRS.items()}


def tensor_of(array):
    """An array's elements as a tensor that shares their memory."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return array
    shape, dtype = interface["shape"], TORCH[interface["typestr"]]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    strides = [stride // dtype.itemsize for stride in interface["strides"]]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (reach * dtype.itemsize)).from_address(interface["data"][0])
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


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
