"""Launches on arrays of several libraries, and in a process without torch, give what torch computes in float64."""

import shutil
import subprocess
import sys
import time
import tomllib

import numpy as np
import pytest
import torch
from environments import ROOT, BarePython

from tilekern import arrays
from tilekern.errors import DriverError, InputError
from tilekern.runtime import dispatch

ROWS, COLUMNS = 100, 4096


class Own:
    """tilekern's own arrays."""

    def __init__(self):
        self.stream = arrays.device(0).stream()

    def put(self, values):
        array = arrays.empty(values.shape, str(values.dtype), self.stream)
        array.write(values)
        return array

    def get(self, array):
        return np.frombuffer(array.read(), np.float32).reshape(array.shape)


class Torch:
    """torch's, on a stream of its own."""

    def __init__(self):
        self.stream = torch.cuda.Stream()

    def put(self, values):
        array = torch.from_numpy(values).cuda()
        torch.cuda.synchronize()
        return array

    def get(self, array):
        self.stream.synchronize()
        return array.cpu().numpy()


class ByDlpack(Torch):
    """torch's, of which only DLPack is seen."""

    class Array:
        def __init__(self, tensor):
            self.tensor = tensor
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    def put(self, values):
        return self.Array(super().put(values))

    def get(self, array):
        return super().get(array.tensor)


class CuPy:
    def __init__(self):
        self.module = pytest.importorskip("cupy", reason="cupy is not installed")
        self.stream = self.module.cuda.Stream(non_blocking=True)

    def put(self, values):
        array = self.module.asarray(values)
        self.module.cuda.runtime.deviceSynchronize()
        return array

    def get(self, array):
        self.stream.synchronize()
        return self.module.asnumpy(array)


class Numba:
    def __init__(self):
        self.module = pytest.importorskip("numba.cuda", reason="numba is not installed")
        self.stream = 0

    def put(self, values):
        return self.module.to_device(values)

    def get(self, array):
        self.module.synchronize()
        return array.copy_to_host()


class Jax(Own):
    """JAX's inputs; nothing else may write its arrays, so that the output is tilekern's."""

    def __init__(self):
        super().__init__()
        self.module = pytest.importorskip("jax", reason="jax is not installed")
        if self.module.default_backend() != "gpu":
            pytest.skip("this jax has no GPU")

    def put(self, values):
        return self.module.numpy.asarray(values) + 0  # runs on JAX's stream, which the launch's waits for


def drawn():
    made = np.random.default_rng(0).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)
    gate, up = (torch.from_numpy(one).double() for one in made)
    return *made, (torch.nn.functional.silu(gate) * up).numpy()


@pytest.mark.parametrize("library", [Own, Torch, ByDlpack, CuPy, Numba, Jax])
def test_arrays_of_a_library(library):
    theirs, (gate, up, expected) = library(), drawn()
    plan = arrays.plan("swiglu_forward", rows=ROWS, columns=COLUMNS, dtype="float32")
    zeros = np.zeros((ROWS, COLUMNS), np.float32)
    y = Own.put(theirs, zeros) if library is Jax else theirs.put(zeros)
    given = theirs.put(gate), theirs.put(up)
    before = dispatch.stats()["swiglu_forward"]["launches"]
    plan.launch(theirs.stream, *given, y)
    np.testing.assert_allclose(theirs.get(y), expected, rtol=1e-5, atol=1e-6)
    assert dispatch.stats()["swiglu_forward"]["launches"] == before + 1


def test_a_graph_repeats_a_launch_on_new_values():
    own, (gate, up, expected) = Own(), drawn()
    plan = arrays.plan("swiglu_forward", rows=ROWS, columns=COLUMNS, dtype="float32")
    given, y = [own.put(np.zeros_like(gate)) for _ in range(2)], own.put(np.zeros_like(gate))
    graph = own.stream.capture(lambda: plan.launch(own.stream, *given, y))
    for array, values in zip(given, (gate, up), strict=True):
        array.write(values)
    first = own.stream.record()
    graph.launch(own.stream)
    assert 0 < own.stream.record().ms_since(first) < 1000
    np.testing.assert_allclose(own.get(y), expected, rtol=1e-5, atol=1e-6)


def test_errors_of_the_host_s_arrays_and_of_a_full_gpu():
    own = Own()
    plan = arrays.plan("swiglu_forward", rows=ROWS, columns=COLUMNS, dtype="float32")
    array = own.put(np.zeros((ROWS, COLUMNS), np.float32))
    with pytest.raises(InputError, match=r"up, of type torch\.Tensor, is not in the memory of a CUDA GPU"):
        plan.launch(own.stream, array, torch.zeros(ROWS, COLUMNS), array)
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2 failed with error 2 \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        arrays.empty((1 << 42,), "uint8", own.stream)
    plan.launch(own.stream, array, array, array)
    own.stream.synchronize()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_torch_and_an_array_share_memory_by_dlpack(dtype):
    stream = arrays.device(0).stream()
    values = torch.randint(-100, 100, (ROWS, COLUMNS)).to(getattr(torch, dtype))
    array = arrays.empty(values.shape, dtype, stream)
    array.write(values.view(torch.uint8).numpy())
    tensor = torch.from_dlpack(array)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (values.dtype, values.shape, array.address)
    assert torch.equal(tensor.cpu(), values)
    assert torch.equal(torch.from_dlpack(array.view((10, 8), (COLUMNS, 1), offset=5)).cpu(), values[:10, 5:13])
    tensor.mul_(2)
    torch.cuda.synchronize()
    assert array.read() == (values * 2).view(torch.uint8).numpy().tobytes()
    array.fill(0)
    stream.synchronize()
    assert not tensor.any()


@pytest.mark.parametrize("is_default", [True, False])
def test_torch_s_stream_waits_for_an_array_and_its_memory_for_torch(is_default):
    gpu = arrays.device(0)
    stream, size = gpu.stream(), 1 << 28
    with torch.cuda.stream(torch.cuda.default_stream() if is_default else torch.cuda.Stream()):
        copy = torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        array = arrays.empty((size,), "uint8", stream)
        for byte in range(100):
            array.fill(byte)
        tensor = torch.from_dlpack(array)
        assert tensor.sum() == 99 * size
        address = array.address
        del array
        assert arrays.empty((size,), "uint8", stream).address != address
        torch.cuda._sleep(100_000_000)
        copy.copy_(tensor)
        del tensor
        again = [arrays.empty((size,), "uint8", stream) for _ in range(2)]
        assert address in [array.address for array in again]
        for array in again:
            array.fill(7)
        torch.cuda.synchronize()
        assert copy.sum() == 99 * size
    del again, array
    gpu.trim()


@pytest.mark.parametrize("library", [CuPy, Jax])
def test_other_libraries_take_an_array_and_give_it_back(library):
    own, values = library(), np.arange(24, dtype=np.float32).reshape(4, 6)
    mine = Own()  # memory that outlives its stream goes to no pool
    array = mine.put(values)
    theirs = own.module.from_dlpack(array) if library is CuPy else pytest.importorskip("jax.dlpack").from_dlpack(array)
    del array
    pooled = arrays.device(0).pooled_bytes()
    assert theirs.tolist() == values.tolist()
    assert arrays.device(0).pooled_bytes() == pooled
    del theirs
    end = time.monotonic() + 10
    while arrays.device(0).pooled_bytes() == pooled and time.monotonic() < end:
        time.sleep(0.01)  # JAX frees in a thread
    assert arrays.device(0).pooled_bytes() == pooled + 512


def test_bfloat16_of_jax_is_read_by_dlpack():
    theirs, (gate, up, expected) = Jax(), drawn()
    plan = arrays.plan("swiglu_forward", rows=ROWS, columns=COLUMNS, dtype="bfloat16")
    y = plan.outputs(theirs.stream)["y"]
    plan.launch(theirs.stream, *(theirs.put(values).astype("bfloat16") for values in (gate, up)), y)
    np.testing.assert_allclose(torch.from_dlpack(y).double().cpu().numpy(), expected, rtol=0.05, atol=0.05)


AT_THE_END = """
import builtins, torch
from tilekern import arrays

array = arrays.empty((4,), "bfloat16", arrays.device(0).stream())
builtins.kept = [torch.from_dlpack(array), array.__dlpack__()]
torch.kept = torch.from_dlpack(array)
print("done")
"""


def test_a_process_ends_while_torch_has_an_array():
    ran = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


WITHOUT_TORCH = """
import math, struct, sys
from tilekern import arrays

def rounded(value):
    return struct.unpack("<I", struct.pack("<f", value))[0] + 0x8000 >> 16

def real(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]

rows, columns = 3, 12288
stream = arrays.device(0).stream()
plan = arrays.plan("swiglu_forward", rows=rows, columns=columns, dtype="bfloat16")
values = [[math.sin(n * step) * 3 for n in range(rows * columns)] for step in (0.37, 0.11)]
bits = [[rounded(value) for value in one] for one in values]
given = [arrays.empty((rows, columns), "bfloat16", stream) for _ in bits]
for array, one in zip(given, bits):
    array.write(struct.pack(f"<{len(one)}H", *one))
y = plan.outputs(stream)["y"]
plan.launch(stream, *given, y)
got = struct.unpack(f"<{rows * columns}H", y.read())
for gate, up, out in zip(*bits, got):
    expected = real(gate) / (1 + math.exp(-real(gate))) * real(up)
    assert abs(real(out) - expected) <= 0.02 * abs(expected) + 1e-3, (gate, up, out)
assert not {"torch", "numpy"} & set(sys.modules)
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="the driver's library may be elsewhere")
def test_a_process_without_torch(tmp_path):
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (tmp_path / "bare").mkdir()
    python = BarePython(tmp_path / "bare", needs)
    ran = python.run("-c", WITHOUT_TORCH, CUDA_VISIBLE_DEVICES="0", TILEKERN_CACHE_DIR=str(tmp_path / "cache"))
    if "CacheMiss" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert ran.returncode == 0, ran.stderr
