"""Torch's linear layers, whose function is exchanged while the invariant mode or generation asks for kernels.

``torch.nn.functional.linear``, so ``torch.nn.Linear`` too, runs the kernel of its bit class in the invariant mode, as
cuBLAS chooses its kernel by the number of rows. In generation it runs the kernel for few rows, where a record says that
it is the fastest. All else stays torch's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import NoVariant
from tilekern.kernels.matmul.product import MOST_ELEMENTS, SPEC, sizes
from tilekern.ops import few_rows
from tilekern.ops.registration import (
    PLAIN,
    as_rows,
    cast_as_products,
    differentiable_once,
    is_autocast,
    is_eager,
    needs_gradient,
    run_product,
    shaped,
    uncast,
)
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import UNTAKEN, count_fallback, plan_for, refused

# The function as it was found when it was exchanged; another library may have exchanged it before.
_torch_linear = torch.nn.functional.linear
_lock, _depth = threading.Lock(), 0


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Exchange the function inside, for the whole process."""
    take()
    try:
        yield
    finally:
        give_back()


def take() -> None:
    """Exchange the function, until :func:`give_back` is called as often."""
    global _depth, _torch_linear  # noqa: PLW0603
    with _lock:
        if not _depth:
            _torch_linear = torch.nn.functional.linear
            torch.nn.functional.linear = linear
        _depth += 1


def give_back() -> None:
    """Put torch's function back."""
    global _depth  # noqa: PLW0603
    with _lock:
        _depth -= 1
        if not _depth:
            torch.nn.functional.linear = _torch_linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand in for ``torch.nn.functional.linear``: a kernel's product where one serves, else torch's."""
    if torch.compiler.is_compiling():
        return _torch_linear(input, weight, bias)
    if not dispatch.is_invariant():
        is_plain = type(input) in PLAIN and type(weight) in PLAIN
        found = few_rows.product(input, weight, bias) if is_plain else None
        return _torch_linear(input, weight, bias) if found is None else found
    given = (input, weight) if bias is None else (input, weight, bias)
    if is_autocast(input):
        cast = cast_as_products(input, weight, bias)
        with uncast(input.device.type):
            return linear(*cast)
    if any(type(x) not in PLAIN for x in given) or not is_eager(*given):
        count_fallback(SPEC, UNTAKEN)
        return _torch_linear(input, weight, bias)
    if needs_gradient(input, weight, bias):
        made: Tensor = _Linear.apply(input, weight, bias)
        return made
    return of_class(input, weight, bias)


def of_class(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias``, without a gradient: in the mode by the kernel of its class, else by torch.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    is_elsewhere = x.device.type == "cpu" and not dispatch.interpreting()
    if not dispatch.is_invariant() or is_elsewhere or not x.numel() or not weight.numel():
        return _torch_linear(x, weight, bias)
    found = few_rows.product(x, weight, bias)
    if found is not None:
        return found
    out, features = weight.shape
    rows = x.numel() // features
    # The weight of a layer that keeps it [in, out] is a transposed view.
    is_transposed = weight.stride(1) != 1 and weight.stride(0) == 1
    on = [*([] if is_transposed else ["b_transposed"]), *([] if bias is None else ["biased"])]
    plan = None
    if max(x.numel(), weight.numel(), rows * out) <= MOST_ELEMENTS:
        plan = plan_for(SPEC, x.device, *sizes(rows, features, out, x.dtype, on).values())
    if plan is None:
        count_fallback(SPEC)
        return _torch_linear(x, weight, bias)
    matrix = weight.t() if is_transposed else as_rows(weight)
    given = (as_rows(x), matrix, *(() if bias is None else (bias.contiguous(),)))
    try:
        return shaped(run_product(plan, (rows, out), *given), *x.shape[:-1], out)
    except NoVariant as error:
        refused(SPEC, error)
        count_fallback(SPEC)
        return _torch_linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """A linear layer whose forward is of one class; its gradients are torch's products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return of_class(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slopes, wants = dy.reshape(-1, dy.shape[-1]), ctx.needs_input_grad
        dx = shaped(torch.mm(slopes, weight), *x.shape) if wants[0] else None
        dweight = torch.mm(slopes.t(), x.reshape(-1, x.shape[-1])) if wants[1] else None
        return dx, dweight, slopes.sum(0) if wants[2] else None
