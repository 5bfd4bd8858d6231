"""linear: ``activation(x @ weight^T + bias)``, its products by whichever kernel or library call was tuned.

Its launches are written by hand: the three directions are problems of one spec, and a library may win any of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tilekern.kernels.matmul.product import MOST_ELEMENTS, SPEC, sizes
from tilekern.ops import few_rows
from tilekern.ops.operation import operation
from tilekern.ops.registration import as_rows, is_autocast, needs_gradient, run_product, shaped
from tilekern.runtime.dispatch import Plan, count_fallback, is_invariant, plan_for, tuned_plan_for
from tilekern.spec import Array

# Plans of the forward, and of the gradients of x and weight if they are needed; or that of the kernel for few rows.
Plans = tuple[Plan, Plan | None, Plan | None] | tuple[Plan]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
# The kernel can apply these before rounding; gelu with erf is torch's own operation.
_FUSED = ("gelu_tanh", "silu")
_OUTSIDE = "linear applies an activation outside of its op if there is a gradient"
_ARRAYS = (
    Array("x", "dtype", ("rows", "in_features")),
    Array("weight", "dtype", ("out_features", "in_features")),
    Array("bias", "dtype", ("out_features",)),
    Array("y", "dtype", ("rows", "out_features"), "output"),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return ``activation(x @ weight^T + bias)``, summed in float32.

    Without gradients, ``gelu_tanh`` and ``silu`` are applied before rounding, and up to 64 rows have a kernel of their
    own. For training the value before the activation is kept, since computing it again would cost a third product.

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
    if activation not in _ACTIVATIONS:
        raise ValueError(f"linear: activation must be one of {_ACTIVATIONS}, got {activation!r}")
    if is_autocast(x):
        # torch casts the inputs of a linear layer.
        _check(x, weight, bias, activation)
        if not torch.compiler.is_compiling():
            count_fallback(SPEC)
        return _activated(torch.nn.functional.linear(x, weight, bias), activation)
    if activation is None:
        return _linear(x, weight, bias, None)
    graded = needs_gradient(x, weight, bias)
    inside = activation if activation in _FUSED and not graded else None
    y = _linear(x, weight, bias, inside)
    return y if inside is not None else _activated(y, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    if activation == "silu":
        return torch.nn.functional.silu(y)
    return torch.nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _find(
    graded: tuple[bool, bool] | Literal[False], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Plans | None:
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return None
    out, features = weight.shape
    if not x.numel() or not out:
        return None
    rows = x.numel() // features
    biased = "biased" if bias is not None else None
    few = None if graded else few_rows.sizes_of(x, weight, biased, activation)
    # In the invariant mode only a measurement says that the kernel for few rows has the bits of the other.
    find = tuned_plan_for if is_invariant() else plan_for
    if few is not None and (serving := few_rows.planned(find, x.device, few)) is not None:
        return (serving,)
    if max(x.numel(), weight.numel(), rows * out) > MOST_ELEMENTS:
        return None

    def plan(inner: int, columns: int, *on: str | None) -> Plan | None:
        """Return the plan of a product with the flags ``on``."""
        flags = [name for name in on if name is not None]
        return plan_for(SPEC, x.device, *sizes(rows, inner, columns, x.dtype, flags).values())

    forward = plan(features, out, "b_transposed", biased, activation)
    to_x, to_weight = graded or (False, False)
    of_x = plan(out, features) if to_x else None
    of_weight = plan(out, features, "a_transposed") if to_weight else None
    if forward is None or (to_x and of_x is None) or (to_weight and of_weight is None):
        return None
    return forward, of_x, of_weight


def _launch(plans: Plans, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if len(plans) == 1:
        return few_rows.launched(plans[0], x, weight, bias=bias)
    rows, out = as_rows(x), weight.shape[0]
    more = () if bias is None else (bias.contiguous(),)
    return shaped(run_product(plans[0], (rows.shape[0], out), rows, as_rows(weight), *more), *x.shape[:-1], out)


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    activation: str | None,
) -> Gradients:  # fmt: skip
    assert activation is None, _OUTSIDE
    assert len(plans) == 3
    slopes, rows = as_rows(dy), as_rows(x)
    _, of_x, of_weight = plans
    dx = None if of_x is None else shaped(run_product(of_x, rows.shape, slopes, as_rows(weight)), *x.shape)
    dweight = None if of_weight is None else run_product(of_weight, weight.shape, slopes, rows)
    return dx, dweight, slopes.sum(0) if bias is not None and needs[2] else None


def _fallback_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Gradients:
    assert activation is None, _OUTSIDE
    slopes, rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return (slopes @ weight).view(x.shape), slopes.t() @ rows, slopes.sum(0)


@operation(
    SPEC, SPEC, name="linear", arrays=_ARRAYS, reads=("x", "weight", "bias"), apart=("x", "weight"),
    key=("activation",), find=_find, launch=_launch, launch_backward=_launch_backward,
    fallback_backward=_fallback_backward,
)  # fmt: skip
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return _activated(torch.nn.functional.linear(x, weight, bias), activation)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight^T + bias`` by the kernel for few rows if a record says that it is faster, else by torch."""
    found = few_rows.product(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias) if found is None else found


_check = _linear.functions["check"]  # type: ignore[attr-defined]
