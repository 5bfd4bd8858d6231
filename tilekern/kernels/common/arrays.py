"""From a kernel's arrays, whatever its family: numbers to run it on, and the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tilekern.spec import ITEM_BYTES, Array, Problem, ScalarParameter

Arrays = tuple[Array | ScalarParameter, ...]


def tensors(arrays: Arrays, *roles: str) -> list[Array]:
    """The arrays that have one of some roles; without roles, all that are not scalars."""
    return [x for x in arrays if isinstance(x, Array) and (not roles or x.role in roles)]


def drawn(arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Normal numbers for every input: without their signs where it takes none that are negative, about 1 for a weight,
    as norms have them."""
    import torch

    def normal(array: Array) -> Any:
        # An array of no size is one element, in one axis.
        values = torch.randn(array.shape_in(problem) or (1,), generator=generator, device=device)
        values = values.abs() if array.nonnegative else values
        values = 1 + values / 4 if array.name.endswith("weight") else values
        return values.to(getattr(torch, array.dtype_in(problem)))

    return {array.name: normal(array) for array in tensors(arrays, "input")}


def drawn_angles(problem: Problem, pairs: int, generator: Any, device: str) -> dict[str, Any]:
    """The cosines and sines of angles of any size, [batch, tokens, pairs]."""
    import torch

    angles = torch.rand((problem["batch"], problem["tokens"], pairs), generator=generator, device=device) * 6.0
    dtype = getattr(torch, problem["angle_dtype"])
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def bytes_of(arrays: Iterable[Array], problem: Problem) -> int:
    """Each array read or written once; partial sums count as the one row that is made of them."""
    return sum(math.prod(array.shape_in(problem)) * ITEM_BYTES[array.dtype_in(problem)] for array in arrays)
