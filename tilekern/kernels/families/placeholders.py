"""Make placeholders for the arrays that a call does not have: they need no tensor and no memory."""

from __future__ import annotations

import functools
from typing import Any

# Names of dtypes in the CUDA array interface; it has no bfloat16, which is two bytes to it and to cuda.tile.
TYPES = {"bfloat16": "<V2", "float16": "<f2", "float32": "<f4", "int32": "<i4", "int64": "<i8"}
# An address without memory. No kernel accesses an array that its flags switch off; the interpreter checks this. As
# nothing is allocated, nothing depends on the stream, graph, pool or mode of the first call.
_ADDRESS = 256


class Placeholder:
    """An array of one element for the launcher, by the CUDA array interface."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, ndim: int, dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "typestr": TYPES[dtype], "shape": (1,) * ndim, "data": (_ADDRESS, False), "version": 3
        }  # fmt: skip


@functools.cache
def _of(ndim: int, dtype: Any) -> Placeholder:
    return Placeholder(ndim, str(dtype).removeprefix("torch."))


def placeholder(ndim: int, dtype: Any, device: Any) -> Any:
    """Return the placeholder of an array of a rank and a torch dtype, for a call on ``device``.

    On the CPU it is a tensor without elements: the interpreter refuses every access to it.
    """
    if device.type == "cuda":
        return _of(ndim, dtype)
    import torch

    return torch.empty((0,) * ndim, dtype=dtype, device=device)
