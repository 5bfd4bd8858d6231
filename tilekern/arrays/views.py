"""Arrays on a GPU: tilekern's own, and the facts of other libraries' arrays, by their protocols.

An array says where its elements are by ``__cuda_array_interface__`` (CuPy, numba, torch) or by DLPack (JAX and all of
these). Nothing is copied, and nothing waits: a caller launches on a stream on which the arrays are ready.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from tilekern.errors import InputError
from tilekern.runtime.driver import Fetched, Memory, Stream, device_of

# By the arrays' dtypes: how __cuda_array_interface__ spells them (bfloat16 as ml_dtypes does), and their bytes.
TYPESTRS = {
    "bfloat16": "<V2", "float16": "<f2", "float32": "<f4", "int8": "|i1", "int32": "<i4", "int64": "<i8",
    "uint8": "|u1",
}  # fmt: skip
ITEM_BYTES = {dtype: int(typestr[2:]) for dtype, typestr in TYPESTRS.items()}
_DTYPES = {typestr: dtype for dtype, typestr in TYPESTRS.items()}
# The same by DLPack's code and bits of a type.
_DLPACK_DTYPES = {
    (4, 16): "bfloat16", (2, 16): "float16", (2, 32): "float32", (0, 8): "int8", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8",
}  # fmt: skip
# DLPack's types of memory that kernels read: that of a GPU, and managed memory.
_ON_GPU = (2, 13)
_READ_ONLY = 1


class Form(NamedTuple):
    """What a launch is checked for, of one array; strides are in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    is_read_only: bool = False


class Array:
    """A view of memory on a GPU, which lives as long as its views.

    Whatever reads ``__cuda_array_interface__`` takes it: CuPy, numba, ``torch.as_tensor``.

    Attributes:
        memory: the memory.
        dtype: ``bfloat16``, ``float16``, ``float32``, ``int8``, ``int32``, ``int64`` or ``uint8``.
        shape: the sizes.
        strides: the distances of neighbours along each axis, in elements.
        address: where the first element is.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "address", "dtype", "form", "memory", "shape", "strides")

    def __init__(
        self, memory: Memory, shape: Iterable[int], dtype: str, strides: Iterable[int] | None = None, offset: int = 0
    ) -> None:
        """Make a view of memory that begins ``offset`` elements after its start.

        Raises:
            InputError: the dtype is unknown, or the view would leave the memory.
        """
        if dtype not in TYPESTRS:
            raise InputError(f"unknown dtype {dtype!r:.40}; known: {', '.join(TYPESTRS)}")
        self.memory, self.shape, self.dtype = memory, tuple(shape), dtype
        self.strides = _contiguous(self.shape) if strides is None else tuple(strides)
        item = ITEM_BYTES[dtype]
        if len(self.strides) != len(self.shape) or min((*self.shape, *self.strides, offset, 0)) < 0:
            raise InputError(f"shape {self.shape}, strides {self.strides} and offset {offset} do not make a view")
        last = offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and (last + 1) * item > memory.size_bytes:
            raise InputError(
                f"a view of shape {self.shape} and strides {self.strides} from element {offset} on ends after the "
                f"memory's {memory.size_bytes // item} elements of {dtype}"
            )
        self.address = memory.address + offset * item
        self.form = Form(dtype, self.shape, self.strides, memory.stream.device.number)
        self.__cuda_array_interface__ = {
            "shape": self.shape, "strides": tuple(stride * item for stride in self.strides), "typestr": TYPESTRS[dtype],
            "data": (self.address, False), "version": 3, "stream": None,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on GPU {self.form.device}>"

    def view(self, shape: Iterable[int], strides: Iterable[int] | None = None, offset: int = 0) -> Array:
        """Return another view of the same memory that begins ``offset`` elements after this one.

        Raises:
            InputError: it would leave the memory.
        """
        before = (self.address - self.memory.address) // ITEM_BYTES[self.dtype]
        return Array(self.memory, shape, self.dtype, strides, before + offset)

    def moved(self, memory: Memory) -> Array:
        """Return the same view of other memory, which must be as large."""
        view = Array.__new__(Array)  # without the checks, which this one has passed
        view.memory, view.dtype, view.shape, view.strides = memory, self.dtype, self.shape, self.strides
        view.address = memory.address + self.address - self.memory.address
        view.form = Form(self.dtype, self.shape, self.strides, memory.stream.device.number)
        view.__cuda_array_interface__ = self.__cuda_array_interface__ | {"data": (view.address, False)}
        return view

    def write(self, data: Any) -> None:
        """Copy a buffer with the bytes of all elements here, such as a mapped file; wait until it is done.

        Raises:
            InputError: the elements are not contiguous.
            ValueError: the buffer has another size.
        """
        self.memory.write(data, *self._bytes())

    def read(self) -> bytearray:
        """Return the bytes of contiguous elements, when the stream that the memory belongs to has come so far.

        Raises:
            InputError: the elements are not contiguous.
        """
        return self.memory.read(*self._bytes())

    def fetch(self) -> Fetched:
        """Queue a copy of the bytes of contiguous elements, at most 4096, to the host, and wait for nothing.

        Raises:
            InputError: the elements are not contiguous.
        """
        return self.memory.fetch(*self._bytes())

    def fill(self, byte: int = 0) -> None:
        """Queue on the memory's stream that all bytes of contiguous elements get a value.

        Raises:
            InputError: the elements are not contiguous.
        """
        self.memory.fill(byte, *self._bytes())

    def _bytes(self) -> tuple[int, int]:
        """Return where the elements begin in the memory, in bytes, and how many bytes they are."""
        dense = _contiguous(self.shape)
        if any(size > 1 and one != other for size, one, other in zip(self.shape, self.strides, dense, strict=True)):
            raise InputError(f"only contiguous elements are copied and filled; these have the strides {self.strides}")
        return self.address - self.memory.address, math.prod(self.shape) * ITEM_BYTES[self.dtype]


def empty(shape: Iterable[int], dtype: str, stream: Stream) -> Array:
    """Return an array with memory of the pool, for work on a stream; its values are whatever was there.

    Raises:
        InputError: the dtype is unknown, or a size is negative.
        DriverError: the GPU has no such memory left.
    """
    sizes = tuple(shape)
    if dtype not in TYPESTRS or min((*sizes, 0)) < 0:
        known = ", ".join(TYPESTRS)
        raise InputError(f"an array of {dtype!r:.40} with the shape {sizes} cannot be made; known dtypes: {known}")
    return Array(stream.memory(math.prod(sizes) * ITEM_BYTES[dtype]), sizes, dtype)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _View:
    """An array that is only known by DLPack, as ``__cuda_array_interface__``; it keeps the array."""

    def __init__(self, array: Any, address: int, form: Form) -> None:
        self.array, item = array, ITEM_BYTES[form.dtype]
        self.__cuda_array_interface__ = {
            "shape": form.shape, "strides": tuple(stride * item for stride in form.strides),
            "typestr": TYPESTRS[form.dtype], "data": (address, form.is_read_only), "version": 3, "stream": None,
        }  # fmt: skip


def form_of(array: Any, name: str) -> tuple[Form, Any, int]:
    """Return the form of another library's array, what a launch takes for it, and its address.

    Args:
        array: the array.
        name: the parameter, for errors.

    Raises:
        InputError: it is not an array in the memory of a GPU, or its dtype is one that no kernel takes.
    """
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
        if isinstance(interface, dict):
            form, address = _by_interface(interface, name)
            return form, array, address
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            form, address = _by_dlpack(array, name)
            return form, _View(array, address, form), address
    except (RuntimeError, BufferError, KeyError, TypeError) as error:  # torch's, of a tensor that requires gradients
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name}, {_kind(array)}, cannot be read: {what}") from None
    raise InputError(
        f"{name} is {_kind(array)}, not an array on a GPU: it has neither __cuda_array_interface__ nor DLPack"
    )


def _kind(array: Any) -> str:
    return f"of type {type(array).__module__}.{type(array).__qualname__}"


def _by_interface(interface: dict[str, Any], name: str) -> tuple[Form, int]:
    address, is_read_only = interface["data"]
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    dtype = _DTYPES.get(typestr)
    if dtype is None:
        raise InputError(f"{name} has elements of type {typestr!r:.20}; kernels take {', '.join(TYPESTRS)}")
    item, strides = ITEM_BYTES[dtype], interface.get("strides")
    if strides is not None and any(stride % item for stride in strides):
        raise InputError(f"{name} has strides of {strides} bytes, which are not whole elements of {dtype}")
    in_elements = _contiguous(shape) if strides is None else tuple(stride // item for stride in strides)
    number = device_of(address) if address else None
    if number is None and 0 not in shape:
        raise InputError(f"{name} is not in the memory of a GPU; copy it there first")
    return Form(dtype, shape, in_elements, -1 if number is None else number, bool(is_read_only)), address


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _by_dlpack(array: Any, name: str) -> tuple[Form, int]:
    where, _ = array.__dlpack_device__()
    if int(where) not in _ON_GPU:
        raise InputError(f"{name}, {_kind(array)}, is not in the memory of a CUDA GPU; copy it there first")
    try:
        capsule = array.__dlpack__(stream=-1, max_version=(1, 0))
    except TypeError:  # of before DLPack 1.0
        capsule = array.__dlpack__(stream=-1)
    flags = 0
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_in(capsule, b"dltensor_versioned"))
        tensor, flags = versioned.tensor, versioned.flags
    else:
        tensor = _Tensor.from_address(_pointer_in(capsule, b"dltensor"))
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        code = f"{tensor.code} with {tensor.bits} bits"
        raise InputError(f"{name} has elements of DLPack's type {code}; kernels take {', '.join(TYPESTRS)}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _contiguous(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return Form(dtype, shape, strides, tensor.device, bool(flags & _READ_ONLY)), address
