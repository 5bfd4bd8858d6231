"""The mode in which a row depends on itself alone: it has the same bits among 1, 64 or 8192 rows.

Kernels of one bit class run then, which ``python -m tilekern.tune --invariant`` finds and records name. The products of
``torch.nn.functional.linear``, so of ``torch.nn.Linear`` too, are among them, as cuBLAS chooses its kernel by the
number of rows. A kernel whose record names none runs as before; that is said once, and :func:`tilekern.report` lists
it.
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
from tilekern.ops.registration import as_rows, differentiable_once, is_eager, needs_gradient, run_product, shaped
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import count_fallback, plan_for, refused
from tilekern.warning import warn_once

# What the mode exchanges, as it was found when the mode began; another library may have exchanged it before.
_torch_linear = torch.nn.functional.linear
_PLAIN = (Tensor, torch.nn.Parameter)
_lock, _depth = threading.Lock(), 0


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """Run kernels of one bit class inside.

    Each mode keeps its plans, so that entering again looks nothing up. The mode is the whole process's: enter it while
    no other thread calls an op. Code that ``torch.compile`` has traced keeps the mode of its trace, as CUDA graphs do
    that are not :func:`tilekern.graphed`'s.
    """
    before = dispatch.set_invariant(on=True)
    take_products()
    try:
        yield
    finally:
        give_products_back()
        dispatch.set_invariant(on=before)
        for kernel, reason in dispatch.varying().items():
            warn_once(f"invariant: rows of {kernel} may depend on others: {reason}", about=f"varying {kernel}")


def take_products() -> None:
    """Let torch's linear layers run kernels of one class, until :func:`give_products_back` is called as often."""
    global _depth, _torch_linear  # noqa: PLW0603
    with _lock:
        if not _depth:
            _torch_linear = torch.nn.functional.linear
            torch.nn.functional.linear = linear
        _depth += 1


def give_products_back() -> None:
    """Let torch's linear layers run torch's products again."""
    global _depth  # noqa: PLW0603
    with _lock:
        _depth -= 1
        if not _depth:
            torch.nn.functional.linear = _torch_linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand in for ``torch.nn.functional.linear``: the product of one class where there is one, else torch's."""
    given = (input, weight) if bias is None else (input, weight, bias)
    if torch.compiler.is_compiling() or any(type(x) not in _PLAIN for x in given) or not is_eager(*given):
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


if dispatch.is_invariant():  # TILEKERN_INVARIANT=1
    take_products()
