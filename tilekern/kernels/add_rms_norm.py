"""A residual sum and its RMSNorm in one pass over memory, forward and backward.

Forward, for rows r (residual) and x of n columns: ``total = cast(r + x)``, and with ``rstd = 1 / sqrt(mean(total^2) +
eps)``, ``y = weight * cast(total * rstd)`` (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467). Both casts go to the
dtype of the arrays and stand where Hugging Face's decoder layers have them: the norm reads the rounded sum.
Backward, with g = dy * weight: ``dx = dtotal + rstd * (g - total * rstd^2 * mean(g * total))``, where dtotal is what
reaches the sum past the norm. It is the gradient of r as well as of x. ``dweight = sum over rows of dy * cast(total *
rstd)``: each block stores its rows' share as one row of ``partial``, which the spec ``column_sum`` adds up in a fixed
order. Nothing but total and weight is saved; every matrix is read or written once.
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
    Constraint,
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


def _read(array, step, tile_m, tile_n, chunks, bounded, tma):
    """One step of rows as a tuple of tiles, in the array's dtype: half the registers of float32 until they are used."""
    tiles = ()
    for c in ct.static_iter(range(chunks)):
        tiles = tiles + (load(array, (step, c), (tile_m, tile_n), bounded, 0, tma),)
    return tiles


def _weights(weight, tile_n, chunks, bounded, tma):
    tiles = ()
    for c in ct.static_iter(range(chunks)):
        tiles = tiles + (load(weight, (c,), (tile_n,), bounded, 0, tma),)
    return tiles


def _added(left, right, dtype):
    """The sum as it is stored."""
    return (left.astype(ct.float32) + right.astype(ct.float32)).astype(dtype)


def _add_pairs(a, b, c, d):
    """Two sums in one reduction: one barrier among a block's warps in place of two."""
    return a + c, b + d


def _add_and_normalise(residual, x, weights, eps, total, y, step, columns, tile_m, tile_n, chunks, bounded, tma):
    """One step of the forward: ``tile_m`` rows, held in registers; every load is issued before the first use."""
    left = _read(residual, step, tile_m, tile_n, chunks, bounded, tma)
    right = _read(x, step, tile_m, tile_n, chunks, bounded, tma)
    tiles = ()
    squares = ct.zeros((tile_m, tile_n), ct.float32)
    for c in ct.static_iter(range(chunks)):
        tile = _added(left[c], right[c], total.dtype)
        ct.store(total, (step, c), tile, check_bounds=bounded, allow_tma=tma)
        wide = tile.astype(ct.float32)
        squares = squares + wide * wide
        tiles = tiles + (tile,)
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
    for c in ct.static_iter(range(chunks)):
        normal = (tiles[c].astype(ct.float32) * rstd).astype(total.dtype).astype(ct.float32)
        out = (normal * weights[c].astype(ct.float32)).astype(y.dtype)
        ct.store(y, (step, c), out, check_bounds=bounded, allow_tma=tma)


@ct.kernel
def add_rms_norm_forward_block(
    residual, x, weight, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One step of rows a block."""
    # Its launch overlaps the end of the kernel that writes x.
    ct.grid_dependency_control_wait()
    weights = _weights(weight, tile_n, chunks, bounded, tma)
    _add_and_normalise(residual, x, weights, eps, total, y, ct.bid(0), columns, tile_m, tile_n, chunks, bounded, tma)


@ct.kernel
def add_rms_norm_forward_persistent(
    residual, x, weight, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over steps of rows; the weight stays in registers."""
    ct.grid_dependency_control_wait()
    weights = _weights(weight, tile_n, chunks, bounded, tma)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        _add_and_normalise(residual, x, weights, eps, total, y, step, columns, tile_m, tile_n, chunks, bounded, tma)


@ct.kernel
def add_rms_norm_forward_two_pass(
    residual, x, weight, eps, total, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """For rows that registers cannot hold: adds residual and x twice, the second time out of the L2 cache."""
    ct.grid_dependency_control_wait()
    shape = (tile_m, tile_n)
    for step in range(ct.bid(0), ct.cdiv(x.shape[0], tile_m), ct.num_blocks(0)):
        squares = ct.zeros(shape, ct.float32)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            left, right = load(residual, (step, c), shape, bounded, 0, tma), load(x, (step, c), shape, bounded, 0, tma)
            wide = _added(left, right, total.dtype).astype(ct.float32)
            squares = squares + wide * wide
        rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
        for c in range(ct.cdiv(x.shape[1], tile_n)):
            left, right = load(residual, (step, c), shape, bounded, 0, tma), load(x, (step, c), shape, bounded, 0, tma)
            tile = _added(left, right, total.dtype)
            ct.store(total, (step, c), tile, check_bounds=bounded, allow_tma=tma)
            normal = (tile.astype(ct.float32) * rstd).astype(total.dtype).astype(ct.float32)
            scale = load(weight, (c,), (tile_n,), bounded, 0, tma).astype(ct.float32)
            ct.store(y, (step, c), (normal * scale).astype(y.dtype), check_bounds=bounded, allow_tma=tma)


@ct.kernel
def add_rms_norm_backward_persistent(
    dtotal, dy, total, weight, eps, dx, partial, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over steps of rows; weight and the sums for dweight stay in registers."""
    ct.grid_dependency_control_wait()
    weights = _weights(weight, tile_n, chunks, bounded, tma)
    sums = ()
    for _ in ct.static_iter(range(chunks)):
        sums = sums + (ct.zeros((tile_m, tile_n), ct.float32),)
    for step in range(ct.bid(0), ct.cdiv(total.shape[0], tile_m), ct.num_blocks(0)):
        tiles = _read(total, step, tile_m, tile_n, chunks, bounded, tma)
        gradients = _read(dy, step, tile_m, tile_n, chunks, bounded, tma)
        straight = _read(dtotal, step, tile_m, tile_n, chunks, bounded, tma)
        squares = ct.zeros((tile_m, tile_n), ct.float32)
        products = ct.zeros((tile_m, tile_n), ct.float32)
        for c in ct.static_iter(range(chunks)):
            tile = tiles[c].astype(ct.float32)
            squares = squares + tile * tile
            products = products + gradients[c].astype(ct.float32) * weights[c].astype(ct.float32) * tile
        square, product = ct.reduce((squares, products), 1, _add_pairs, (0.0, 0.0), keepdims=True)
        rstd = ct.rsqrt(square / columns + eps)
        pull = product * rstd * rstd / columns
        added = ()
        for c in ct.static_iter(range(chunks)):
            tile, gradient = tiles[c].astype(ct.float32), gradients[c].astype(ct.float32)
            slope = straight[c].astype(ct.float32) + (gradient * weights[c].astype(ct.float32) - tile * pull) * rstd
            ct.store(dx, (step, c), slope.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
            added = added + (sums[c] + gradient * (tile * rstd).astype(total.dtype).astype(ct.float32),)
        sums = added
    for c in ct.static_iter(range(chunks)):
        ct.store(partial, (ct.bid(0), c), ct.sum(sums[c], axis=0, keepdims=True))


@ct.kernel
def add_rms_norm_backward_two_pass(
    dtotal, dy, total, weight, eps, dx, partial, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    chunks: ConstInt, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """For rows that registers cannot hold: reads total and dy twice and adds to the block's own row of ``partial``."""
    ct.grid_dependency_control_wait()
    shape = (tile_m, tile_n)
    for c in range(ct.cdiv(total.shape[1], tile_n)):
        ct.store(partial, (ct.bid(0), c), ct.zeros((1, tile_n), ct.float32))
    for step in range(ct.bid(0), ct.cdiv(total.shape[0], tile_m), ct.num_blocks(0)):
        squares, products = ct.zeros(shape, ct.float32), ct.zeros(shape, ct.float32)
        for c in range(ct.cdiv(total.shape[1], tile_n)):
            tile = load(total, (step, c), shape, bounded, 0, tma).astype(ct.float32)
            gradient = load(dy, (step, c), shape, bounded, 0, tma).astype(ct.float32)
            squares = squares + tile * tile
            products = products + gradient * load(weight, (c,), (tile_n,), bounded, 0, tma).astype(ct.float32) * tile
        square, product = ct.reduce((squares, products), 1, _add_pairs, (0.0, 0.0), keepdims=True)
        rstd = ct.rsqrt(square / columns + eps)
        pull = product * rstd * rstd / columns
        for c in range(ct.cdiv(total.shape[1], tile_n)):
            straight = load(dtotal, (step, c), shape, bounded, 0, tma).astype(ct.float32)
            tile = load(total, (step, c), shape, bounded, 0, tma).astype(ct.float32)
            gradient = load(dy, (step, c), shape, bounded, 0, tma).astype(ct.float32)
            scale = load(weight, (c,), (tile_n,), bounded, 0, tma).astype(ct.float32)
            slope = straight + (gradient * scale - tile * pull) * rstd
            ct.store(dx, (step, c), slope.astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
            normal = (tile * rstd).astype(total.dtype).astype(ct.float32)
            # The block reads what it alone has stored, so this load must not go through TMA's other memory proxy.
            before = load(partial, (ct.bid(0), c), (1, tile_n), True, 0, False)
            share = ct.sum(gradient * normal, axis=0, keepdims=True)
            ct.store(partial, (ct.bid(0), c), before + share, allow_tma=False)


_SCHEDULES = Constraint(
    "one block a step has no loop in which a block's own TMA loads could run ahead",
    lambda problem, config, target: config["schedule"] == "persistent" or not config["tma"],
)


def _axes(problem: Problem, direction: str) -> dict[str, list[Value]]:
    columns = problem["columns"]
    width = power_of_two(columns)
    resident, backward = columns <= LONGEST_HELD[direction], direction == "backward"
    return {
        "schedule": ["persistent"] if backward or not resident else ["persistent", "block"],
        "passes": passes(columns, direction),
        "tile_m": row_tiles(columns, 2048, 8192) if resident else [1],
        "tile_n": sorted({width, min(width, 1024)}) if resident else [1024, 2048],
        "occupancy": [1, 2, 3, 4] if backward else [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


_ROWS, _NORMED = ("rows", "columns"), "dtype*weight_dtype"
_WEIGHT, _EPS = Array("weight", "weight_dtype", ("columns",)), ScalarParameter("eps", "float32")
_FORWARD_ARRAYS = (
    Array("residual", "dtype", _ROWS), Array("x", "dtype", _ROWS), _WEIGHT, _EPS,
    Array("total", "dtype", _ROWS, "output"), Array("y", _NORMED, _ROWS, "output"),
)  # fmt: skip
_BACKWARD_ARRAYS = (
    Array("dtotal", "dtype", _ROWS), Array("dy", _NORMED, _ROWS), Array("total", "dtype", _ROWS), _WEIGHT, _EPS,
    Array("dx", "dtype", _ROWS, "output"), Array("partial", "float32", ("blocks", "columns"), "scratch"),
)  # fmt: skip


def _implementation(spec: KernelSpec, problem: Problem, config: Config, function: Any) -> Implementation:
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    return Implementation(
        function=function,
        parameters=spec.parameters(problem),
        constants=(
            ("columns", columns),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("chunks", cdiv(columns, tile_n)),
            ("bounded", is_bounded(tile_m, columns, tile_n)),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(cdiv(sizes["rows"], tile_m), config, sm_count),
        hints=hints(config),
        dependent=True,
    )


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    persistent = add_rms_norm_forward_two_pass if config["passes"] == 2 else add_rms_norm_forward_persistent
    function = persistent if config["schedule"] == "persistent" else add_rms_norm_forward_block
    return _implementation(FORWARD, problem, config, function)


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    function = add_rms_norm_backward_two_pass if config["passes"] == 2 else add_rms_norm_backward_persistent
    return _implementation(BACKWARD, problem, config, function)


def _default(problem: Problem, target: Target, direction: str) -> Config:
    columns, backward = problem["columns"], direction == "backward"
    resident, width = columns <= HELD_BY_DEFAULT, power_of_two(columns)
    hopper, wide = target.capability >= 90, problem["dtype"] == "float32"
    return Config(
        schedule="persistent",
        passes=1 if resident else 2,
        tile_m=max(1, min(64, (2048 if backward else 4096) // width)) if resident else 1,
        tile_n=width if resident and width <= 4096 else 1024,
        occupancy=(2 if width <= 4096 else 1) if backward else 4 if width <= 4096 else 2,
        # Four warps would spill what long rows of float32 hold.
        num_worker_warps=8 if (backward and hopper) or (resident and width > 4096 and wide) else 0,
        tma=hopper,
    )


def _generic(problem: Problem) -> Config:
    width = min(1024, power_of_two(problem["columns"]))
    return Config(
        schedule="persistent", passes=2 if problem["columns"] > 2 * width else 1, tile_m=max(1, 512 // width),
        tile_n=width, occupancy=1, num_worker_warps=0, tma=False,
    )  # fmt: skip


def _inputs(arrays: tuple[Any, ...], problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    def random(array: Array) -> Any:
        drawn = torch.randn(array.shape_in(problem), generator=generator, device=device)
        return drawn.to(getattr(torch, array.dtype_in(problem)))

    given = (array for array in arrays if isinstance(array, Array) and array.role == "input")
    drawn = {array.name: random(array) for array in given}
    return {**drawn, "weight": 1 + drawn["weight"] / 4, "eps": 1e-6}


def reference_forward(residual: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The formula in float64 but for the casts of the sum and of the normalised row, which belong to the op."""
    import torch

    total = residual.double() + x.double()
    wide = total.to(x.dtype).double()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return {"total": total, "y": normal.to(x.dtype).double() * weight.double()}


def reference_backward(dtotal: Any, dy: Any, total: Any, weight: Any, eps: float) -> dict[str, Any]:
    """The gradients of :func:`reference_forward`, the casts' own slopes taken as 1, as autograd does."""
    import torch

    wide, gradient = total.double(), dy.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    pulled = gradient * weight.double()
    dx = dtotal.double() + rstd * (pulled - wide * rstd.square() * (pulled * wide).mean(-1, keepdim=True))
    return {"dx": dx, "dweight": (gradient * (wide * rstd).to(total.dtype).double()).sum(0)}


def _bytes(problem: Problem, vectors: int) -> int:
    """Three matrices of the sum's dtype, one of the norm's, and vectors of the weight's."""
    item, weight = ITEM_BYTES[problem["dtype"]], ITEM_BYTES[problem["weight_dtype"]]
    normed = ITEM_BYTES[promoted(problem["dtype"], problem["weight_dtype"])]
    return int(problem["columns"] * (problem["rows"] * (3 * item + normed) + vectors * weight))


def _spec(direction: str, summary: str, live: int, arrays: tuple[Any, ...], **rest: Any) -> KernelSpec:
    return KernelSpec(
        name=f"add_rms_norm_{direction}",
        summary=summary,
        module=__name__,
        dimensions=(
            Dimension("rows", "bucketed"),
            Dimension("columns", "exact"),
            Dimension("dtype", "dtype"),
            Dimension("weight_dtype", "dtype"),
        ),
        space=Space(
            lambda problem: _axes(problem, direction),
            (fits_registers(live), TMA_NEEDS_HOPPER, PASSES_MATCH, _SCHEDULES, FEW_CHUNKS),
        ),
        ops=("fused_add_rms_norm",),
        default=lambda problem, target: _default(problem, target, direction),
        generic=_generic,
        inputs=lambda problem, generator, device: _inputs(arrays, problem, generator, device),
        outputs=outputs_of(arrays),
        result_dtype=lambda problem: problem["dtype"],
        arrays=arrays,
        **rest,
    )


FORWARD = _spec(
    "forward",
    "total = residual + x and y = weight * cast(total / sqrt(mean(total^2) + eps)), row by row",
    2,
    _FORWARD_ARRAYS,
    implement=_implement_forward,
    reference=reference_forward,
    bytes_moved=lambda problem: _bytes(problem, 1),
    flops=lambda problem: 5 * problem["rows"] * problem["columns"],
)

BACKWARD = _spec(
    "backward",
    "gradients of add_rms_norm: dx, which is dresidual too, and dweight as one float32 row for each block",
    4,
    _BACKWARD_ARRAYS,
    implement=_implement_backward,
    reference=reference_backward,
    bytes_moved=lambda problem: _bytes(problem, 2),
    flops=lambda problem: 11 * problem["rows"] * problem["columns"],
    results=lambda outputs: {"dx": outputs["dx"], "dweight": outputs["partial"].double().sum(0)},
)

SPECS = (FORWARD, BACKWARD)
