"""Describe the arrays of all families' kernels: random inputs, moved bytes, and gradients by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tilekern.spec import ITEM_BYTES, Array, Follower, Problem, ScalarParameter

Arrays = tuple[Array | ScalarParameter, ...]
# Shapes of matrices and of weights, and the dtype of a product of both.
ROWS, COLUMNS, PRODUCT = ("rows", "columns"), ("columns",), "dtype*weight_dtype"


def matrices(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Arrays:
    """Return matrices by their names, all of one dtype."""
    given = tuple(Array(name, "dtype", ROWS) for name in inputs)
    return given + tuple(Array(name, "dtype", ROWS, "output") for name in outputs)


def partial_sums(count: int) -> Array:
    """Return the array in which each block stores its ``count`` sums over rows."""
    return Array("partial", "float32", ("blocks", "columns" if count == 1 else f"{count}*columns"), "scratch")


def followed_by_sum(partial: Array, dtype: str) -> Follower:
    """Return ``column_sum`` as the follower of a kernel in which each block stores a row of an array.

    Args:
        partial: the array, [blocks, ...].
        dtype: the dimension with the dtype of the sums.
    """
    return Follower(
        kernel="column_sum",
        array=partial.name,
        dimensions=lambda problem, blocks: {
            "rows": blocks, "columns": partial.shape_in(problem, blocks)[1], "dtype": problem[dtype],
        },
    )  # fmt: skip


def tensors(arrays: Arrays, *roles: str) -> list[Array]:
    """Return the arrays with one of the roles; without roles, all except scalars."""
    return [x for x in arrays if isinstance(x, Array) and (not roles or x.role in roles)]


def drawn(arrays: Arrays, problem: Problem, generator: Any, device: str, *, about_one: bool = True) -> dict[str, Any]:
    """Draw normal numbers for every input; scalars take their samples.

    A nonnegative input gets absolute values. Weights are about 1, as in norms, unless ``about_one`` is false.
    """
    import torch

    def normal(array: Array) -> Any:
        # An array without sizes has one element, in one axis.
        values = torch.randn(array.shape_in(problem) or (1,), generator=generator, device=device)
        values = values.abs() if array.nonnegative else values
        values = 1 + values / 4 if about_one and array.name.endswith("weight") else values
        return values.to(getattr(torch, array.dtype_in(problem)))

    samples = {x.name: x.sample for x in arrays if isinstance(x, ScalarParameter) and x.sample is not None}
    return {array.name: normal(array) for array in tensors(arrays, "input")} | samples


def bytes_of(arrays: Iterable[Array], problem: Problem) -> int:
    """Return the bytes of all arrays, each read or written once; partial sums count as one row."""
    read = (array for array in arrays if array.is_in(problem))
    return sum(math.prod(array.shape_in(problem)) * ITEM_BYTES[array.dtype_in(problem)] for array in read)


def gradients(reference: Callable[..., dict[str, Any]], slopes: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return the gradients of a forward's reference, by autograd in float64, as ``d<name>`` of each given tensor.

    The reference must not round between: a cast would round the gradients too.

    Args:
        reference: the forward's.
        slopes: the gradients of its results by their names.
        given: its arguments.
    """
    import torch

    leaves = {k: x.detach().double().requires_grad_() for k, x in given.items() if isinstance(x, torch.Tensor)}
    with torch.enable_grad():
        results = reference(**given | leaves)
        asked = [results[name] for name in slopes]
    found = torch.autograd.grad(asked, list(leaves.values()), [slope.double() for slope in slopes.values()])
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
