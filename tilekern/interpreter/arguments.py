"""Check a launch's arguments against the kernel's parameters, as the launcher does for the variants of a cubin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilekern.interpreter.errors import InterpreterError

# The types of Python numbers that a kernel accepts; the launcher accepts no other types.
_SCALARS = {float: "float32", int: "int32", bool: "bool_"}


class Parameters:
    """The parameters of a kernel (those of a spec's implementation), against which each launch is checked.

    The generic variant of a cubin accepts any base and any strides of a last axis. No variant accepts another dtype or
    rank, elements that share memory, or a number of another type than the scalar's.
    """

    def __init__(self, kernel: str, parameters: Sequence[Any]) -> None:
        self._kernel = kernel
        # Name, dtype and rank; the rank of a scalar is None, and its dtype a name.
        self._taken = [
            (p.name, getattr(torch, p.dtype), p.ndim) if hasattr(p, "ndim") else (p.name, p.dtype, None)
            for p in parameters
        ]

    def check(self, arguments: Sequence[Any]) -> None:
        """Refuse arguments that no variant allows.

        Raises:
            InterpreterError: an argument is not allowed, or there are too many or too few.
        """
        if len(arguments) != len(self._taken):
            raise InterpreterError(f"{self._kernel} takes {len(self._taken)} arguments, got {len(arguments)}")
        for argument, (name, dtype, ndim) in zip(arguments, self._taken, strict=True):
            if ndim is None:
                given = _SCALARS.get(type(argument), type(argument).__name__)
                if given != dtype:
                    self._refuse(name, f"is {given} ({argument!r:.60}), and must be {dtype}")
            elif not isinstance(argument, torch.Tensor):
                self._refuse(name, f"is of {type(argument).__name__}, and must be a tensor")
            elif argument.dtype != dtype or argument.dim() != ndim:
                given = f"{argument.dtype} of rank {argument.dim()}"
                self._refuse(name, f"is {given}, and must be {dtype} of rank {ndim}")
            elif not (argument.is_contiguous() or _disjoint(argument)):
                shape, strides = tuple(argument.shape), argument.stride()
                self._refuse(name, f"has elements that share memory, shape {shape}, strides {strides}")

    def _refuse(self, name: str, why: str) -> None:
        raise InterpreterError(f"{self._kernel}: no variant allows the arguments: {name} {why}")


def _disjoint(x: torch.Tensor) -> bool:
    """Return whether cuda.tile's launcher would see that no two elements of an array share memory."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach = stride * size if size > 1 else reach
    return True
