"""DLPack by ctypes: what a capsule of another library says of its array, and capsules for other libraries."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tilekern.runtime.driver import LEGACY, Memory

if TYPE_CHECKING:
    from tilekern.arrays.views import Form

# DLPack's code and bits of a type.
DTYPES = {
    "bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "int8": (0, 8), "int32": (0, 32), "int64": (0, 64),
    "uint8": (1, 8),
}  # fmt: skip
_NAMES = {code: dtype for dtype, code in DTYPES.items()}
# DLPack's types of memory: that of a GPU, and managed memory, which kernels read too.
CUDA, MANAGED = 2, 13
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor, of before 1.0."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


# The names of capsules that nobody has consumed.
_UNVERSIONED, _VERSIONED = b"dltensor", b"dltensor_versioned"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_libc.free.restype, _libc.free.argtypes = None, (ctypes.c_void_p,)
_TIME = ctypes.cast(_libc.time, ctypes.c_void_p).value


class Facts(NamedTuple):
    """What a capsule says of an array; the strides are in elements, and None if the elements are contiguous."""

    dtype: str | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: int
    is_read_only: bool
    address: int
    type_name: str


def read(array: Any, stream: int | None) -> Facts:
    """Return what DLPack says of an array, which is not consumed.

    Args:
        array: an array on a GPU.
        stream: as ``__dlpack__`` takes it. The array's library makes this stream wait for its own work.
    """
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # of before DLPack 1.0
        capsule = array.__dlpack__(stream=stream)
    flags = 0
    if _is_capsule(capsule, _VERSIONED):
        versioned = _Versioned.from_address(_pointer_in(capsule, _VERSIONED))
        tensor, flags = versioned.tensor, versioned.flags
    else:
        tensor = _Tensor.from_address(_pointer_in(capsule, _UNVERSIONED))
    return Facts(
        _NAMES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        tensor.device,
        bool(flags & _READ_ONLY),
        (tensor.data or 0) + tensor.byte_offset,
        f"{tensor.code} with {tensor.bits} bits",
    )


def export(memory: Memory, form: Form, address: int, stream: int | None, max_version: tuple[int, int] | None) -> Any:
    """Return a capsule of an array in a memory, which lives until the capsule's consumer is done with it.

    Args:
        memory: the memory.
        form: the array's form.
        address: where its first element is.
        stream: the consumer's stream, as ``__dlpack__`` takes it, which waits for the work on the memory's.
        max_version: the newest DLPack that the consumer reads.

    Raises:
        BufferError: there is no such stream, or it would wait for work that is being captured.
        DriverError: the driver does not know the stream.
    """
    handle = LEGACY if stream is None else stream
    if not isinstance(handle, int) or isinstance(handle, bool) or handle == 0 or handle < -1:
        raise BufferError(f"the stream of __dlpack__ is a handle, 1, 2, -1 or None, not {handle!r:.40}")
    if handle not in (-1, memory.stream.handle):
        if memory.stream.captured is not None:
            raise BufferError("the array's stream is being captured, so that no other can wait for it; export it later")
        memory.lend(handle)
    exported = _Exported(memory, form, address, is_versioned=max_version is not None and tuple(max_version) >= (1, 0))
    capsule = exported.capsule
    memory.stream.device.keep(exported)
    return capsule


class _Exported:
    """A memory that the consumer of a capsule uses until it calls the deleter.

    A consumer may call the deleter in any thread, while an exception is raised, and after the interpreter has ended.
    Code of Python, called by ctypes, would replace the exception by a SystemError, or crash. So the deleter is the C
    library's ``time``: it writes the time over the first eight bytes of the managed tensor, which nobody reads any more
    but :meth:`is_over`. For the same reason the capsule has no destructor; it is kept until nobody else refers to it.
    """

    def __init__(self, memory: Memory, form: Form, address: int, *, is_versioned: bool) -> None:
        kind, self._name = (_Versioned, _VERSIONED) if is_versioned else (_Managed, _UNVERSIONED)
        axes = len(form.shape)
        numbers = ctypes.c_int64 * axes
        first, size = ctypes.sizeof(kind), ctypes.sizeof(numbers)
        # Of the C library, so that it outlives the interpreter if the consumer does.
        self._block = _libc.malloc(first + 2 * size)
        if not self._block:
            raise MemoryError
        managed = kind()
        for field, values, at in (("shape", form.shape, first), ("strides", form.strides, first + size)):
            ctypes.memmove(self._block + at, numbers(*values), size)
            setattr(managed.tensor, field, ctypes.cast(self._block + at, ctypes.POINTER(ctypes.c_int64)))
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device, tensor.ndim = address, CUDA, form.device, axes
        (tensor.code, tensor.bits), tensor.lanes = DTYPES[form.dtype], 1
        managed.deleter = _TIME
        if isinstance(managed, _Versioned):
            managed.major = 1
        ctypes.memmove(self._block, ctypes.byref(managed), first)
        self._mark = ctypes.c_int64.from_address(self._block)
        self._unmarked = self._mark.value
        self._memory = memory
        self.capsule: Any = _new_capsule(self._block, self._name, None)

    def is_over(self) -> bool:
        """Return whether the consumer has called the deleter, or no consumer has come and none can."""
        if self._mark.value != self._unmarked:
            return True
        if self.capsule is not None and _references(self) == _ALONE:
            if _is_capsule(self.capsule, self._name):
                return True
            self.capsule = None
        return False

    def end(self) -> None:
        """Free what the consumer has read."""
        _libc.free(self._block)


def _references(exported: Any) -> int:
    return sys.getrefcount(exported.capsule)


class _Alone:
    """Has a capsule that nobody else refers to."""

    def __init__(self) -> None:
        self.capsule = object()


_ALONE = _references(_Alone())
