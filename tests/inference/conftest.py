"""A GPU for the engine: the stub of the driver, whose memory is the host's, and the interpreter in place of its SMs."""

import ctypes
import math
import shutil

import pytest
import torch
from environments import stub_of_the_driver

from tilekern.runtime import dispatch, driver
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec.targets import INTERPRETED

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8")}


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
        def run():
            self.launch(0, *map(tensor_of, arguments))

        run() if Interpreted.capturing is None else Interpreted.capturing.append(run)


class Recorded:
    """A graph: launches in their order."""

    def __init__(self, launches):
        self._launches = launches

    def launch(self, stream):  # noqa: ARG002
        for run in self._launches:
            run()


def capture(stream, body):
    Interpreted.capturing = launches = []
    try:
        body()
    finally:
        Interpreted.capturing = None
    return Recorded(launches)


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


def read(array):
    """A contiguous array's elements, when its stream has come so far."""
    assert math.prod(array.shape)
    return tensor_of(array).clone()
