"""Gradients of the experts' weights: ``c[e] = a_e^T @ b_e`` over the rows of expert e, in float32, rounded once.

With rows sorted by expert and dy [rows, columns], the gradient of a weight stored as [experts, columns, inner] has a =
dy and b = x; stored as [experts, inner, columns], it has a = x and b = dy. Rows are added up in their order, so that
every run gives the same bits; an expert without rows gets zeros; rows beyond the last offset are ignored. Rows may be
gathered through ``order``, like in :mod:`tilekern.kernels.grouped.product`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.grouped.routing import OF_SUMS
from tilekern.kernels.grouped.space import OFFSETS, ORDER, dimensions, grouped_spec, readable, rows_in, values
from tilekern.kernels.grouped.tiles import gathered, rows_of, sources
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import Array, Problem


def _rows(array, tokens, part, step, i, tile_k, tile, latency):
    """Load step ``step`` of an expert's rows, columns [i * tile, ...), as (tile_k, tile); zeros after its last row."""
    if ct.static_eval(tokens is not None):
        return gathered(array, tokens, i, tile, latency)
    return load(part, (step, i), (tile_k, tile), True, latency, True)


def _sums(
    a, b, order, slots, begin, end, i, j, tile_m, tile_n, tile_k, latency, a_gathered, b_gathered,
):  # fmt: skip
    """Compute a tile of an expert's gradient, from rows [begin, end)."""
    total = ct.zeros((tile_m, tile_n), ct.float32)
    if begin < end:
        a_part = None if ct.static_eval(a_gathered) else a.slice(0, begin, end)
        b_part = None if ct.static_eval(b_gathered) else b.slice(0, begin, end)
        for step in range(ct.cdiv(end - begin, tile_k)):
            a_tokens, b_tokens = None, None
            if ct.static_eval(order is not None):
                first = begin + step * tile_k
                tokens = sources(order, first, slots, tile_k)
                inside = first + ct.arange(tile_k, dtype=ct.int32) < end
                if ct.static_eval(a_gathered):
                    a_tokens = ct.where(inside, tokens, a.shape[0])
                if ct.static_eval(b_gathered):
                    b_tokens = ct.where(inside, tokens, b.shape[0])
            one = _rows(a, a_tokens, a_part, step, i, tile_k, tile_m, latency)
            other = _rows(b, b_tokens, b_part, step, j, tile_k, tile_n, latency)
            total = ct.mma(one.transpose(), other, total)
    return total


def _tile(
    a, b, offsets, order, slots, c, item, tile_m, tile_n, tile_k, group_m, latency, a_gathered, b_gathered,
):  # fmt: skip
    """Compute tile number ``item`` of all experts' gradients."""
    down, across = ct.cdiv(c.shape[1], tile_m), ct.cdiv(c.shape[2], tile_n)
    expert = item // (down * across)
    i, j = place_and_column(item % (down * across), down, across, group_m)
    begin, end = rows_of(offsets, expert, c.shape[0], a.shape[0])
    total = _sums(a, b, order, slots, begin, end, i, j, tile_m, tile_n, tile_k, latency, a_gathered, b_gathered)
    ct.store(c, (expert, i, j), ct.reshape(total.astype(c.dtype), (1, tile_m, tile_n)))


def _gradient(
    a, b, offsets, order, slots, c, persistent, tile_m, tile_n, tile_k, group_m, latency, a_gathered, b_gathered,
):  # fmt: skip
    """One tile a block, or resident blocks that loop."""
    if ct.static_eval(persistent):
        tiles = c.shape[0] * ct.cdiv(c.shape[1], tile_m) * ct.cdiv(c.shape[2], tile_n)
        for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
            _tile(
                a, b, offsets, order, slots, c, item, tile_m, tile_n, tile_k, group_m, latency, a_gathered, b_gathered,
            )  # fmt: skip
    else:
        _tile(
            a, b, offsets, order, slots, c, ct.bid(0), tile_m, tile_n, tile_k, group_m, latency, a_gathered,
            b_gathered,
        )  # fmt: skip


@ct.kernel
def grouped_weight_gradient(
    a, b, offsets, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt,
    latency: ConstInt, a_gathered: ConstBool, b_gathered: ConstBool,
):  # fmt: skip
    """The gradient from sorted rows; a [rows, inner], b [rows, columns], offsets [experts].

    c [experts, inner, columns].
    """
    _gradient(
        a, b, offsets, None, None, c, persistent, tile_m, tile_n, tile_k, group_m, latency, a_gathered, b_gathered
    )


@ct.kernel
def grouped_weight_gradient_gathered(
    a, b, offsets, order, slots, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt,
    group_m: ConstInt, latency: ConstInt, a_gathered: ConstBool, b_gathered: ConstBool,
):  # fmt: skip
    """The gradient from gathered rows of a, b or both, which have a row for each token; order [rows].

    a [rows or tokens, inner], b [rows or tokens, columns], offsets [experts], c [experts, inner, columns].
    """
    _gradient(
        a, b, offsets, order, slots, c, persistent, tile_m, tile_n, tile_k, group_m, latency, a_gathered, b_gathered
    )


DIMENSIONS = dimensions("a_gathered", "b_gathered")
sizes = functools.partial(values, DIMENSIONS)


def _is_gathered(problem: Problem) -> bool:
    return bool(problem["a_gathered"] or problem["b_gathered"])


def _arrays(problem: Problem) -> Arrays:
    return (
        Array("a", "dtype", (rows_in(problem["a_gathered"]), "inner")),
        Array("b", "dtype", (rows_in(problem["b_gathered"]), "columns")),
        OFFSETS,
        *(ORDER if _is_gathered(problem) else ()),
        Array("c", "dtype", ("experts", "inner", "columns"), "output"),
    )


def _by_torch(problem: Problem) -> Callable[..., tuple[Any, ...]]:
    def call(a: Any, b: Any, offsets: Any, order: Any = None, slots: int = 1) -> tuple[Any]:
        import torch

        if order is not None:
            tokens = order // slots
            a = a.index_select(0, tokens) if problem["a_gathered"] else a
            b = b.index_select(0, tokens) if problem["b_gathered"] else b
        return (torch._grouped_mm(readable(a).t(), readable(b), offs=offsets),)

    return call


def reference(
    a: Any, b: Any, offsets: Any, order: Any = None, slots: int = 1, *, a_gathered: bool, b_gathered: bool
) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    one, other = a.double(), b.double()
    if order is not None:
        tokens = order.long() // slots
        one, other = one[tokens] if a_gathered else one, other[tokens] if b_gathered else other
    begins = [0, *offsets.tolist()]
    return {"c": torch.stack([one[begin:end].t() @ other[begin:end] for begin, end in itertools.pairwise(begins)])}


SPEC = grouped_spec(
    "grouped_weight_gradient",
    "gradients of the experts' weights: a^T @ b over the rows of each, in a fixed order, summed in float32",
    DIMENSIONS,
    _arrays,
    reference,
    function=lambda problem, config: (
        grouped_weight_gradient_gathered if _is_gathered(problem) else grouped_weight_gradient
    ),
    call=_by_torch,
    variations=OF_SUMS,
)

SPECS = (SPEC,)
