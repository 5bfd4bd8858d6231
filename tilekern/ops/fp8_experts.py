"""fp8_experts: a layer of experts whose products are of 8-bit floats (e4m3), with a scale for each row.

With x [tokens, hidden], its rows in the order of experts ``x[order]``, and ``q`` and ``t`` as in
:mod:`tilekern.ops.fp8_linear`, for each expert:

    forward          pre = q(x)[order] @ q(gate_up)^T      rows = q(gate(pre)) @ q(down)^T
    input gradient   dy = q(dout)[order] @ t(q(down))^T    drows = q(dpre) @ t(q(gate_up))^T
    weight gradient  ddown = t(q(dout)[order]) @ t(q(w y))^T    dgate_up = t(q(dpre)) @ t(q(x)[order])^T

where ``w`` are the routing weights. Turned rows have a scale for each 128 rows, turned weights for each 128 x 128
numbers (:mod:`tilekern.kernels.fp8.grouped_turned`). Of weights that are stored [experts, in, out], as GPT-OSS's, the
forward reads the turned ones, and the gradient those as they are stored.

The gate and its gradients are rounded in the launches that compute them (:mod:`tilekern.kernels.fp8.experts_gate`). The
routing and the sums of tokens and biases are those of :mod:`tilekern.ops.experts`. It keeps the pre-activation and the
routing as that does, and of x what a linear layer of 8-bit floats keeps. Weights are rounded anew in both directions.
All sums have a fixed order.

It is written by hand and not declared, as the linear layer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.kernels.experts import combine, gate, gather
from tilekern.kernels.families.placeholders import Placeholder, placeholder
from tilekern.kernels.fp8 import experts_gate, grouped_gradient, grouped_turned
from tilekern.kernels.fp8.grouped import SPEC as PRODUCT
from tilekern.kernels.fp8.grouped import grouped_product
from tilekern.kernels.fp8.grouped_turned import SIDE, blocks_of
from tilekern.kernels.fp8.rows import SPEC as ROWS
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.kernels.grouped import sums
from tilekern.kernels.matmul.product import MOST_ELEMENTS
from tilekern.kernels.skinny.tiles import MOST_ROWS
from tilekern.ops.experts import Gate, check_layer, experts
from tilekern.ops.foreseen import written
from tilekern.ops.fp8_linear import (
    E4M3,
    UNSERVED,
    Rounded,
    kept_input,
    read_again,
    rounded,
    rounded_input,
    why_never,
)
from tilekern.ops.grouped_linear import plans_of_sum, stored, summed
from tilekern.ops.registration import (
    applied,
    as_rows,
    cast_as_products,
    check_dtype,
    differentiable_once,
    is_autocast,
    is_eager,
    needs_gradient,
    uncast,
)
from tilekern.ops.route import Routing, route
from tilekern.runtime.dispatch import count_fallback, plan_for
from tilekern.spec import cdiv

# Both sides of a weight are multiples of this, so that rows of e4m3 begin at whole 16 bytes.
UNIT = 16


def fp8_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: str = "silu", alpha: float = 1.0, limit: float | None = None,
    shift: float = 0.0, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`tilekern.ops.experts`, with products of 8-bit floats in the forward and in the gradients.

    ``experts`` itself runs, counted among the fallbacks of ``fp8_grouped_matmul``, where :func:`fp8_linear` would run
    torch's layer, if a side of a weight is no multiple of 16, and, without a gradient, for up to 64 rows an expert.

    Args, result and errors are those of :func:`tilekern.ops.experts`.
    """
    if (gate_up_bias is None) != (down_bias is None):
        # Kernels accept both biases or none.
        gate_up_bias = gate_up.new_zeros(gate_up.shape[:2]) if gate_up_bias is None else gate_up_bias
        down_bias = down.new_zeros(down.shape[:2]) if down_bias is None else down_bias
    check_dtype("experts", "x", x)
    how = (activation, alpha, limit, shift, interleaved)
    parameters: Sequence[Any] = (gate_up, down, gate_up_bias, down_bias)
    if not is_autocast(x):
        return _run(x.to(gate_up.dtype), ids, weights, parameters, how).to(x.dtype)
    cast, *parameters = cast_as_products(x, *parameters)
    with uncast(x.device.type):
        return _run(cast.to(parameters[0].dtype), ids, weights, parameters, how).to(x.dtype)


def _run(x: Tensor, ids: Tensor, weights: Tensor, parameters: Sequence[Any], how: tuple[Any, ...]) -> Tensor:
    graded = needs_gradient(x, weights, *parameters)
    gate_up, down, *biases = parameters
    why = _why_not(x, ids, parameters, graded) or _why_unserved(stored(gate_up)[0], graded)
    if why:
        if not torch.compiler.is_compiling():
            count_fallback(PRODUCT, why)
        return experts(x, ids, weights, *parameters, **dict(zip(Gate._fields, how, strict=False)))
    (first, up_turned), (second, down_turned) = stored(gate_up), stored(down)
    options = Gate(*how)._replace(up_turned=up_turned, down_turned=down_turned)
    given = (x, weights, first, second, *biases, ids)
    check_layer(*given, *options)
    if not graded:
        return _forward(options, *given)[0]
    y: Tensor = _apply(options, *given)
    return y


def _why_not(x: Tensor, ids: Tensor, parameters: Sequence[Any], graded: bool) -> str:
    """Return why :func:`tilekern.ops.experts` computes a call; empty if products of 8-bit floats do."""
    if not is_eager(x, *parameters):
        return "torch.compile, a transform or a mode of torch, or parameters of several dtypes"
    if why := why_never(x):
        return why
    gate_up, down = parameters[:2]
    sizes = (*gate_up.shape, *down.shape)
    if not ids.numel() or not all(sizes) or not x.numel():
        return "an empty matrix"
    if len(sizes) < 6 or any(side % UNIT for side in (*gate_up.shape[1:], *down.shape[1:])):
        return f"a side of a weight that is no multiple of {UNIT}"
    rows, number = ids.numel(), gate_up.shape[0]
    if not graded and rows <= MOST_ROWS * number:
        return "few rows without a gradient"
    widest = max(gate_up.shape[1:] + down.shape[1:])
    weights = max(number * SIDE * cdiv(a, SIDE) * b for _, a, b in (gate_up.shape, gate_up.mT.shape, down.shape))
    most = max(x.numel(), blocks_of(rows, number) * SIDE * widest, weights)
    return "a matrix of more than 2^31 elements" if most > MOST_ELEMENTS else ""


def _why_unserved(weight: Tensor, graded: bool) -> str:
    """Return that kernels have no plans on a GPU, if those that round weights have none; a tune has all or none."""
    number, rows, columns = weight.shape
    asked = [(ROWS, (number * rows, columns)), *([(grouped_turned.WEIGHTS_SPEC, weight.shape)] if graded else ())]
    plans = [plan_for(spec, weight.device, *sizes, weight.dtype) for spec, sizes in asked if weight.is_cuda]
    return UNSERVED if None in plans else ""


# Matrices of rows and of weights.


def _ordered(rows: Rounded, routing: Routing) -> Rounded:
    """Return the rounded rows of tokens, copied in the order of experts."""
    (numbers, scale), slots = rows, routing.ranks.shape[1]
    # Two e4m3 numbers are copied as one of 16 bits.
    pairs, tokens = numbers.view(torch.bfloat16), routing.order // slots
    count, columns = len(tokens), pairs.shape[1]
    given = (pairs, routing.order, routing.experts, placeholder(2, pairs.dtype, pairs.device), slots)

    def allocate() -> tuple[Tensor, Tensor]:
        return pairs.new_empty(count, columns), scale.new_empty(1)

    made = written(gather.SPEC, (count, columns, pairs.dtype, False), given, allocate)
    copies = pairs.view(torch.int16).index_select(0, tokens) if made is None else made[0]
    return copies.view(E4M3), scale.index_select(0, tokens)


def _turned_rows(rows: Rounded, routing: Routing, *, gathers: bool = False) -> Rounded:
    """Return the blocks of rows in the order of experts; if it ``gathers``, of rows of tokens, in that order."""
    numbers, scale = rows
    number, count, columns = len(routing.offsets), len(routing.order), numbers.shape[1]
    order = (routing.order, routing.ranks.shape[1]) if gathers else ()

    def allocate() -> Rounded:
        return numbers.new_empty(blocks_of(count, number), columns, SIDE), scale.new_empty(blocks_of(count, number))

    given = (numbers, scale, routing.offsets, *order)
    made = written(grouped_turned.ROWS_SPEC, (count, columns, number, gathers), given, allocate)
    return grouped_turned.turned_groups(*given) if made is None else (made[0], made[1])


def _rounded_weight(weight: Tensor) -> Rounded:
    """Return the e4m3 numbers of weights [experts, rows, columns], and the scales of their rows."""
    numbers, scale = rounded(as_rows(weight))
    return numbers.view(weight.shape), scale.view(weight.shape[:2])


def _turned_weight(weight: Tensor) -> Rounded:
    """Return the blocks of weights [experts, rows, columns]."""
    number, rows, columns = weight.shape
    count = number * cdiv(rows, SIDE)

    def allocate() -> Rounded:
        numbers = torch.empty((count, columns, SIDE), dtype=E4M3, device=weight.device)
        return numbers, torch.empty((count, cdiv(columns, SIDE)), dtype=torch.float32, device=weight.device)

    weight = weight.contiguous()
    made = written(grouped_turned.WEIGHTS_SPEC, (*weight.shape, weight.dtype), (weight,), allocate)
    return grouped_turned.turned_weights(weight) if made is None else (made[0], made[1])


def _multiplied(rows: Rounded, weight: Tensor, offsets: Tensor, dtype: torch.dtype, *, turned: bool) -> Tensor:
    """Return the product of sorted rows with their experts' weights, [rows, columns]; rows of nobody hold anything.

    Sums are over the last axis of the weight as it is stored, or, if ``turned``, over the one before.
    """
    (a, a_scale), (b, b_scale) = rows, _turned_weight(weight) if turned else _rounded_weight(weight)
    (count, inner), columns = a.shape, b.shape[1]

    def allocate() -> tuple[Tensor]:
        return (torch.empty((count, columns), dtype=dtype, device=a.device),)

    given = (a, b, a_scale, b_scale, offsets)
    made = written(PRODUCT, (count, inner, columns, len(offsets), turned, dtype), given, allocate)
    if made is not None:
        return made[0]
    if a.is_meta:
        return allocate()[0]
    return grouped_product(*given, torch.float32, turned=turned).to(dtype)


def _outer(a: Rounded, b: Rounded, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Return ``a_e^T @ b_e`` [experts, a's columns, b's columns] over the rows of each expert, of their blocks."""
    (left, down), (right, across), offsets = a, b, routing.offsets
    number, inner, columns = len(offsets), left.shape[1], right.shape[1]

    def allocate() -> tuple[Tensor]:
        return (torch.empty((number, inner, columns), dtype=dtype, device=left.device),)

    given = (left, right, down, across, offsets)
    made = written(grouped_gradient.SPEC, (len(routing.order), inner, columns, number, dtype), given, allocate)
    if made is not None:
        return made[0]
    if left.is_meta:
        return allocate()[0]
    return grouped_gradient.grouped_gradient(*given, torch.float32).to(dtype)


# The gate, the routing and the sums.


def _bias(bias: Tensor | None, x: Tensor) -> Tensor:
    return placeholder(2, x.dtype, x.device) if bias is None else bias.contiguous()


def _tensors(*given: Any) -> Iterator[Any]:
    """Return a kernel's inputs as its reference reads them: what stands for an absent array is an empty tensor."""
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    return (nothing if isinstance(x, Placeholder) else x for x in given)


def _gated(how: Gate, pre: Tensor, bias: Tensor | None, routing: Routing) -> Rounded:
    """Return the gate's rounded value [rows, inner]; zeros for rows without an expert."""
    rows, inner = len(pre), pre.shape[1] // 2
    flags = *how.flags, bias is not None

    def allocate() -> Rounded:
        return pre.new_empty((rows, inner), dtype=E4M3), pre.new_empty(rows, dtype=torch.float32)

    given = (pre, _bias(bias, pre), routing.experts, len(routing.offsets), *how.numbers)
    made = written(experts_gate.FORWARD, (rows, inner, pre.dtype, *flags), given, allocate)
    return scaled_rows(gate.reference(*_tensors(*given, *flags))["y"]) if made is None else (made[0], made[1])


def _ungated(
    how: Gate, dy: Tensor, pre: Tensor, bias: Tensor | None, factors: Tensor, shares: Tensor, routing: Routing
) -> tuple[Rounded, Rounded, Tensor, Tensor]:
    """Return the rounded gradient of the pre-activation and weighted value, the gradients of the routing weights, and,
    if there is a bias, the first one unrounded.
    """
    flags = *how.flags, bias is not None
    known, numbers = (_bias(bias, pre), routing.experts), (len(routing.offsets), *how.numbers)
    given = (dy, pre, *known, routing.order, factors, shares, *numbers)

    def allocate() -> tuple[Tensor, ...]:
        wide = placeholder(2, pre.dtype, pre.device) if bias is None else torch.empty_like(pre)
        scales = (pre.new_empty(len(pre), dtype=torch.float32) for _ in range(2))
        of_pre, of_y = torch.empty_like(pre, dtype=E4M3), torch.empty_like(dy, dtype=E4M3)
        return of_pre, wide, of_y, *scales, torch.empty_like(factors, dtype=torch.float32)

    made = written(experts_gate.BACKWARD, (*dy.shape, pre.dtype, *flags, factors.dtype), given, allocate)
    if made is not None:
        of_pre, wide, of_y, pre_scale, y_scale, dweights = made
        return (of_pre, pre_scale), (of_y, y_scale), dweights, wide
    names = ("dy", "pre", "bias", "experts", "order", "weights", "shares", "total", "alpha", "limit", "shift")
    switches = dict(zip(("tanh", "interleaved", "biased"), flags, strict=True))
    found = gate.backward_reference(**dict(zip(names, _tensors(*given), strict=True)), **switches, remade=True)
    dpre = found["dpre"]
    return scaled_rows(dpre), scaled_rows(found["y"]), found["dweights"].float(), dpre.to(pre.dtype)


def _combined(rows: Tensor, routing: Routing, weights: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the sum of each token's rows, with their experts' biases, weighted if there are weights."""
    of_factors = rows.dtype if weights is None else weights.dtype
    factors = placeholder(2, of_factors, rows.device) if weights is None else weights.contiguous()
    (tokens, choices), columns = routing.ranks.shape, rows.shape[1]
    flags = bias is not None, weights is not None
    given = (rows, routing.ranks, routing.experts, factors, _bias(bias, rows), len(routing.offsets))
    dimensions = (tokens, choices, columns, rows.dtype, of_factors, *flags)
    made = written(combine.SPEC, dimensions, given, lambda: (rows.new_empty(tokens, columns),))
    return combine.reference(*given, *flags)["y"].to(rows.dtype) if made is None else made[0]


def _slopes(dout: Tensor, routing: Routing, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens in the order of experts, and the product of each with its expert's bias."""
    count, columns = len(routing.order), dout.shape[1]
    given = (dout, routing.order, routing.experts, bias.contiguous(), routing.ranks.shape[1])

    def allocate() -> tuple[Tensor, Tensor]:
        return dout.new_empty(count, columns), torch.empty(count, dtype=torch.float32, device=dout.device)

    made = written(gather.SPEC, (count, columns, dout.dtype, True), given, allocate)
    if made is not None:
        return made[0], made[1]
    found = gather.reference(*given, True)
    return found["y"].to(dout.dtype), found["shares"].float()


def _summed(rows: Tensor, routing: Routing, *weighting: Tensor) -> Tensor:
    """Return the sum of each expert's rows, [experts, columns], weighted by slot."""
    offsets, weight_dtype = routing.offsets, weighting[0].dtype if weighting else None
    weighting = (routing.order, *weighting) if weighting else ()
    plans = plans_of_sum(rows.device, len(rows), rows.shape[1], len(offsets), rows.dtype, weight_dtype)
    if plans is not None:
        return summed(plans, rows, offsets, *weighting)
    count_fallback(sums.SPEC)
    return sums.reference(rows, offsets, *weighting, weighted=bool(weighting))["partial"].to(rows.dtype)


def _forward(
    how: Gate, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, ids: Tensor,
) -> tuple[Tensor, Rounded, Tensor, Routing]:  # fmt: skip
    """Return the result, the rounded x, the pre-activation and the routing."""
    routing, numbers = route(ids, len(gate_up)), rounded_input(x)
    ends, dtype = routing.offsets, x.dtype
    pre = _multiplied(_ordered(numbers, routing), gate_up, ends, dtype, turned=how.up_turned)
    y = _gated(how, pre, gate_up_bias, routing)
    rows = _multiplied(y, down, ends, dtype, turned=how.down_turned)
    return _combined(rows, routing, weights, down_bias), numbers, pre, routing


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Gate, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
        down_bias: Tensor | None, ids: Tensor,
    ) -> Tensor:  # fmt: skip
        y, numbers, pre, routing = _forward(how, x, weights, gate_up, down, gate_up_bias, down_bias, ids)
        kept = kept_input(x, numbers) if ctx.needs_input_grad[3] else ()
        ctx.save_for_backward(weights, gate_up, down, gate_up_bias, down_bias, pre, *routing, *kept)
        ctx.how = how
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weights, gate_up, down, gate_up_bias, down_bias, pre, *rest = ctx.saved_tensors
        routing, kept, how, dtype = Routing(*rest[:4]), rest[4:], ctx.how, pre.dtype
        of_x, of_weights, of_gate_up, of_down, of_gate_up_bias, of_down_bias = ctx.needs_input_grad[1:7]

        def of_weight(out: Rounded, inner: Rounded, is_turned: bool) -> Tensor:
            a, b = (inner, out) if is_turned else (out, inner)
            return _outer(a, b, routing, dtype)

        dout, factors = as_rows(dout), weights.contiguous().view(-1)
        slopes = _ordered(rounded(dout), routing)
        dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        shares = torch.empty(1, dtype=torch.float32, device=dout.device)
        if down_bias is not None:
            rows, shares = _slopes(dout, routing, down_bias)
            ddown_bias = _summed(rows, routing, factors) if of_down_bias else None
            del rows
        dy = _multiplied(slopes, down, routing.offsets, dtype, turned=not how.down_turned)
        gradients, y, dweights, wide = _ungated(how, dy, pre, gate_up_bias, factors, shares, routing)
        del dy, pre, shares
        if of_down:
            across = _turned_rows(y, routing)
            ddown = of_weight(_turned_rows(slopes, routing), across, how.down_turned)
            del across
        del slopes, y
        if of_gate_up_bias:
            dgate_up_bias = _summed(wide, routing)
        del wide
        if of_gate_up:
            across = _turned_rows(read_again(kept), routing, gathers=True)
            dgate_up = of_weight(_turned_rows(gradients, routing), across, how.up_turned)
            del across
        if of_x:
            drows = _multiplied(gradients, gate_up, routing.offsets, dtype, turned=not how.up_turned)
            dx = _combined(drows, routing, None, None)
        made = dweights.view(weights.shape).to(weights.dtype) if of_weights else None
        return None, dx, made, dgate_up, ddown, dgate_up_bias, ddown_bias, None


_apply = applied(_Fp8Experts)
