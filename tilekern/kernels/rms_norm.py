"""RMSNorm forward and backward (Zhang and Sennrich 2019, arXiv:1910.07467), with Hugging Face's order of casts.

Forward, for a row x of n columns: ``rstd = 1 / sqrt(mean(x^2) + eps)``, ``y = weight * cast(x * rstd)``, where the
cast goes to the dtype of x before the weight is applied, as Llama and Qwen3 do.
Backward, with g = dy * weight: ``dx = rstd * (g - x * rstd^2 * mean(g * x))`` and ``dweight = sum over rows of
dy * cast(x * rstd)``. The row is read anyway, so rstd is computed again and nothing but x and weight is saved. Each
block adds up its rows' share of dweight in float32 and stores one row of ``partial``; the spec ``column_sum`` adds
these up in a fixed order, so that the result does not depend on timing.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

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
    Array,
    Config,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
    outputs_of,
)
from tilekern.targets import Target


def _weights(weight, tile_n: ConstInt, chunks: ConstInt, bounded, latency, tma):
    tiles = ()
    for c in ct.static_iter(range(chunks)):
        tiles = tiles + (load(weight, (c,), (tile_n,), bounded, latency, tma),)
    return tiles


def _add_pairs(a, b, c, d):
    """Two sums in one reduction: one barrier among a block's warps in place of two."""
    return a + c, b + d


def _normalise(x, weights, y, step, eps, columns, tile_m, tile_n, chunks, bounded, latency, tma):
    """One step of the forward: ``tile_m`` rows, held in registers as ``chunks`` tiles."""
    tiles = ()
    squares = ct.zeros((tile_m, tile_n), ct.float32)
    for c in ct.static_iter(range(chunks)):
        tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
        squares = squares + tile * tile
        tiles = tiles + (tile,)
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
    for c in ct.static_iter(range(chunks)):
        normal = (tiles[c] * rstd).astype(x.dtype).astype(ct.float32)
        out = (normal * weights[c].astype(ct.float32)).astype(y.dtype)
        ct.store(y, (step, c), out, check_bounds=bounded, allow_tma=tma)


@ct.kernel
def rms_norm_forward_block(
    x, weight, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block."""
    weights = _weights(weight, tile_n, chunks, bounded, latency, tma)
    _normalise(x, weights, y, ct.bid(0), eps, columns, tile_m, tile_n, chunks, bounded, latency, tma)


@ct.kernel
def rms_norm_forward_persistent(
    x, weight, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over steps of rows; the weight stays in registers."""
    weights = _weights(weight, tile_n, chunks, bounded, latency, tma)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        _normalise(x, weights, y, step, eps, columns, tile_m, tile_n, chunks, bounded, latency, tma)


@ct.kernel
def rms_norm_forward_two_pass(
    x, weight, y, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """For rows that registers cannot hold: reads x twice, the second time out of the L2 cache."""
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        squares = ct.zeros((tile_m, tile_n), ct.float32)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            squares = squares + tile * tile
        rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            normal = (tile * rstd).astype(x.dtype).astype(ct.float32)
            scale = load(weight, (c,), (tile_n,), bounded, latency, tma).astype(ct.float32)
            ct.store(y, (step, c), (normal * scale).astype(y.dtype), check_bounds=bounded, allow_tma=tma)


@ct.kernel
def rms_norm_backward_persistent(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over steps of rows; weight and the sums for dweight stay in registers."""
    weights = _weights(weight, tile_n, chunks, bounded, latency, tma)
    sums = ()
    for _ in ct.static_iter(range(chunks)):
        sums = sums + (ct.zeros((tile_m, tile_n), ct.float32),)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        tiles = ()
        gradients = ()
        squares = ct.zeros((tile_m, tile_n), ct.float32)
        products = ct.zeros((tile_m, tile_n), ct.float32)
        for c in ct.static_iter(range(chunks)):
            tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            gradient = load(dy, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            squares = squares + tile * tile
            products = products + gradient * weights[c].astype(ct.float32) * tile
            tiles = tiles + (tile,)
            gradients = gradients + (gradient,)
        square, product = ct.reduce((squares, products), 1, _add_pairs, (0.0, 0.0), keepdims=True)
        rstd = ct.rsqrt(square / columns + eps)
        pull = product * rstd * rstd / columns
        added = ()
        for c in ct.static_iter(range(chunks)):
            slope = (gradients[c] * weights[c].astype(ct.float32) - tiles[c] * pull) * rstd
            ct.store(dx, (step, c), slope.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
            normal = (tiles[c] * rstd).astype(x.dtype).astype(ct.float32)
            added = added + (sums[c] + gradients[c] * normal,)
        sums = added
    for c in ct.static_iter(range(chunks)):
        ct.store(partial, (ct.bid(0), c), ct.sum(sums[c], axis=0, keepdims=True))


@ct.kernel
def rms_norm_backward_two_pass(
    dy, x, weight, dx, partial, eps, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, latency: ConstInt, tma: ConstBool,
):  # fmt: skip
    """For rows that registers cannot hold: reads x and dy twice and adds to the block's own row of ``partial``."""
    for c in range(ct.cdiv(x.shape[1], tile_n)):
        ct.store(partial, (ct.bid(0), c), ct.zeros((1, tile_n), ct.float32))
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        squares = ct.zeros((tile_m, tile_n), ct.float32)
        products = ct.zeros((tile_m, tile_n), ct.float32)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            gradient = load(dy, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            scale = load(weight, (c,), (tile_n,), bounded, latency, tma).astype(ct.float32)
            squares = squares + tile * tile
            products = products + gradient * scale * tile
        square, product = ct.reduce((squares, products), 1, _add_pairs, (0.0, 0.0), keepdims=True)
        rstd = ct.rsqrt(square / columns + eps)
        pull = product * rstd * rstd / columns
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            tile = load(x, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            gradient = load(dy, (step, c), (tile_m, tile_n), bounded, latency, tma).astype(ct.float32)
            scale = load(weight, (c,), (tile_n,), bounded, latency, tma).astype(ct.float32)
            slope = (gradient * scale - tile * pull) * rstd
            ct.store(dx, (step, c), slope.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
            normal = (tile * rstd).astype(x.dtype).astype(ct.float32)
            # The block reads what it alone has stored, so this load must not go through TMA's other memory proxy.
            before = load(partial, (ct.bid(0), c), (1, tile_n), True, 0, False)
            share = ct.sum(gradient * normal, axis=0, keepdims=True)
            ct.store(partial, (ct.bid(0), c), before + share, allow_tma=False)


DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("columns", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("weight_dtype", "dtype"),
)
_ROWS, _PRODUCT = ("rows", "columns"), "dtype*weight_dtype"
_GIVEN = Array("x", "dtype", _ROWS), Array("weight", "weight_dtype", ("columns",))
_EPS = ScalarParameter("eps", "float32")
_FORWARD_ARRAYS = (*_GIVEN, Array("y", _PRODUCT, _ROWS, "output"), _EPS)
_BACKWARD_ARRAYS = (
    Array("dy", _PRODUCT, _ROWS),
    *_GIVEN,
    Array("dx", "dtype", _ROWS, "output"),
    Array("partial", "float32", ("blocks", "columns"), "scratch"),
    _EPS,
)


def _axes(problem: Problem, direction: str) -> dict[str, list[Value]]:
    columns = problem["columns"]
    width, resident = power_of_two(columns), columns <= LONGEST_HELD[direction]
    backward = direction == "backward"
    return {
        "schedule": ["persistent"] if backward or not resident else ["persistent", "block"],
        "passes": passes(columns, direction),
        "tile_m": row_tiles(columns, 2048, 8192 if backward else 16384) if resident else [1],
        "tile_n": sorted({width, min(width, 1024)}) if resident else [1024, 2048],
        "occupancy": [1, 2, 3, 4] if backward else [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
        "latency": [0],
    }


def _implementation(spec: KernelSpec, problem: Problem, config: Config, function: Any) -> Implementation:
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    constants = (
        ("columns", columns),
        ("tile_m", tile_m),
        ("tile_n", tile_n),
        ("chunks", cdiv(columns, tile_n)),
        ("bounded", is_bounded(tile_m, columns, tile_n)),
        ("latency", config["latency"]),
        ("tma", config["tma"]),
    )
    return Implementation(
        function=function,
        parameters=spec.parameters(problem),
        constants=constants,
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["rows"], tile_m), config, sm_count),
        hints=hints(config),
    )


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    function = rms_norm_forward_block if config["schedule"] == "block" else rms_norm_forward_persistent
    if config["passes"] == 2:
        function = rms_norm_forward_two_pass
    return _implementation(FORWARD, problem, config, function)


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    function = rms_norm_backward_two_pass if config["passes"] == 2 else rms_norm_backward_persistent
    return _implementation(BACKWARD, problem, config, function)


def _default(problem: Problem, target: Target, direction: str) -> Config:
    columns, backward = problem["columns"], direction == "backward"
    resident, width = columns <= HELD_BY_DEFAULT, power_of_two(columns)
    tma = target.capability >= 90
    return Config(
        schedule="persistent",
        passes=1 if resident else 2,
        tile_m=max(1, min(64, (2048 if backward else 4096) // width)) if resident else 1,
        tile_n=width if resident and width <= 4096 else 1024,
        occupancy=2 if backward and width <= 4096 else 1 if backward else 4 if width <= 4096 else 2,
        num_worker_warps=8 if backward and tma else 0,
        tma=tma,
        latency=0,
    )


def _generic(problem: Problem) -> Config:
    width = min(1024, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", passes=2 if problem["columns"] > 4 * width else 1,
        tile_m=max(1, 512 // width), tile_n=width, occupancy=1, num_worker_warps=0, tma=False, latency=0,
    )  # fmt: skip


def _random(shape: tuple[int, ...], dtype: str, generator: Any, device: str) -> Any:
    import torch

    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(getattr(torch, dtype))


def _inputs_forward(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    rows, columns = problem["rows"], problem["columns"]
    return {
        "x": _random((rows, columns), problem["dtype"], generator, device),
        "weight": 1 + _random((columns,), problem["weight_dtype"], generator, device) / 4,
        "eps": 1e-6,
    }


def _inputs_backward(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    dtype = promoted(problem["dtype"], problem["weight_dtype"])
    dy = _random((problem["rows"], problem["columns"]), dtype, generator, device)
    return {"dy": dy, **_inputs_forward(problem, generator, device)}


def reference_forward(x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The formula in float64 but for the cast of the normalised row, which is part of what the op means."""
    import torch

    wide = x.double()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return {"y": normal.to(x.dtype).double() * weight.double()}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The gradients of :func:`reference_forward`, the cast's own slope taken as 1, as autograd does."""
    import torch

    wide, gradient = x.double(), dy.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    pulled = gradient * weight.double()
    dx = rstd * (pulled - wide * rstd.square() * (pulled * wide).mean(-1, keepdim=True))
    dweight = (gradient * (wide * rstd).to(x.dtype).double()).sum(0)
    return {"dx": dx, "dweight": dweight}


def _bytes(problem: Problem, matrices: int, weights: int) -> int:
    """``matrices`` of x's dtype and one of the product's, and ``weights`` rows of the weight's."""
    product = ITEM_BYTES[promoted(problem["dtype"], problem["weight_dtype"])]
    row = problem["rows"] * (matrices * ITEM_BYTES[problem["dtype"]] + product)
    return int(problem["columns"] * (row + weights * ITEM_BYTES[problem["weight_dtype"]]))


FORWARD = KernelSpec(
    name="rms_norm_forward",
    summary="y = weight * cast(x / sqrt(mean(x^2) + eps)), row by row",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(
        lambda problem: _axes(problem, "forward"), (fits_registers(2), TMA_NEEDS_HOPPER, PASSES_MATCH, FEW_CHUNKS)
    ),
    ops=("rms_norm",),
    implement=_implement_forward,
    default=lambda problem, target: _default(problem, target, "forward"),
    generic=_generic,
    inputs=_inputs_forward,
    outputs=outputs_of(_FORWARD_ARRAYS),
    reference=reference_forward,
    bytes_moved=lambda problem: _bytes(problem, 1, 1),
    flops=lambda problem: 4 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    arrays=_FORWARD_ARRAYS,
)

BACKWARD = KernelSpec(
    name="rms_norm_backward",
    summary="gradients of rms_norm: dx, and dweight as one float32 row for each block",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(
        lambda problem: _axes(problem, "backward"), (fits_registers(4), TMA_NEEDS_HOPPER, PASSES_MATCH, FEW_CHUNKS)
    ),
    ops=("rms_norm",),
    implement=_implement_backward,
    default=lambda problem, target: _default(problem, target, "backward"),
    generic=_generic,
    inputs=_inputs_backward,
    outputs=outputs_of(_BACKWARD_ARRAYS),
    reference=reference_backward,
    bytes_moved=lambda problem: _bytes(problem, 2, 2),
    flops=lambda problem: 10 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
    results=lambda outputs: {"dx": outputs["dx"], "dweight": outputs["partial"].double().sum(0)},
    arrays=_BACKWARD_ARRAYS,
)

SPECS = (FORWARD, BACKWARD)
