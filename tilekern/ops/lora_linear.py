"""lora_linear: a linear layer and its low-rank adapter, ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``.

The adapter's products are added inside of matrix products: its result to the layer's, and its part of the gradient of
``x`` to that of the frozen weight. So each of the two is read and written once more, and nothing else of their size is
made. Layer and adapter by themselves make the adapter's result, its scaled copy and the sum, a scaled copy of the
gradient, and two gradients of ``x`` with their sum.

Layers that share ``x`` (q, k and v; gate and up) are one function: their factors ``a`` are one product, and all
gradients of ``x`` are added inside of products. Some of them may have no adapter.

A dropout before ``a`` gives each adapter an input of its own. The backward makes it again of ``x``, which is kept once
for all of them, and of the adapter's mask, of which a byte is kept for each element of ``x``.

PEFT's adapters of a half type's layer are of float32 unless one asks otherwise, and outside of autocast it multiplies
them in float32. So does this: the adapter's products are of the factors' dtype, and what they add is rounded once.

It is written by hand and not declared, as it is a sequence of torch's matrix products. If it is traced or in the
invariant mode, its parts run as operations of their own, so there is nothing to register.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.ops.linear import product
from tilekern.ops.projections import gradient, input_gradient, projections
from tilekern.ops.registration import (
    applied,
    as_products,
    check_devices,
    differentiable_once,
    is_autocast,
    is_eager,
    needs_gradient,
    shaped,
)
from tilekern.runtime.dispatch import is_invariant


class Adapted(NamedTuple):
    """A linear layer with an adapter; the arguments of :func:`lora_linear`. Without one, ``a`` and ``b`` are None.

    ``rate``: that of a dropout of what ``a`` reads, at least 0 and less than 1; None if the caller gives its result.
    """

    weight: Tensor
    a: Tensor | None
    b: Tensor | None
    scaling: float = 1.0
    bias: Tensor | None = None
    rate: float | None = 0.0


# Scaling, rank, rate and ``drawn`` of a layer's adapter; None for a layer without one.
Kind = tuple[float, int, float, torch.dtype] | None
# For each of some layers, what the dropout of its adapter leaves of the rows, [rows, in_features] bool; None without.
Masks = Sequence[Tensor | None]


class Adapter(NamedTuple):
    """An adapter by itself, as of :func:`lora_linear`; in a backward a factor is None if no gradient reads it.

    Attributes:
        rate: as of :class:`Adapted`.
        drawn: dtype in which its dropout draws: that of the factors before autocast casts them, as PEFT casts ``x``.
        mask: in a backward, the adapter's one of :data:`Masks`.
    """

    a: Any
    b: Any
    scaling: float
    rank: int
    rate: float = 0.0
    drawn: torch.dtype | None = None
    mask: Tensor | None = None


def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, bias: Tensor | None = None,
    dropped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight^T + bias + scaling * (x @ a^T) @ b^T``, rounded to the dtype of ``x`` after each product.

    Products of factors of float32 are not rounded before they are added.

    For the backward it keeps what gradients read, as the layers apart would: ``x @ a^T`` if ``b`` learns, ``x`` (or
    ``dropped``) if ``a`` does, and parameters. Under autocast all are cast, as a linear layer's are.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], of the dtype of ``x``.
        a: [rank, in_features], of the dtype of ``x``, or of float32 beside a half type.
        b: [out_features, rank], of the dtype of ``a``.
        scaling: factor of the adapter.
        bias: [out_features], of the dtype of ``x``, or None.
        dropped: read by ``a`` in the place of ``x``, whose shape it has: ``x`` after a dropout, of its dtype or that of
            ``a``. None for ``x``.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    return lora_linears(x, [Adapted(weight, a, b, scaling, bias)], dropped)[0]


def lora_linears(x: Tensor, layers: Sequence[Adapted], dropped: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the result of :func:`lora_linear` for each of some layers that share ``x``, and ``dropped``."""
    if not any(layer.a is not None for layer in layers):
        return projections(x, *(layer.weight for layer in layers), biases=[layer.bias for layer in layers])
    for layer in layers:
        _check(x, layer, dropped)
    kinds, _ = flat([adapter_of(layer) for layer in layers])
    parameters = [part for layer in layers for part in (layer.weight, layer.a, layer.b, layer.bias)]
    made: tuple[Tensor, ...] = as_products(functools.partial(_run, kinds), x, dropped, *parameters)
    return made


def _check(x: Tensor, layer: Adapted, dropped: Tensor | None) -> None:
    weight, a, b, _, bias, _ = layer
    fit = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:]
    if a is not None and b is not None:
        fit = fit and a.dim() == 2 and a.shape[1] == weight.shape[1] and b.shape == (weight.shape[0], a.shape[0])
    if not fit:
        shapes = (str(list(given.shape)) for given in (x, weight, a, b) if given is not None)
        raise ValueError(
            "lora_linear: x must be [..., in_features], weight [out_features, in_features], a [rank, in_features] and "
            f"b [out_features, rank], got {', '.join(shapes)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lora_linear: bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    if dropped is not None and dropped.shape != x.shape:
        raise ValueError(f"lora_linear: dropped must be {list(x.shape)} as x is, got {list(dropped.shape)}")
    check_devices("lora_linear", x=x, weight=weight, a=a, b=b, bias=bias, dropped=dropped)


def _run(
    kinds: tuple[Kind, ...], x: Tensor, dropped: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the results; ``parameters`` are weight, a, b and bias of each layer."""
    is_served = is_eager(x, *parameters[::4], *parameters[3::4]) and are_served(x, _factors(parameters))
    if not is_served or is_invariant():
        return _apart(kinds, x, dropped, parameters)
    if needs_gradient(x, dropped, *parameters):
        made: tuple[Tensor, ...] = _apply(kinds, x, dropped, *parameters)
        return made
    return _products(product, kinds, x, dropped, parameters)[0]


def _apart(kinds: tuple[Kind, ...], x: Tensor, dropped: Tensor | None, parameters: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the results by torch's operations in PEFT's order."""
    linear, made = torch.nn.functional.linear, []
    for number, kind in enumerate(kinds):
        weight, a, b, bias = parameters[4 * number : 4 * number + 4]
        y = linear(x, weight, bias)
        if kind is not None:
            scaling, _, rate, drawn = kind
            read = x if dropped is None else dropped
            read = torch.nn.functional.dropout(read.to(drawn), rate) if rate else read
            y = (y + linear(linear(read.to(a.dtype), a), b) * scaling).to(y.dtype)
        made.append(y)
    return tuple(made)


def _products(
    multiply: Callable[..., Tensor], kinds: tuple[Kind, ...], x: Tensor, dropped: Tensor | None,
    parameters: Sequence[Any],
) -> tuple[tuple[Tensor, ...], Tensor | None, Masks]:  # fmt: skip
    """Return what :func:`products` does, the results in the shape of ``x``; ``parameters`` as of :func:`_run`."""
    rows, read = _rows(x), None if dropped is None else _rows(dropped)
    adapters = adapters_of(kinds, _factors(parameters))
    made, low, masks = products(rows, parameters[::4], parameters[3::4], adapters, read, multiply)
    return tuple(shaped(y, *x.shape[:-1], y.shape[1]) for y in made), low, masks


def _factors(parameters: Sequence[Any]) -> list[Any]:
    """Return the factors among the parameters of layers."""
    return [factor for pair in zip(parameters[1::4], parameters[2::4], strict=True) for factor in pair]


def adapter_of(layer: Adapted) -> Adapter | None:
    """Return the adapter of a layer."""
    return None if layer.a is None else Adapter(layer.a, layer.b, layer.scaling, layer.a.shape[0], layer.rate or 0.0)


def flat(adapters: Sequence[Adapter | None]) -> tuple[tuple[Kind, ...], list[Tensor | None]]:
    """Return the kinds of adapters, and the factors ``a`` and ``b`` of each."""
    factors = [factor for adapter in adapters for factor in (adapter[:2] if adapter else (None, None))]
    return tuple(adapter and (*adapter[2:5], adapter.a.dtype) for adapter in adapters), factors


def adapters_of(kinds: Sequence[Kind], factors: Sequence[Any]) -> list[Adapter | None]:
    """Return the adapters of layers with these factors: ``a`` and ``b`` of each."""
    given = zip(kinds, factors[::2], factors[1::2], strict=True)
    return [None if kind is None else Adapter(a, b, *kind) for kind, a, b in given]


def draws(adapters: Sequence[Adapter | None]) -> bool:
    """Return whether an adapter has a dropout."""
    return any(adapter and adapter.rate for adapter in adapters)


def with_masks(adapters: Sequence[Adapter | None], masks: Masks) -> Sequence[Adapter | None]:
    """Return adapters with their masks."""
    if not draws(adapters):
        return adapters
    return [adapter and adapter._replace(mask=mask) for adapter, mask in zip(adapters, masks, strict=True)]


def are_served(x: Tensor, factors: Iterable[Any]) -> bool:
    """Return whether factors have the dtype of ``x``, or are float32 beside a half type, or autocast casts them."""
    dtypes = {factor.dtype for factor in factors if factor is not None}
    if dtypes <= {x.dtype}:
        return True
    if is_autocast(x):
        return torch.float64 not in (x.dtype, *dtypes)
    return dtypes == {torch.float32} and x.dtype != torch.float64


def products(
    rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], adapters: Sequence[Adapter | None],
    dropped: Tensor | None = None, multiply: Callable[..., Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None, Masks]:  # fmt: skip
    """Return the results of layers that share their rows, ``rows @ a^T`` [rows, ranks] of all adapters, and masks.

    Args:
        rows: [rows, in_features].
        weights, biases: of each layer.
        adapters: of each layer; or empty.
        dropped: read by ``a`` in place of the rows.
        multiply: a linear layer's product; None for torch's, which the invariant mode replaces.
    """
    multiply = multiply or torch.nn.functional.linear
    masks: list[Tensor | None] = [None] * len(adapters)
    if not any(adapters):
        return [multiply(rows, *pair) for pair in zip(weights, biases, strict=True)], None, masks
    made = []
    if draws(adapters):
        lows = []
        for number, adapter in enumerate(adapters):
            if adapter is not None:
                read, masks[number] = _dropped(rows, adapter)
                lows.append(multiply(read, adapter.a))
        low = torch.cat(lows, 1)
    else:
        a = _joined(adapters)
        low = multiply((rows if dropped is None else dropped).to(a.dtype), a)
    parts = iter(_parts(low, adapters, 1))
    for weight, bias, adapter in zip(weights, biases, adapters, strict=True):
        y = multiply(rows, weight, bias)
        if adapter is not None:
            part, b = next(parts)[2], adapter.b.t()
            if part.dtype == y.dtype:
                y.addmm_(part, b, alpha=adapter.scaling)
            else:
                y.add_(torch.mm(part, b), alpha=adapter.scaling)
        made.append(y)
    return made, low, masks


def _dropped(rows: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor | None]:
    """Return what an adapter reads of rows, and the mask that it draws.

    It draws as torch.nn.Dropout does: on a GPU by the same kernel, whose numbers depend on the dtype that it is given,
    and on a CPU by another operation that takes the same numbers.
    """
    read = rows.to(adapter.a.dtype)
    if not adapter.rate:
        return read, None
    if read.dtype == adapter.drawn:
        made: tuple[Tensor, Tensor] = torch.native_dropout(read, adapter.rate, True)
        return made
    mask = torch.native_dropout(torch.empty_like(read, dtype=adapter.drawn), adapter.rate, True)[1]
    return _left(read, adapter._replace(mask=mask)), mask


def _left(rows: Tensor, adapter: Adapter) -> Tensor:
    """Return what an adapter's mask leaves of rows that it reads, or of their gradient."""
    if adapter.mask is None:
        return rows
    made: Tensor = torch.ops.aten.native_dropout_backward(rows, adapter.mask, 1 / (1 - adapter.rate))
    return made


def low_gradients(
    is_read: bool, wants: Sequence[bool], slopes: Sequence[Tensor], low: Tensor | None,
    adapters: Sequence[Adapter | None], dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Return the gradients of :func:`products`' second result and of each adapter's ``b``; None for those not wanted.

    Args:
        is_read: whether the gradient of the rows is wanted, which reads the first result, as those of ``a`` do.
        wants: whether those of ``a`` and ``b`` of each layer's adapter are.
        slopes: the gradients of the layers' results. Factors of another dtype have each cast once.
        low: the second result; not read if no ``b`` is wanted.
        dtype: of the gradients of ``b``, as of :func:`tilekern.ops.projections.gradient`.
    """
    of_b: list[Tensor | None] = [None] * len(adapters)
    own = [adapter for adapter in adapters if adapter]
    is_read = bool(own) and (is_read or any(wants[::2]))
    if not is_read and not any(wants[1::2]):
        return None, of_b
    dlow = None
    if is_read:
        dlow = slopes[0].new_empty(slopes[0].shape[0], sum(adapter.rank for adapter in own), dtype=own[0].b.dtype)
    made, read = (_parts(x, adapters, 1) if x is not None else () for x in (dlow, low))
    for each, (number, adapter, part) in enumerate(made or read):
        slope = slopes[number].to(part.dtype)
        if is_read:
            part.addmm_(slope, adapter.b, beta=0, alpha=adapter.scaling)
        if wants[2 * number + 1]:
            of_b[number] = gradient(slope.t(), read[each][2], dtype, adapter.scaling)
    return dlow, of_b


def rows_gradient(
    slopes: Sequence[Tensor], weights: Sequence[Tensor], dlow: Tensor | None, adapters: Sequence[Adapter | None],
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of :func:`products`' rows, as :func:`input_gradient`; ``dlow`` is :func:`low_gradients`'."""
    if dlow is None:
        return input_gradient(slopes, weights, dtype)
    if draws(adapters):
        made = input_gradient(slopes, weights, dtype)
        for _, adapter, part in _parts(dlow, adapters, 1):
            made.add_(_left(torch.mm(part, adapter.a), adapter))
        return made
    a = _joined(adapters)
    if dlow.dtype == slopes[0].dtype:
        return input_gradient((*slopes, dlow), (*weights, a), dtype)
    return input_gradient(slopes, weights, dtype).add_(torch.mm(dlow, a))


def factor_gradients(
    wants: Sequence[bool], rows: Tensor | None, dlow: Tensor | None, of_b: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None], dtype: torch.dtype | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of ``a`` and ``b`` of each layer's adapter, None for those that are not wanted.

    Args:
        wants: whether each is wanted, in that order.
        rows: what the adapters read; not read if no ``a`` is wanted.
        dlow, of_b: the results of :func:`low_gradients`.
        dtype: of the gradients of ``a``, as of :func:`tilekern.ops.projections.gradient`.
    """
    of_a: list[Tensor | None] = [None] * len(adapters)
    if any(wants[::2]):
        assert dlow is not None
        assert rows is not None
        if draws(adapters):
            for number, adapter, part in _parts(dlow, adapters, 1):
                if wants[2 * number]:
                    of_a[number] = gradient(part.t(), _left(rows.to(dlow.dtype), adapter), dtype)
        else:
            for number, _, part in _parts(gradient(dlow.t(), rows.to(dlow.dtype), dtype), adapters, 0):
                of_a[number] = part if wants[2 * number] else None
    return [each for pair in zip(of_a, of_b, strict=True) for each in pair]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _joined(adapters: Sequence[Adapter | None]) -> Tensor:
    """Return the factors ``a`` [rank, in_features] of all adapters below each other; the first may be that of all."""
    factors = [adapter.a for adapter in adapters if adapter is not None and adapter.a is not None]
    return factors[0] if len(factors) == 1 else torch.cat(factors)


def _parts(joined: Tensor, adapters: Sequence[Adapter | None], dim: int) -> list[tuple[int, Adapter, Tensor]]:
    """Return the number of each layer with an adapter, this, and its rank's part of ``joined`` in a dimension."""
    numbers = [number for number, adapter in enumerate(adapters) if adapter]
    own = [adapter for adapter in adapters if adapter]
    # Half the host time of ``split``, which is Python.
    parts = joined.split_with_sizes([adapter.rank for adapter in own], dim) if len(own) > 1 else (joined,)
    return list(zip(numbers, own, parts, strict=True))


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
        ctx: Any, kinds: tuple[Kind, ...], x: Tensor, dropped: Tensor | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        results, low, masks = _products(torch.nn.functional.linear, kinds, x, dropped, parameters)
        needs = _Needs.of(ctx.needs_input_grad, dropped is not None)
        reads_x = any(needs.weight) or (any(needs.a) and dropped is None)
        factors = _factors(parameters)
        factors[::2] = [a if needs.through_a else None for a in factors[::2]]
        ctx.save_for_backward(
            x if reads_x else None, dropped if any(needs.a) else None, low if any(needs.b) else None,
            *(weight if needs.x else None for weight in parameters[::4]),
            *(part if needs.low else None for part in (*factors, *masks)),
        )  # fmt: skip
        ctx.kinds, ctx.shape, ctx.needs = kinds, x.shape, needs
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, low, *parameters = ctx.saved_tensors
        needs, number = ctx.needs, len(given)
        weights, factors, masks = parameters[:number], parameters[number : 3 * number], parameters[3 * number :]
        adapters = with_masks(adapters_of(ctx.kinds, factors), masks)
        slopes, dx, ddropped = [_rows(dy) for dy in given], None, None
        wants = [want for pair in zip(needs.a, needs.b, strict=True) for want in pair]
        dlow, of_b = low_gradients(needs.through_a, wants, slopes, low, adapters)
        if needs.x:
            dx = rows_gradient(slopes, weights, dlow if needs.through_a and not needs.dropped else None, adapters)
        if needs.dropped:
            ddropped = shaped(torch.mm(dlow, _joined(adapters)), *ctx.shape)
        read = x if dropped is None else dropped
        dfactors = factor_gradients(wants, None if read is None else _rows(read), dlow, of_b, adapters)
        found: list[Tensor | None] = [None, None if dx is None else shaped(dx, *ctx.shape), ddropped]
        for each, slope in enumerate(slopes):
            found.append(torch.mm(slope.t(), _rows(x)) if needs.weight[each] else None)
            found += dfactors[2 * each : 2 * each + 2]
            found.append(slope.sum(0) if needs.bias[each] else None)
        return tuple(found)


_apply = applied(_LoraLinears)
