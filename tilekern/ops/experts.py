"""experts: a layer of experts, ``y = sum_k weights[k] * down_e(gate(up_e(x)))`` over the experts e of each token.

It saves x, the pre-activation and the routing. In the backward one kernel recomputes the activation, and computes its
gradients and those of the routing weights, so the rows that were summed are not needed
(:mod:`tilekern.kernels.experts.gate`). Nothing waits for the GPU, and all sums have a fixed order.

Its launches are written by hand: they are a sequence of grouped products with kernels around them.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.experts import combine, gate, gather, route
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.grouped_linear import SumPlans, by_experts, grouped_outer, plans_of_sum, stored, summed
from tilekern.ops.operation import operation
from tilekern.ops.registration import cast_as_products, check_dtype, check_tensors
from tilekern.ops.route import Routing, launched, plans_of
from tilekern.runtime.dispatch import Plan, plan_for
from tilekern.spec import Array

ACTIVATIONS = ("silu", "gelu_tanh")
# The arguments that may get a gradient, in their order.
_GRADED = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")
_ARRAYS = (
    Array("x", "dtype", ("tokens", "hidden")),
    Array("weights", "weight_dtype", ("tokens", "choices")),
    Array("gate_up", "dtype", ("experts", "2*inner", "hidden")),
    Array("down", "dtype", ("experts", "hidden", "inner")),
    Array("gate_up_bias", "dtype", ("experts", "2*inner")),
    Array("down_bias", "dtype", ("experts", "hidden")),
    Array("ids", "int64", ("tokens", "choices")),
    Array("y", "dtype", ("tokens", "hidden"), "output"),
    Array("pre", "dtype", ("rows_of_slots", "2*inner"), "output"),
    Array("offsets", "int32", ("experts",), "output"),
    Array("order", "int32", ("rows_of_slots",), "output"),
    Array("ranks", "int32", ("tokens", "choices"), "output"),
    Array("chosen", "int32", ("rows_of_slots",), "output"),
)


class Gate(NamedTuple):
    """The gate between the two products, as in :func:`experts`, and which weights are stored transposed."""

    activation: str
    alpha: float
    limit: float | None
    shift: float
    interleaved: bool
    up_turned: bool = False
    down_turned: bool = False

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The kernels' scalars."""
        return float(self.alpha), math.inf if self.limit is None else float(self.limit), float(self.shift)

    @property
    def flags(self) -> tuple[bool, bool]:
        """The kernels' flags."""
        return self.activation == "gelu_tanh", self.interleaved


class _Needs(NamedTuple):
    """Which tensors need a gradient."""

    x: bool = False
    weights: bool = False
    gate_up: bool = False
    down: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False


class _Plans(NamedTuple):
    """The plans of a call; the backward's are None if their results are not needed."""

    needs: _Needs
    route: tuple[Plan, Plan]
    gate: Plan
    combine: Plan
    gather: Plan | None = None
    gate_backward: Plan | None = None
    remade: bool = False
    add_up: Plan | None = None
    sums: SumPlans | None = None
    down_sums: SumPlans | None = None


# The result, then the pre-activation and the routing, which are saved.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: str = "silu", alpha: float = 1.0, limit: float | None = None,
    shift: float = 0.0, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``sum_k weights[t, k] * (down[e] @ gate(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``.

    The expert e is ``ids[t, k]``. The sum is in float32, in the order of k. With a and b the two halves of the result
    of ``gate_up``, the gate is ``p(min(a, limit)) * (min(max(b, -limit), limit) + shift)``, p being
    ``a * sigmoid(alpha * a)`` or gelu by tanh.

    Args:
        x: [tokens, hidden], cast to the dtype of ``gate_up``.
        ids: [tokens, choices], any integers; a slot whose id is not from 0 to experts - 1 adds nothing, and its weight
            has the gradient 0.
        weights: [tokens, choices]; bfloat16, float16 or float32.
        gate_up: [experts, 2 * inner, hidden], possibly a view of [experts, hidden, 2 * inner].
        down: [experts, hidden, inner], possibly a view of [experts, inner, hidden].
        gate_up_bias, down_bias: [experts, 2 * inner] and [experts, hidden].
        activation: ``silu`` or ``gelu_tanh``.
        alpha: factor inside silu's sigmoid; gelu has none.
        limit: bound of both halves, positive; None for no bound.
        shift: added to the second half.
        interleaved: whether columns alternate between the halves, as in GPT-OSS, instead of one half after the other.

    Returns:
        [tokens, hidden] in the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option has an invalid value.
    """
    if (gate_up_bias is None) != (down_bias is None):
        # Kernels accept both biases or none.
        gate_up_bias = gate_up.new_zeros(gate_up.shape[:2]) if gate_up_bias is None else gate_up_bias
        down_bias = down.new_zeros(down.shape[:2]) if down_bias is None else down_bias
    check_dtype("experts", "x", x)
    dtype = x.dtype
    x, gate_up, down, gate_up_bias, down_bias = cast_as_products(x, gate_up, down, gate_up_bias, down_bias)
    (gate_up, up_turned), (down, down_turned) = stored(gate_up), stored(down)
    how = (activation, alpha, limit, shift, interleaved, up_turned, down_turned)
    return _experts(x.to(gate_up.dtype), weights, gate_up, down, gate_up_bias, down_bias, ids, *how).to(dtype)


def check_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    ids: Tensor, *options: Any,
) -> None:  # fmt: skip
    """Raise ValueError if the arguments, weights as they are stored, do not fit."""
    how = Gate(*options)
    gate_up, down = _seen(gate_up, down, how)
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
    check_tensors(
        "experts", "ids", x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )  # fmt: skip


def _find(
    graded: tuple[bool, ...] | Literal[False], x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, ids: Tensor, *options: Any,
) -> _Plans | None:  # fmt: skip
    how, needs = Gate(*options), _Needs(*graded or ())
    (tokens, choices), (number, double), hidden = ids.shape, _sides(gate_up, how), x.shape[1]
    rows, inner, dtype = tokens * choices, double // 2, x.dtype
    if not rows or not hidden or not inner or number > route.MOST_EXPERTS or dtype == torch.float64:
        return None

    def plan(spec: Any, *sizes: Any) -> Plan | None:
        return plan_for(spec, x.device, *sizes)

    is_biased = gate_up_bias is not None
    whole = (rows, inner, dtype, *how.flags, is_biased)
    found: list[Any] = [
        plans_of(ids, number),
        plan(gate.FORWARD, *whole),
        plan(combine.SPEC, tokens, choices, hidden, dtype, weights.dtype, is_biased, True),
    ]
    if any(needs):
        remade = needs.down
        gate_backward = plan(gate.BACKWARD, *whole, weights.dtype, remade)
        if gate_backward is None and not remade:
            # The kernel that also recomputes the activation can be used too.
            remade, gate_backward = True, plan(gate.BACKWARD, *whole, weights.dtype, True)
        found += [
            plan(gather.SPEC, rows, hidden, dtype, is_biased),
            gate_backward,
            remade,
            plan(combine.SPEC, tokens, choices, hidden, dtype, dtype, False, False) if needs.x else (),
            plans_of_sum(x.device, rows, double, number, dtype) if needs.gate_up_bias else (),
            plans_of_sum(x.device, rows, hidden, number, dtype, weights.dtype) if needs.down_bias else (),
        ]
    if None in found:
        return None
    return _Plans(needs, *found)


def _sides(gate_up: Tensor, how: Gate) -> tuple[int, int]:
    """Return the number of experts, and the columns of their first product."""
    return gate_up.shape[0], gate_up.shape[2 if how.up_turned else 1]


def _launch(
    plans: _Plans, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, ids: Tensor, *options: Any,
) -> Results:  # fmt: skip
    how, number = Gate(*options), gate_up.shape[0]
    routing = launched(plans.route, ids, number)
    first, second = _seen(gate_up, down, how)
    # Rows without an expert are neither written nor read.
    pre = by_experts(x, first, routing.offsets, None, routing.order, ids.shape[1], partial=False)
    y = pre.new_empty(pre.shape[0], pre.shape[1] // 2)
    plans.gate.launch(x.get_device(), pre, _bias(gate_up_bias, x), routing.experts, number, *how.numbers, y)
    rows = by_experts(y, second, routing.offsets, partial=False)
    del y
    return _combined(plans.combine, rows, routing, weights, down_bias, number), pre, *routing


def _seen(gate_up: Tensor, down: Tensor, how: Gate) -> tuple[Tensor, Tensor]:
    """Return the weights in the layout of the products."""
    return gate_up.mT if how.up_turned else gate_up, down.mT if how.down_turned else down


def _bias(bias: Tensor | None, x: Tensor) -> Tensor:
    """Return the bias, or a placeholder for the kernels."""
    return placeholder(2, x.dtype, x.device) if bias is None else bias.contiguous()


def _gathered(plan: Plan, x: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens in the order of experts, and the product of each with its expert's bias."""
    rows = routing.order.shape[0]
    y = x.new_empty(rows, x.shape[1])
    shares = torch.empty(1 if bias is None else rows, dtype=torch.float32, device=x.device)
    plan.launch(
        x.get_device(), x.contiguous(), routing.order, routing.experts, _bias(bias, x), routing.ranks.shape[1], y,
        shares,
    )  # fmt: skip
    return y, shares


def _combined(
    plan: Plan, rows: Tensor, routing: Routing, weights: Tensor | None, bias: Tensor | None, number: int
) -> Tensor:
    """Sum the weighted rows of each token."""
    factors = placeholder(2, rows.dtype, rows.device) if weights is None else weights.contiguous()
    y = rows.new_empty(routing.ranks.shape[0], rows.shape[1])
    plan.launch(
        rows.get_device(), rows, routing.ranks, routing.experts, factors, _bias(bias, rows), number, y
    )  # fmt: skip
    return y


def _launch_backward(
    plans: _Plans, asked: tuple[bool, ...], dout: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, ids: Tensor, pre: Tensor, offsets: Tensor, order: Tensor,
    ranks: Tensor, chosen: Tensor, *options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    how, needs, routing = Gate(*options), plans.needs, Routing(offsets, order, ranks, chosen)
    device, number, (first, second) = x.get_device(), gate_up.shape[0], _seen(gate_up, down, how)
    assert plans.gather is not None
    assert plans.gate_backward is not None
    slopes, shares = _gathered(plans.gather, dout, routing, down_bias)
    dy = by_experts(slopes, second.mT, offsets, partial=False)
    dpre, dweights = torch.empty_like(pre), torch.empty(weights.numel(), dtype=torch.float32, device=x.device)
    y = torch.empty_like(dy) if plans.remade else placeholder(2, x.dtype, x.device)
    factors = weights.contiguous().view(-1)
    plans.gate_backward.launch(
        device, dy, pre, _bias(gate_up_bias, x), chosen, order, factors, shares, number, *how.numbers, dpre, y,
        dweights,
    )  # fmt: skip
    del dy, shares
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
    if needs.down:
        ddown = grouped_outer(slopes, y, offsets, inner_first=how.down_turned)
    if plans.down_sums:
        ddown_bias = summed(plans.down_sums, slopes, offsets, order, factors)
    del slopes, y
    if plans.sums:
        dgate_up_bias = summed(plans.sums, dpre, offsets)
    if needs.gate_up:
        dgate_up = grouped_outer(dpre, x, offsets, order, ids.shape[1], inner_first=how.up_turned)
    if plans.add_up:
        drows = by_experts(dpre, first.mT, offsets, partial=False)
        dx = _combined(plans.add_up, drows, routing, None, None, number)
    made = dweights.view(weights.shape).to(weights.dtype) if needs.weights else None
    return dx, made, dgate_up, ddown, dgate_up_bias, ddown_bias


def _fake(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    ids: Tensor, *options: Any,
) -> Results:  # fmt: skip
    (tokens, choices), (number, double) = ids.shape, _sides(gate_up, Gate(*options))
    rows = tokens * choices
    routing = (ids.new_empty(size, dtype=torch.int32) for size in ((number,), (rows,), ids.shape, (rows,)))
    return x.new_empty(x.shape), x.new_empty(rows, double), *routing


def _rest(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return zeros, which no backward kernel reads: without plans of the forward there are none of the backward."""
    return tuple(kept.zero_() for kept in _fake(x, *given)[1:])


def _formula(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    ids: Tensor, activation: str, alpha: float, limit: float | None, shift: float, interleaved: bool, up_turned: bool,
    down_turned: bool,
) -> Tensor:  # fmt: skip
    how = Gate(activation, alpha, limit, shift, interleaved, up_turned, down_turned)
    number, (tokens, choices) = gate_up.shape[0], ids.shape
    offsets, order, ranks, chosen = route.routed(ids, number)
    first, second = _seen(gate_up, down, how)
    counts = (chosen < number)[:, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    # Products neither read nor write rows without an expert.
    rows = x[order.long() // max(1, choices)].where(counts, 0.0)
    pre = by_experts(rows, first, offsets, partial=False).where(counts, 0.0).to(wide)
    y = gate.value_of(pre, gate_up_bias, chosen, *how.numbers, *how.flags, gate_up_bias is not None)
    out = by_experts(y.to(x.dtype), second, offsets, partial=False).where(counts, 0.0).to(wide)
    if down_bias is not None:
        out = out + down_bias[chosen.long().clamp(max=number - 1)].to(wide).where(counts, 0.0)
    places = ranks.long()
    slots = out[places].view(tokens, choices, x.shape[1]) * weights.to(wide)[..., None]
    return slots.where(counts[places].view(tokens, choices, 1), 0.0).sum(1).to(x.dtype)


_experts = operation(
    gate.FORWARD, gate.BACKWARD, name="experts", ungraded=("ids",), arrays=_ARRAYS,
    kept=("pre", "offsets", "order", "ranks", "chosen"),
    reads=(*_GRADED, "ids", "pre", "offsets", "order", "ranks", "chosen"), apart=_GRADED,
    key=("activation == 'gelu_tanh'", "interleaved", "up_turned", "down_turned"), check=check_layer, find=_find,
    launch=_launch, launch_backward=_launch_backward, fake=_fake, rest=_rest,
)(_formula)  # fmt: skip
