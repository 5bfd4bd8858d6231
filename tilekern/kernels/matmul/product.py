"""Matrix products: ``c = addend + epilogue(op(a) @ op(b) + bias)``, summed in float32 and rounded once.

One spec serves a linear layer's three products. With x [tokens, in], weight [out, in] and dy [tokens, out]:

    forward          y = x @ weight^T      a = x,  b = weight, b_transposed
    input gradient   dx = dy @ weight      a = dy, b = weight
    weight gradient  dweight = dy^T @ x    a = dy, b = x,      a_transposed

``a`` is stored [rows, inner] in all of them, so that ``rows`` is the number of tokens whichever side it is of the
product, and one bucketed dimension lets a record serve nearby token counts. Epilogues: gelu in the form with tanh
(Hendrycks and Gimpel 2016, arXiv:1606.08415; cuTile has no erf) and silu; with both, silu follows gelu.

Where a problem is ``accumulated``, ``c`` may be the memory of ``addend``, so that the product adds to what is there: a
tile of ``c`` is stored by the block that read the same tile of ``addend``, after it did, and no other reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import cuda.tile as ct

from tilekern.kernels.matmul.space import SPACE, default, generic, is_tile, sizes_of, tiles
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    LibraryCall,
    Problem,
)

_LOG2_E = 1.4426950408889634
# sqrt(8 / pi), and the same times 0.044715: gelu's tanh as a sigmoid of a polynomial.
_GELU_LINEAR, _GELU_CUBIC = 1.5957691216057308, 0.07135481627260025
# Kernels index with 32 bits.
MOST_ELEMENTS = (1 << 31) - 1
# Where the rows of an array begin for loads of full width, and what a store by TMA is made of.
_ALIGNMENT_BYTES = 16


def _sigmoid(x):
    """1 / (1 + exp(-x)) by the hardware's exponential and reciprocal."""
    grown = 1.0 + ct.exp2(x * -_LOG2_E, flush_to_zero=True)
    return ct.truediv(1.0, grown, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def _place(item, down, across, group):
    """Row and column of a tile: bands of ``group`` rows of tiles, each column by column, so that L2 holds operands."""
    band = group * across
    first = item // band * group
    height = min(down - first, group)
    inside = item % band
    return first + inside % height, inside // height


# A public name, for other kernels: renamed where it is written, the records of this one would be stale.
place_and_column = _place


def _operand(array, outer, step, tile_outer, tile_k, depth_first, latency):
    """A tile [tile_outer, tile_k] of an array that is stored that way or, where ``depth_first``, transposed."""
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
    """A tile of ``c``; TMA writes 16 bytes at a time, so the end of rows that are not whole is stored without it."""
    if ct.static_eval(whole_rows) or (j + 1) * tile_n <= c.shape[1]:
        ct.store(c, (i, j), tile)
    else:
        ct.store(c, (i, j), tile, allow_tma=False)


def _tile(
    a, b, bias, addend, c, item, tile_m, tile_n, tile_k, group_m, latency, from_addend, a_transposed, b_transposed,
    gelu_tanh, silu, whole_rows,
):  # fmt: skip
    """Tile number ``item`` of the result; its sums begin at the addend, or at zero."""
    i, j = _place(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
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

    b is [columns, inner] where ``b_transposed``. Where ``a_transposed`` the sums are over rows: b is [rows, columns]
    and c [inner, columns]. ``whole_rows`` says that the rows of c are whole 16 bytes.
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
    """Added to what there is: the addend, of the shape of c; others as in :func:`matmul_plain`."""
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
    Dimension("inner", "exact"),
    Dimension("columns", "exact"),
    Dimension("a_transposed", "flag"),
    Dimension("b_transposed", "flag"),
    Dimension("biased", "flag"),
    Dimension("gelu_tanh", "flag"),
    Dimension("silu", "flag"),
    Dimension("accumulated", "flag"),
    Dimension("dtype", "dtype"),
)


def sizes(rows: int, inner: int, columns: int, dtype: Any, on: Collection[str]) -> dict[str, Any]:
    """The values of the dimensions in their order, with the flags that ``on`` names set."""
    flags = {d.name: d.name in on for d in DIMENSIONS if d.kind == "flag"}
    return {"rows": rows, "inner": inner, "columns": columns, **flags, "dtype": dtype}


def by_cublas(a: Any, b: Any, out: Any, on: Collection[str]) -> Any:
    """``out = op(a) @ op(b)``, or ``out += op(a) @ op(b)`` where ``accumulated``; ``on`` names the flags that are set.

    The arrays lie as in the problem of these flags; ``out`` is given back.
    """
    import torch

    left, right = (x.t() if name in on else x for x, name in zip((a, b), _LAYOUT, strict=True))
    return out.addmm_(left, right) if "accumulated" in on else torch.mm(left, right, out=out)


def by_winner(plan_for: Callable[..., Any], a: Any, b: Any, out: Any, on: Collection[str]) -> Any:
    """As :func:`by_cublas`, by what was found fastest for the problem: a kernel of this module or cuBLAS.

    cuBLAS too where ``plan_for`` gives nothing, and for arrays that no kernel reads in wide loads.
    """
    (rows, inner), plan = a.shape, None
    if all(_is_wide(x) for x in (a, b, out)):
        plan = plan_for(SPEC, a.device, *sizes(rows, inner, out.shape[1], a.dtype, on).values())
    if plan is None or not is_tile(plan.config):
        return by_cublas(a, b, out, on)
    plan.launch(a.get_device(), a, b, *([out] if "accumulated" in on else []), out)
    return out


def _is_wide(x: Any) -> bool:
    """Whether a matrix meets what the aligned variant assumes, and has no more elements than kernels can count."""
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

    return LibraryCall(call, tuple(_operand_shapes(problem)), updates="addend" if problem["accumulated"] else None)


def _grid(problem: Problem, config: Config, sm_count: int) -> int:
    # A grid counts blocks; each takes as many SMs as its cluster has.
    resident = sm_count * config["occupancy"] // config["num_ctas"]
    steps = tiles(problem, config)
    return max(1, min(steps, resident)) if config["schedule"] == "persistent" else steps


def _implement(problem: Problem, config: Config) -> Implementation | LibraryCall:
    if not is_tile(config):
        return _library(problem)
    dtype, inner, columns = problem["dtype"], problem["inner"], problem["columns"]
    tokens_last = problem["a_transposed"] and problem["b_transposed"]
    arrays = [
        ArrayParameter("a", dtype, 2, inner),
        ArrayParameter("b", dtype, 2, None if tokens_last else inner if problem["b_transposed"] else columns),
        *([ArrayParameter("bias", dtype, 1, columns)] if problem["biased"] else []),
        *([ArrayParameter("addend", dtype, 2, columns)] if problem["accumulated"] else []),
        ArrayParameter("c", dtype, 2, columns, "output"),
    ]
    return Implementation(
        function=_FUNCTIONS[problem["biased"], problem["accumulated"]],
        parameters=tuple(arrays),
        constants=(
            ("persistent", config["schedule"] == "persistent"),
            *((name, config[name]) for name in ("tile_m", "tile_n", "tile_k", "group_m", "latency")),
            ("from_addend", config["sums_begin"] == "addend"),
            *((name, problem[name]) for name in (*_LAYOUT, *_ACTIVATIONS)),
            ("whole_rows", columns * ITEM_BYTES[dtype] % _ALIGNMENT_BYTES == 0),
        ),
        grid=lambda sizes, sm_count: _grid(sizes, config, sm_count),
        hints={name: config[name] or None for name in ("occupancy", "num_ctas", "num_worker_warps")},
    )


def _operand_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    m, n, k = sizes_of(problem)
    shapes: dict[str, tuple[int, ...]] = {
        "a": (problem["rows"], problem["inner"]),
        "b": (n, k) if problem["b_transposed"] else (k, n),
    }
    if problem["biased"]:
        shapes["bias"] = (n,)
    return shapes | ({"addend": (m, n)} if problem["accumulated"] else {})


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    # Weights of the size that keeps the variance of a row: an epilogue then sees values near 0.
    scales = {"b": sizes_of(problem)[2] ** -0.5}
    # In the problem's dtype from the start: the head of a language model is a GiB without a float32 copy.
    dtype = getattr(torch, problem["dtype"])
    return {
        name: torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scales.get(name, 1.0))
        for name, shape in _operand_shapes(problem).items()
    }


def reference(
    a: Any,
    b: Any,
    bias: Any = None,
    addend: Any = None,
    *,
    a_transposed: bool,
    b_transposed: bool,
    gelu_tanh: bool,
    silu: bool,
) -> dict[str, Any]:
    """The formula in float64."""
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


def _bytes(problem: Problem) -> int:
    m, n, k = sizes_of(problem)
    elements = m * k + k * n + m * n * (1 + problem["accumulated"]) + n * problem["biased"]
    return int(elements * ITEM_BYTES[problem["dtype"]])


def _flops(problem: Problem) -> int:
    m, n, k = sizes_of(problem)
    return 2 * m * n * k


SPEC = KernelSpec(
    name="matmul",
    summary="c = addend + epilogue(op(a) @ op(b) + bias), summed in float32",
    module=__name__,
    dimensions=DIMENSIONS,
    space=SPACE,
    implement=_implement,
    default=default,
    generic=generic,
    inputs=_inputs,
    outputs=lambda problem, blocks: {"c": (sizes_of(problem)[:2], problem["dtype"])},
    reference=reference,
    bytes_moved=_bytes,
    flops=_flops,
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (SPEC,)
