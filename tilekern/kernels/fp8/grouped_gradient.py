"""Gradients of the experts' weights from e4m3 rows: ``c[e] = a_e^T @ b_e`` over the rows of expert e.

Both operands come turned, by blocks of 128 rows of one expert each (:mod:`tilekern.kernels.fp8.grouped_turned`). The
sums of a block are scaled by both blocks' scales and added up in float32, in the order of the rows, so every run gives
the same bits. An expert without rows gets zeros. The roles of ``a`` and ``b`` are those of
:mod:`tilekern.kernels.grouped.weight_gradient`.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.fp8.grouped import added, experts_spec, operand
from tilekern.kernels.fp8.grouped_turned import SIDE, blocks_of, turned_groups
from tilekern.kernels.fp8.scales import E4M3, scaled_rows
from tilekern.kernels.grouped.routing import OF_SUMS, balanced
from tilekern.kernels.grouped.space import OFFSETS
from tilekern.kernels.grouped.tiles import rows_of
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, load
from tilekern.spec import ITEM_BYTES, Array, Problem, cdiv


def _tile(item, a, b, a_scale, b_scale, offsets, c, tile_m, tile_n, group_m, latency):
    """Compute tile number ``item`` of all experts' gradients."""
    down, across = ct.cdiv(c.shape[1], tile_m), ct.cdiv(c.shape[2], tile_n)
    expert = item // (down * across)
    i, j = place_and_column(item % (down * across), down, across, group_m)
    begin, end = rows_of(offsets, expert, c.shape[0], 0)
    first = begin // SIDE + expert
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for block in range(first, first + ct.cdiv(end - begin, SIDE)):
        left = operand(a, block, i, 0, tile_m, SIDE, latency)
        right = operand(b, block, j, 0, tile_n, SIDE, latency)
        a_step = load(a_scale, (block,), (1,), True, latency, False)
        b_step = load(b_scale, (block,), (1,), True, latency, False)
        total = added(total, left, right, ct.reshape(a_step * b_step, (1, 1)))
    ct.store(c, (expert, i, j), ct.reshape(total.astype(c.dtype), (1, tile_m, tile_n)))


@ct.kernel
def fp8_grouped_weight_gradient(
    a, b, a_scale, b_scale, offsets, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    latency: ConstInt,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; a [blocks, inner, 128], b [blocks, columns, 128].

    a_scale and b_scale [blocks], offsets [experts], c [experts, inner, columns].
    """
    steps = c.shape[0] * ct.cdiv(c.shape[1], tile_m) * ct.cdiv(c.shape[2], tile_n)
    each_step(_tile, steps, persistent, (a, b, a_scale, b_scale, offsets, c, tile_m, tile_n, group_m, latency))


def _arrays(problem: Problem) -> Arrays:
    return (
        Array("a", E4M3, ("row_blocks", "inner", str(SIDE))),
        Array("b", E4M3, ("row_blocks", "columns", str(SIDE))),
        Array("a_scale", "float32", ("row_blocks",), aligned=False),
        Array("b_scale", "float32", ("row_blocks",), aligned=False),
        OFFSETS,
        Array("c", "dtype", ("experts", "inner", "columns"), "output"),
    )


def _routed(problem: Problem, offsets: Any, generator: Any, device: str) -> dict[str, Any]:
    """Draw rows and turn those of each expert; where an expert's blocks are depends on the routing."""
    import torch

    def normal(columns: int) -> tuple[Any, Any]:
        x = torch.randn((problem["rows"], columns), generator=generator, device=device)
        return turned_groups(*scaled_rows(x), offsets)

    (a, a_scale), (b, b_scale) = normal(problem["inner"]), normal(problem["columns"])
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets}


def _varied(of_offsets: Any) -> Any:
    def variation(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
        offsets = of_offsets(problem, generator, device)["offsets"]
        return _routed(problem, offsets, generator, device)

    return variation


def grouped_gradient(a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any, dtype: Any) -> Any:
    """Return the gradients [experts, inner, columns] by torch's operations, of numbers of a dtype.

    The host must know the rows of experts.
    """
    import torch

    found, begin = [], 0
    for expert, end in enumerate(offsets.tolist()):
        first = begin // SIDE + expert
        own = slice(first, first - (begin - end) // SIDE)
        left = a[own].to(dtype) * (a_scale[own] * b_scale[own]).to(dtype)[:, None, None]
        found.append(torch.einsum("bmk,bnk->mn", left, b[own].to(dtype)))
        begin = end
    return torch.stack(found)


def _reference(a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    return {"c": grouped_gradient(a, b, a_scale, b_scale, offsets, torch.float64)}


def _bytes(problem: Problem) -> int:
    """Return the bytes of the rows, not of what fills their blocks, of offsets and of the result."""
    inner, columns, experts = problem["inner"], problem["columns"], problem["experts"]
    rows = problem["rows"] * (inner + columns) + 2 * 4 * cdiv(problem["rows"], SIDE)
    return int(rows + 4 * experts + ITEM_BYTES[problem["dtype"]] * experts * inner * columns)


SPEC = experts_spec(
    "fp8_grouped_weight_gradient",
    "gradients of the experts' weights from e4m3 rows, in a fixed order, summed in float32",
    (),
    _arrays,
    _reference,
    function=fp8_grouped_weight_gradient,
    sizes=lambda problem: {"row_blocks": blocks_of(problem["rows"], problem["experts"])},
    given=lambda problem, generator, device: _routed(problem, balanced(problem, device), generator, device),
    bytes_moved=_bytes,
    variations={name: _varied(variation) for name, variation in OF_SUMS.items()},
)
