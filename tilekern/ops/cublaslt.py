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
    "cublasLtMatmul": (*(_HANDLE,) * 14, ctypes.c_size_t, _HANDLE),
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
    if _current_device() != device or (library := _library()) is None:
        return None
    key = device, a.shape, b.shape[0], a.stride(0), b.stride(0), bias is None, addend is None
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16) if addend is None else addend
    given = a.data_ptr(), b.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(), out.data_ptr()
    if (given[0] | given[1] | given[2] | given[3] | given[4]) % _ALIGNED:
        return None
    of_bias = 0 if bias is None else bias.data_ptr()
    products = _thread.products
    try:
        product = products[key]
    except KeyError:
        if len(products) >= _MOST_SIZES:
            products.clear()
        product = products[key] = _Product(library, a, b, given[2:4], of_bias, addend is not None)
    return out if product.queue(given, of_bias, out) else None


class _Product:
    """A product of one size for one thread: descriptors, and the library's choice of a kernel.

    The library counts along columns: its first matrix is ``b``, transposed, its second ``a``, its result [n, m].
    """

    def __init__(
        self, library: ctypes.CDLL, a: Tensor, b: Tensor, scales: tuple[int, ...], bias: int, accumulates: bool
    ) -> None:
        (m, k), n = a.shape, b.shape[0]
        self._made: list[tuple[str, Any]] = []
        # A handle of torch's lives as long as the process.
        self._library, self._handle = library, _HANDLE(torch.cuda.current_blas_handle())
        self._operation = self._new("MatmulDesc", _COMPUTE_FLOAT, _FLOAT)
        self._of_b, self._of_a = (
            self._new("MatrixLayout", _E4M3, k, rows, stride) for rows, stride in ((n, b.stride(0)), (m, a.stride(0)))
        )
        self._of_out = self._new("MatrixLayout", _BFLOAT16, n, m, n)
        # Each with its address, where the library reads one of the GPU's.
        self._cells = {name: _SIZE() for name in (_SCALES_A, _SCALES_B, *([_BIAS] if bias else []))}
        for name, value in ((_TRANSPOSE_A, _TRANSPOSED), (_MODE_A, _OF_ROWS), (_MODE_B, _OF_ROWS)):
            self._set(name, _INT(value))
        if bias:
            self._set(_EPILOGUE, _INT(_WITH_BIAS))
        # The library looks at these as well when it chooses.
        self._point((scales[1], scales[0], bias))
        preference, most = self._new("MatmulPreference"), _SIZE(_WORKSPACE)
        library.cublasLtMatmulPreferenceSetAttribute(preference, _MOST_WORKSPACE, ctypes.byref(most), 8)
        found, count = _Heuristic(), _INT()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, self._of_b, self._of_a, self._of_out, self._of_out, preference, 1,
            ctypes.byref(found), ctypes.byref(count),
        )  # fmt: skip
        self._is_served = not status and count.value == 1 and not found.status
        self._found, self._algorithm = found, ctypes.byref(found.algorithm)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._factors = ctypes.byref(one), ctypes.byref(one if accumulates else zero)

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
        for (name, cell), address in zip(self._cells.items(), addresses, strict=False):
            cell.value = address
            self._set(name, cell)

    def queue(self, given: tuple[int, ...], bias: int, out: Tensor) -> bool:
        """Queue the kernel on the current stream; return whether the library took it.

        Args:
            given: addresses of a, b, their scales and the result.
            bias: the address of the bias, or 0.
            out: the result.
        """
        if not self._is_served:
            return False
        a, b, a_scale, b_scale, c = given
        self._point((b_scale, a_scale, bias))
        (one, other), size = self._factors, self._found.workspace
        # By torch's allocator, which knows the stream.
        workspace = out.new_empty(size, dtype=torch.uint8) if size else None
        status: int = self._library.cublasLtMatmul(
            self._handle, self._operation, one, b, self._of_b, a, self._of_a, other, c, self._of_out, c, self._of_out,
            self._algorithm, None if workspace is None else workspace.data_ptr(), size, _stream_of(out.get_device()),
        )  # fmt: skip
        return not status


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
