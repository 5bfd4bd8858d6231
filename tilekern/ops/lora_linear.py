"""lora_linear: a linear layer and its low-rank adapter, ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``.

The adapter's products are added inside of matrix products: its result to the layer's, and its part of the gradient of
``x`` to that of the frozen weight. So each of the two is read and written once more, and nothing else of their size is
made. Layer and adapter by themselves make the adapter's result, its scaled copy and the sum, a scaled copy of the
gradient, and two gradients of ``x`` with their sum.

It is written by hand and not declared, as it is a sequence of torch's matrix products. If it is traced or in the
invariant mode, its parts run as operations of their own, so there is nothing to register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilekern.ops.linear import product
from tilekern.ops.registration import (
    applied,
    cast_as_products,
    check_devices,
    differentiable_once,
    is_autocast,
    is_eager,
    needs_gradient,
    shaped,
    uncast,
)
from tilekern.runtime.dispatch import is_invariant


def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, bias: Tensor | None = None,
    dropped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``, rounded after each product.

    For the backward it keeps ``x``, ``dropped``, ``x @ a^T`` and the parameters. Under autocast all are cast, as a
    linear layer's are.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], of the dtype of ``x``.
        a: [rank, in_features], of the dtype of ``x``.
        b: [out_features, rank], of the dtype of ``x``.
        scaling: factor of the adapter.
        bias: [out_features], of the dtype of ``x``, or None.
        dropped: read by ``a`` in the place of ``x``, whose shape it has: ``x`` after a dropout. None for ``x``.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    given: tuple[Any, ...] = (x, weight, a, b, bias, dropped)
    _check(*given)
    if is_autocast(x):
        given = cast_as_products(*given)
        with uncast(x.device.type):
            return _lora_linear(scaling, *given)
    return _lora_linear(scaling, *given)


def _lora_linear(scaling: float, *given: Any) -> Tensor:
    x, weight, a, b, bias, dropped = given
    if not is_eager(*given) or is_invariant():
        low = torch.nn.functional.linear(x if dropped is None else dropped, a)
        return torch.nn.functional.linear(x, weight, bias) + torch.nn.functional.linear(low, b) * scaling
    if needs_gradient(*given):
        return _apply(*given, scaling)
    return _products(product, scaling, *given)[0]


def _check(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, dropped: Tensor | None) -> None:
    shapes = (x.shape[-1:], weight.shape, a.shape, b.shape)
    fit = len(weight.shape) == 2 and shapes[0] == weight.shape[1:] == a.shape[1:]
    if not fit or len(a.shape) != 2 or b.shape != (weight.shape[0], a.shape[0]):
        raise ValueError(
            "lora_linear: x must be [..., in_features], weight [out_features, in_features], a [rank, in_features] and "
            f"b [out_features, rank], got {', '.join(str(list(x.shape)) for x in (x, weight, a, b))}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lora_linear: bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    if dropped is not None and dropped.shape != x.shape:
        raise ValueError(f"lora_linear: dropped must be {list(x.shape)} as x is, got {list(dropped.shape)}")
    check_devices("lora_linear", x=x, weight=weight, a=a, b=b, bias=bias, dropped=dropped)


def _products(
    multiply: Callable[..., Tensor], scaling: float, x: Tensor, weight: Tensor, a: Tensor, b: Tensor,
    bias: Tensor | None, dropped: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and ``x @ a^T`` [rows, rank]; ``multiply`` is the product of a linear layer."""
    rows = _rows(x)
    low = multiply(rows if dropped is None else _rows(dropped), a)
    y = multiply(rows, weight, bias).addmm_(low, b.t(), alpha=scaling)
    return shaped(y, *x.shape[:-1], weight.shape[0]), low


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _scaled(first: Tensor, second: Tensor, scaling: float) -> Tensor:
    """Return ``scaling * first @ second``."""
    made = torch.empty((first.shape[0], second.shape[1]), dtype=first.dtype, device=first.device)
    return made.addmm_(first, second, beta=0, alpha=scaling)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, dropped: Tensor | None,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        y, low = _products(torch.nn.functional.linear, scaling, x, weight, a, b, bias, dropped)
        ctx.save_for_backward(x, weight, a, b, dropped, low)
        ctx.scaling = scaling
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, dropped, low = ctx.saved_tensors
        of_x, of_weight, of_a, of_b, of_bias, of_dropped, _ = ctx.needs_input_grad
        slopes, apart = _rows(dy), dropped is not None
        dx = ddropped = da = None
        if of_x:
            dx = torch.mm(slopes, weight)
        if of_a or of_dropped or (of_x and not apart):
            dlow = _scaled(slopes, b, ctx.scaling)
            da = torch.mm(dlow.t(), _rows(dropped if apart else x)) if of_a else None
            if of_dropped:
                ddropped = shaped(torch.mm(dlow, a), *x.shape)
            elif dx is not None and not apart:
                dx.addmm_(dlow, a)
        dx = None if dx is None else shaped(dx, *x.shape)
        dweight = torch.mm(slopes.t(), _rows(x)) if of_weight else None
        db = _scaled(slopes.t(), low, ctx.scaling) if of_b else None
        return dx, dweight, da, db, slopes.sum(0) if of_bias else None, ddropped, None


_apply = applied(_LoraLinear)
