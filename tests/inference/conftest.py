"""A GPU for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of its SMs."""

import ctypes
import math
import shutil

import pytest
import torch
from environments import stub_of_the_driver
from small_models import MODELS, save

from tilekern.runtime import dispatch, driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int32", "int64", "uint8")}


def tensor_of(array):
    """An array's elements as a tensor that shares their memory."""
    if not isinstance(array, driver_arrays()):
        return array
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    item = TORCH[array.dtype].itemsize
    if 0 in array.shape:
        return torch.empty(array.shape, dtype=TORCH[array.dtype])
    raw = (ctypes.c_char * (reach * item)).from_address(array.address)
    return torch.frombuffer(raw, dtype=TORCH[array.dtype]).as_strided(array.shape, array.strides)


def driver_arrays():
    from tilekern.arrays import Array

    return Array


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


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed, which compiles the driver's stub")
    folder = tmp_path_factory.mktemp("driver")
    stub_of_the_driver(folder)
    return ctypes.CDLL(str(folder / "libcuda.so.1"))


@pytest.fixture
def gpu(stub, monkeypatch):
    """The GPU; kernels have their default configs."""
    monkeypatch.setattr(driver, "_driver", lambda: stub)
    monkeypatch.setattr(dispatch, "array_plan_for", interpreted)
    monkeypatch.setattr(driver.Stream, "capture", capture)
    driver.device.cache_clear()
    yield driver.device(0)
    driver.device.cache_clear()


@pytest.fixture(scope="session", params=MODELS)
def saved(request, tmp_path_factory):
    """A small model of each architecture, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    return save(request.param, folder), folder


def read(array):
    """A contiguous array's elements, when its stream has come so far."""
    assert math.prod(array.shape)
    return tensor_of(array).clone()
