"""gated_linear: ``activation(x @ gate^T) * (x @ up^T)``, for few rows without a gradient by one kernel.

Its launch is written by hand, as those of ``linear``; other calls are products and the op of their gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.skinny.linear import SPEC
from tilekern.ops import few_rows
from tilekern.ops.geglu import geglu
from tilekern.ops.linear import linear
from tilekern.ops.operation import operation
from tilekern.ops.registration import is_autocast, needs_gradient
from tilekern.ops.swiglu import swiglu
from tilekern.runtime.dispatch import Plan, is_invariant, plan_for
from tilekern.spec import Array

_ACTIVATIONS = ("silu", "gelu_tanh")
_ARRAYS = (
    Array("x", "dtype", ("rows", "in_features")),
    Array("gate_weight", "dtype", ("out_features", "in_features")),
    Array("up_weight", "dtype", ("out_features", "in_features")),
    Array("y", "dtype", ("rows", "out_features"), "output"),
)


def gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str = "silu") -> Tensor:
    """Return ``activation(x @ gate_weight^T) * (x @ up_weight^T)``.

    Without a gradient and for up to 64 rows one kernel computes both products and the gate, and rounds once; inside
    :func:`tilekern.invariant` it rounds both products too, and runs where it has the bits of many rows. Other calls
    run :func:`linear` twice, then :func:`swiglu` or :func:`geglu`.

    Args:
        x: [..., in_features]; bfloat16, float16 or float32, any strides.
        gate_weight, up_weight: [out_features, in_features], of the dtype of ``x``.
        activation: ``silu`` or ``gelu_tanh``.

    Returns:
        [..., out_features], contiguous.

    Raises:
        ValueError: shapes or devices do not fit, or the activation is unknown.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"gated_linear: activation must be one of {_ACTIVATIONS}, got {activation!r}")
    # A compiled graph serves any number of rows: the op looks when it runs.
    is_many = not torch.compiler.is_compiling() and not _is_few(x, gate_weight, up_weight, activation)
    if is_many or is_autocast(x) or needs_gradient(x, gate_weight, up_weight):
        _check(x, gate_weight, up_weight, activation)
        gate, up = linear(x, gate_weight), linear(x, up_weight)
        return swiglu(gate, up) if activation == "silu" else geglu(gate, up, tanh=True)
    return _gated_linear(x, gate_weight, up_weight, activation)


def _is_few(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> bool:
    if not is_invariant():
        return few_rows.is_few(x)
    served = few_rows.is_served(x, gate_weight, up_weight)
    return served and few_rows.is_tuned(x, gate_weight, "gated", activation)


def _find(graded: bool, x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> tuple[Plan] | None:
    if not x.dtype == gate_weight.dtype == up_weight.dtype:
        return None
    if is_invariant():
        plan = few_rows.tuned(x, gate_weight, "gated", activation)
    else:
        found = few_rows.sizes_of(x, gate_weight, "gated", activation)
        plan = None if found is None else plan_for(SPEC, x.device, *found)
    return None if plan is None else (plan,)


def _launch(plans: tuple[Plan], x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Tensor:
    return few_rows.launched(plans[0], x, gate_weight, up_weight)


@operation(SPEC, name="gated_linear", arrays=_ARRAYS, key=("activation",), find=_find, launch=_launch)
def _gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str) -> Tensor:
    gate, up = (torch.nn.functional.linear(x, weight) for weight in (gate_weight, up_weight))
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


_check = _gated_linear.functions["check"]  # type: ignore[attr-defined]
