"""linear: ``activation(x @ weight^T + bias)``, its products by whichever kernel or library call was tuned."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels.linear import MOST_ELEMENTS, SPEC, sizes
from tilekern.ops.registration import (
    as_rows,
    check_devices,
    differentiable_once,
    is_autocast,
    needs_gradient,
    register,
    register_gradient,
    shaped,
)

# The forward's plan, and those of the gradients of x and of the weight where they are asked for.
Plans = tuple[Plan, Plan | None, Plan | None]
_memo: dict[Any, Plans | None] = memo()
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
# Those that the kernel can apply before it rounds; gelu with erf is torch's own operation.
_FUSED = ("gelu_tanh", "silu")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """``activation(x @ weight^T + bias)``, summed in float32.

    An activation is applied before rounding where no gradient is asked for (``gelu_tanh``, ``silu``); for training the
    value before it is kept, since to compute it again would cost a third product.

    Args:
        x: [..., in_features]; bfloat16, float16 or float32, any strides.
        weight: [out_features, in_features], of the dtype of ``x``.
        bias: [out_features], of the dtype of ``x``, or None.
        activation: None, ``gelu`` (with erf, as torch's default), ``gelu_tanh`` or ``silu``.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit, or the activation is unknown.
    """
    compiling = torch.compiler.is_compiling()
    if is_autocast(x.device.type):
        # torch casts the inputs of a linear layer there.
        _check(x, weight, bias, activation)
        return _by_torch(x, weight, bias, activation) if compiling else fallback(x, weight, bias, activation)
    graded = needs_gradient(x, weight) or (bias is not None and needs_gradient(bias))
    inside = _inside(activation, graded)
    if compiling:
        _check(x, weight, bias, activation)
        y = _op(x, weight, bias, inside)
    else:
        plans = _plans(x, weight, bias, activation, graded)
        if plans is None:
            return fallback(x, weight, bias, activation)
        y = _Linear.apply(x, weight, bias, plans) if graded else _launch(plans[0], x, weight, bias)
    return y if inside == activation else _activated(y, activation)


def _inside(activation: str | None, graded: bool) -> str | None:
    """The activation that the kernel applies, if it does."""
    return activation if activation in _FUSED and not graded else None


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    if weight.dim() != 2 or not x.dim() or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear: weight must be [out, in] for x [..., in], got {list(weight.shape)}, {list(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must have the shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"linear: activation must be one of {_ACTIVATIONS}, got {activation!r}")
    check_devices("linear", x=x, weight=weight, bias=bias)


def fallback(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """The op in torch's own operations; counted."""
    count_fallback(SPEC)
    return _by_torch(x, weight, bias, activation)


def _by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    return _activated(torch.nn.functional.linear(x, weight, bias), activation)


def _activated(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return y
    if activation == "silu":
        return torch.nn.functional.silu(y)
    return torch.nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _plans(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, graded: bool
) -> Plans | None:
    """Plans of the forward and of the gradients that will be asked for; None where torch must do the work."""
    wanted = (graded and x.requires_grad, graded and weight.requires_grad)
    inside = _inside(activation, graded)
    if not x.is_cuda:
        _check(x, weight, bias, activation)
        return _find_plans(x, weight, bias, inside, wanted)
    added = None if bias is None else (bias.shape, bias.dtype, bias.get_device())
    devices = (x.get_device(), weight.get_device())
    key = (x.shape, weight.shape, x.dtype, weight.dtype, devices, added, activation, graded, wanted)
    try:
        return _memo[key]
    except KeyError:
        _check(x, weight, bias, activation)
        return keep(_memo, key, _find_plans(x, weight, bias, inside, wanted))


def _find_plans(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inside: str | None, wanted: tuple[bool, bool]
) -> Plans | None:
    others = [weight] if bias is None else [weight, bias]
    if any(other.dtype != x.dtype for other in others):
        return None
    out, features = weight.shape
    if not x.numel() or not out:
        return None
    rows = x.numel() // features
    if max(x.numel(), weight.numel(), rows * out) > MOST_ELEMENTS:
        return None
    around = [name for name in ("biased" if bias is not None else None, inside) if name]
    forward = _plan(x, rows, features, out, "b_transposed", *around)
    to_x = _plan(x, rows, out, features) if wanted[0] else None
    to_weight = _plan(x, rows, out, features, "a_transposed") if wanted[1] else None
    if forward is None or (wanted[0] and to_x is None) or (wanted[1] and to_weight is None):
        return None
    return forward, to_x, to_weight


def _plan(x: torch.Tensor, rows: int, inner: int, columns: int, *on: str) -> Plan | None:
    """The plan of a product with the flags that ``on`` names set."""
    return plan_for(SPEC, x.device, *sizes(rows, inner, columns, x.dtype, on).values())


def _product(plan: Plan, shape: tuple[int, int], *inputs: torch.Tensor) -> torch.Tensor:
    like = inputs[0]
    c: torch.Tensor
    (c,) = plan.run(like.get_device(), inputs, lambda: (torch.empty(shape, dtype=like.dtype, device=like.device),))
    return c


def _launch(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, out = as_rows(x), weight.shape[0]
    more = () if bias is None else (bias.contiguous(),)
    y = _product(plan, (rows.shape[0], out), rows, as_rows(weight), *more)
    return shaped(y, *x.shape[:-1], out)


def _gradients(
    plans: tuple[Plan | None, Plan | None], dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, with_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    slopes, rows = as_rows(dy), as_rows(x)
    to_x, to_weight = plans
    dx = None if to_x is None else _product(to_x, (rows.shape[0], rows.shape[1]), slopes, as_rows(weight))
    dweight = None if to_weight is None else _product(to_weight, (weight.shape[0], weight.shape[1]), slopes, rows)
    return None if dx is None else dx.view(x.shape), dweight, slopes.sum(0) if with_bias else None


class _Linear(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plans: Plans
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plans = plans[1:]
        return _launch(plans[0], x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*_gradients(ctx.plans, dy, x, weight, ctx.needs_input_grad[2]), None)


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    inside = _inside(activation, graded=False)
    plans = _plans(x, weight, bias, activation, graded=False)
    if plans is None:
        return fallback(x, weight, bias, activation)
    y = _launch(plans[0], x, weight, bias)
    return y if inside == activation else _activated(y, activation)


def _run_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plans = _find_plans(x, weight, None, None, (True, True))
    if plans is not None:
        dx, dweight, dbias = _gradients(plans[1:], dy, x, weight, with_bias=True)
        assert dx is not None
        assert dweight is not None
        assert dbias is not None
        return dx, dweight, dbias
    count_fallback(SPEC)
    slopes, rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return (slopes @ weight).view(x.shape), slopes.t() @ rows, slopes.sum(0)


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dy.new_empty(weight.shape[:1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.activation = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, *([bias] if ctx.activation and ctx.biased else []))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, *bias = ctx.saved_tensors
    if ctx.activation is not None:
        # Only a direct call of the registered op comes here: `linear` keeps the value before an activation.
        before = _op(x, weight, bias[0] if bias else None, None)
        if ctx.activation == "silu":
            dy = torch.ops.aten.silu_backward(dy, before)
        else:
            form = "tanh" if ctx.activation == "gelu_tanh" else "none"
            dy = torch.ops.aten.gelu_backward(dy, before, approximate=form)
    dx, dweight, dbias = _op_backward(dy, x, weight)
    return dx, dweight, dbias if ctx.biased else None, None


_op = register("linear(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor", _run, _fake)
_op_backward = register(
    "linear_backward(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)", _run_backward, _fake_backward
)
register_gradient(_op, _backward, _save)
