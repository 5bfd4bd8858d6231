"""Grouped products: ``y[r] = x[r] @ weight[e(r)] + bias[e(r)]`` for rows sorted by expert, in float32, rounded once.

The layout is ``torch._grouped_mm``'s: ``offsets`` [experts] (int32) are the ends of the experts' rows. If a
problem is ``gathered``, row r of the product reads row ``order[r] // slots`` of x, and no rows are copied; for each
sorted row ``order`` (int32) is its slot ``token * slots + k``. If it is ``partial``, rows beyond the last offset belong
to no expert (sentinels of expert parallel), and their results are zeros; otherwise they are not written. Weights are
stored [experts, columns, inner], like those of ``torch.nn.Linear``, or with ``inner_first`` [experts, inner, columns],
like GPT-OSS's; the gradient of x is the product with the weight in its other role.

A block finds the rows of its tiles itself (:mod:`tilekern.kernels.grouped.tiles`): the host waits for no counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.grouped.routing import VARIATIONS, expert_rows
from tilekern.kernels.grouped.space import (
    OFFSETS,
    ORDER,
    dimensions,
    grouped_spec,
    groups_of,
    readable,
    rows_in,
    values,
)
from tilekern.kernels.grouped.tiles import gathered, group_at, rows_of, sources, weight_tile
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import Array, Config, Problem


def _tile(
    x, weight, offsets, order, slots, bias, y, item, experts, groups, turns, tile_m, tile_n, tile_k, group_m, latency,
    inner_first,
):  # fmt: skip
    """Compute tile number ``item`` of all places, if it is not empty. A tile's last rows may be the next expert's."""
    place, j = place_and_column(item, y.shape[0] // tile_m + groups, ct.cdiv(y.shape[1], tile_n), group_m)
    group = group_at(offsets, place, tile_m, groups, turns)
    begin, end = rows_of(offsets, group, experts, y.shape[0])
    i = place - (begin // tile_m + group)
    first = begin + i * tile_m
    if first < end:
        expert = min(group, experts - 1)
        steps = ct.cdiv(x.shape[1], tile_k)
        if group == experts:
            steps = 0
        if ct.static_eval(order is not None):
            tokens = sources(order, first, slots, tile_m)
        else:
            view = x.tiled_view((tile_m, tile_k), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_k))
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for step in range(steps):
            if ct.static_eval(order is not None):
                left = gathered(x, tokens, step, tile_k, latency)
            else:
                left = view.load((first, step), latency=ct.static_eval(latency if latency > 0 else None))
            right = weight_tile(weight, expert, j, step, tile_n, tile_k, inner_first, latency)
            total = ct.mma(left, right.transpose(), total)
        if ct.static_eval(bias is not None):
            biased = total + load(bias, (expert, j), (1, tile_n), True, 0, True).astype(ct.float32)
            total = ct.where(group < experts, biased, total) if ct.static_eval(groups > experts) else biased
        ct.store(y.slice(0, begin, end), (i, j), total.astype(y.dtype))


def _product(
    x, weight, offsets, order, slots, bias, y, persistent, experts, groups, turns, tile_m, tile_n, tile_k, group_m,
    latency, inner_first,
):  # fmt: skip
    """One place a block, or resident blocks that loop, so that a tile's loads overlap the end of the one before it."""
    if ct.static_eval(persistent):
        places = (y.shape[0] // tile_m + groups) * ct.cdiv(y.shape[1], tile_n)
        for item in range(ct.bid(0), places, ct.num_blocks(0)):
            _tile(
                x, weight, offsets, order, slots, bias, y, item, experts, groups, turns, tile_m, tile_n, tile_k,
                group_m, latency, inner_first,
            )  # fmt: skip
    else:
        _tile(
            x, weight, offsets, order, slots, bias, y, ct.bid(0), experts, groups, turns, tile_m, tile_n, tile_k,
            group_m, latency, inner_first,
        )  # fmt: skip


@ct.kernel
def grouped_plain(
    x, weight, offsets, y, persistent: ConstBool, experts: ConstInt, groups: ConstInt, turns: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt, inner_first: ConstBool,
):  # fmt: skip
    """The product of sorted rows; x [rows, inner], weight [experts, columns, inner], offsets [experts].

    y [rows, columns]; the weight is [experts, inner, columns] if ``inner_first``.
    """
    _product(
        x, weight, offsets, None, None, None, y, persistent, experts, groups, turns, tile_m, tile_n, tile_k, group_m,
        latency, inner_first,
    )  # fmt: skip


@ct.kernel
def grouped_biased(
    x, weight, offsets, bias, y, persistent: ConstBool, experts: ConstInt, groups: ConstInt, turns: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt, inner_first: ConstBool,
):  # fmt: skip
    """The product with a bias of each expert [experts, columns]; others as in :func:`grouped_plain`."""
    _product(
        x, weight, offsets, None, None, bias, y, persistent, experts, groups, turns, tile_m, tile_n, tile_k, group_m,
        latency, inner_first,
    )  # fmt: skip


@ct.kernel
def grouped_gathered(
    x, weight, offsets, order, slots, y, persistent: ConstBool, experts: ConstInt, groups: ConstInt, turns: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt, inner_first: ConstBool,
):  # fmt: skip
    """The product of gathered rows: x [tokens, inner], order [rows]; others as in :func:`grouped_plain`."""
    _product(
        x, weight, offsets, order, slots, None, y, persistent, experts, groups, turns, tile_m, tile_n, tile_k, group_m,
        latency, inner_first,
    )  # fmt: skip


@ct.kernel
def grouped_gathered_biased(
    x, weight, offsets, order, slots, bias, y, persistent: ConstBool, experts: ConstInt, groups: ConstInt,
    turns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt,
    inner_first: ConstBool,
):  # fmt: skip
    """The product of gathered rows with a bias: x [tokens, inner], order [rows], bias [experts, columns].

    Others as in :func:`grouped_plain`.
    """
    _product(
        x, weight, offsets, order, slots, bias, y, persistent, experts, groups, turns, tile_m, tile_n, tile_k, group_m,
        latency, inner_first,
    )  # fmt: skip


# By whether rows are gathered, and whether there is a bias.
_FUNCTIONS = {
    (False, False): grouped_plain,
    (False, True): grouped_biased,
    (True, False): grouped_gathered,
    (True, True): grouped_gathered_biased,
}

DIMENSIONS = dimensions("inner_first", "gathered", "biased", "partial")
sizes = functools.partial(values, DIMENSIONS)


def _arrays(problem: Problem) -> Arrays:
    of_expert = ("inner", "columns") if problem["inner_first"] else ("columns", "inner")
    return (
        Array("x", "dtype", (rows_in(problem["gathered"]), "inner")),
        Array("weight", "dtype", ("experts", *of_expert)),
        OFFSETS,
        *(ORDER if problem["gathered"] else ()),
        *([Array("bias", "dtype", ("experts", "columns"))] if problem["biased"] else []),
        Array("y", "dtype", ROWS, "output"),
    )


def _by_torch(problem: Problem) -> Callable[..., tuple[Any, ...]]:
    def call(x: Any, weight: Any, offsets: Any, *more: Any) -> tuple[Any]:
        import torch

        if problem["gathered"]:
            order, slots, *more = more
            x = x.index_select(0, order // slots)
        weight = readable(weight)
        y = torch._grouped_mm(readable(x), weight if problem["inner_first"] else weight.transpose(1, 2), offs=offsets)
        if problem["biased"]:
            y += more[0].index_select(0, expert_rows(offsets, len(y)).clamp_(max=problem["experts"] - 1))
        if problem["partial"]:
            y.masked_fill_((torch.arange(len(y), device=y.device) >= offsets[-1])[:, None], 0)
        return (y,)

    return call


def _constants(problem: Problem, config: Config) -> dict[str, int]:
    groups = groups_of(problem)
    return {"groups": groups, "turns": (groups - 1).bit_length()}


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw a weight that keeps the variance of rows."""
    import torch

    inner, columns, dtype = problem["inner"], problem["columns"], getattr(torch, problem["dtype"])
    shape = (problem["experts"], *((inner, columns) if problem["inner_first"] else (columns, inner)))
    # In the problem's dtype from the start: the weights of a layer are a GiB.
    return {"weight": torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(inner**-0.5)}


def by_experts(rows: Any, weight: Any, offsets: Any, bias: Any = None) -> Any:
    """Return the product [rows, columns] by torch's operations, in the dtype of its factors; rows of nobody are zeros.

    The host must know the rows of experts.
    """
    import torch

    parts, begin = [], 0
    for expert, end in enumerate(offsets.tolist()):
        part = rows[begin:end] @ weight[expert].t()
        parts.append(part if bias is None else part + bias[expert])
        begin = end
    return torch.cat([*parts, rows.new_zeros(len(rows) - begin, weight.shape[1])])


def reference(
    x: Any, weight: Any, offsets: Any, order: Any = None, slots: int = 1, bias: Any = None, *, inner_first: bool
) -> dict[str, Any]:
    """Compute the formula in float64."""
    rows = x.double() if order is None else x.double()[order.long() // slots]
    wide = weight.double().transpose(1, 2) if inner_first else weight.double()
    return {"y": by_experts(rows, wide, offsets, None if bias is None else bias.double())}


SPEC = grouped_spec(
    "grouped_linear",
    "y = x @ weight of each row's expert + bias, for rows sorted by expert, summed in float32",
    DIMENSIONS,
    _arrays,
    reference,
    function=lambda problem, config: _FUNCTIONS[problem["gathered"], problem["biased"]],
    call=_by_torch,
    constants=_constants,
    given=_given,
    variations=VARIATIONS,
)

SPECS = (SPEC,)
