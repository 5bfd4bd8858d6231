"""The engine's GPU, and small models."""

import ctypes
import shutil

import pytest
from emulated import Nccl, capture, interpreted
from environments import stub_of_the_driver
from small_models import MODELS, save

from tilekern.arrays import ArrayPlan
from tilekern.interpreter import dtypes
from tilekern.runtime import dispatch, driver, nccl

_TO_TFLOAT32 = dtypes._to_tfloat32


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed, which compiles the driver's stub")
    folder = tmp_path_factory.mktemp("driver")
    stub_of_the_driver(folder)
    return ctypes.CDLL(str(folder / "libcuda.so.1"))


@pytest.fixture
def gpu(stub, monkeypatch):
    """The GPU; kernels have their default configs.

    TF32 holds all numbers of float32: roundings would hide small errors of the engine.
    """
    monkeypatch.setattr(dtypes, "_to_tfloat32", lambda data: data)
    monkeypatch.setattr(driver, "_driver", lambda: stub)
    monkeypatch.setattr(dispatch, "array_plan_for", interpreted)
    monkeypatch.setattr(driver.Stream, "capture", capture)
    driver.device.cache_clear()
    yield driver.device(0)
    driver.device.cache_clear()


@pytest.fixture
def linked(gpu, monkeypatch):
    """NCCL between as many GPUs as a test asks for, at most 8."""
    found = Nccl()
    monkeypatch.setenv("STUB_GPUS", "8")
    monkeypatch.setattr(nccl, "library", lambda: found)
    return found


@pytest.fixture
def rounding_gpu(gpu, monkeypatch):
    """The GPU, with TF32 as it is."""
    monkeypatch.setattr(dtypes, "_to_tfloat32", _TO_TFLOAT32)
    return gpu


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched."""
    found, launch = [], ArrayPlan.launch

    def noted(plan, stream, *arguments):
        found.append(plan.kernel)
        launch(plan, stream, *arguments)

    monkeypatch.setattr(ArrayPlan, "launch", noted)
    return found


@pytest.fixture(scope="session", params=MODELS)
def saved(request, tmp_path_factory):
    """A small model of each architecture, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    return save(request.param, folder), folder
