"""Losses of two matrices whose forward also computes the gradient: the overrides of such an op's declaration.

The gradient is kept for one backward, which scales it in place by the incoming gradient; if that is 1, nothing is read
or written (:mod:`tilekern.kernels.scale`). Under ``torch.compile``, and if the graph is kept for another backward, it
scales a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import scale as scaling
from tilekern.ops.registration import (
    as_rows,
    by_autograd,
    check_tensors,
    fresh,
    is_traced,
    keeps_graph,
    needs_gradient,
    plans_of_both,
)
from tilekern.runtime.dispatch import Plan
from tilekern.spec import Array, KernelSpec

Plans = tuple[Plan, Plan | None]


def arrays(first: str, second: str) -> tuple[Array, ...]:
    """Return the tensors and results of an op with :func:`parts`."""
    rows = ("rows", "columns")
    return (
        Array(first, "dtype", rows), Array(second, "dtype", rows), Array("slope", "float32", ("rows",)),
        Array("loss", "float32", (), "output"), Array("gradient", "dtype", rows, "output"),
    )  # fmt: skip


def slopes(op: str, name: str, like: Tensor, labels: Tensor | None, ignore_index: int, columns: int | None) -> Tensor:
    """Return the factor of each row's loss, [...] in float32 (float64 for float64): 0 if the row does not count.

    Args:
        op, name: the op and its argument ``like``, for error messages.
        like: [..., columns].
        labels: [...], or None if all rows count.
        ignore_index: the label of rows that do not count.
        columns: each loss is divided by the number of rows that count times this number; None for no division.

    Raises:
        ValueError: ``labels`` has another shape or is on another device.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = like.shape[:-1]
    if labels is None:
        return like.new_full(rows, 1 / (max(1, rows.numel()) * columns) if columns else 1.0, dtype=dtype)
    if labels.shape != rows:
        raise ValueError(f"{op}: shift_labels must have the shape {list(rows)}, got {list(labels.shape)}")
    check_tensors(op, "shift_labels", **{name: like, "shift_labels": labels})
    counted = (labels != ignore_index).to(dtype)
    return counted / (counted.sum().clamp(min=1) * columns) if columns else counted


def modes(first: Tensor) -> tuple[bool, bool]:
    """Return the last two scalars: whether the op computes a gradient, and may scale it in place."""
    return needs_gradient(first), not is_traced(first)


def total(terms: Callable[..., Tensor], first: Tensor, second: Tensor, slope: Tensor, *own: Any) -> Tensor:
    """Compute the loss by torch; ``terms`` gives the term of each element, which is 0 for two zeros."""
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    # Rows that do not count may hold anything, and 0 * NaN is NaN.
    counted = slope[..., None] != 0
    added = terms(first.to(dtype).where(counted, 0), second.to(dtype).where(counted, 0), *own)
    return (added.sum(-1) * slope).sum()


def parts(
    spec: KernelSpec, name: str, names: tuple[str, str], terms: Callable[..., Tensor],
    flags: Callable[..., tuple[bool, ...]] = lambda *_: (),
) -> dict[str, Any]:  # fmt: skip
    """Return the overrides of an op (first, second, slope, *own, with_gradient, in_place) -> loss.

    Args:
        spec: the kernel, of :func:`tilekern.kernels.families.losses.spec`.
        name: the op's name, for errors.
        names: the names of both matrices.
        terms: a function as for :func:`total`, for float32 or float64.
        flags: (*own) -> the spec's flags after ``graded``.
    """

    def check(first: Tensor, second: Tensor, slope: Tensor, *_: Any) -> None:
        if not first.dim():
            raise ValueError(f"{name}: {names[0]} must have the shape [..., columns], got []")
        if first.shape != second.shape:
            given = f"{list(first.shape)} and {list(second.shape)}"
            raise ValueError(f"{name}: {names[0]} and {names[1]} must have one shape, got {given}")
        if slope.shape != first.shape[:-1]:
            raise ValueError(f"{name}: slope must have the shape {list(first.shape[:-1])}, got {list(slope.shape)}")
        check_tensors(name, **{names[0]: first, names[1]: second, "slope": slope})

    def find(_: bool, first: Tensor, second: Tensor, slope: Tensor, *scalars: Any) -> Plans | None:
        *own, with_gradient, _in_place = scalars
        if not first.numel() or second.dtype != first.dtype or slope.dtype != torch.float32:
            return None
        columns = first.shape[-1]
        sizes = (first.numel() // columns, columns, first.dtype)
        forward = (spec, *sizes, with_gradient, *flags(*own))
        return plans_of_both(with_gradient, first.device, forward, (scaling.SPEC, *sizes))

    def launch(plans: Plans, first: Tensor, second: Tensor, slope: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        *own, with_gradient, _ = scalars
        gradient = fresh(first) if with_gradient else first.new_empty(0)
        losses = torch.empty(slope.numel(), dtype=torch.float32, device=first.device)
        written = (losses, as_rows(gradient)) if with_gradient else (losses,)
        rows = slope.contiguous().view(-1)
        plans[0].launch(first.get_device(), as_rows(first), as_rows(second), rows, *written, *map(float, own))
        return losses.sum(), gradient

    def launch_backward(
        plans: tuple[Plan, Plan], _: tuple[bool, ...], dloss: Tensor, gradient: Tensor, slope: Tensor, *scalars: Any
    ) -> Tensor:
        in_place = scalars[-1] and not keeps_graph()
        made = gradient if in_place else gradient.clone(memory_format=torch.contiguous_format)
        rows = as_rows(made)
        plans[1].launch(gradient.get_device(), rows, dloss.float().reshape(1), rows)
        return made

    def fake(first: Tensor, second: Tensor, slope: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), slope.dtype)
        return first.new_empty((), dtype=dtype), first.new_empty(first.shape if scalars[-2] else (0,))

    def rest(first: Tensor, second: Tensor, slope: Tensor, *scalars: Any) -> tuple[Tensor]:
        if not scalars[-2]:
            return (first.new_empty(0),)
        one = torch.ones((), dtype=fake(first, second, slope, *scalars)[0].dtype, device=first.device)
        given = (terms, first, second, slope, *scalars[:-2])
        return (by_autograd(total, given, (1,), (one,))[0],)

    def fallback_backward(dloss: Tensor, gradient: Tensor, slope: Tensor, *scalars: Any) -> Tensor:
        return (gradient * dloss).to(gradient.dtype)

    found = (check, find, launch, launch_backward, fake, rest, fallback_backward)
    return {part.__name__: part for part in found}
