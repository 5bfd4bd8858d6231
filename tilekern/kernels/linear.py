"""Matrix products: ``c = epilogue(op(a) @ op(b) + bias)``, summed in float32 and rounded once.

One spec serves a linear layer's three products. With x [tokens, in], weight [out, in] and dy [tokens, out]:

    forward          y = x @ weight^T      a = x,  b = weight, b_transposed
    input gradient   dx = dy @ weight      a = dy, b = weight
    weight gradient  dweight = dy^T @ x    a = dy, b = x,      a_transposed

``a`` is stored [rows, inner] in all of them, so that ``rows`` is the number of tokens whichever side it is of the
product, and one bucketed dimension lets a record serve nearby token counts. Epilogues: gelu in the form with tanh
(Hendrycks and Gimpel 2016, arXiv:1606.08415; cuTile has no erf) and silu; with both, silu follows gelu.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.linear_space import SPACE, default, generic, is_tile, sizes_of, tiles
from tilekern.kernels.tiles import ConstBool, ConstInt, load
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    LibraryCall,
    ModelShape,
    Problem,
    Value,
)
from tilekern.targets import Target

_LOG2_E = 1.4426950408889634
# sqrt(8 / pi), and the same times 0.044715: gelu's tanh as a sigmoid of a polynomial.
_GELU_LINEAR, _GELU_CUBIC = 1.5957691216057308, 0.07135481627260025


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


def _product(
    a, b, bias, c, item, tile_m, tile_n, tile_k, group_m, latency, a_transposed, b_transposed, gelu_tanh, silu
):
    """Tile number ``item`` of the result."""
    i, j = _place(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
    depth = ct.static_eval(0 if a_transposed else 1)
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for step in range(ct.cdiv(a.shape[depth], tile_k)):
        left = _operand(a, i, step, tile_m, tile_k, a_transposed, latency)
        right = _operand(b, j, step, tile_n, tile_k, not b_transposed, latency)
        total = ct.mma(left, right.transpose(), total)
    z = _finish(total, bias, j, tile_n, gelu_tanh, silu)
    ct.store(c, (i, j), z.astype(c.dtype))


@ct.kernel
def matrix_product_block(
    a, b, c, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt,
    a_transposed: ConstBool, b_transposed: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
):  # fmt: skip
    """One tile a block."""
    _product(
        a, b, None, c, ct.bid(0), tile_m, tile_n, tile_k, group_m, latency, a_transposed, b_transposed, gelu_tanh, silu
    )


@ct.kernel
def matrix_product_persistent(
    a, b, c, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt,
    a_transposed: ConstBool, b_transposed: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles, so that the next tile's loads overlap this one's epilogue."""
    tiles = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
    for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
        _product(
            a, b, None, c, item, tile_m, tile_n, tile_k, group_m, latency, a_transposed, b_transposed, gelu_tanh, silu
        )


@ct.kernel
def matrix_product_bias_block(
    a, b, bias, c, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt,
    a_transposed: ConstBool, b_transposed: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
):  # fmt: skip
    """One tile a block, with a bias."""
    _product(
        a, b, bias, c, ct.bid(0), tile_m, tile_n, tile_k, group_m, latency, a_transposed, b_transposed, gelu_tanh, silu
    )


@ct.kernel
def matrix_product_bias_persistent(
    a, b, bias, c, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt,
    a_transposed: ConstBool, b_transposed: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles, with a bias."""
    tiles = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
    for item in range(ct.bid(0), tiles, ct.num_blocks(0)):
        _product(
            a, b, bias, c, item, tile_m, tile_n, tile_k, group_m, latency, a_transposed, b_transposed, gelu_tanh, silu
        )


_FUNCTIONS = {
    ("block", False): matrix_product_block,
    ("block", True): matrix_product_bias_block,
    ("persistent", False): matrix_product_persistent,
    ("persistent", True): matrix_product_bias_persistent,
}
_FLAGS = ("a_transposed", "b_transposed", "gelu_tanh", "silu")

DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("inner", "exact"),
    Dimension("columns", "exact"),
    Dimension("a_transposed", "flag"),
    Dimension("b_transposed", "flag"),
    Dimension("biased", "flag"),
    Dimension("gelu_tanh", "flag"),
    Dimension("silu", "flag"),
    Dimension("dtype", "dtype"),
)


def _library(problem: Problem) -> LibraryCall:
    def call(a: Any, b: Any, bias: Any = None) -> tuple[Any]:
        import torch

        left = a.t() if problem["a_transposed"] else a
        right = b.t() if problem["b_transposed"] else b
        c = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        if problem["gelu_tanh"]:
            c = torch.nn.functional.gelu(c, approximate="tanh")
        return (torch.nn.functional.silu(c) if problem["silu"] else c,)

    return LibraryCall(call, ("a", "b", "bias") if problem["biased"] else ("a", "b"))


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
        ArrayParameter("c", dtype, 2, columns, "output"),
    ]
    tuned = ("tile_m", "tile_n", "tile_k", "group_m", "latency")
    return Implementation(
        function=_FUNCTIONS[config["schedule"], problem["biased"]],
        parameters=tuple(arrays),
        constants=(*((name, config[name]) for name in tuned), *((name, problem[name]) for name in _FLAGS)),
        grid=lambda sizes, sm_count: _grid(sizes, config, sm_count),
        hints={name: config[name] or None for name in ("occupancy", "num_ctas", "num_worker_warps")},
    )


def _operand_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    _, n, k = sizes_of(problem)
    shapes: dict[str, tuple[int, ...]] = {
        "a": (problem["rows"], problem["inner"]),
        "b": (n, k) if problem["b_transposed"] else (k, n),
    }
    return shapes | ({"bias": (n,)} if problem["biased"] else {})


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    # Weights of the size that keeps the variance of a row: an epilogue then sees values near 0.
    scale = {"a": 1.0, "b": sizes_of(problem)[2] ** -0.5, "bias": 1.0}
    return {
        name: (torch.randn(shape, generator=generator, device=device) * scale[name]).to(
            getattr(torch, problem["dtype"])
        )
        for name, shape in _operand_shapes(problem).items()
    }


def reference(
    a: Any, b: Any, bias: Any = None, *, a_transposed: bool, b_transposed: bool, gelu_tanh: bool, silu: bool
) -> dict[str, Any]:
    """The formula in float64."""
    import torch

    left, right = a.double(), b.double()
    c = (left.t() if a_transposed else left) @ (right.t() if b_transposed else right)
    if bias is not None:
        c = c + bias.double()
    if gelu_tanh:
        c = torch.nn.functional.gelu(c, approximate="tanh")
    return {"c": torch.nn.functional.silu(c) if silu else c}


def _bytes(problem: Problem) -> int:
    m, n, k = sizes_of(problem)
    elements = m * k + k * n + m * n + (n if problem["biased"] else 0)
    return int(elements * ITEM_BYTES[problem["dtype"]])


def _flops(problem: Problem) -> int:
    m, n, k = sizes_of(problem)
    return 2 * m * n * k


def workloads(shape: ModelShape, tokens: int, dtype: str, target: Target) -> list[dict[str, Value]]:
    """The forward products of every MLP, into it and out of it."""
    flags = dict.fromkeys(("a_transposed", "biased", "gelu_tanh", "silu"), False) | {"b_transposed": True}
    sizes = ((shape.hidden, shape.intermediate), (shape.intermediate, shape.hidden))
    return [{"rows": tokens, "inner": k, "columns": n, "dtype": dtype, **flags} for k, n in sizes]


SPEC = KernelSpec(
    name="matmul",
    summary="c = epilogue(op(a) @ op(b) + bias), summed in float32",
    module=__name__,
    dimensions=DIMENSIONS,
    space=SPACE,
    ops=("linear",),
    workloads=workloads,
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
