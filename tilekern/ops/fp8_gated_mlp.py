"""fp8_gated_mlp: ``down(act(gate(x)) * up(x))`` by 8-bit floats, as one function of autograd.

Its six products are those of :mod:`tilekern.ops.fp8_linear`. The gate and its gradients are rounded to e4m3 in the
launches that compute them (:mod:`tilekern.kernels.fp8.gated`), so no pass of its own does it. It keeps gate and up, and
of x what a linear layer of 8-bit floats does; the gate's result is computed again beside its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.fp8.gated import BACKWARD, FORWARD
from tilekern.kernels.fp8.product import SPEC as PRODUCT
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.ops.foreseen import launch
from tilekern.ops.fp8_linear import (
    E4M3,
    ROWWISE,
    Room,
    Rounded,
    fp8_linear,
    fp8_linears,
    kept_input,
    kept_weight,
    memory,
    multiplied,
    read_again,
    rounded,
    rounded_input,
    rounded_weight,
    turned,
    vectors,
    why_no_plans,
    why_not,
)
from tilekern.ops.gated_mlp import gated_mlp
from tilekern.ops.geglu import geglu
from tilekern.ops.registration import (
    applied,
    as_products,
    as_rows,
    check_tensors,
    differentiable_once,
    is_eager,
    needs_gradient,
    shaped,
)
from tilekern.ops.swiglu import swiglu
from tilekern.runtime.dispatch import count_fallback
from tilekern.spec import KernelSpec

# By name: whether it is gelu, and by tanh; and the gate of torch's or the tuned kernels.
_ACTIVATIONS: dict[str, tuple[bool, bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (False, False, swiglu),
    "gelu": (True, False, geglu),
    "gelu_tanh": (True, True, lambda gate, up: geglu(gate, up, tanh=True)),
}


def fp8_gated_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu"
) -> Tensor:
    """Return ``(act(x @ gate_weight^T) * (x @ up_weight^T)) @ down_weight^T``, with products of 8-bit floats.

    Where :func:`fp8_linear` runs torch's layer, so does each of the three, or :func:`tilekern.ops.gated_mlp`.

    Args:
        x: [..., hidden]; bfloat16, float16 or float32, any strides.
        gate_weight, up_weight: [intermediate, hidden], of the dtype of ``x``. Under autocast all are cast, as those of
            linear layers.
        down_weight: [hidden, intermediate], of the dtype of ``x``.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.

    Returns:
        [..., hidden], contiguous.

    Raises:
        ValueError: shapes or devices do not fit, or the activation is unknown.
    """
    weights = gate_weight, up_weight, down_weight
    _check(x, weights, activation)
    made: Tensor = as_products(functools.partial(_run, activation), x, *weights)
    return made


def _check(x: Tensor, weights: Sequence[Tensor], activation: str) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"fp8_gated_mlp: activation must be one of {tuple(_ACTIVATIONS)}, got {activation!r}")
    gate, up, down = weights
    if not gate.shape == up.shape == down.shape[::-1] or x.shape[-1:] != gate.shape[1:]:
        raise ValueError(
            "fp8_gated_mlp: x must be [..., hidden], gate_weight and up_weight [intermediate, hidden] and down_weight "
            f"[hidden, intermediate], got {', '.join(str(list(each.shape)) for each in (x, *weights))}"
        )
    check_tensors("fp8_gated_mlp", x=x, gate_weight=gate, up_weight=up, down_weight=down)


def _run(activation: str, x: Tensor, *weights: Tensor) -> Tensor:
    graded = needs_gradient(x, *weights)
    if is_eager(x, *weights) and not why_not(x, graded, weights):
        run: Callable[..., Tensor] = call if graded else _plain
        why = why_no_plans("fp8_gated_mlp", run, x, *weights, activation)
        if not why:
            return run(x, *weights, activation)
        first = weights[0], None, weights[1], None
        if activation == "silu" and why_no_plans(ROWWISE.op, ROWWISE.run(graded), x, *first):
            count_fallback(PRODUCT, why)
            return gated_mlp(x, *weights)
    gate, up = fp8_linears(x, [(weight, None) for weight in weights[:2]])
    return fp8_linear(_ACTIVATIONS[activation][2](gate, up), weights[2])


def _plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    y, _ = mlp_forward(x, (gate, up, down), activation)
    return shaped(y, *x.shape[:-1], y.shape[1])


def mlp_forward(x: Tensor, weights: Sequence[Tensor], activation: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the rows of the result, and what gradients read beside weights."""
    made, scales, room = [], [], Room()
    inner, hidden = weights[0].shape
    of_x, of_gate, *of_weights = vectors(x, *[x.numel() // hidden] * 2, inner, inner, weights[2].shape[0])
    numbers = rounded_input(x, of_x)
    for weight, scale in zip(weights[:2], of_weights, strict=False):
        of_weight = rounded_weight(weight, scale, room)
        scales.append(of_weight[1])
        made.append(multiplied(numbers, of_weight, x.dtype))
    room.clear()
    (active,) = _gated(FORWARD, activation, (of_gate,), *made)
    of_weight = rounded_weight(weights[2], of_weights[2])
    return multiplied(active, of_weight, x.dtype), (*made, *scales, of_weight[1], *kept_input(x, numbers))


def _gated(spec: KernelSpec, activation: str, scales: Sequence[Tensor], *given: Tensor) -> list[Rounded]:
    """Return a gate's results, or its gradients and its results: e4m3 numbers [rows, columns] and scales [rows].

    ``scales``: memory for these.
    """
    (rows, columns), dtype = given[0].shape, given[0].dtype
    gelu, tanh, _ = _ACTIVATIONS[activation]
    numbers = [memory((rows, columns), E4M3, given[0].device) for _ in scales]
    if launch(spec, (rows, columns, dtype, gelu, tanh), *given, *numbers, *scales):
        return list(zip(numbers, scales, strict=True))
    return [scaled_rows(x) for x in _by_torch(activation, *given)]


def _by_torch(activation: str, *given: Tensor) -> tuple[Tensor, ...]:
    """Return what is to be rounded in float32: y of gate and up, or dgate, dup and y of dy, gate and up."""
    *slopes, gate, up = (each.float() for each in given)
    gelu, tanh, _ = _ACTIVATIONS[activation]
    functional = torch.nn.functional

    def formula(gate: Tensor, up: Tensor) -> Tensor:
        curve = functional.gelu(gate, approximate="tanh" if tanh else "none") if gelu else functional.silu(gate)
        return curve * up

    if not slopes:
        return (formula(gate, up),)
    with torch.enable_grad():
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        y = formula(*leaves)
    return *torch.autograd.grad(y, leaves, slopes), y.detach()


def mlp_backward(
    needs: Sequence[bool], slope: Tensor, given: Sequence[Tensor], weights: Sequence[Tensor], activation: str
) -> list[Tensor | None]:
    """Return the gradients of rows of x and of the weights; None for those that nobody ``needs``.

    Args:
        needs: whether these are wanted, in their order.
        slope: the gradient of the result.
        given: what :func:`mlp_forward` returned beside it.
        weights: gate, up and down, as :func:`tilekern.ops.fp8_linear.kept_weight`.
        activation: as of :func:`fp8_gated_mlp`.
    """
    gate, up, *rest = given
    scales, kept = rest[:3], rest[3:]
    of_x, *of_weights = needs
    dtype, (rows, inner), hidden = gate.dtype, gate.shape, slope.shape[-1]
    *of_rows, of_inner, of_hidden, of_across = vectors(gate, *[rows] * 4, inner, hidden, hidden)
    # Of turned gradients and weights, which a product has read before the next are written; as their scales.
    of_turned, of_weight = Room(), Room()

    def turned_weight(n: int, common: Tensor, room: Room | None = None) -> Rounded:
        return turned(as_rows(weights[n]), scales[n], dtype, common, room)

    slopes = rounded(as_rows(slope), of_rows[0])
    ddown = None
    dy = multiplied(slopes, turned_weight(2, of_inner), dtype)
    *gradients, y = _gated(BACKWARD, activation, of_rows[1:], dy, gate, up)
    del dy, gate, up
    if of_weights[2]:
        down = turned(*slopes, dtype, of_hidden)
        ddown = multiplied(down, turned(*y, dtype, of_inner, of_turned), dtype, over_rows=True)
    del y, slopes
    dx, across, found = None, None, list[Tensor | None]()
    for n, of_gate in enumerate(gradients):
        if of_x:
            dx = multiplied(of_gate, turned_weight(n, of_hidden, of_weight), dtype, addend=dx)
        if of_weights[n]:
            across = across or turned(*read_again(kept), dtype, of_across)
            down = turned(*of_gate, dtype, of_inner, of_turned)
            found.append(multiplied(down, across, dtype, over_rows=True))
        else:
            found.append(None)
    return [dx, *found, ddown]


class _Fp8GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
        y, kept = mlp_forward(x, (gate, up, down), activation)
        ctx.save_for_backward(*map(kept_weight, (gate, up, down)), *kept)
        ctx.shape, ctx.activation = x.shape, activation
        return shaped(y, *x.shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once, as checkpoints allow
        dx, *found = mlp_backward(ctx.needs_input_grad[:4], slope, saved[3:], saved[:3], ctx.activation)
        return None if dx is None else shaped(dx, *ctx.shape), *found, None


# With gradients: of x, the weights and the activation.
call = applied(_Fp8GatedMlp)
