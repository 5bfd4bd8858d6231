"""grouped_linear: the product of each row with the weight of its expert, for rows that are sorted by expert.

Its launches are written by hand: the gradients of weights and biases are specs of their own, a weight may be stored in
either layout, and rows may be read in place.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from tilekern.kernels import column_sum
from tilekern.kernels.grouped import product, sums, weight_gradient
from tilekern.kernels.matmul.product import MOST_ELEMENTS
from tilekern.ops.operation import operation
from tilekern.ops.registration import (
    as_rows,
    by_autograd,
    cast_as_products,
    check_dtype,
    check_tensors,
    readable,
    run_product,
)
from tilekern.runtime.dispatch import Plan, count_fallback, plan_for
from tilekern.spec import Array

# Plans of the partial sums of each expert's rows, and of their sum.
SumPlans = tuple[Plan, Plan]
# Plans of the forward, and of the gradients of x, weight and bias if they are needed.
Plans = tuple[Plan, Plan | None, Plan | None, SumPlans | None]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_ARRAYS = (
    Array("x", "dtype", ("tokens", "inner")),
    Array("weight", "dtype", ("experts", "outer", "last")),
    Array("bias", "dtype", ("experts", "columns")),
    Array("offsets", "int32", ("experts",)),
    Array("order", "int32", ("tokens_and_slots",)),
    Array("y", "dtype", ("tokens_and_slots", "columns"), "output"),
)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, order: Tensor | None = None, slots: int = 1,
    *, partial: bool = True,
) -> Tensor:  # fmt: skip
    """Return ``x[r] @ weight[e]^T + bias[e]`` for each row r and its expert e, summed in float32.

    Nothing waits for the host: the GPU reads which rows an expert has. Gradients of weights and biases are summed in a
    fixed order; experts without rows get zeros.

    Args:
        x: [rows, in_features], sorted by expert, or, with ``order``, [tokens, in_features]; bfloat16, float16 or
            float32.
        weight: [experts, out_features, in_features] of the dtype of ``x``; a view of
            [experts, in_features, out_features], as in GPT-OSS, is read without a copy.
        offsets: [experts], int32: the end of each expert's rows, as in torch's grouped product.
        bias: [experts, out_features], of the dtype of ``x``, or None.
        order: [tokens * slots], int32, a permutation: the slot ``token * slots + k`` of each sorted row. Row r of the
            product then reads row ``order[r] // slots`` of x, and no rows are copied.
        slots: the number of experts per token; used only with ``order``.
        partial: whether rows after the last offset, which belong to no expert, are set to zero. Otherwise they are not
            written, in the result and in the gradient of x.

    Returns:
        [rows, out_features], contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on the CPU also if ``offsets`` decrease or exceed the rows, or
            ``order`` is not a permutation.
        RuntimeError: on a GPU, an assertion on the device: ``offsets`` are wrong in this way, or a number of ``order``
            is out of range.
    """
    if not torch.compiler.is_compiling() or offsets.is_cuda:
        _check_numbers(x, offsets, order)
    return by_experts(x, weight, offsets, bias, order, slots, partial=partial)


def _check_numbers(x: Tensor, offsets: Tensor, order: Tensor | None) -> None:
    """Refuse numbers that would make a kernel read outside its arrays, without waiting for a GPU."""
    check_dtype("grouped_linear", "offsets", offsets, whole=True)
    if order is not None:
        check_dtype("grouped_linear", "order", order, whole=True)
    rows = (x if order is None else order).shape[:1].numel()
    within = f"grouped_linear: offsets must be from 0 to {rows}, the number of rows, and never fall"
    permuted = f"grouped_linear: order must be a permutation of the numbers from 0 to {rows - 1}"
    if offsets.is_cuda:
        torch._assert_async((offsets.clamp(0, rows).cummax(0).values == offsets).all(), within)
        if order is not None:
            torch._assert_async(((order >= 0) & (order < rows)).all(), permuted)
    elif type(offsets) is Tensor and offsets.device.type == "cpu":
        ends = offsets.flatten().tolist()
        if any(end > following for end, following in itertools.pairwise([0, *ends, rows])):
            raise ValueError(f"{within}, got {str(ends)[:200]}")
        if order is not None and order.device.type == "cpu" and sorted(order.flatten().tolist()) != list(range(rows)):
            raise ValueError(f"{permuted}, got {str(order.tolist())[:200]}")


def by_experts(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, order: Tensor | None = None, slots: int = 1,
    *, partial: bool = True,
) -> Tensor:  # fmt: skip
    """Run :func:`grouped_linear` with offsets and an order from our own kernels, which need no check."""
    weight, inner_first = stored(weight)
    offsets, order = offsets.int(), None if order is None else order.int()
    x, weight, bias = cast_as_products(x, weight, bias)
    return _grouped_linear(x, weight, bias, offsets, order, slots, inner_first, partial)


def stored(weight: Tensor) -> tuple[Tensor, bool]:
    """Return a weight [experts, out_features, in_features] as it is stored, and whether that is transposed.

    Gradients are then stored in the same way; autograd would copy gradients of a view.
    """
    inner_first = weight.dim() == 3 and weight.stride(1) == 1 != weight.stride(2)
    return weight.transpose(1, 2) if inner_first else weight, inner_first


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> None:  # fmt: skip
    if x.dim() != 2:
        raise ValueError(f"grouped_linear: x must have the shape [rows, in_features], got {list(x.shape)}")
    seen = list(weight.transpose(1, 2).shape if inner_first else weight.shape)
    if weight.dim() != 3 or seen[2] != x.shape[1]:
        raise ValueError(
            f"grouped_linear: weight must have the shape [experts, out_features, {x.shape[1]}], got {seen}"
        )
    if list(offsets.shape) != seen[:1]:
        raise ValueError(f"grouped_linear: offsets must have the shape {seen[:1]}, got {list(offsets.shape)}")
    if bias is not None and list(bias.shape) != seen[:2]:
        raise ValueError(f"grouped_linear: bias must have the shape {seen[:2]}, got {list(bias.shape)}")
    if order is not None and (slots < 1 or list(order.shape) != [x.shape[0] * slots]):
        raise ValueError(
            f"grouped_linear: order must have the shape [{x.shape[0]} tokens * {slots} slots], got {list(order.shape)}"
        )
    check_tensors("grouped_linear", "offsets", "order", x=x, weight=weight, bias=bias, offsets=offsets, order=order)


def _columns(weight: Tensor, *, inner_first: bool) -> int:
    return int(weight.shape[2 if inner_first else 1])


def _find(
    graded: tuple[bool, bool] | Literal[False], x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor,
    order: Tensor | None, slots: int, inner_first: bool, partial: bool,
) -> Plans | None:  # fmt: skip
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return None
    if any(tensor is not None and tensor.dtype != torch.int32 for tensor in (offsets, order)):
        return None
    rows, inner = (x if order is None else order).shape[0], x.shape[1]
    experts, columns = weight.shape[0], _columns(weight, inner_first=inner_first)
    if not rows * inner * experts * columns or max(rows * max(inner, columns), weight.numel()) > MOST_ELEMENTS:
        return None
    to_x, to_weight = graded or (False, False)
    gathers, zeros = order is not None, ("partial" if partial else "")

    def linear(inner: int, columns: int, *on: str) -> Plan | None:
        found = product.sizes(rows, inner, columns, experts, x.dtype, {*on, zeros})
        return plan_for(product.SPEC, x.device, *found.values())

    ahead = ("inner_first" if inner_first else "", "gathered" if gathers else "", "" if bias is None else "biased")
    forward = linear(inner, columns, *ahead)
    of_x = linear(columns, inner, "" if inner_first else "inner_first") if to_x else None
    of_weight = of_bias = None
    if to_weight:
        of_weight = _plan_of_weight(x, rows, columns, experts, inner_first=inner_first, gathers=gathers)
    if graded is not False and bias is not None:
        of_bias = plans_of_sum(x.device, rows, columns, experts, x.dtype)
        if of_bias is None:
            return None
    if forward is None or (to_x and of_x is None) or (to_weight and of_weight is None):
        return None
    return forward, of_x, of_weight, of_bias


def _plan_of_weight(
    x: Tensor, rows: int, columns: int, experts: int, *, inner_first: bool, gathers: bool
) -> Plan | None:
    inner = x.shape[1]
    (one, other), which = ((inner, columns), "a_gathered") if inner_first else ((columns, inner), "b_gathered")
    sizes = weight_gradient.sizes(rows, one, other, experts, x.dtype, {which} if gathers else ())
    return plan_for(weight_gradient.SPEC, x.device, *sizes.values())


def _launch(
    plans: Plans, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> Tensor:  # fmt: skip
    gathering = () if order is None else (order.contiguous(), slots)
    more = () if bias is None else (readable(bias),)
    shape = ((x if order is None else order).shape[0], _columns(weight, inner_first=inner_first))
    return run_product(plans[0], shape, as_rows(x), readable(weight), offsets.contiguous(), *gathering, *more)


def _launch_backward(
    plans: Plans, needs: tuple[bool, ...], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor,
    order: Tensor | None, slots: int, inner_first: bool, partial: bool,
) -> Gradients:  # fmt: skip
    _, of_x, of_weight, of_bias = plans
    slopes, ends = as_rows(dy), offsets.contiguous()
    dx = dweight = dbias = None
    if of_x is not None:
        dx = run_product(of_x, (slopes.shape[0], x.shape[1]), slopes, readable(weight), ends)
        dx = dx if order is None else _added(dx, order, slots)
    if of_weight is not None:
        dweight = _run_of_weight(of_weight, slopes, x, ends, order, slots, inner_first=inner_first)
    if of_bias is not None and bias is not None and needs[2]:
        dbias = summed(of_bias, slopes, ends)
    return dx, dweight, dbias


def _run_of_weight(
    plan: Plan, slopes: Tensor, x: Tensor, ends: Tensor, order: Tensor | None, slots: int, *, inner_first: bool
) -> Tensor:
    one, other = (as_rows(x), slopes) if inner_first else (slopes, as_rows(x))
    gathering = () if order is None else (order.contiguous(), slots)
    return run_product(plan, (len(ends), one.shape[1], other.shape[1]), one, other, ends, *gathering)


def _added(rows: Tensor, order: Tensor, slots: int) -> Tensor:
    """Sum sorted rows over each token's slots, in the order of the slots."""
    places = torch.empty_like(order)
    places[order.long()] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return rows.index_select(0, places).view(-1, slots, rows.shape[1]).sum(1)


def _fallback_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> Gradients:  # fmt: skip
    given = (x, weight, bias, offsets, order, slots, inner_first, partial)
    dx, dweight, dbias = by_autograd(_formula, given, (0, 1, 2), (dy,))
    return dx, dweight, dbias


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty((x if order is None else order).shape[0], weight.shape[2 if inner_first else 1])


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> Tensor:  # fmt: skip
    """Compute torch's product for each expert; the host must know its rows."""
    rows = x if order is None else x.index_select(0, order // slots)
    matrices = weight if inner_first else weight.transpose(1, 2)
    if rows.is_meta:
        y = rows @ matrices[0]
        return y if bias is None else y + bias[0]
    ends = offsets.tolist()
    parts = [
        rows[begin:end] @ matrix for matrix, (begin, end) in zip(matrices, itertools.pairwise([0, *ends]), strict=True)
    ]
    if bias is not None:
        parts = [part + own for part, own in zip(parts, bias, strict=True)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], matrices.shape[2])])


@operation(
    product.SPEC, weight_gradient.SPEC, name="grouped_linear", arrays=_ARRAYS,
    reads=("x", "weight", "bias", "offsets", "order"), ungraded=("offsets", "order"), apart=("x", "weight"),
    key=("inner_first", "partial"), check=_check, find=_find, launch=_launch, launch_backward=_launch_backward,
    fake=_fake, fallback_backward=_fallback_backward,
)  # fmt: skip
def _grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, order: Tensor | None, slots: int,
    inner_first: bool, partial: bool,
) -> Tensor:  # fmt: skip
    return _formula(x, weight, bias, offsets, order, slots, inner_first, partial)


def grouped_outer(
    dy: Tensor, x: Tensor, offsets: Tensor, order: Tensor | None = None, slots: int = 1, *, inner_first: bool = False
) -> Tensor:
    """Return ``dy_e^T @ x_e`` over the rows of each expert: only a weight's gradient, for handwritten backwards.

    Args:
        dy: [rows, out_features], sorted by expert; bfloat16, float16 or float32.
        x: [rows, in_features], of the dtype of ``dy``, or, with ``order``, [tokens, in_features].
        offsets: [experts], int32: the end of each expert's rows.
        order, slots: as in :func:`grouped_linear`.
        inner_first: whether the result is transposed.

    Returns:
        [experts, out_features, in_features], or [experts, in_features, out_features] if transposed, contiguous; zeros
        for experts without rows. It has no gradient.
    """
    (rows, columns), experts = dy.shape, len(offsets)
    plan = None
    if dy.dtype == x.dtype and dy.numel() and x.numel() and experts * columns * x.shape[1] <= MOST_ELEMENTS:
        plan = _plan_of_weight(x, rows, columns, experts, inner_first=inner_first, gathers=order is not None)
    with torch.no_grad():
        if plan is not None:
            ends = offsets.int().contiguous()
            return _run_of_weight(plan, as_rows(dy), x, ends, order, slots, inner_first=inner_first)
        count_fallback(weight_gradient.SPEC)
        x = x if order is None else x.index_select(0, order // slots)
        one, other = (x, dy) if inner_first else (dy, x)
        pieces = itertools.pairwise([0, *offsets.tolist()])
        return torch.stack([one[begin:end].t() @ other[begin:end] for begin, end in pieces])


def plans_of_sum(
    device: torch.device, rows: int, columns: int, experts: int, dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
) -> SumPlans | None:  # fmt: skip
    """Return the plans of :func:`summed`, for weighted rows if ``weight_dtype`` is given; None if torch must sum."""
    if sums.SHARES * columns * experts > MOST_ELEMENTS:
        return None
    weighted = weight_dtype is not None
    in_shares = plan_for(sums.SPEC, device, rows, experts, columns, dtype, weight_dtype or dtype, weighted)
    whole = plan_for(column_sum.SPEC, device, sums.SHARES, experts * columns, dtype)
    return None if in_shares is None or whole is None else (in_shares, whole)


def summed(plans: SumPlans, x: Tensor, offsets: Tensor, *weighting: Tensor) -> Tensor:
    """Return the sum of each expert's rows, [experts, columns].

    Args:
        plans: from :func:`plans_of_sum`.
        x: [rows, columns], sorted by expert.
        offsets: [experts], int32: the end of each expert's rows.
        weighting: if rows are weighted, the slot of each row [rows] (int32), and the weight of each slot [rows].
    """
    device, experts, columns = x.get_device(), offsets.shape[0], x.shape[1]
    partial = torch.empty(sums.SHARES, experts, columns, dtype=torch.float32, device=x.device)
    plans[0].launch(device, x, offsets, *weighting, partial)
    total = x.new_empty(experts, columns)
    plans[1].launch(device, partial.view(sums.SHARES, -1), total.view(-1))
    return total
