"""What a kernel is launched with in the place of an array that the call does not have: no tensor, and no memory."""

from __future__ import annotations

import functools
from typing import Any

# How the CUDA array interface names dtypes; bfloat16, which it does not know, is two bytes to it and to cuda.tile.
TYPES = {"bfloat16": "<V2", "float16": "<f2", "float32": "<f4", "int32": "<i4", "int64": "<i8"}
# Where nothing lies. No kernel reads or writes an array that its flags say is not there, which the interpreter holds
# each kernel to; and as nothing is allocated, nothing depends on the stream, graph, pool or mode of the first call.
_ADDRESS = 256


class Placeholder:
    """An array of one element as the launcher takes it, by the CUDA array interface."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, ndim: int, dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "typestr": TYPES[dtype], "shape": (1,) * ndim, "data": (_ADDRESS, False), "version": 3
        }  # fmt: skip


@functools.cache
def _of(ndim: int, dtype: Any) -> Placeholder:
    return Placeholder(ndim, str(dtype).removeprefix("torch."))


def placeholder(ndim: int, dtype: Any, device: Any) -> Any:
    """What stands for an array of a rank and a torch dtype that a call on ``device`` does not have.

    On the CPU it is a tensor without elements, in which the interpreter refuses every access.
    """
    if device.type == "cuda":
        return _of(ndim, dtype)
    import torch

    return torch.empty((0,) * ndim, dtype=dtype, device=device)
