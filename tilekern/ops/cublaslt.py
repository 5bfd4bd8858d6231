"""Products of e4m3 matrices with a scale for each row by cuBLASLt, which is asked for its kernel once for each size.

``torch._scaled_mm`` makes descriptors and asks the library for a kernel at each call, which takes a host longer than
four launches. Here a thread keeps both: a call sets the addresses and queues the kernel that torch's call would, with
the same bits. A product can also be added to what its output holds, which torch's call cannot.

Numbers are those of ``cublasLt.h``; 12.9 is the first version with scales of rows
(https://docs.nvidia.com/cuda/cublas/#cublasltmatmul).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

import torch
from torch import Tensor

_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
_FIRST_VERSION = 120900
# Of cublasComputeType_t and cudaDataType_t.
_COMPUTE_FLOAT, _FLOAT, _BFLOAT16, _E4M3 = 68, 0, 14, 28
# Of cublasLtMatmulDescAttributes_t.
_TRANSPOSE_A, _EPILOGUE, _BIAS, _SCALES_A, _SCALES_B, _MODE_A, _MODE_B = 3, 7, 8, 17, 18, 31, 32
# Their values: CUBLAS_OP_T, CUBLASLT_EPILOGUE_BIAS and CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F.
_TRANSPOSED, _WITH_BIAS, _OF_ROWS = 1, 4, 3
# CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, and as many as torch lets the library have on Hopper.
_MOST_WORKSPACE, _WORKSPACE = 1, 32 << 20
# Of which the library takes addresses to be multiples.
_ALIGNED = 256
# So many sizes a thread keeps; lengths of batches may be without end.
_MOST_SIZES = 1024
_TAKES: dict[str, tuple[Any, ...]] = {
    "cublasLtMatmulDescCreate": (_HANDLE, _INT, _INT),
    "cublasLtMatmulDescDestroy": (_HANDLE,),
    "cublasLtMatmulDescSetAttribute": (_HANDLE, _INT, _HANDLE, ctypes.c_size_t),
    "cublasLtMatrixLayoutCreate": (_HANDLE, _INT, _SIZE, _SIZE, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_HANDLE,),
    "cublasLtMatmulPreferenceCreate": (_HANDLE,),
    "cublasLtMatmulPreferenceDestroy": (_HANDLE,),
    "cublasLtMatmulPreferenceSetAttribute": (_HANDLE, _INT, _HANDLE, ctypes.c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(_HANDLE,) * 7, _INT, _HANDLE, _HANDLE),
}
# On a build of torch for the CPU nothing calls them.
_stream_of, _current_device = (getattr(torch._C, f"_cuda_get{name}", int) for name in ("CurrentRawStream", "Device"))


class _Thread(threading.local):
    """A thread's products, by their sizes: a descriptor holds the addresses of one call."""

    def __init__(self) -> None:
        self.products: dict[Any, _Product] = {}


_thread = _Thread()


class _Heuristic(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", _SIZE * 8), ("workspace", ctypes.c_size_t), ("status", _INT), ("waves", ctypes.c_float),
        ("reserved", _INT * 4),
    )  # fmt: skip


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor | None:
    """Return ``(a * a_scale) @ (b * b_scale)^T + bias + addend`` in bfloat16, or None if the library does not serve it.

    Args:
        a: [m, k] of e4m3 on a GPU, elements of a row next to each other; k is a multiple of 16.
        b: [n, k] likewise; n is a multiple of 16.
        a_scale: [m], float32.
        b_scale: [n], float32.
        bias: [n], bfloat16 and contiguous.
        addend: [m, n], bfloat16 and contiguous; the result has its memory.

    Returns:
        [m, n], bfloat16.
    """
    device = a.get_device()
    # The number of a default stream is 0 on each device, and names that of the current one.
    if _current_device() != device:
        return None
    given = a.data_ptr(), b.data_ptr(), b_scale.data_ptr(), a_scale.data_ptr(), 0 if bias is None else bias.data_ptr()
    if (given[0] | given[1] | given[2] | given[3]) % _ALIGNED:
        return None
    products = _thread.products
    key = device, a.shape, b.shape, a.stride(), b.stride(), bias is None, addend is None
    try:
        product = products[key]
    except KeyError:
        if (library := _library()) is None:
            return None
        if len(products) >= _MOST_SIZES:
            products.clear()
        product = products[key] = _Product(library, a, b, given[2:], accumulates=addend is not None)
    return product.queue(device, given, addend)


class _Product:
    """A product of one size for one thread: descriptors, and the library's choice of a kernel.

    The library counts along columns: its first matrix is ``b``, transposed, its second ``a``, its result [n, m].
    """

    def __init__(
        self, library: ctypes.CDLL, a: Tensor, b: Tensor, addresses: tuple[int, ...], *, accumulates: bool
    ) -> None:
        (m, k), n = a.shape, b.shape[0]
        self._made: list[tuple[str, Any]] = []
        # A handle of torch's lives as long as the process.
        self._library, handle = library, _HANDLE(torch.cuda.current_blas_handle())
        self._shape, self._strides, self._device = (m, n), (n, 1), a.device
        # Functions that look at no types take objects of ctypes alone, in less than half the time.
        self._multiply, self._assign = library["cublasLtMatmul"], library["cublasLtMatmulDescSetAttribute"]
        self._operation = self._new("MatmulDesc", _COMPUTE_FLOAT, _FLOAT)
        of_b, of_a = (
            self._new("MatrixLayout", _E4M3, k, rows, stride) for rows, stride in ((n, b.stride(0)), (m, a.stride(0)))
        )
        of_out = self._new("MatrixLayout", _BFLOAT16, n, m, n)
        for name, value in ((_TRANSPOSE_A, _TRANSPOSED), (_MODE_A, _OF_ROWS), (_MODE_B, _OF_ROWS)):
            self._set(name, _INT(value))
        if addresses[2]:
            self._set(_EPILOGUE, _INT(_WITH_BIAS))
        # Each address of the GPU's that the description holds, with what sets it.
        names = _SCALES_A, _SCALES_B, *([_BIAS] if addresses[2] else [])
        cells = [_SIZE() for _ in names]
        self._settings = [
            (cell, (self._operation, _INT(name), ctypes.byref(cell), ctypes.c_size_t(8)))
            for name, cell in zip(names, cells, strict=True)
        ]
        self._pointed: tuple[int, ...] = ()
        # The library looks at these as well when it chooses.
        self._point(addresses)
        preference, most = self._new("MatmulPreference"), _SIZE(_WORKSPACE)
        library.cublasLtMatmulPreferenceSetAttribute(preference, _MOST_WORKSPACE, ctypes.byref(most), 8)
        found, count = _Heuristic(), _INT()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            handle, self._operation, of_b, of_a, of_out, of_out, preference, 1, ctypes.byref(found), ctypes.byref(count)
        )
        self._is_served = not status and count.value == 1 and not found.status
        self._workspace = found.workspace
        one, other = ctypes.c_float(1.0), ctypes.c_float(1.0 if accumulates else 0.0)
        # What differs from call to call: addresses of a, b, the result and the workspace, and the stream.
        self._a, self._b, self._out, self._room, self._stream = (_HANDLE() for _ in range(5))
        self._arguments = (
            handle, self._operation, ctypes.byref(one), self._b, of_b, self._a, of_a, ctypes.byref(other), self._out,
            of_out, self._out, of_out, ctypes.byref(found.algorithm), self._room, ctypes.c_size_t(found.workspace),
            self._stream,
        )  # fmt: skip

    def __del__(self) -> None:
        for kind, made in self._made:
            getattr(self._library, f"cublasLt{kind}Destroy")(made)

    def _new(self, kind: str, *given: int) -> Any:
        made = _HANDLE()
        if getattr(self._library, f"cublasLt{kind}Create")(ctypes.byref(made), *given):
            raise MemoryError(f"cublasLt{kind}Create found no memory")
        self._made.append((kind, made))
        return made

    def _set(self, name: int, value: Any) -> None:
        self._library.cublasLtMatmulDescSetAttribute(self._operation, name, ctypes.byref(value), ctypes.sizeof(value))

    def _point(self, addresses: tuple[int, ...]) -> None:
        assign = self._assign
        for (cell, setting), address in zip(self._settings, addresses, strict=False):
            if cell.value != address:
                cell.value = address
                assign(*setting)
        self._pointed = addresses

    def queue(self, device: int, given: tuple[int, ...], addend: Tensor | None) -> Tensor | None:
        """Queue the kernel on the current stream of a device, and return the result; None if the library refuses.

        Args:
            device: the number of the current device.
            given: addresses of a, b, b's scale, a's scale and the bias, or 0.
            addend: what the result is added to.
        """
        if not self._is_served:
            return None
        out = addend
        if out is None:
            # This takes half the time of new_empty.
            out = torch.empty_strided(self._shape, self._strides, dtype=torch.bfloat16, device=self._device)
        self._a.value, self._b.value = given[0], given[1]
        self._out.value = address = out.data_ptr()
        if address % _ALIGNED:
            return None
        if (addresses := given[2:]) != self._pointed:
            self._point(addresses)
        if self._workspace:
            # By torch's allocator, which knows the stream.
            workspace = torch.empty_strided((self._workspace,), (1,), dtype=torch.uint8, device=self._device)
            self._room.value = workspace.data_ptr()
        self._stream.value = _stream_of(device)
        return None if self._multiply(*self._arguments) else out


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library that torch has loaded; None if there is none, or one that knows no scales of rows."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    for function, takes in _TAKES.items():
        getattr(library, function).argtypes = takes
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library if library.cublasLtGetVersion() >= _FIRST_VERSION else None
