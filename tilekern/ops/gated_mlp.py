"""gated_mlp: ``down(silu(gate(x)) * up(x))`` as one function of autograd.

It saves x, gate and up, and recomputes ``silu(gate) * up`` in the kernel of its gradients: two matrices
[tokens, intermediate] are saved, where a layer saves three.

It is written by hand and not declared, as it is a sequence of torch's matrix products around two launches. If it is
traced or needs no gradient, its parts run as ops of their own, so there is nothing to register.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels import geglu
from tilekern.kernels import swiglu as kernels
from tilekern.ops import few_rows
from tilekern.ops.gated_linear import gated_linear
from tilekern.ops.linear import product
from tilekern.ops.projections import gradient, input_gradient
from tilekern.ops.registration import (
    applied,
    as_products,
    check_tensors,
    differentiable_once,
    is_eager,
    needs_gradient,
    shaped,
)
from tilekern.ops.swiglu import swiglu
from tilekern.runtime.dispatch import Plan, keep, memo, plan_for
from tilekern.spec import KernelSpec

_plans: dict[Any, tuple[Plan, Plan] | None] = memo()
# The kernels of both directions by activation, and their flags. The second of silu also makes again what ``down`` read.
_KERNELS: dict[str, tuple[KernelSpec, KernelSpec, tuple[bool, ...]]] = {
    "silu": (kernels.FORWARD, kernels.REMAKE, ()),
    "gelu": (geglu.FORWARD, geglu.BACKWARD, (False,)),
    "gelu_tanh": (geglu.FORWARD, geglu.BACKWARD, (True,)),
}


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
        made: Tensor = as_products(_trained, x, *weights)
        return made
    if few_rows.is_served(x, *weights) and few_rows.is_tuned(x, gate_weight, "gated", "silu"):
        return product(gated_linear(x, gate_weight, up_weight), down_weight)
    return _by_parts(x, *weights)


def _trained(x: Tensor, *weights: Tensor) -> Tensor:
    plans = plans_of(x, *weights) if is_eager(x, *weights) else None
    return _by_parts(x, *weights) if plans is None else _apply(x, *weights, plans)


def _by_parts(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return product(swiglu(product(x, gate_weight), product(x, up_weight)), down_weight)


def plans_of(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu"
) -> tuple[Plan, Plan] | None:
    """Return the plans of both directions; None if a kernel is missing. All have one dtype.

    The activation is ``silu``, ``gelu`` or ``gelu_tanh``.
    """
    key = (
        x.shape, x.dtype, x.get_device(), gate_weight.shape, gate_weight.get_device(), up_weight.shape,
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
        found = _find(x, gate_weight, activation)
        return keep(_plans, key, found) if x.is_cuda else found


def _find(x: Tensor, weight: Tensor, activation: str) -> tuple[Plan, Plan] | None:
    if x.dtype != weight.dtype or not x.numel():
        return None
    *specs, flags = _KERNELS[activation]
    sizes = (x.numel() // x.shape[-1], weight.shape[0], x.dtype, *flags)
    forward, backward = (plan_for(spec, x.device, *sizes) for spec in specs)
    return None if forward is None or backward is None else (forward, backward)


def launched(plan: Plan, rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result [rows, hidden], gate, up and what ``down`` read; ``rows`` are [rows, hidden]."""
    gate_weight, up_weight, down_weight = weights
    gate, up = torch.nn.functional.linear(rows, gate_weight), torch.nn.functional.linear(rows, up_weight)
    y = torch.empty_like(gate)
    plan.launch(rows.get_device(), gate, up, y)
    return torch.nn.functional.linear(y, down_weight), gate, up, y


def launched_backward(
    plan: Plan, wants: Sequence[bool], slope: Tensor, rows: Tensor, gate: Tensor, up: Tensor, weights: Sequence[Tensor],
    y: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of rows and weights; None for those that nobody ``wants``.

    Args:
        slope: the gradient of the result, [rows, hidden].
        rows, gate, up: what :func:`launched` read and returned.
        y: what ``down`` read; None with silu, whose kernel makes it again.
        dtype: of the gradients, as of :func:`tilekern.ops.projections.gradient`.
    """
    gate_weight, up_weight, down_weight = weights
    dy = torch.mm(slope, down_weight)
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    if y is None:
        y = torch.empty_like(gate)
        plan.launch(rows.get_device(), dy, gate, up, dgate, dup, y)
    else:
        plan.launch(rows.get_device(), dy, gate, up, dgate, dup)
    del dy
    ddown = gradient(slope.t(), y, dtype) if wants[3] else None
    del y
    drows = input_gradient((dgate, dup), (gate_weight, up_weight), dtype) if wants[0] else None
    dgate_weight = gradient(dgate.t(), rows, dtype) if wants[1] else None
    return drows, dgate_weight, gradient(dup.t(), rows, dtype) if wants[2] else None, ddown


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, plans: tuple[Plan, Plan]
    ) -> Tensor:
        weights = gate_weight, up_weight, down_weight
        y, gate, up, _ = launched(plans[0], x.reshape(-1, x.shape[-1]), weights)
        ctx.save_for_backward(x, gate, up, *weights)
        ctx.plan = plans[1]
        return shaped(y, *x.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, *weights = ctx.saved_tensors
        slope, rows = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
        dx, *rest = launched_backward(ctx.plan, ctx.needs_input_grad, slope, rows, gate, up, weights)
        return None if dx is None else shaped(dx, *x.shape), *rest, None


_apply = applied(_GatedMlp)
