"""gated_mlp: ``down(silu(gate(x)) * up(x))`` as one function of autograd.

It saves x, gate and up, and recomputes ``silu(gate) * up`` in the kernel of its gradients: two matrices
[tokens, intermediate] are saved, where a layer saves three. The products may have adapters, as in ``lora_linear``.

It is written by hand and not declared, as it is a sequence of torch's matrix products around two launches. If it is
traced or needs no gradient, its parts run as ops of their own, so there is nothing to register.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import geglu
from tilekern.kernels import swiglu as kernels
from tilekern.ops import few_rows
from tilekern.ops.gated_linear import gated_linear
from tilekern.ops.linear import product
from tilekern.ops.lora_linear import (
    Adapted,
    Adapter,
    Kind,
    Masks,
    adapter_of,
    adapters_of,
    are_served,
    factor_gradients,
    flat,
    lora_linears,
    low_gradients,
    products,
    rows_gradient,
    with_masks,
)
from tilekern.ops.projections import gradient
from tilekern.ops.registration import (
    applied,
    as_products,
    cast_together,
    check_tensors,
    differentiable_once,
    needs_gradient,
    product_dtype,
    shaped,
)
from tilekern.ops.swiglu import swiglu
from tilekern.runtime.dispatch import Plan, is_invariant, keep, memo, plan_for
from tilekern.spec import KernelSpec

_plans: dict[Any, tuple[Plan, Plan] | None] = memo()
# The kernels of both directions by activation, and their flags. The second of silu also makes again what ``down`` read.
_KERNELS: dict[str, tuple[KernelSpec, KernelSpec, tuple[bool, ...]]] = {
    "silu": (kernels.FORWARD, kernels.REMAKE, ()),
    "gelu": (geglu.FORWARD, geglu.BACKWARD, (False,)),
    "gelu_tanh": (geglu.FORWARD, geglu.BACKWARD, (True,)),
}
# Kept where inputs are kept as copies of another dtype, or not at all, so that differentiating twice is refused: gate
# and up come from them.
UNREAD = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)


def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Return ``(silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``.

    Args:
        x: [..., hidden].
        gate_weight, up_weight: [intermediate, hidden], of x's dtype.
        down_weight: [hidden, intermediate], of x's dtype.

    Returns:
        [..., hidden].

    Raises:
        ValueError: the devices differ, or the shapes of ``gate_weight`` and ``up_weight``.
    """
    weights = (gate_weight, up_weight, down_weight)
    if needs_gradient(x, *weights):
        return _trained((), x, *weights)
    if few_rows.is_served(x, *weights) and few_rows.is_tuned(x, gate_weight, "gated", "silu"):
        return product(gated_linear(x, gate_weight, up_weight), down_weight)
    return product(swiglu(product(x, gate_weight), product(x, up_weight)), down_weight)


def lora_gated_mlp(x: Tensor, layers: Sequence[Adapted]) -> Tensor:
    """Return the result of :func:`gated_mlp` for gate, up and the last layer, which may have biases and adapters."""
    weights, (kinds, factors) = [layer.weight for layer in layers], flat([adapter_of(layer) for layer in layers])
    is_bare = all(layer.bias is None for layer in layers)
    if is_bare and needs_gradient(x, *weights, *factors) and not is_invariant():
        made: Tensor = as_products(functools.partial(_trained, kinds), x, *weights, *factors)
        return made
    return _by_parts(x, layers)


def _trained(kinds: tuple[Kind, ...], x: Tensor, *given: Any) -> Tensor:
    """Return the result of weights and factors of adapters."""
    gate_weight, up_weight, down_weight = given[:3]
    dtype = product_dtype(x, *given[:3]) if are_served(x, given[3:]) else None
    plans = None if dtype is None else plans_of(x, gate_weight, up_weight, down_weight, dtype=dtype)
    if plans is not None:
        made: Tensor = _apply(x, *given, plans, kinds, dtype)
        return made
    if not kinds:
        return product(swiglu(product(x, gate_weight), product(x, up_weight)), down_weight)
    return _by_parts(
        x,
        [
            Adapted(weight, None, None) if one is None else Adapted(weight, *one[:3], rate=one.rate)
            for weight, one in zip(given[:3], adapters_of(kinds, given[3:]), strict=True)
        ],
    )


def _by_parts(x: Tensor, layers: Sequence[Adapted]) -> Tensor:
    return lora_linears(swiglu(*lora_linears(x, layers[:2])), layers[2:])[0]


def plans_of(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu",
    dtype: torch.dtype | None = None,
) -> tuple[Plan, Plan] | None:  # fmt: skip
    """Return the plans of both directions; None if a kernel is missing. All have one dtype.

    The activation is ``silu``, ``gelu`` or ``gelu_tanh``, ``dtype`` that of the products, if autocast casts.
    """
    dtype = dtype or x.dtype
    key = (
        x.shape, dtype, x.get_device(), gate_weight.shape, gate_weight.get_device(), up_weight.shape,
        up_weight.get_device(), down_weight.shape, down_weight.get_device(), activation,
    )  # fmt: skip
    try:
        return _plans[key]
    except KeyError:
        if up_weight.shape != gate_weight.shape:
            raise ValueError(
                "gated_mlp: gate_weight and up_weight must have one shape, got "
                f"{list(gate_weight.shape)} and {list(up_weight.shape)}"
            ) from None
        check_tensors("gated_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
        found = _find(x, gate_weight, activation, dtype) if x.dtype == gate_weight.dtype else None
        return keep(_plans, key, found) if x.is_cuda else found


def _find(x: Tensor, weight: Tensor, activation: str, dtype: torch.dtype) -> tuple[Plan, Plan] | None:
    if not x.numel():
        return None
    *specs, flags = _KERNELS[activation]
    sizes = (x.numel() // x.shape[-1], weight.shape[0], dtype, *flags)
    forward, backward = (plan_for(spec, x.device, *sizes) for spec in specs)
    return None if forward is None or backward is None else (forward, backward)


def launched(
    plan: Plan, rows: Tensor, weights: Sequence[Tensor], adapters: Sequence[Adapter | None] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None], Masks]:
    """Return the result [rows, hidden], gate, up, what the last layer read, and ``low`` and masks of :func:`products`.

    ``low`` is that of gate and up, and that of the last layer.

    Args:
        rows: [rows, hidden].
        adapters: of gate, up and the last layer; or empty.
    """
    (gate, up), low, masks = products(rows, weights[:2], (None, None), adapters[:2])
    y = torch.empty_like(gate)
    plan.launch(rows.get_device(), gate, up, y)
    (made,), last, of_last = products(y, weights[2:], (None,), adapters[2:])
    return made, gate, up, y, (low, last), (*masks, *of_last)


def kept(
    of_weights: Sequence[bool], of_factors: Sequence[bool], rows: Tensor, lows: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the rows and what adapters made; None in place of what :func:`launched_backward` does not read.

    Args:
        of_weights: whether gradients of the weights of gate and up are wanted.
        of_factors: whether those of the factors are; or empty.
        rows, lows: what :func:`launched` read and returned.
    """
    read = rows if any(of_weights) or any(of_factors[:4:2]) else None
    if not of_factors:
        return read, None, None
    low, last = lows
    return read, low if any(of_factors[1:4:2]) else None, last if of_factors[5] else None


def launched_backward(
    plan: Plan, wants: Sequence[bool], slope: Tensor, rows: Any, gate: Tensor, up: Tensor, weights: Sequence[Tensor],
    adapters: Sequence[Adapter | None] = (), lows: Sequence[Tensor | None] = (None, None),
    dtype: torch.dtype | None = None, y: Any = None, activation: str = "silu",
    factors_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of rows, weights, and factors of adapters; None for those that nobody ``wants``.

    Args:
        slope: the gradient of the result, [rows, hidden].
        rows, gate, up, lows: what :func:`launched` read and returned, as :func:`kept`.
        adapters: with its masks.
        dtype: of the gradients, as of :func:`tilekern.ops.projections.gradient`.
        y: what the last layer read, unless it is made again, as with silu, or no gradient reads it.
        activation: as of :func:`plans_of`.
        factors_dtype: of the gradients of factors.
    """
    gate_weight, up_weight, down_weight = weights
    first, last = adapters[:2], adapters[2:]
    dlow, of_b = low_gradients(True, wants[8:], (slope,), lows[1], last, factors_dtype)
    dy = rows_gradient((slope,), (down_weight,), dlow, last)
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    if activation == "silu":
        y = torch.empty_like(gate)
        plan.launch(slope.get_device(), dy, gate, up, dgate, dup, y)
    else:
        plan.launch(slope.get_device(), dy, gate, up, dgate, dup)
    del dy
    ddown = gradient(slope.t(), y, dtype) if wants[3] else None
    of_last = factor_gradients(wants[8:], y, dlow, of_b, last, factors_dtype)
    del y
    slopes = dgate, dup
    dlow, of_b = low_gradients(wants[0], wants[4:8], slopes, lows[0], first, factors_dtype)
    drows = rows_gradient(slopes, (gate_weight, up_weight), dlow, first, dtype) if wants[0] else None
    of_first = factor_gradients(wants[4:8], rows, dlow, of_b, first, factors_dtype)
    dgate_weight = gradient(dgate.t(), rows, dtype) if wants[1] else None
    return drows, dgate_weight, gradient(dup.t(), rows, dtype) if wants[2] else None, ddown, *of_first, *of_last


class _GatedMlp(torch.autograd.Function):
    """Of x, the weights and the factors of adapters, then plans, kinds of adapters, and the dtype of the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        plans, kinds, dtype = given[-3:]
        ctx.call, ctx.shape = (plans[1], kinds, x.dtype), x.shape
        x, *weights = cast_together(dtype, (x, *given[:3]))
        factors = given[3:-3]
        adapters = adapters_of(kinds, factors)
        y, gate, up, _, lows, masks = launched(plans[0], x.reshape(-1, x.shape[-1]), weights, adapters)
        _, *wants = ctx.needs_input_grad[:-3]
        rows, *read = kept(wants[:2], wants[3:], x, lows)
        unread = UNREAD if rows is None or dtype != ctx.call[2] else None
        ctx.save_for_backward(unread, rows, gate, up, *read, *weights, *masks, *factors)
        return shaped(y, *x.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _, x, gate, up, *saved = ctx.saved_tensors
        plan, kinds, wide = ctx.call
        lows, weights, masks, factors = saved[:2], saved[2:5], saved[5 : 5 + len(kinds)], saved[5 + len(kinds) :]
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        adapters = with_masks(adapters_of(kinds, factors), masks)
        wants, slope = ctx.needs_input_grad[:-3], dout.reshape(-1, dout.shape[-1])
        dx, *rest = launched_backward(plan, wants, slope, rows, gate, up, weights, adapters, lows, wide)
        return None if dx is None else shaped(dx, *ctx.shape), *rest, None, None, None


_apply = applied(_GatedMlp)
