"""lora_linear: a linear layer and its low-rank adapter, ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``.

The adapter's products are added inside of matrix products: its result to the layer's, and its part of the gradient of
``x`` to that of the frozen weight. So each of the two is read and written once more, and nothing else of their size is
made. Layer and adapter by themselves make the adapter's result, its scaled copy and the sum, a scaled copy of the
gradient, and two gradients of ``x`` with their sum.

Layers that share ``x`` (q, k and v; gate and up) are one function: their factors ``a`` are one product, and all
gradients of ``x`` are added inside of products.

It is written by hand and not declared, as it is a sequence of torch's matrix products. If it is traced or in the
invariant mode, its parts run as operations of their own, so there is nothing to register.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.ops.linear import product
from tilekern.ops.projections import input_gradient
from tilekern.ops.registration import (
    applied,
    as_products,
    check_devices,
    differentiable_once,
    is_eager,
    needs_gradient,
    shaped,
)
from tilekern.runtime.dispatch import is_invariant


class Adapted(NamedTuple):
    """A linear layer with an adapter; the arguments of :func:`lora_linear`."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scaling: float = 1.0
    bias: Tensor | None = None


def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, bias: Tensor | None = None,
    dropped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``, rounded after each product.

    For the backward it keeps what gradients read, as the layers apart would: ``x @ a^T`` if ``b`` learns, ``x`` (or
    ``dropped``) if ``a`` does, and parameters. Under autocast all are cast, as a linear layer's are.

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
    return lora_linears(x, [Adapted(weight, a, b, scaling, bias)], dropped)[0]


def lora_linears(x: Tensor, layers: Sequence[Adapted], dropped: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the result of :func:`lora_linear` for each of some layers that share ``x``, and ``dropped``."""
    for layer in layers:
        _check(x, layer, dropped)
    scalings = tuple(layer.scaling for layer in layers)
    parameters = [part for layer in layers for part in (layer.weight, layer.a, layer.b, layer.bias)]
    made: tuple[Tensor, ...] = as_products(functools.partial(_run, scalings), x, dropped, *parameters)
    return made


def _check(x: Tensor, layer: Adapted, dropped: Tensor | None) -> None:
    weight, a, b, _, bias = layer
    fit = weight.dim() == a.dim() == 2 and x.shape[-1:] == weight.shape[1:] == a.shape[1:]
    if not fit or b.shape != (weight.shape[0], a.shape[0]):
        raise ValueError(
            "lora_linear: x must be [..., in_features], weight [out_features, in_features], a [rank, in_features] and "
            f"b [out_features, rank], got {', '.join(str(list(given.shape)) for given in (x, weight, a, b))}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lora_linear: bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    if dropped is not None and dropped.shape != x.shape:
        raise ValueError(f"lora_linear: dropped must be {list(x.shape)} as x is, got {list(dropped.shape)}")
    check_devices("lora_linear", x=x, weight=weight, a=a, b=b, bias=bias, dropped=dropped)


def _run(
    scalings: tuple[float, ...], x: Tensor, dropped: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the results; ``parameters`` are weight, a, b and bias of each layer."""
    if not is_eager(x, dropped, *parameters) or is_invariant():
        return tuple(_apart(x, dropped, *layer) for layer in _layers(scalings, parameters))
    if needs_gradient(x, dropped, *parameters):
        made: tuple[Tensor, ...] = _apply(scalings, x, dropped, *parameters)
        return made
    return _products(product, scalings, x, dropped, parameters)[0]


def _layers(scalings: Sequence[float], parameters: Sequence[Any]) -> list[Adapted]:
    found = []
    for number, scaling in enumerate(scalings):
        weight, a, b, bias = parameters[4 * number : 4 * number + 4]
        found.append(Adapted(weight, a, b, scaling, bias))
    return found


def _apart(
    x: Tensor, dropped: Tensor | None, weight: Tensor, a: Tensor, b: Tensor, scaling: float, bias: Tensor | None
) -> Tensor:
    """Return the result of a layer, by torch's operations in PEFT's order."""
    y = torch.nn.functional.linear(x, weight, bias)
    low = torch.nn.functional.linear(x if dropped is None else dropped, a)
    return y + torch.nn.functional.linear(low, b) * scaling


def _products(
    multiply: Callable[..., Tensor], scalings: tuple[float, ...], x: Tensor, dropped: Tensor | None,
    parameters: Sequence[Any],
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Return the results, and ``x @ a^T`` [rows, ranks] of all layers; ``multiply`` is a linear layer's product."""
    layers, rows, made = _layers(scalings, parameters), _rows(x), []
    low = multiply(rows if dropped is None else _rows(dropped), _joined([layer.a for layer in layers]))
    parts = _split(low, [layer.a.shape[0] for layer in layers], 1)
    for (weight, _, b, scaling, bias), part in zip(layers, parts, strict=True):
        y = multiply(rows, weight, bias).addmm_(part, b.t(), alpha=scaling)
        made.append(shaped(y, *x.shape[:-1], weight.shape[0]))
    return tuple(made), low


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _joined(factors: Sequence[Tensor]) -> Tensor:
    """Return the factors [rank, in_features] of all layers below each other."""
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def _split(joined: Tensor, ranks: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Return the part of each layer's rank in a dimension."""
    return (joined,) if len(ranks) == 1 else joined.split(ranks, dim)


class _Needs(NamedTuple):
    """Which gradients are wanted: of x, of what was dropped, and of the parameters of each layer.

    through_a: whether one of the first two goes through ``a``; low: whether the gradient of ``x @ a^T`` is read.
    """

    x: bool
    dropped: bool
    weight: tuple[bool, ...]
    a: tuple[bool, ...]
    b: tuple[bool, ...]
    bias: tuple[bool, ...]
    through_a: bool
    low: bool

    @classmethod
    def of(cls, needs_input_grad: tuple[bool, ...], apart: bool) -> _Needs:
        """Sort autograd's flags; ``apart``: whether ``a`` reads something else than ``x``."""
        _, x, dropped, *rest = needs_input_grad
        weight, a, b, bias = (tuple(rest[number::4]) for number in range(4))
        through_a = dropped if apart else x
        return cls(x, dropped, weight, a, b, bias, through_a, through_a or any(a))


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scalings: tuple[float, ...], x: Tensor, dropped: Tensor | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        results, low = _products(torch.nn.functional.linear, scalings, x, dropped, parameters)
        needs = _Needs.of(ctx.needs_input_grad, dropped is not None)
        reads_x = any(needs.weight) or (any(needs.a) and dropped is None)
        ctx.save_for_backward(
            x if reads_x else None, dropped if any(needs.a) else None, low if any(needs.b) else None,
            *(weight if needs.x else None for weight in parameters[::4]),
            *(a if needs.through_a else None for a in parameters[1::4]),
            *(b if needs.low else None for b in parameters[2::4]),
        )  # fmt: skip
        ctx.scalings, ctx.shape, ctx.needs = scalings, x.shape, needs
        ctx.ranks = [a.shape[0] for a in parameters[1::4] if a is not None]
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, low, *parameters = ctx.saved_tensors
        needs, ranks, number = ctx.needs, ctx.ranks, len(given)
        weights, factors, seconds = parameters[:number], parameters[number : 2 * number], parameters[2 * number :]
        slopes = [_rows(dy) for dy in given]
        dx = input_gradient(slopes, weights) if needs.x else None
        ddropped, da, db = None, [None] * number, [None] * number
        if needs.low:
            dlow = slopes[0].new_empty(slopes[0].shape[0], sum(ranks))
            for b, slope, part, scaling in zip(seconds, slopes, _split(dlow, ranks, 1), ctx.scalings, strict=True):
                part.addmm_(slope, b, beta=0, alpha=scaling)
            if any(needs.a):
                da = list(_split(torch.mm(dlow.t(), _rows(x if dropped is None else dropped)), ranks, 0))
            if needs.dropped:
                ddropped = shaped(torch.mm(dlow, _joined(factors)), *ctx.shape)
            elif dx is not None and needs.through_a:
                dx.addmm_(dlow, _joined(factors))
        if any(needs.b):
            parts = zip(slopes, _split(low, ranks, 1), ctx.scalings, strict=True)
            db = [_scaled(slope.t(), part, scaling) for slope, part, scaling in parts]
        found: list[Tensor | None] = [None, None if dx is None else shaped(dx, *ctx.shape), ddropped]
        for each, slope in enumerate(slopes):
            found.append(torch.mm(slope.t(), _rows(x)) if needs.weight[each] else None)
            found.append(da[each] if needs.a[each] else None)
            found.append(db[each] if needs.b[each] else None)
            found.append(slope.sum(0) if needs.bias[each] else None)
        return tuple(found)


def _scaled(first: Tensor, second: Tensor, scaling: float) -> Tensor:
    """Return ``scaling * first @ second``."""
    made = torch.empty((first.shape[0], second.shape[1]), dtype=first.dtype, device=first.device)
    return made.addmm_(first, second, beta=0, alpha=scaling)


_apply = applied(_LoraLinears)
