"""swiglu: ``silu(gate) * up``; the backward computes the sigmoid again and keeps no further activation."""

from __future__ import annotations

from typing import Any

import torch

from tilekern.dispatch import Plan, count_fallback, keep, memo, plan_for
from tilekern.kernels import swiglu as kernels
from tilekern.ops.registration import (
    as_rows,
    check_devices,
    differentiable_once,
    like_rows,
    needs_gradient,
    register,
    register_gradient,
)

_FORWARD, _BACKWARD = kernels.FORWARD, kernels.BACKWARD
Plans = tuple[Plan, Plan | None]
_memo: dict[Any, Plans | None] = memo()


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate, up: [..., columns], of one shape and dtype; bfloat16, float16 or float32, any strides.

    Returns:
        [..., columns], contiguous.

    Raises:
        ValueError: the shapes or the devices differ.
    """
    if torch.compiler.is_compiling():
        _check(gate, up)
        return _op(gate, up)
    graded = needs_gradient(gate, up)
    plans = _plans(gate, up, backward=graded)
    if plans is None:
        return fallback(gate, up)
    if graded:
        return _SwiGlu.apply(gate, up, plans)
    return _launch_forward(plans[0], gate, up)


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate and up must have one shape, got {list(gate.shape)} and {list(up.shape)}")
    check_devices("swiglu", gate=gate, up=up)


def fallback(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The op in torch's own operations, as Hugging Face writes it; counted."""
    count_fallback(_FORWARD)
    return torch.nn.functional.silu(gate) * up


def _plans(gate: torch.Tensor, up: torch.Tensor, *, backward: bool) -> Plans | None:
    """Plans of the forward and, where asked for, of the backward; None where torch must do the work."""
    if not gate.is_cuda:
        return _find_plans(gate, up, backward=backward)
    key = (gate.shape, up.shape, gate.dtype, up.dtype, gate.get_device(), up.get_device(), backward)
    try:
        return _memo[key]
    except KeyError:
        return keep(_memo, key, _find_plans(gate, up, backward=backward))


def _find_plans(gate: torch.Tensor, up: torch.Tensor, *, backward: bool) -> Plans | None:
    _check(gate, up)
    if gate.dtype != up.dtype or not gate.numel():
        return None
    columns = gate.shape[-1]
    sizes = (gate.numel() // columns, columns, gate.dtype)
    forward = plan_for(_FORWARD, gate.device, *sizes)
    if forward is None or not backward:
        return None if forward is None else (forward, None)
    gradient = plan_for(_BACKWARD, gate.device, *sizes)
    return None if gradient is None else (forward, gradient)


def _launch_forward(plan: Plan, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    rows = as_rows(gate)
    # No view of its rows, so that autograd lets it be changed in place.
    y = like_rows(gate, gate.dtype)
    plan.launch(gate.get_device(), rows, as_rows(up), y if gate.dim() == 2 else y.view(rows.shape))
    return y


def _launch_backward(
    plan: Plan, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = as_rows(gate)
    dgate, dup = like_rows(rows, gate.dtype), like_rows(rows, gate.dtype)
    plan.launch(gate.get_device(), as_rows(dy), rows, as_rows(up), dgate, dup)
    return (dgate, dup) if gate.dim() == 2 else (dgate.view(gate.shape), dup.view(gate.shape))


class _SwiGlu(torch.autograd.Function):
    """The eager path: cheaper for the host than a registered op."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, plans: tuple[Plan, Plan]) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.plan = plans[1]
        return _launch_forward(plans[0], gate, up)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*_launch_backward(ctx.plan, dy, *ctx.saved_tensors), None)


def _run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    plans = _plans(gate, up, backward=False)
    return fallback(gate, up) if plans is None else _launch_forward(plans[0], gate, up)


def _run_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    plans = _plans(gate, up, backward=True)
    if plans is not None and plans[1] is not None:
        return _launch_backward(plans[1], dy, gate, up)
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        dgate, dup = torch.autograd.grad(fallback(gate, up), (gate, up), dy)
    return dgate.contiguous(), dup.contiguous()


def _fake(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _fake_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _op_backward(dy, *ctx.saved_tensors)


_op = register("swiglu(Tensor gate, Tensor up) -> Tensor", _run, _fake)
_op_backward = register(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)", _run_backward, _fake_backward
)
register_gradient(_op, _backward, _save)
