"""Other libraries' arrays are read by their protocols: real capsules of numpy and torch, said to be on a GPU."""

import numpy as np
import pytest
import torch

from tilekern.arrays import views
from tilekern.arrays.views import Form
from tilekern.errors import InputError

LEGACY, OWN, CAPTURED = 1, 0x5570, 0x5580


class Gpu:
    """A GPU on which one stream is being captured."""

    @staticmethod
    def is_capturing(stream):
        return stream == CAPTURED


def form_of(array, name, stream=OWN):
    return views.form_of(array, name, Gpu, stream)


class OnGpu:
    """An array of the host with its own DLPack, that says of itself that it is on GPU 0."""

    def __init__(self, array, *, versioned=True):
        self.array, self.versioned = array, versioned
        if not versioned:
            self.__class__ = OnGpuBefore1

    def __dlpack__(self, *, stream=None, max_version=None):
        self.stream = stream
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return 2, 0


class OnGpuBefore1(OnGpu):
    """As a library whose DLPack is older than 1.0."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8"])
def test_a_tensor_s_memory_is_read_by_dlpack(dtype, versioned):
    whole = torch.zeros(4, 6, dtype=getattr(torch, dtype))
    for tensor in (whole, whole.t(), whole[1:, 2:4], whole[0, 0], whole[:, :0]):
        form, taken, address = form_of(OnGpu(tensor, versioned=versioned), "x")
        assert form == Form(dtype, tuple(tensor.shape), form.strides, 0)
        assert all(a == b for a, b, n in zip(form.strides, tensor.stride(), tensor.shape, strict=True) if n > 1)
        assert address == tensor.data_ptr() or not tensor.numel()
        interface = taken.__cuda_array_interface__
        assert interface["data"] == (address, False)
        assert interface["shape"] == tuple(tensor.shape)
        assert interface["strides"] == tuple(stride * tensor.element_size() for stride in form.strides)


def test_what_is_read_only_says_so():
    array = np.zeros((2, 3), np.float32)
    assert not form_of(OnGpu(array), "x")[0].is_read_only
    array.flags.writeable = False
    assert form_of(OnGpu(array), "x")[0].is_read_only


@pytest.mark.parametrize(("stream", "asked"), [(0, LEGACY), (LEGACY, LEGACY), (2, 2), (OWN, OWN), (CAPTURED, None)])
def test_the_library_of_an_array_makes_the_launch_s_stream_wait(stream, asked):
    """Never -1, which JAX takes for a handle; a stream that is captured cannot wait for what is not."""
    array = OnGpu(np.zeros((2, 3), np.float32))
    form_of(array, "x", stream)
    assert array.stream == asked


class OfJax(OnGpu):
    """As JAX's: its interface is read-only and has no stream, and its DLPack does not say that it is read-only."""

    def __init__(self, array, **more):
        super().__init__(array)
        address = array.ctypes.data
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (address, True), "version": 2, **more
        }  # fmt: skip


def test_an_array_with_a_hidden_stream_is_waited_for_by_dlpack_and_stays_read_only():
    values = np.zeros((2, 3), np.float32)
    array = OfJax(values)
    form, taken, address = form_of(array, "x")
    assert (form, address) == (Form("float32", (2, 3), (3, 1), 0, is_read_only=True), values.ctypes.data)
    assert array.stream == OWN
    assert taken.__cuda_array_interface__["data"] == (address, True)


def test_an_array_that_tells_its_stream_is_read_by_the_interface(monkeypatch):
    monkeypatch.setattr(views, "device_of", lambda _: 0)
    array = OfJax(np.zeros((2, 3), np.float32), stream=None, version=3)
    form_of(array, "x")
    assert not hasattr(array, "stream")


def test_a_launch_gets_nothing_that_cuda_tile_would_ask_for_dlpack():
    _, taken, _ = form_of(OnGpu(np.zeros((2, 3), np.float32)), "x")
    assert not hasattr(taken, "__dlpack__")


@pytest.mark.parametrize("error", [RuntimeError("INTERNAL: CUDA error:\n invalid handle"), ValueError("no"), OSError()])
def test_an_error_of_a_library_names_the_argument(error):
    class Broken(OnGpu):
        def __dlpack__(self, **options):
            raise error

    with pytest.raises(InputError, match=r"^gate, of type .*Broken, cannot be read: \w+Error: ?[^\n]*$"):
        form_of(Broken(None), "gate")


@pytest.mark.parametrize(
    ("array", "line"),
    [
        (np.zeros(2, np.float32), "x, of type numpy.ndarray, is not in the memory of a CUDA GPU; copy it there first"),
        (torch.zeros(2), "x, of type torch.Tensor, is not in the memory of a CUDA GPU; copy it there first"),
        (OnGpu(np.zeros(2, np.float64)), "x has elements of DLPack's type 2 with 64 bits; kernels take bfloat16, "),
        (OnGpu(np.zeros(2, bool)), "x has elements of DLPack's type 6 with 8 bits; kernels take bfloat16, float16, "),
        ([1.0], "x is of type builtins.list, not an array on a GPU: it has neither __cuda_array_interface__ nor "),
        (OnGpu(torch.zeros(2, requires_grad=True)), "x, of type test_foreign_arrays.OnGpu, cannot be read: "),
    ],
)
def test_what_is_no_array_on_a_gpu_is_one_line(array, line):
    with pytest.raises(InputError) as caught:
        form_of(array, "x")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
