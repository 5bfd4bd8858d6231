"""PolyNorm (Zhuo et al. 2024, arXiv:2411.03884): a sum of three normalised powers, statistics in float32.

With rms(u) the root mean square of a row of n numbers, ``sqrt(mean(u^2) + eps)``, and four parameters,
``y = w0 * x^3 / rms(x^3) + w1 * x^2 / rms(x^2) + w2 * x / rms(x) + b``.
Backward, where r is 1 / rms(x^p) and w the weight of the power p: each power adds
``w * p * x^(p-1) * (r * dy - x^p * r^3 * mean(dy * x^p))`` to dx; each row adds ``r * sum(dy * x^p)`` to the gradient
of w, and sum(dy) to that of b. A block adds its rows' shares up and stores the four of them as its row of ``partial``,
which the spec ``column_sum`` adds up.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.common.arrays import gradients
from tilekern.kernels.common.rows import add_up, forward, in_blocks
from tilekern.kernels.tiles import (
    FEW_CHUNKS,
    HELD_BY_DEFAULT,
    LONGEST_HELD,
    PASSES_MATCH,
    TMA_NEEDS_HOPPER,
    ConstBool,
    ConstInt,
    fits_registers,
    grid_of,
    hints,
    is_bounded,
    load,
    passes,
    power_of_two,
    promoted,
    row_tiles,
)
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)
from tilekern.targets import Target


def _number(array, n):
    """One number of a vector, [1, 1] in float32."""
    return ct.load(array, (n,), (1,)).astype(ct.float32).reshape((1, 1))


def _square(tiles, weights, known):
    return (tiles[0] * tiles[0],)


def _higher_squares(tiles, weights, known):
    """Of the square and the cube."""
    square = tiles[0] * tiles[0]
    return square * square, square * square * square


def _norms(rows, columns, eps, w0, w1, w2, bias):
    """The weights of x^3, x^2 and x over the rms of each, [tile_m, 1]."""
    one = add_up(_square, 1, rows, (), False)[0]
    two, three = add_up(_higher_squares, 2, rows, (), False)
    return (
        w0 * ct.rsqrt(three / columns + eps), w1 * ct.rsqrt(two / columns + eps), w2 * ct.rsqrt(one / columns + eps)
    )  # fmt: skip


def _polynomial(tiles, weights, known):
    x = tiles[0]
    return (((known[0] * x + known[1]) * x + known[2]) * x + known[7],)


@ct.kernel
def poly_norm_forward(
    x, weight, bias, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], weight [3], bias [1]."""
    scalars = (eps, _number(weight, 0), _number(weight, 1), _number(weight, 2), _number(bias, 0))
    forward(
        _norms, _polynomial, (x,), (), (y,), scalars, columns, tile_m, tile_n, chunks, persistent, long, bounded, tma
    )  # fmt: skip


def _add_seven(a, b, c, d, e, f, g, h, i, j, k, m, n, o):
    return a + h, b + i, c + j, d + k, e + m, f + n, g + o


def _terms(sums, dy, x):
    """Sums of squares of the three powers, of their products with dy, and of dy, with another tile added."""
    square, product = x * x, dy * x
    return (
        sums[0] + square, sums[1] + square * square, sums[2] + square * square * square, sums[3] + product,
        sums[4] + product * x, sums[5] + product * square, sums[6] + dy,
    )  # fmt: skip


def _nothing(tile_m, tile_n):
    sums = ()
    for _ in ct.static_iter(range(7)):
        sums = sums + (ct.zeros((tile_m, tile_n), ct.float32),)
    return sums


def _read(dy, x, step, c, tile_m, tile_n, bounded, tma):
    """A tile of both in the dtypes that they are stored in."""
    return (
        load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma), load(x, (step, c), (tile_m, tile_n), bounded, 0, tma)
    )  # fmt: skip


def _slopes(sums, columns, eps, weight):
    """The factors of dx, a polynomial of x with dy in some terms, from a step's sums; and the gradients' shares."""
    r1 = ct.rsqrt(sums[0] / columns + eps)
    r2 = ct.rsqrt(sums[1] / columns + eps)
    r3 = ct.rsqrt(sums[2] / columns + eps)
    w1, w2, w3 = weight[2] * r1, 2.0 * weight[1] * r2, 3.0 * weight[0] * r3
    pulls = (
        w1 * sums[3] * r1 * r1 / columns, w2 * sums[4] * r2 * r2 / columns, w3 * sums[5] * r3 * r3 / columns
    )  # fmt: skip
    return (w1, w2, w3), pulls, (sums[5] * r3, sums[4] * r2, sums[3] * r1, sums[6])


def _inside(shares, x, step, tile_m):
    """Shares, but 0 of rows beyond the last, whose r is infinite where eps is 0."""
    if ct.static_eval(tile_m == 1):
        return shares
    inside = step * tile_m + ct.arange(tile_m, dtype=ct.int32).reshape((tile_m, 1)) < x.shape[0]
    kept = ()
    for n in ct.static_iter(range(4)):
        kept = kept + (ct.where(inside, shares[n], 0.0),)
    return kept


def _dx(dy, x, factors, pulls):
    square = x * x
    direct = (factors[2] * x + factors[1]) * x + factors[0]
    return dy * direct - x * ((pulls[2] * square + pulls[1]) * square + pulls[0])


@ct.kernel
def poly_norm_backward(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks; dy, x and dx [rows, columns], weight [3], partial [blocks, 4]."""
    weights = (_number(weight, 0), _number(weight, 1), _number(weight, 2))
    one = ct.zeros((tile_m, 1), ct.float32)
    totals = (one, one, one, one)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        sums, held = _nothing(tile_m, tile_n), ()
        if ct.static_eval(long):
            for c in range(ct.cdiv(x.shape[1], tile_n)):
                above, below = _read(dy, x, step, c, tile_m, tile_n, bounded, tma)
                sums = _terms(sums, above.astype(ct.float32), below.astype(ct.float32))
        else:
            for c in ct.static_iter(range(chunks)):
                held = held + (_read(dy, x, step, c, tile_m, tile_n, bounded, tma),)
            for c in ct.static_iter(range(chunks)):
                sums = _terms(sums, held[c][0].astype(ct.float32), held[c][1].astype(ct.float32))
        added = ct.reduce(sums, 1, _add_seven, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), keepdims=True)
        factors, pulls, shares = _slopes(added, columns, eps, weights)
        shares = _inside(shares, x, step, tile_m)
        totals = (totals[0] + shares[0], totals[1] + shares[1], totals[2] + shares[2], totals[3] + shares[3])
        if ct.static_eval(long):
            for c in range(ct.cdiv(x.shape[1], tile_n)):
                above, below = _read(dy, x, step, c, tile_m, tile_n, bounded, tma)
                made = _dx(above.astype(ct.float32), below.astype(ct.float32), factors, pulls)
                ct.store(dx, (step, c), made.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
        else:
            for c in ct.static_iter(range(chunks)):
                made = _dx(held[c][0].astype(ct.float32), held[c][1].astype(ct.float32), factors, pulls)
                ct.store(dx, (step, c), made.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
    for n in ct.static_iter(range(4)):
        ct.store(partial, (ct.bid(0), n), ct.sum(totals[n], axis=0, keepdims=True), allow_tma=False)


_POWERS = (3, 2, 1)


def reference_forward(x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """The formula in float64."""
    wide, y = x.double(), bias.double()
    for w, p in zip(weight.double(), _POWERS, strict=True):
        y = y + w * wide**p * (wide ** (2 * p)).mean(-1, keepdim=True).add(eps).rsqrt()
    return {"y": y}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The gradients of :func:`reference_forward`, which are the same for any bias.

    Those of weight and bias are one vector: alone, a sum of terms of both signs may be 0 but for its rounding.
    """
    import torch

    found = gradients(reference_forward, {"y": dy}, x=x, weight=weight, bias=weight[:1], eps=eps)
    return {"dx": found["dx"], "sums": torch.cat((found["dweight"], found["dbias"]))}


def _wide(problem: Problem) -> str:
    """The dtype of y."""
    return promoted(problem["dtype"], problem["weight_dtype"])


def _parameters(problem: Problem, *, backward: bool) -> tuple[ArrayParameter | ScalarParameter, ...]:
    columns, dtype, weight_dtype = problem["columns"], problem["dtype"], problem["weight_dtype"]
    x, eps = ArrayParameter("x", dtype, 2, columns), ScalarParameter("eps", "float32")
    weight = ArrayParameter("weight", weight_dtype, 1, 3)
    if backward:
        dy, dx = ArrayParameter("dy", _wide(problem), 2, columns), ArrayParameter("dx", dtype, 2, columns, "output")
        return dy, x, weight, dx, ArrayParameter("partial", "float32", 2, 4, "output"), eps
    bias, y = ArrayParameter("bias", weight_dtype, 1, 1), ArrayParameter("y", _wide(problem), 2, columns, "output")
    return x, weight, bias, y, eps


def _axes(problem: Problem, direction: str) -> dict[str, list[Value]]:
    columns, backward = problem["columns"], direction == "backward"
    width, resident = power_of_two(columns), columns <= LONGEST_HELD[direction]
    return {
        "schedule": ["persistent"] if backward or not resident else ["persistent", "block"],
        "passes": passes(columns, direction),
        "tile_m": row_tiles(columns, 2048, 8192) if resident else [1],
        "tile_n": sorted({width, min(width, 1024)}) if resident else [1024, 2048],
        "occupancy": [1, 2, 3, 4] if backward else [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


def _implement(function: Any, backward: bool, problem: Problem, config: Config) -> Implementation:
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    schedule = () if backward else (("persistent", config["schedule"] == "persistent"),)
    return Implementation(
        function=function,
        parameters=_parameters(problem, backward=backward),
        constants=(
            ("columns", columns),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("chunks", cdiv(columns, tile_n)),
            *schedule,
            ("long", config["passes"] == 2),
            ("bounded", is_bounded(tile_m, columns, tile_n)),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["rows"], tile_m), config, sm_count),
        hints=hints(config),
    )


def _default(backward: bool, problem: Problem, target: Target) -> Config:
    columns = problem["columns"]
    in_block = None if backward else in_blocks(problem, 8)
    if in_block is not None:
        return in_block
    resident, width = columns <= HELD_BY_DEFAULT, power_of_two(columns)
    if backward and 1024 <= width <= 4096 and problem["dtype"] != "float32":
        # Seven sums are many registers: short chunks leave some for another block.
        return Config(
            schedule="persistent", passes=1, tile_m=2048 // min(width, 2048), tile_n=1024, occupancy=3,
            num_worker_warps=0, tma=target.capability >= 90,
        )  # fmt: skip
    return Config(
        schedule="persistent",
        passes=1 if resident else 2,
        tile_m=max(1, min(64, (2048 if backward else 4096) // width)) if resident else 1,
        tile_n=width if resident and width <= 4096 else 1024,
        occupancy=(2 if backward else 4) if width <= 4096 else 1 if backward else 2,
        num_worker_warps=8 if resident and width > 2048 else 0,
        tma=target.capability >= 90,
    )


def _generic(problem: Problem) -> Config:
    width = min(256, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", passes=2 if problem["columns"] > width else 1, tile_m=max(1, 256 // width), tile_n=width,
        occupancy=1, num_worker_warps=0, tma=False,
    )  # fmt: skip


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Of either direction, each of which takes some."""
    import torch

    def normal(*shape: int, dtype: str) -> Any:
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))

    shape, weight_dtype = (problem["rows"], problem["columns"]), problem["weight_dtype"]
    return {
        "x": normal(*shape, dtype=problem["dtype"]), "weight": normal(3, dtype=weight_dtype), "eps": 1e-6
    }  # fmt: skip


def _forward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    bias = torch.randn((1,), generator=generator, device=device).to(getattr(torch, problem["weight_dtype"]))
    return _inputs(problem, generator, device) | {"bias": bias}


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    dy = torch.randn((problem["rows"], problem["columns"]), generator=generator, device=device)
    return {"dy": dy.to(getattr(torch, _wide(problem)))} | _inputs(problem, generator, device)


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    shape = (problem["rows"], problem["columns"])
    return {"dx": (shape, problem["dtype"]), "partial": ((blocks, 4), "float32")}


def _results(outputs: dict[str, Any]) -> dict[str, Any]:
    """The shares of all blocks, added up."""
    return {"dx": outputs["dx"], "sums": outputs["partial"].double().sum(0)}


def _bytes(problem: Problem, *, backward: bool) -> int:
    """Partial sums count as the one row that is made of them."""
    elements, size = problem["rows"] * problem["columns"], ITEM_BYTES[problem["dtype"]]
    wide, weight = ITEM_BYTES[_wide(problem)], ITEM_BYTES[problem["weight_dtype"]]
    return int(elements * (wide + 2 * size) + 3 * weight + 16 if backward else elements * (wide + size) + 4 * weight)


_DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("columns", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("weight_dtype", "dtype"),
)
_TMA_PAYS = Constraint(
    "one block a step has no loop in which its own TMA loads could run ahead, which pays for short rows alone",
    lambda problem, config, target: (
        config["schedule"] == "persistent" or not config["tma"] or problem["columns"] <= 1024
    ),
)
FORWARD = KernelSpec(
    name="poly_norm_forward",
    summary="y = the sum of x^3, x^2 and x, each divided by its root mean square and weighted, and a bias",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(
        lambda problem: _axes(problem, "forward"),
        (fits_registers(2), TMA_NEEDS_HOPPER, _TMA_PAYS, PASSES_MATCH, FEW_CHUNKS),
    ),
    implement=lambda problem, config: _implement(poly_norm_forward, False, problem, config),
    default=lambda problem, target: _default(False, problem, target),
    generic=_generic,
    inputs=_forward_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["rows"], problem["columns"]), _wide(problem))},
    reference=reference_forward,
    bytes_moved=lambda problem: _bytes(problem, backward=False),
    flops=lambda problem: 14 * problem["rows"] * problem["columns"],
    result_dtype=_wide,
)
BACKWARD = KernelSpec(
    name="poly_norm_backward",
    summary="gradients of poly_norm: dx, and those of weight and bias as one float32 row of four for each block",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(
        lambda problem: _axes(problem, "backward"),
        (fits_registers(5), TMA_NEEDS_HOPPER, PASSES_MATCH, FEW_CHUNKS),
    ),
    implement=lambda problem, config: _implement(poly_norm_backward, True, problem, config),
    default=lambda problem, target: _default(True, problem, target),
    generic=_generic,
    inputs=_backward_inputs,
    outputs=_outputs,
    reference=reference_backward,
    results=_results,
    bytes_moved=lambda problem: _bytes(problem, backward=True),
    flops=lambda problem: 34 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: str(problem["dtype"]),
)
SPECS = (FORWARD, BACKWARD)
