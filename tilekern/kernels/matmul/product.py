"""Matrix products: ``c = addend + epilogue(op(a) @ op(b) + bias)``, summed in float32 and rounded once.

One spec serves a linear layer's three products. With x [tokens, in], weight [out, in] and dy [tokens, out]:

    forward          y = x @ weight^T      a = x,  b = weight, b_transposed
    input gradient   dx = dy @ weight      a = dy, b = weight
    weight gradient  dweight = dy^T @ x    a = dy, b = x,      a_transposed

``a`` is stored [rows, inner] in all of them: ``rows`` is always the number of tokens, and the one bucketed dimension.
Epilogues: gelu in the form with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415; cuTile has no erf) and silu; with
both, silu follows gelu.

If a problem is ``accumulated``, ``c`` may be the memory of ``addend``: only the block that stores a tile of ``c`` reads
this tile of ``addend``, and reads it first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, tensors
from tilekern.kernels.families.tables import names_of, spec
from tilekern.kernels.matmul.space import SPACE, blocks, default, generic, hints, is_tile, sizes_of, tiles
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import ITEM_BYTES, Array, Config, Dimension, LibraryCall, Problem

_LOG2_E = 1.4426950408889634
# sqrt(8 / pi), and the same times 0.044715: gelu's tanh as a sigmoid of a polynomial.
_GELU_LINEAR, _GELU_CUBIC = 1.5957691216057308, 0.07135481627260025
# Kernels index with 32 bits.
MOST_ELEMENTS = (1 << 31) - 1
# The alignment of rows for loads of full width, and the unit of a store by TMA.
_ALIGNMENT_BYTES = 16


def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) by the hardware's exponential and reciprocal."""
    grown = 1.0 + ct.exp2(x * -_LOG2_E, flush_to_zero=True)
    return ct.truediv(1.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def place_and_column(item, down, across, group):
    """Return a tile's row and column: bands of ``group`` rows of tiles, column by column: operands stay in L2."""
    band = group * across
    first = item // band * group
    height = min(down - first, group)
    inside = item % band
    return first + inside % height, inside // height


def _operand(array, outer, step, tile_outer, tile_k, depth_first, latency):
    """Load a tile [tile_outer, tile_k] of an array stored in that order or (``depth_first``) transposed."""
    if ct.static_eval(depth_first):
        return load(array, (step, outer), (tile_k, tile_outer), True, latency, True).transpose()
    return load(array, (outer, step), (tile_outer, tile_k), True, latency, True)


def _finish(z, bias, column, tile_n, gelu_tanh, silu):
    if ct.static_eval(bias is not None):
        z = z + load(bias, (column,), (tile_n,), True, 0, True).astype(ct.float32)
    if ct.static_eval(gelu_tanh):
        z = z * _sigmoid(z * (_GELU_LINEAR + _GELU_CUBIC * (z * z)))
    if ct.static_eval(silu):
        z = z * _sigmoid(z)
    return z


def _store(c, i, j, tile, tile_n, whole_rows):
    """Store a tile of ``c``; TMA writes whole 16 bytes, so the ends of other rows are stored without it."""
    if ct.static_eval(whole_rows) or (j + 1) * tile_n <= c.shape[1]:
        ct.store(c, (i, j), tile)
    else:
        ct.store(c, (i, j), tile, allow_tma=False)


def _tile(
    a, b, bias, addend, c, item, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed, b_transposed,
    gelu_tanh, silu, whole_rows,
):  # fmt: skip
    """Compute tile number ``item`` of the result; its sums begin at the addend, or at zero."""
    i, j = place_and_column(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
    depth = ct.static_eval(0 if a_transposed else 1)
    if ct.static_eval(from_addend):
        total = load(addend, (i, j), (tile_m, tile_n), True, 0, True).astype(ct.float32)
    else:
        total = ct.zeros((tile_m, tile_n), ct.float32)
    for step in range(ct.cdiv(a.shape[depth], tile_k)):
        left = _operand(a, i, step, tile_m, tile_k, a_transposed, latency)
        right = _operand(b, j, step, tile_n, tile_k, not b_transposed, latency)
        total = ct.mma(left, right.transpose(), total)
    z = _finish(total, bias, j, tile_n, gelu_tanh, silu)
    if ct.static_eval(addend is not None and not from_addend):
        z = z + load(addend, (i, j), (tile_m, tile_n), True, 0, True).astype(ct.float32)
    _store(c, i, j, z.astype(c.dtype), tile_n, whole_rows)


def _product(
    a, b, bias, addend, c, persistent, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
    b_transposed, gelu_tanh, silu, whole_rows,
):  # fmt: skip
    """One tile a block, or resident blocks that loop, so that a tile's loads overlap the epilogue before it."""
    if ct.static_eval(persistent):
        tiles = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
        for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
            _tile(
                a, b, bias, addend, c, item, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
                b_transposed, gelu_tanh, silu, whole_rows,
            )  # fmt: skip
    else:
        _tile(
            a, b, bias, addend, c, ct.bid(0), tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
            b_transposed, gelu_tanh, silu, whole_rows,
        )  # fmt: skip


@ct.kernel
def matmul_plain(
    a, b, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt,
    latency: ConstInt, from_addend: ConstBool, a_transposed: ConstBool, b_transposed: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """The product and its activations; a [rows, inner], b [inner, columns], c [rows, columns].

    b is [columns, inner] if ``b_transposed``. If ``a_transposed``, the sums are over rows: b is [rows, columns]
    and c [inner, columns]. ``whole_rows`` means that the rows of c are whole 16 bytes.
    """
    _product(
        a, b, None, None, c, persistent, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
        b_transposed, gelu_tanh, silu, whole_rows,
    )  # fmt: skip


@ct.kernel
def matmul_biased(
    a, b, bias, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt,
    latency: ConstInt, from_addend: ConstBool, a_transposed: ConstBool, b_transposed: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """With a bias [columns]; others as in :func:`matmul_plain`."""
    _product(
        a, b, bias, None, c, persistent, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
        b_transposed, gelu_tanh, silu, whole_rows,
    )  # fmt: skip


@ct.kernel
def matmul_accumulated(
    a, b, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt,
    latency: ConstInt, from_addend: ConstBool, a_transposed: ConstBool, b_transposed: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """The product added to the addend, of the shape of c; others as in :func:`matmul_plain`."""
    _product(
        a, b, None, addend, c, persistent, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
        b_transposed, gelu_tanh, silu, whole_rows,
    )  # fmt: skip


@ct.kernel
def matmul_biased_accumulated(
    a, b, bias, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt,
    group_m: ConstInt, latency: ConstInt, from_addend: ConstBool, a_transposed: ConstBool, b_transposed: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """With a bias [columns], added to the addend, of the shape of c; others as in :func:`matmul_plain`."""
    _product(
        a, b, bias, addend, c, persistent, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed,
        b_transposed, gelu_tanh, silu, whole_rows,
    )  # fmt: skip


# By whether there is a bias, and whether there is an addend.
_FUNCTIONS = {
    (False, False): matmul_plain,
    (True, False): matmul_biased,
    (False, True): matmul_accumulated,
    (True, True): matmul_biased_accumulated,
}
_LAYOUT = ("a_transposed", "b_transposed")
_ACTIVATIONS = ("gelu_tanh", "silu")

DIMENSIONS = (
    Dimension("rows", "bucketed"),
    *(Dimension(name, "exact") for name in ("inner", "columns")),
    *(Dimension(name, "flag") for name in (*_LAYOUT, "biased", *_ACTIVATIONS, "accumulated")),
    Dimension("dtype", "dtype"),
)


def sizes(rows: int, inner: int, columns: int, dtype: Any, on: Collection[str]) -> dict[str, Any]:
    """Return the values of the dimensions in their order, with the flags in ``on`` set."""
    flags = {d.name: d.name in on for d in DIMENSIONS if d.kind == "flag"}
    return {"rows": rows, "inner": inner, "columns": columns, **flags, "dtype": dtype}


def by_cublas(a: Any, b: Any, out: Any, on: Collection[str]) -> Any:
    """Compute ``out = op(a) @ op(b)``, or ``out += op(a) @ op(b)`` if ``accumulated``, and return ``out``.

    The flags in ``on`` are set; the arrays are laid out as in the problem with these flags.
    """
    import torch

    left, right = (x.t() if name in on else x for x, name in zip((a, b), _LAYOUT, strict=True))
    return out.addmm_(left, right) if "accumulated" in on else torch.mm(left, right, out=out)


def by_winner(plan_for: Callable[..., Any], a: Any, b: Any, out: Any, on: Collection[str]) -> Any:
    """Compute :func:`by_cublas`'s result by the problem's winner: a kernel of this module or cuBLAS.

    cuBLAS also runs if ``plan_for`` returns None, and for arrays that no kernel reads in wide loads.
    """
    (rows, inner), plan = a.shape, None
    if all(_is_wide(x) for x in (a, b, out)):
        plan = plan_for(SPEC, a.device, *sizes(rows, inner, out.shape[1], a.dtype, on).values())
    if plan is None or not is_tile(plan.config):
        return by_cublas(a, b, out, on)
    plan.launch(a.get_device(), a, b, *([out] if "accumulated" in on else []), out)
    return out


def _is_wide(x: Any) -> bool:
    """Return whether a matrix meets the aligned variant's assumptions, and kernels can index all its elements."""
    reach, step = x.stride()
    starts = x.data_ptr() % _ALIGNMENT_BYTES == 0 and reach * x.element_size() % _ALIGNMENT_BYTES == 0
    return bool(starts and step == 1 and x.shape[0] * reach <= MOST_ELEMENTS)


def _library(problem: Problem) -> LibraryCall:
    on = [d.name for d in DIMENSIONS if d.kind == "flag" and problem[d.name]]
    plain = not problem["biased"] and not any(problem[name] for name in _ACTIVATIONS)

    def call(a: Any, b: Any, *more: Any) -> tuple[Any]:
        import torch

        if problem["accumulated"] and plain:
            return (by_cublas(a, b, more[0], on),)
        left, right = (x.t() if name in on else x for x, name in zip((a, b), _LAYOUT, strict=True))
        c = torch.addmm(more[0], left, right) if problem["biased"] else torch.mm(left, right)
        if problem["gelu_tanh"]:
            c = torch.nn.functional.gelu(c, approximate="tanh")
        if problem["silu"]:
            c = torch.nn.functional.silu(c)
        return (more[-1].add_(c) if problem["accumulated"] else c,)

    return LibraryCall(call, names_of(_arrays(problem)), updates="addend" if problem["accumulated"] else None)


def _arrays(problem: Problem) -> Arrays:
    m, k = ("inner", "rows") if problem["a_transposed"] else ("rows", "inner")
    return (
        Array("a", "dtype", ("rows", "inner")),
        Array("b", "dtype", ("columns", k) if problem["b_transposed"] else (k, "columns")),
        *([Array("bias", "dtype", ("columns",))] if problem["biased"] else []),
        *([Array("addend", "dtype", (m, "columns"))] if problem["accumulated"] else []),
        Array("c", "dtype", (m, "columns"), "output"),
    )


def _constants(problem: Problem, config: Config) -> dict[str, bool]:
    row_bytes = problem["columns"] * ITEM_BYTES[problem["dtype"]]
    return {"from_addend": config["sums_begin"] == "addend", "whole_rows": row_bytes % _ALIGNMENT_BYTES == 0}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    # Weights that keep the variance of a row: an epilogue then gets values near 0.
    scales = {"b": sizes_of(problem)[2] ** -0.5}
    # In the problem's dtype from the start: the head of a language model is a GiB without a float32 copy.
    dtype = getattr(torch, problem["dtype"])
    return {
        x.name: torch.randn(x.shape_in(problem), generator=generator, device=device, dtype=dtype).mul_(
            scales.get(x.name, 1.0)
        )
        for x in tensors(_arrays(problem), "input")
    }


def reference(
    a: Any, b: Any, bias: Any = None, addend: Any = None, *, a_transposed: bool, b_transposed: bool, gelu_tanh: bool,
    silu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64."""
    import torch

    left, right = a.double(), b.double()
    c = (left.t() if a_transposed else left) @ (right.t() if b_transposed else right)
    if bias is not None:
        c = c + bias.double()
    if gelu_tanh:
        c = torch.nn.functional.gelu(c, approximate="tanh")
    if silu:
        c = torch.nn.functional.silu(c)
    return {"c": c if addend is None else c + addend.double()}


SPEC = spec(
    "matmul",
    "c = addend + epilogue(op(a) @ op(b) + bias), summed in float32",
    DIMENSIONS,
    _arrays,
    reference,
    function=lambda problem, config: _FUNCTIONS[problem["biased"], problem["accumulated"]],
    library=lambda problem, config: None if is_tile(config) else _library(problem),
    constants=_constants,
    grid=lambda sizes, config, sm_count: blocks(tiles(sizes, config), config, sm_count),
    hints=hints,
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
)

SPECS = (SPEC,)
