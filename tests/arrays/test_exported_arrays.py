"""torch and numpy take tilekern's arrays by DLPack: here in the host's memory, which the capsules say they are in."""

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tilekern.arrays import Array, dlpack
from tilekern.runtime.driver import Device, Memory

CPU = 1
DTYPES = ["bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8"]


class HostDevice(Device):
    def __init__(self):
        self.number, self._loans, self._settling = 0, [], threading.Lock()

    def loans(self):
        self._settle()
        return len(self._loans)


class HostMemory(Memory):
    def __init__(self, device, size_bytes):
        self.stream = SimpleNamespace(device=device, handle=0x5570, captured=None)
        self.buffer = ctypes.create_string_buffer(size_bytes)
        self.size_bytes, self.address = size_bytes, ctypes.addressof(self.buffer)

    def __del__(self):
        """It is the host's."""

    def lend(self, handle):
        assert handle == 1, "torch and numpy give no stream for the host's memory"


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(dlpack, "CUDA", CPU)
    return HostDevice()


def made(device, shape=(4, 6), dtype="float32"):
    return Array(HostMemory(device, 8 * 24), shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_shares_an_array_s_memory(device, dtype):
    array = made(device, dtype=dtype)
    for view in (array, array.view((3, 2), (6, 1), offset=7), array.view((), (), offset=3), array.view((0, 4))):
        tensor = torch.from_dlpack(view)
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (getattr(torch, dtype), view.shape, view.strides)
        assert tensor.data_ptr() == view.address or not tensor.numel()
    tensor = torch.from_dlpack(array)
    tensor.copy_(torch.arange(24).view(4, 6))
    memory = array.memory
    assert bytes(memory.buffer)[: tensor.nbytes] == bytes(tensor.clone().view(-1).view(torch.uint8).numpy())
    del array, view, memory
    assert tensor.sum() == 276
    assert device.loans() == 1
    part = tensor[2]
    del tensor
    assert part.sum() == 87
    assert device.loans() == 1
    del part
    assert device.loans() == 0


@pytest.mark.parametrize("version", [{}, {"max_version": (1, 0)}])
def test_an_error_while_a_tensor_is_dropped_stays_what_it_is(device, version):
    """A deleter in Python would turn it into a SystemError."""
    array = made(device)
    with pytest.raises(RuntimeError, match="shape '\\[7\\]' is invalid for input of size 24"):
        torch.utils.dlpack.from_dlpack(array.__dlpack__(**version)).view(7)
    assert device.loans() == 0


def test_an_error_of_a_consumer_stays_what_it_is_and_frees_the_array(device, monkeypatch):
    monkeypatch.setattr(dlpack, "CUDA", 2)
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported device"):
        np.from_dlpack(made(device))
    assert device.loans() == 0


def test_threads_may_free_while_others_export(device):
    kept = [made(device) for _ in range(4)]

    def work():
        for _ in range(300):
            torch.from_dlpack(kept[0])
            tensors = [torch.from_dlpack(array) for array in kept]
            assert len({tensor.data_ptr() for tensor in tensors}) == 4

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.loans() == 0


def test_exports_leave_nothing_behind(device, monkeypatch):
    libc, blocks = dlpack._libc, set()

    def malloc(size):
        block = libc.malloc(size)
        blocks.add(block)
        return block

    def free(block):
        blocks.remove(block)
        libc.free(block)

    monkeypatch.setattr(dlpack, "_libc", SimpleNamespace(malloc=malloc, free=free))
    array = made(device)
    before = sys.getrefcount(array.memory)
    for _ in range(100):
        torch.from_dlpack(array)
        array.__dlpack__()
        array.__dlpack__(max_version=(1, 0))
    assert device.loans() == 0
    after = sys.getrefcount(array.memory)
    assert (after, blocks) == (before, set())


AT_THE_END = """
import builtins, sys
import torch
sys.path.insert(0, sys.argv[1])
from test_exported_arrays import CPU, HostDevice, dlpack, made

dlpack.CUDA = CPU
array = made(HostDevice())
# Dropped by the interpreter at its very end, with the deleter called or not, and a capsule that nobody consumed.
builtins.kept = [torch.from_dlpack(array), array.__dlpack__()]
torch.kept = torch.from_dlpack(array)
print("done")
"""


def test_the_interpreter_ends_while_arrays_are_exported(request):
    ran = subprocess.run(
        [sys.executable, "-c", AT_THE_END, request.path.parent], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
