"""The mode in which a row depends on itself alone: it has the same bits among 1, 64 or 8192 rows.

Kernels of one bit class run then, which ``python -m tilekern.tune --invariant`` finds and records name. The products of
``torch.nn.functional.linear``, so of ``torch.nn.Linear`` too, are among them, as cuBLAS chooses its kernel by the
number of rows. A kernel whose record names none runs as before; that is said once, and :func:`tilekern.report` lists
it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilekern.errors import InputError, NoVariant
from tilekern.kernels.matmul.product import MOST_ELEMENTS, SPEC, sizes
from tilekern.ops import strictness
from tilekern.ops.registration import (
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
from tilekern.warning import warn_once

# What the mode exchanges, as it was found when the mode began; another library may have exchanged it before.
_torch_linear = torch.nn.functional.linear
_PLAIN = (Tensor, torch.nn.Parameter)
_lock = threading.Lock()
# How often the mode is on: whether strictly, of each context, of ``apply``, of the environment.
_on: list[bool] = []
# What ``tilekern.apply`` asked for.
_chosen: list[bool] = []
_CHOICES = (False, True, "strict")


@contextlib.contextmanager
def invariant(*, strict: bool = False) -> Iterator[None]:
    """Run kernels of one bit class inside.

    Each mode keeps its plans, so that entering again looks nothing up. The mode is the whole process's: enter it while
    no other thread calls an op. Code that ``torch.compile`` has traced keeps the mode of its trace, as CUDA graphs do
    that are not :func:`tilekern.graphed`'s.

    Args:
        strict: raise :class:`tilekern.errors.RowsVary` where a row may depend on others: a kernel has no class, torch
            runs instead of one, or torch's own products, attention or means run inside of a module's forward, which
            costs the host time. Gradients and losses are sums over rows, and are not judged.
    """
    _begin(strict)
    try:
        yield
    finally:
        _end(strict)
        for kernel, reason in dispatch.varying().items():
            warn_once(f"invariant: rows of {kernel} may depend on others: {reason}", about=f"varying {kernel}")


def check_choice(wish: bool | str) -> None:
    """Raise InputError unless a choice is False, True or ``"strict"``."""
    if not any(wish is known or (isinstance(known, str) and wish == known) for known in _CHOICES):
        raise InputError(f'invariant must be False, True or "strict", got {wish!r}')


def choose(wish: bool | str) -> None:
    """Turn the mode on or off for the process, as ``tilekern.apply(invariant=...)`` asks.

    Contexts and ``TILEKERN_INVARIANT`` turn it on beside that.
    """
    while _chosen:
        _end(_chosen.pop())
    if wish:
        _chosen.append(wish == "strict")
        _begin(_chosen[-1])


def _begin(strict: bool) -> None:
    global _torch_linear  # noqa: PLW0603
    with _lock:
        if not _on:
            dispatch.set_invariant(on=True)
            _torch_linear = torch.nn.functional.linear
            torch.nn.functional.linear = linear
        _on.append(strict)
        _watch()


def _end(strict: bool) -> None:
    with _lock:
        _on.remove(strict)
        if not _on:
            torch.nn.functional.linear = _torch_linear
            dispatch.set_invariant(on=False)
        _watch()


def _watch() -> None:
    dispatch.set_strict(on=any(_on))
    strictness.watch(any(_on))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand in for ``torch.nn.functional.linear``: the product of one class where there is one, else torch's."""
    given = (input, weight) if bias is None else (input, weight, bias)
    if torch.compiler.is_compiling():
        return _torch_linear(input, weight, bias)
    if is_autocast(input):
        cast = cast_as_products(input, weight, bias)
        with uncast(input.device.type):
            return linear(*cast)
    if any(type(x) not in _PLAIN for x in given) or not is_eager(*given):
        count_fallback(SPEC, UNTAKEN)
        return _torch_linear(input, weight, bias)
    if needs_gradient(input, weight, bias):
        made: Tensor = _Linear.apply(input, weight, bias)
        return made
    return product(input, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias``, without a gradient: in the mode by the kernel of its class, else by torch.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    is_elsewhere = x.device.type == "cpu" and not dispatch.interpreting()
    if not dispatch.is_invariant() or is_elsewhere or not x.numel() or not weight.numel():
        return _torch_linear(x, weight, bias)
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
        return product(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slopes, wants = dy.reshape(-1, dy.shape[-1]), ctx.needs_input_grad
        dx = shaped(torch.mm(slopes, weight), *x.shape) if wants[0] else None
        dweight = torch.mm(slopes.t(), x.reshape(-1, x.shape[-1])) if wants[1] else None
        return dx, dweight, slopes.sum(0) if wants[2] else None


if dispatch.is_invariant():
    _begin(os.environ["TILEKERN_INVARIANT"] == "strict")
