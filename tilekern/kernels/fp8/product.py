"""Products of e4m3 matrices with a scale for each row: ``c = (scale_a scale_b^T) * (a @ b^T) + bias + addend``.

Both operands are stored along the sums, as tensor cores read 8-bit floats. One spec serves a linear layer's three
products. With x [tokens, in], weight [out, in] and dy [tokens, out], where ``'`` is a turned matrix:

    forward          y = x @ weight^T          a = x,   b = weight
    input gradient   dx = dy @ weight'^T       a = dy,  b = weight'
    weight gradient  dweight = dy' @ x'^T      a = dy', b = x', over_rows

``rows`` is always the number of tokens, and the one bucketed dimension; the sums of the last product are over it. If a
problem is ``accumulated``, ``c`` may be the memory of ``addend``: only the block that stores a tile of ``c`` reads this
tile of ``addend``, and reads it first.

Hopper's tensor cores keep sums of e4m3 products with 14 bits of mantissa, and cut off what is below. Terms of one sign
then lose 7 % of their sum at 4096 terms, and 44 % at 32768 (measured on an H200 by ``torch._scaled_mm`` with
``use_fast_accum``). So the sums of each step, of 64 or 128 terms, are added up in float32: that costs a tenth of the
speed, and nothing is lost. Other GPUs sum in float32 anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import Table, names_of, spec
from tilekern.kernels.fp8.scales import E4M3, scaled_rows
from tilekern.kernels.fp8.space import SPACE, default, generic, sizes_of, tiles
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.matmul.space import blocks, hints, is_tile
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import ITEM_BYTES, Array, Config, Dimension, KernelSpec, LibraryCall, Problem

_ALIGNMENT_BYTES = 16


def _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, tile_k, group_m, whole_rows):
    """Compute tile number ``item`` of the result."""
    i, j = place_and_column(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for step in range(ct.cdiv(a.shape[1], tile_k)):
        left = load(a, (i, step), (tile_m, tile_k), True, 0, True)
        right = load(b, (j, step), (tile_n, tile_k), True, 0, True)
        total = ct.mma(left, right.transpose(), total)
    down, across = load(a_scale, (i,), (tile_m,), True, 0, False), load(b_scale, (j,), (tile_n,), True, 0, False)
    z = total * ct.reshape(down, (tile_m, 1)) * ct.reshape(across, (1, tile_n))
    if ct.static_eval(bias is not None):
        z = z + load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
    if ct.static_eval(addend is not None):
        z = z + load(addend, (i, j), (tile_m, tile_n), True, 0, True).astype(ct.float32)
    # TMA writes whole 16 bytes, so the ends of other rows are stored without it.
    if ct.static_eval(whole_rows) or (j + 1) * tile_n <= c.shape[1]:
        ct.store(c, (i, j), z.astype(c.dtype))
    else:
        ct.store(c, (i, j), z.astype(c.dtype), allow_tma=False)


def _product(a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, tile_k, group_m, whole_rows):
    if ct.static_eval(persistent):
        count = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
        for item in range(ct.bid(0), count, ct.num_blocks(0)):
            _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, tile_k, group_m, whole_rows)
    else:
        _tile(a, b, a_scale, b_scale, bias, addend, c, ct.bid(0), tile_m, tile_n, tile_k, group_m, whole_rows)


@ct.kernel
def fp8_plain(
    a, b, a_scale, b_scale, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt,
    group_m: ConstInt, whole_rows: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; a [m, k], b [n, k], a_scale [m], b_scale [n], c [m, n].

    ``whole_rows`` means that the rows of c are whole 16 bytes.
    """
    _product(a, b, a_scale, b_scale, None, None, c, persistent, tile_m, tile_n, tile_k, group_m, whole_rows)


@ct.kernel
def fp8_biased(
    a, b, a_scale, b_scale, bias, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt,
    group_m: ConstInt, whole_rows: ConstBool,
):  # fmt: skip
    """With a bias [n]; others as in :func:`fp8_plain`."""
    _product(a, b, a_scale, b_scale, bias, None, c, persistent, tile_m, tile_n, tile_k, group_m, whole_rows)


@ct.kernel
def fp8_accumulated(
    a, b, a_scale, b_scale, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt,
    group_m: ConstInt, whole_rows: ConstBool,
):  # fmt: skip
    """With an addend [m, n], which may be ``c``; others as in :func:`fp8_plain`."""
    _product(a, b, a_scale, b_scale, None, addend, c, persistent, tile_m, tile_n, tile_k, group_m, whole_rows)


@ct.kernel
def fp8_biased_accumulated(
    a, b, a_scale, b_scale, bias, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt,
    tile_k: ConstInt, group_m: ConstInt, whole_rows: ConstBool,
):  # fmt: skip
    """With both."""
    _product(a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, tile_k, group_m, whole_rows)


# By whether there are a bias and an addend.
_FUNCTIONS = {
    (False, False): fp8_plain, (True, False): fp8_biased, (False, True): fp8_accumulated,
    (True, True): fp8_biased_accumulated,
}  # fmt: skip
DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("inner", "exact"),
    Dimension("columns", "exact"),
    Dimension("over_rows", "flag"),
    Dimension("biased", "flag"),
    Dimension("accumulated", "flag"),
    Dimension("dtype", "dtype"),
)


def arrays_of(problem: Problem, *scales: Array) -> Arrays:
    """Return the arrays of a product whose operands have these scales."""
    m, k = ("inner", "rows") if problem["over_rows"] else ("rows", "inner")
    return (
        Array("a", E4M3, (m, k)),
        Array("b", E4M3, ("columns", k)),
        *scales,
        *([Array("bias", "dtype", ("columns",))] if problem["biased"] else []),
        *([Array("addend", "dtype", (m, "columns"))] if problem["accumulated"] else []),
        Array("c", "dtype", (m, "columns"), "output"),
    )


def operands(problem: Problem, generator: Any, device: str) -> tuple[Any, Any]:
    """Draw a and b before they are rounded; b keeps the variance of rows."""
    import torch

    m, n, k = sizes_of(problem)
    dtype = getattr(torch, problem["dtype"])
    a, b = (torch.randn((rows, k), generator=generator, device=device, dtype=dtype) for rows in (m, n))
    return a, b * k**-0.5


def multiplied(left: Any, right: Any, bias: Any = None, addend: Any = None) -> Any:
    """Return ``left @ right^T + bias + addend`` in the dtype of both, by torch's operations."""
    c = left @ right.t()
    c = c if bias is None else c + bias.to(c.dtype)
    return c if addend is None else c + addend.to(c.dtype)


def whole_rows(problem: Problem, config: Config) -> dict[str, bool]:
    """Return the constant ``whole_rows``: whether the rows of c are whole 16 bytes."""
    return {"whole_rows": problem["columns"] * ITEM_BYTES[problem["dtype"]] % _ALIGNMENT_BYTES == 0}


def product_spec(
    name: str, summary: str, arrays: Table, reference: Callable[..., dict[str, Any]],
    by_torch: Callable[..., Any], *, constants: Callable[[Problem, Config], dict[str, Any]] = whole_rows, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Make the spec of a product of e4m3 numbers.

    Args:
        arrays: (problem) -> the arrays, by :func:`arrays_of`.
        by_torch: (problem, a, b, a_scale, b_scale, bias or None, dtype) -> the product in a dtype, which a config
            without a device function runs.
        more: the rest, as in :func:`tilekern.kernels.families.tables.spec`.
    """

    def library(problem: Problem) -> LibraryCall:
        import torch

        dtype = getattr(torch, problem["dtype"])

        def call(a: Any, b: Any, a_scale: Any, b_scale: Any, *more: Any) -> tuple[Any]:
            c = by_torch(problem, a, b, a_scale, b_scale, more[0] if problem["biased"] else None, dtype)
            return (more[-1].add_(c) if problem["accumulated"] else c,)

        return LibraryCall(call, names_of(arrays(problem)), updates="addend" if problem["accumulated"] else None)

    return spec(
        name, summary, DIMENSIONS, arrays, reference,
        library=lambda problem, config: None if is_tile(config) else library(problem),
        constants=constants,
        result_dtype=lambda problem: problem["dtype"],
        flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
        **more,
    )  # fmt: skip


def _arrays(problem: Problem) -> Arrays:
    m = "inner" if problem["over_rows"] else "rows"
    return arrays_of(problem, Array("a_scale", "float32", (m,)), Array("b_scale", "float32", ("columns",)))


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    (a, a_scale), (b, b_scale) = map(scaled_rows, operands(problem, generator, device))
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}


def _reference(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any = None, addend: Any = None) -> dict[str, Any]:
    """Compute the formula in float64."""
    left, right = a.double() * a_scale.double()[:, None], b.double() * b_scale.double()[:, None]
    return {"c": multiplied(left, right, bias, addend)}


def scaled_product(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, dtype: Any) -> Any:
    """Return the product [a's rows, b's rows]: on a GPU by ``torch._scaled_mm``, elsewhere of float32 numbers.

    ``torch._scaled_mm`` takes only sizes that are multiples of 16, and makes bfloat16.
    """
    import torch

    n, k = b.shape
    if a.is_cuda and k % 16 == 0 and n % 16 == 0 and dtype == torch.bfloat16:
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scale[:, None], scale_b=b_scale[None], bias=bias, out_dtype=dtype, use_fast_accum=False
        )
    return multiplied(a.float() * a_scale[:, None], b.float() * b_scale[:, None], bias).to(dtype)


SPEC = product_spec(
    "fp8_matmul",
    "c = a @ b^T of e4m3 numbers, scaled by rows of both",
    _arrays,
    _reference,
    lambda problem, *given: scaled_product(*given),
    function=lambda problem, config: _FUNCTIONS[problem["biased"], problem["accumulated"]],
    grid=lambda sizes, config, sm_count: blocks(tiles(sizes, config), config, sm_count),
    hints=hints,
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
)
