"""experts: a layer of experts, ``y = sum_k weights[k] * down_e(gate(up_e(x)))`` over the experts e of each token.

As one function of autograd it keeps x, the pre-activation and the routing. The backward copies rows again, and makes
the activation again inside of the kernel that makes its gradients. That kernel makes the gradient of the routing
weights too, from the gradient of the activation, so the rows that were added up are not needed: :mod:`the gate
<tilekern.kernels.experts.gate>`. Nothing waits for the GPU, and all sums have a fixed order.

It is written by hand and not declared, as it is an order of grouped products around launches. Where it is traced by
``torch.compile``, torch's own operations run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilekern.kernels.experts import combine, gate, gather, route
from tilekern.ops.grouped_linear import SumPlans, grouped_linear, grouped_outer, plans_of_sum, summed
from tilekern.ops.registration import check_devices, differentiable_once, needs_gradient, placeholder
from tilekern.ops.route import Routing, launched, plans_of
from tilekern.runtime.dispatch import Plan, count_fallback, keep, memo, plan_for

ACTIVATIONS = ("silu", "gelu_tanh")


class Gate(NamedTuple):
    """What stands between the two products: how :func:`experts` has it."""

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    interleaved: bool = False

    @property
    def numbers(self) -> tuple[float, float, float]:
        """What kernels take."""
        return float(self.alpha), math.inf if self.limit is None else float(self.limit), float(self.shift)

    @property
    def flags(self) -> tuple[bool, bool]:
        """What kernels are compiled for."""
        return self.activation == "gelu_tanh", self.interleaved


class _Needs(NamedTuple):
    """Which tensors need a gradient."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class _Plans(NamedTuple):
    """The plans of a call; those of the backward are None where nobody asks for what they make."""

    route: tuple[Plan, Plan]
    gather: Plan
    gate: Plan
    combine: Plan
    gather_slopes: Plan | None = None
    gate_backward: Plan | None = None
    add_up: Plan | None = None
    sums: SumPlans | None = None
    down_sums: SumPlans | None = None


_known: dict[Any, _Plans | None] = memo()


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """``sum_k weights[t, k] * (down[e] @ gate(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``, e = ids[t, k].

    Summed over k in float32 in the order of k. With a and b the two halves of what ``gate_up`` gives, the gate is
    ``p(min(a, limit)) * (min(max(b, -limit), limit) + shift)``, p being ``a * sigmoid(alpha * a)`` or gelu by tanh.

    Args:
        x: [tokens, hidden], cast to the dtype of ``gate_up``.
        ids: [tokens, choices], any integers; a slot whose id is not from 0 to experts - 1 adds nothing, and its weight
            gets a gradient of 0.
        weights: [tokens, choices]; bfloat16, float16 or float32.
        gate_up: [experts, 2 * inner, hidden], or such a view of [experts, hidden, 2 * inner].
        down: [experts, hidden, inner], or such a view of [experts, inner, hidden].
        gate_up_bias, down_bias: [experts, 2 * inner] and [experts, hidden].
        activation: ``silu`` or ``gelu_tanh``.
        alpha: of silu's sigmoid; gelu has none.
        limit: of both halves, positive; None for none.
        shift: added to the second half.
        interleaved: whether the halves stand in turn, as in GPT-OSS, and not one behind the other.

    Returns:
        [tokens, hidden] in the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option has a value that it cannot have.
    """
    how = Gate(activation, alpha, limit, shift, interleaved)
    if (gate_up_bias is None) != (down_bias is None):
        # Kernels know both or none.
        gate_up_bias = gate_up.new_zeros(gate_up.shape[:2]) if gate_up_bias is None else gate_up_bias
        down_bias = down.new_zeros(down.shape[:2]) if down_bias is None else down_bias
    _check(x, ids, weights, gate_up, down, gate_up_bias, down_bias, how)
    rows = x.to(gate_up.dtype)
    plans = None
    tensors = (rows, weights, gate_up, down, gate_up_bias, down_bias)
    if not torch.compiler.is_compiling():
        plans = _found(tensors, ids, how)
        if plans is None:
            count_fallback(gate.FORWARD)
    if plans is None:
        return formula(rows, ids, *tensors[1:], how).to(x.dtype)
    if needs_gradient(*(tensor for tensor in tensors if tensor is not None)):
        return _Experts.apply(*tensors, ids, how, plans).to(x.dtype)
    return _run(*tensors, ids, how, plans)[0].to(x.dtype)


def _check(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, how: Gate,
) -> None:  # fmt: skip
    if gate_up.dim() != 3 or gate_up.shape[1] % 2:
        raise ValueError(f"experts: gate_up must be [experts, 2 * inner, hidden], got {list(gate_up.shape)}")
    number, inner, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"experts: x must have the shape [tokens, {hidden}], got {list(x.shape)}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape:
        raise ValueError(
            f"experts: ids and weights must have the shape [{x.shape[0]}, choices], got {list(ids.shape)} and "
            f"{list(weights.shape)}"
        )
    shapes = {"down": (number, hidden, inner), "gate_up_bias": (number, 2 * inner), "down_bias": (number, hidden)}
    for name, tensor in (("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if tensor is not None and tensor.shape != shapes[name]:
            raise ValueError(f"experts: {name} must have the shape {list(shapes[name])}, got {list(tensor.shape)}")
        if tensor is not None and tensor.dtype != gate_up.dtype:
            raise ValueError(f"experts: {name} must be {gate_up.dtype} as gate_up is, got {tensor.dtype}")
    if how.activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation must be one of {', '.join(ACTIVATIONS)}, got {how.activation!r}")
    if how.limit is not None and not how.limit > 0:
        raise ValueError(f"experts: limit must be positive, or None for no limit, got {how.limit}")
    check_devices(
        "experts", x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )  # fmt: skip


Tensors = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]  # fmt: skip


def _found(tensors: Tensors, ids: torch.Tensor, how: Gate) -> _Plans | None:
    """The plans of a kind of call; None where torch must do the work."""
    x, weights, gate_up, _, gate_up_bias, down_bias = tensors
    graded = torch.is_grad_enabled()
    needs = _Needs(*(graded and tensor is not None and tensor.requires_grad for tensor in tensors))
    biased = (gate_up_bias is not None, down_bias is not None)
    key = (
        x.get_device(), ids.shape, gate_up.shape, x.dtype, weights.dtype, ids.dtype, how.flags, biased, needs,
    )  # fmt: skip
    try:
        return _known[key]
    except KeyError:
        found = _find(tensors, ids, how, needs)
        return keep(_known, key, found) if x.is_cuda else found


def _find(tensors: Tensors, ids: torch.Tensor, how: Gate, needs: _Needs) -> _Plans | None:
    x, weights, gate_up, _, gate_up_bias, down_bias = tensors
    (tokens, choices), (number, double, hidden) = ids.shape, gate_up.shape
    rows, inner, dtype = tokens * choices, double // 2, x.dtype
    if not rows or not hidden or not inner or number > route.MOST_EXPERTS or dtype == torch.float64:
        return None

    def plan(spec: Any, *sizes: Any) -> Plan | None:
        return plan_for(spec, x.device, *sizes)

    has_bias, has_down_bias = gate_up_bias is not None, down_bias is not None
    whole = (rows, inner, dtype, *how.flags, has_bias)
    found: list[Any] = [
        plans_of(ids, number),
        plan(gather.SPEC, rows, hidden, dtype, False),
        plan(gate.FORWARD, *whole),
        plan(combine.SPEC, tokens, choices, hidden, dtype, weights.dtype, has_down_bias, True),
    ]
    if any(needs):
        found += [
            plan(gather.SPEC, rows, hidden, dtype, has_down_bias),
            plan(gate.BACKWARD, *whole, weights.dtype, needs.down),
            plan(combine.SPEC, tokens, choices, hidden, dtype, dtype, False, False),
            plans_of_sum(x.device, rows, double, number, dtype) if needs.gate_up_bias else (),
            plans_of_sum(x.device, rows, hidden, number, dtype, weights.dtype) if needs.down_bias else (),
        ]
    if None in found:
        return None
    return _Plans(*found)


def _run(
    x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, ids: torch.Tensor, how: Gate, plans: _Plans,
) -> tuple[torch.Tensor, torch.Tensor, Routing]:  # fmt: skip
    """The result, the pre-activation and the routing."""
    device, number = x.get_device(), gate_up.shape[0]
    routing = launched(plans.route, ids, number)
    pre = _product(_gathered(plans.gather, x, routing, None)[0], gate_up, routing.offsets)
    y = pre.new_empty(pre.shape[0], pre.shape[1] // 2)
    plans.gate.launch(device, pre, _bias(gate_up_bias, x), routing.experts, number, *how.numbers, y)
    rows = _product(y, down, routing.offsets)
    del y
    return _combined(plans.combine, rows, routing, weights, down_bias, number), pre, routing


def _product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row's product with its expert's weight; rows of no expert are not written, since nothing reads them."""
    return grouped_linear(x, weight, offsets, partial=False)


def _bias(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """What kernels take where there is none, too."""
    return placeholder(2, x.dtype, x.device) if bias is None else bias.contiguous()


def _gathered(
    plan: Plan, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of tokens in the order of experts, and the products of each with its expert's bias."""
    rows = routing.order.shape[0]
    y = x.new_empty(rows, x.shape[1])
    shares = torch.empty(1 if bias is None else rows, dtype=torch.float32, device=x.device)
    plan.launch(
        x.get_device(), x.contiguous(), routing.order, routing.experts, _bias(bias, x), routing.ranks.shape[1], y,
        shares,
    )  # fmt: skip
    return y, shares


def _combined(
    plan: Plan, rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None, bias: torch.Tensor | None,
    number: int,
) -> torch.Tensor:  # fmt: skip
    """The rows of each token, weighted and added up."""
    factors = placeholder(2, rows.dtype, rows.device) if weights is None else weights.contiguous()
    y = rows.new_empty(routing.ranks.shape[0], rows.shape[1])
    plan.launch(
        rows.get_device(), rows, routing.ranks, routing.experts, factors, _bias(bias, rows), number, y
    )  # fmt: skip
    return y


def _outer(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight, in memory as the weight is: else autograd would copy it into that order."""
    if weight.stride(2) != 1 and weight.stride(1) == 1:
        return grouped_outer(x, dy, offsets).transpose(1, 2)
    return grouped_outer(dy, x, offsets)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
        gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, ids: torch.Tensor, how: Gate, plans: _Plans,
    ) -> torch.Tensor:  # fmt: skip
        y, pre, routing = _run(x, weights, gate_up, down, gate_up_bias, down_bias, ids, how, plans)
        ctx.save_for_backward(x, weights, gate_up, down, gate_up_bias, down_bias, pre, *routing)
        ctx.how, ctx.plans = how, plans
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, gate_up, down, gate_up_bias, down_bias, pre, *kept = ctx.saved_tensors
        routing, needs, plans = Routing(*kept), _Needs(*ctx.needs_input_grad[:6]), ctx.plans
        device, number, offsets = x.get_device(), gate_up.shape[0], routing.offsets
        slopes, shares = _gathered(plans.gather_slopes, dout, routing, down_bias)
        dy = _product(slopes, down.transpose(1, 2), offsets)
        dpre, dweights = torch.empty_like(pre), torch.empty(weights.numel(), dtype=torch.float32, device=x.device)
        factors = weights.contiguous().view(-1)
        y = torch.empty_like(dy) if needs.down else placeholder(2, x.dtype, x.device)
        plans.gate_backward.launch(
            device, dy, pre, _bias(gate_up_bias, x), routing.experts, routing.order, factors, shares, number,
            *ctx.how.numbers, dpre, y, dweights,
        )  # fmt: skip
        del dy, shares
        ddown = _outer(slopes, y, down, offsets) if needs.down else None
        ddown_bias = summed(plans.down_sums, slopes, offsets, routing.order, factors) if needs.down_bias else None
        del slopes, y
        dgate_up_bias = summed(plans.sums, dpre, offsets) if needs.gate_up_bias else None
        dx = dgate_up = None
        if needs.gate_up:
            dgate_up = _outer(dpre, _gathered(plans.gather, x, routing, None)[0], gate_up, offsets)
        if needs.x:
            drows = _product(dpre, gate_up.transpose(1, 2), offsets)
            dx = _combined(plans.add_up, drows, routing, None, None, number)
        dweights = dweights.view(weights.shape).to(weights.dtype) if needs.weights else None
        return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, None, None, None


def formula(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, how: Gate,
) -> torch.Tensor:  # fmt: skip
    """The op in torch's own operations; arguments as those of :func:`experts`."""
    number, (tokens, choices) = gate_up.shape[0], ids.shape
    offsets, order, ranks, chosen = route.routed(ids, number)
    counts = (chosen < number)[:, None]
    (alpha, limit, shift), (tanh, interleaved) = how.numbers, how.flags
    wide = torch.promote_types(x.dtype, torch.float32)
    # The products write no rows of no expert, and read none.
    rows = x[order.long() // max(1, choices)].where(counts, 0.0)
    pre = _product(rows, gate_up, offsets).where(counts, 0.0).to(wide)
    biased = gate_up_bias is not None
    y = gate.value_of(pre, gate_up_bias, chosen, alpha, limit, shift, tanh, interleaved, biased)
    out = _product(y.to(x.dtype), down, offsets).where(counts, 0.0).to(wide)
    if down_bias is not None:
        out = out + down_bias[chosen.long().clamp(max=number - 1)].to(wide).where(counts, 0.0)
    places = ranks.long()
    slots = out[places].view(tokens, choices, x.shape[1]) * weights.to(wide)[..., None]
    return slots.where(counts[places].view(tokens, choices, 1), 0.0).sum(1).to(x.dtype)
