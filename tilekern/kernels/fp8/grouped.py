"""Products of e4m3 rows, sorted by expert, with each expert's own weight: the forward, and the gradient of the input.

``offsets`` [experts] (int32) are the ends of the experts' rows, as in :mod:`tilekern.kernels.grouped.product`; rows
beyond the last one are not written. Rows are not gathered here: the addresses of single rows spilled on Hopper, and to
copy e4m3 rows before takes a part of the product's time. Both operands are stored along the sums, and each row of ``a``
has a scale. A weight is stored in one of two ways:

    along the sums  b [experts, columns, inner]     a scale for each row of b
    ``turned``      b [blocks, columns, 128]        a scale for each 128 x 128

Blocks are those of :mod:`tilekern.kernels.fp8.grouped_turned`. A layer whose weights are [experts, out, in] reads them
as they are in the forward, and turned for the gradient; one that stores [experts, in, out] the other way round.

The sums of each step, of 64 or 128 terms, are added up in float32 (:mod:`tilekern.kernels.fp8.product`). If a weight is
turned they are scaled then, by one fused multiplication for each sum in place of an addition.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import names_of, spec
from tilekern.kernels.fp8.grouped_turned import SIDE, turned_weights
from tilekern.kernels.fp8.scales import E4M3, scaled_rows
from tilekern.kernels.fp8.space import HAS_FP8, HOLDS_STEPS, STEP_TILES, check_target, holds_steps, sums
from tilekern.kernels.grouped.product import by_experts
from tilekern.kernels.grouped.routing import VARIATIONS, balanced
from tilekern.kernels.grouped.space import BANDS, OFFSETS, dimensions, extents, is_gradient, tiles
from tilekern.kernels.grouped.tiles import group_at, rows_of
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.matmul.space import is_tile, of_tiles, one_for_library, sides, unit_of
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import Array, Config, Constraint, LibraryCall, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# What torch's product asks of both sides of a matrix.
_LIBRARY_UNIT = 16
# Of the compiler's latencies, 1 to 10, that of loads for steps that are scaled. By its own estimate it spilled the sums
# of steps (:mod:`tilekern.kernels.fp8.block_product`).
_LATENCY = 10


def added(total, left, right, scale):
    """Return sums with those of a step, which have a scale of their own."""
    # Sums that begin at zero lose nothing by fast accumulation, which saves an addition of the zeros.
    sums = ct.mma(left, right.transpose(), ct.full(total.shape, 0.0, ct.float32), use_fast_acc=True)
    return total + sums * scale


def operand(array, block, row, depth, tile, tile_k, latency):
    """Load tile ``row`` of one expert's weight, or of one block, as (tile, tile_k)."""
    return ct.reshape(load(array, (block, row, depth), (1, tile, tile_k), True, latency, True), (tile, tile_k))


def _tile(
    item, a, b, a_scale, b_scale, offsets, c, experts, turns, tile_m, tile_n, tile_k, group_m, latency, turned
):  # fmt: skip
    """Compute tile number ``item`` of all places, if it is not empty. A tile's last rows may be the next expert's."""
    place, j = place_and_column(item, c.shape[0] // tile_m + experts, ct.cdiv(c.shape[1], tile_n), group_m)
    expert = group_at(offsets, place, tile_m, experts, turns)
    begin, end = rows_of(offsets, expert, experts, c.shape[0])
    i = place - (begin // tile_m + expert)
    first = begin + i * tile_m
    if first < end:
        view = a.tiled_view((tile_m, tile_k), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_k))
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for step in range(ct.cdiv(a.shape[1], tile_k)):
            left = view.load((first, step), latency=ct.static_eval(latency if latency > 0 else None))
            if ct.static_eval(turned):
                block = expert * ct.cdiv(a.shape[1], SIDE) + step * tile_k // SIDE
                right = operand(b, block, j, step % (SIDE // tile_k), tile_n, tile_k, latency)
                scale = load(b_scale, (block, j * tile_n // SIDE), (1, 1), True, latency, False)
                total = added(total, left, right, scale)
            else:
                total = ct.mma(left, operand(b, expert, j, step, tile_n, tile_k, latency).transpose(), total)
        scales = a_scale.tiled_view((tile_m,), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1,))
        total = total * ct.reshape(scales.load((first,)), (tile_m, 1))
        if ct.static_eval(not turned):
            total = total * load(b_scale, (expert, j), (1, tile_n), True, 0, False)
        ct.store(c.slice(0, begin, end), (i, j), total.astype(c.dtype))


@ct.kernel
def fp8_grouped(
    a, b, a_scale, b_scale, offsets, c, persistent: ConstBool, experts: ConstInt, turns: ConstInt, tile_m: ConstInt,
    tile_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt, turned: ConstBool,
):  # fmt: skip
    """One place a block, or resident blocks that loop; a [rows, inner], a_scale [rows], offsets [experts].

    b is [experts, columns, inner] and b_scale [experts, columns], or, if ``turned``, [blocks, columns, 128] and
    [blocks, columns / 128]; c [rows, columns].
    """
    places = (c.shape[0] // tile_m + experts) * ct.cdiv(c.shape[1], tile_n)
    each_step(
        _tile, places, persistent,
        (a, b, a_scale, b_scale, offsets, c, experts, turns, tile_m, tile_n, tile_k, group_m, latency, turned),
    )  # fmt: skip


def _arrays(problem: Problem) -> Arrays:
    b, b_scale = (
        (("weight_blocks", "columns", str(SIDE)), ("weight_blocks", "across"))
        if problem["turned"]
        else (("experts", "columns", "inner"), ("experts", "columns"))
    )
    return (
        Array("a", E4M3, ("rows", "inner")),
        Array("b", E4M3, b),
        Array("a_scale", "float32", ("rows",), aligned=False),
        Array("b_scale", "float32", b_scale, aligned=False),
        OFFSETS,
        Array("c", "dtype", ROWS, "output"),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw a weight that keeps the variance of rows, from the dtype that a layer has."""
    import torch

    inner, columns, experts = problem["inner"], problem["columns"], problem["experts"]
    dtype = getattr(torch, problem["dtype"])

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    a, a_scale = scaled_rows(normal(problem["rows"], inner))
    if problem["turned"]:
        b, b_scale = turned_weights(normal(experts, inner, columns).mul_(inner**-0.5))
    else:
        b, b_scale = scaled_rows(normal(experts * columns, inner).mul_(inner**-0.5))
        b, b_scale = b.view(experts, columns, inner), b_scale.view(experts, columns)
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": balanced(problem, device)}


def wide_weight(b: Any, b_scale: Any, inner: int, dtype: Any, *, turned: bool) -> Any:
    """Return weights [experts, columns, inner] of a dtype."""
    if not turned:
        return b.to(dtype) * b_scale.to(dtype)[..., None]
    columns = b.shape[1]
    scale = b_scale.to(dtype).repeat_interleave(SIDE, 1)[:, :columns, None]
    wide = (b.to(dtype) * scale).view(-1, cdiv(inner, SIDE), columns, SIDE)
    return wide.transpose(1, 2).reshape(len(wide), columns, -1)[..., :inner]


def grouped_product(a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any, dtype: Any, *, turned: bool) -> Any:
    """Return the product [rows, columns] by torch's operations, of numbers of a dtype; rows of nobody are zeros.

    The host must know the rows of experts.
    """
    rows = a.to(dtype) * a_scale.to(dtype)[:, None]
    return by_experts(rows, wide_weight(b, b_scale, a.shape[1], dtype, turned=turned), offsets)


def _reference(a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any, turned: bool) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    return {"c": grouped_product(a, b, a_scale, b_scale, offsets, torch.float64, turned=turned)}


def _by_torch(a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any) -> tuple[Any]:
    import torch

    if not a.is_cuda:
        return (grouped_product(a, b, a_scale, b_scale, offsets, torch.float32, turned=False).bfloat16(),)
    # Its fast accumulation loses part of long sums, as that of `torch._scaled_mm` does.
    c = torch._scaled_grouped_mm(
        a, b.transpose(1, 2), a_scale, b_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    return (c,)


# The search spaces of both products of experts.


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = extents(problem)
    of_rows = not is_gradient(problem)
    return {
        "implementation": ["tile", "torch"] if of_rows and not problem["turned"] else ["tile"],
        "schedule": ["persistent", "block"],
        "tile_m": sides(min(m, SIDE)),
        "tile_n": sides(min(n, SIDE)),
        "tile_k": [SIDE, 64] if of_rows else [SIDE],
        "group_m": [8, 1],
        "occupancy": [1, 2],
        "num_worker_warps": [0, 8],
        "latency": [0, _LATENCY] if of_rows and not problem["turned"] else [_LATENCY],
    }


def _library_takes(problem: Problem, config: Config, target: Target) -> bool:
    fits = all(problem[name] % _LIBRARY_UNIT == 0 for name in ("inner", "columns"))
    return is_tile(config) or (fits and problem["dtype"] == "bfloat16" and unit_of(target) == "wgmma")


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    stage = (config["tile_m"] + config["tile_n"]) * config["tile_k"]
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


def _suits_size(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether a tile is large, and alone on its SM, on a problem whose tiles of 128 x 128 fill the GPU twice."""
    m, n, _ = extents(problem)
    if min(m, n) < SIDE or problem["experts"] * cdiv(m, SIDE) * cdiv(n, SIDE) < 2 * target.sm_count:
        return True
    return config["occupancy"] == 1 and sums(config) >= SIDE * (64 if unit_of(target) == "mma" else SIDE)


def _has_its_warps(problem: Problem, config: Config, target: Target) -> bool:
    if unit_of(target) == "tcgen05" and not is_gradient(problem):
        return config["num_worker_warps"] == 8
    return config["num_worker_warps"] == 0 or sums(config) >= SIDE * 64


def _suits_depth(problem: Problem, config: Config, target: Target) -> bool:
    return config["tile_k"] == SIDE or unit_of(target) == "mma" or not problem["turned"]


SPACE = Space(
    _axes,
    (
        HAS_FP8,
        one_for_library(_axes),
        Constraint("torch's product is Hopper's, takes multiples of 16, and makes bfloat16", _library_takes),
        HOLDS_STEPS,
        of_tiles("two stages of operands exceed shared memory", _fits_shared),
        of_tiles("a small tile, or a second block on an SM, is for small problems", _suits_size),
        of_tiles("8 warps are for tiles of 128 x 64 or more, and for rows on tcgen05, always", _has_its_warps),
        BANDS,
        of_tiles("128 terms have one scale if the weight is turned: fewer in a step cost more", _suits_depth),
    ),
)


def _config(tile_m: int, tile_n: int, warps: int, latency: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=tile_m, tile_n=tile_n, tile_k=SIDE, group_m=8, occupancy=1,
        num_worker_warps=warps, latency=latency,
    )  # fmt: skip


def default(problem: Problem, target: Target) -> Config:
    """Return the first tile that gives each SM one, or the smallest.

    Raises:
        InputError: the GPU is older than sm_90.
    """
    check_target(target)
    m, n, _ = extents(problem)
    latency = 0 if not is_gradient(problem) and not problem["turned"] else _LATENCY
    fitting = [_config(*tile, latency) for tile in STEP_TILES if tile[0] in sides(m) and tile[1] in sides(n)]
    if unit_of(target) == "tcgen05" and not is_gradient(problem):
        fitting = [config.but(num_worker_warps=8) for config in fitting]
    fitting = [config for config in fitting if holds_steps(problem, config, target)]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds; eight warps share its loads of single elements."""
    return _config(32, 32, 8, 0) if is_gradient(problem) else _config(64, 64, 8, 0).but(tile_k=64)


def experts_spec(name: str, summary: str, flags: tuple[str, ...], arrays: Any, reference: Any, **more: Any) -> Any:
    """Make the spec of a product of experts; the rest is as in :func:`tilekern.kernels.families.tables.spec`."""
    return spec(
        name, summary, dimensions(*flags), arrays, reference,
        grid=lambda sizes, config, sm_count: grid_of(tiles(sizes, config), config, sm_count),
        space=SPACE,
        default=default,
        generic=generic,
        result_dtype=lambda problem: problem["dtype"],
        flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
        timed=("zipf",),
        **more,
    )  # fmt: skip


SPEC = experts_spec(
    "fp8_grouped_matmul",
    "c = a @ b^T of e4m3 numbers, b being the weight of each row's expert, for rows sorted by expert",
    ("turned",),
    _arrays,
    _reference,
    function=fp8_grouped,
    library=lambda problem, config: None if is_tile(config) else LibraryCall(_by_torch, names_of(_arrays(problem))),
    sizes=lambda problem: {
        "weight_blocks": problem["experts"] * cdiv(problem["inner"], SIDE), "across": cdiv(problem["columns"], SIDE),
    },
    constants=lambda problem, config: {"turns": (problem["experts"] - 1).bit_length()},
    given=_inputs,
    variations=VARIATIONS,
)  # fmt: skip
