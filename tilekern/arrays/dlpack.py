"""DLPack by ctypes: what a capsule of another library says of its array."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

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
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_in(capsule, b"dltensor_versioned"))
        tensor, flags = versioned.tensor, versioned.flags
    else:
        tensor = _Tensor.from_address(_pointer_in(capsule, b"dltensor"))
    return Facts(
        _NAMES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        tensor.device,
        bool(flags & _READ_ONLY),
        (tensor.data or 0) + tensor.byte_offset,
        f"{tensor.code} with {tensor.bits} bits",
    )
