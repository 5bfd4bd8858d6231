"""Products of e4m3 matrices with scales of blocks, ``c = a @ b^T + bias + addend``, as DeepSeek-V3 trains.

Both operands are stored along the sums, and each 128 terms of a row of ``a`` have a scale. Of ``b``, 128 x 128 numbers
of a weight have one, or each 128 terms of a row (:mod:`tilekern.kernels.fp8.block_scales`). With x [tokens, in], weight
[out, in] and dy [tokens, out], where ``'`` is a turned matrix:

    forward          y = x @ weight^T          a = x,   b = weight
    input gradient   dx = dy @ weight'^T       a = dy,  b = weight'
    weight gradient  dweight = dy' @ x'^T      a = dy', b = x', over_rows: both with a scale for each 128 tokens

``rows`` is always the number of tokens, and the one bucketed dimension. If a problem is ``accumulated``, ``c`` may be
the memory of ``addend``: only the block that stores a tile of ``c`` reads this tile of ``addend``, and reads it first.

A step sums 128 terms on the tensor core, then adds ``scale_a * scale_b * sums`` to float32 sums: one fused
multiplication for each sum against a weight, a multiplication more over tokens. A scale is a power of two, so it rounds
nothing. Hopper's tensor cores keep 14 bits of the largest number that an instruction adds, 32 terms and the sum before.
Four of them are off by at most 4 * 33 * 2^-13 = 1.6 % of the largest term or partial sum of their step, if all that is
cut off has one sign; no error grows from step to step. Steps are added up with an error of 2^-24 of each partial sum.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.fp8.block_scales import SIDE, UNIT, block_rows, block_squares, wide_rows, wide_squares
from tilekern.kernels.fp8.product import arrays_of, multiplied, operands, product_spec, whole_rows
from tilekern.kernels.fp8.space import (
    HAS_FP8,
    HOLDS_STEPS,
    STEP_TILES,
    check_target,
    holds_steps,
    sizes_of,
    sums,
    threads,
    tiles,
)
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.matmul.space import is_tile, of_tiles, one_for_library, sides, unit_of
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

# Of the compiler's latencies, 1 to 10. By its own estimate it adds a step's sums some steps later, and spills those
# between; by 8 and 10 it adds them at once, and loads five or six steps ahead in place of two.
_LATENCY = 10


def _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, group_m, squares, whole_rows):
    """Compute tile number ``item`` of the result."""
    i, j = place_and_column(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for step in range(ct.cdiv(a.shape[1], SIDE)):
        left = load(a, (i, step), (tile_m, SIDE), True, _LATENCY, True)
        right = load(b, (j, step), (tile_n, SIDE), True, _LATENCY, True)
        # Sums that begin at zero lose nothing by fast accumulation, which saves an addition of the zeros.
        sums = ct.mma(left, right.transpose(), ct.zeros((tile_m, tile_n), ct.float32), use_fast_acc=True)
        down = ct.reshape(load(a_scale, (step, i), (1, tile_m), True, _LATENCY, True), (tile_m, 1))
        if ct.static_eval(squares):
            across = load(b_scale, (j * tile_n // SIDE, step), (1, 1), True, _LATENCY, False)
            total = total + sums * (down * across)
        else:
            across = load(b_scale, (step, j), (1, tile_n), True, _LATENCY, True)
            total = total + sums * down * across
    if ct.static_eval(bias is not None):
        total = total + load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
    if ct.static_eval(addend is not None):
        total = total + load(addend, (i, j), (tile_m, tile_n), True, 0, True).astype(ct.float32)
    # TMA writes whole 16 bytes, so the ends of other rows are stored without it.
    if ct.static_eval(whole_rows) or (j + 1) * tile_n <= c.shape[1]:
        ct.store(c, (i, j), total.astype(c.dtype))
    else:
        ct.store(c, (i, j), total.astype(c.dtype), allow_tma=False)


def _product(
    a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, group_m, squares, whole_rows
):  # fmt: skip
    if ct.static_eval(persistent):
        count = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
        for item in range(ct.bid(0), count, ct.num_blocks(0)):
            _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, group_m, squares, whole_rows)
    else:
        _tile(a, b, a_scale, b_scale, bias, addend, c, ct.bid(0), tile_m, tile_n, group_m, squares, whole_rows)


@ct.kernel
def fp8_block_plain(
    a, b, a_scale, b_scale, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    squares: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; a [m, k], b [n, k], a_scale [k / 128, m], c [m, n].

    b_scale is [n / 128, k / 128] for ``squares``, else [k / 128, n]. ``whole_rows`` means that the rows of c are whole
    16 bytes.
    """
    _product(a, b, a_scale, b_scale, None, None, c, persistent, tile_m, tile_n, group_m, squares, whole_rows)


@ct.kernel
def fp8_block_biased(
    a, b, a_scale, b_scale, bias, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    squares: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """With a bias [n]; others as in :func:`fp8_block_plain`."""
    _product(a, b, a_scale, b_scale, bias, None, c, persistent, tile_m, tile_n, group_m, squares, whole_rows)


@ct.kernel
def fp8_block_accumulated(
    a, b, a_scale, b_scale, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    squares: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """With an addend [m, n], which may be ``c``; others as in :func:`fp8_block_plain`."""
    _product(a, b, a_scale, b_scale, None, addend, c, persistent, tile_m, tile_n, group_m, squares, whole_rows)


@ct.kernel
def fp8_block_biased_accumulated(
    a, b, a_scale, b_scale, bias, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt,
    group_m: ConstInt, squares: ConstBool, whole_rows: ConstBool,
):  # fmt: skip
    """With both."""
    _product(a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, group_m, squares, whole_rows)


# By whether there are a bias and an addend.
_FUNCTIONS = {
    (False, False): fp8_block_plain, (True, False): fp8_block_biased, (False, True): fp8_block_accumulated,
    (True, True): fp8_block_biased_accumulated,
}  # fmt: skip


def _sizes(problem: Problem) -> dict[str, int]:
    _, n, k = sizes_of(problem)
    return {"steps": cdiv(k, SIDE), "squares_across": cdiv(n, SIDE)}


def _arrays(problem: Problem) -> Arrays:
    m, b_scale = "rows", Array("b_scale", "float32", ("squares_across", "steps"), aligned=False)
    if problem["over_rows"]:
        m, b_scale = "inner", Array("b_scale", "float32", ("steps", "columns"))
    return arrays_of(problem, Array("a_scale", "float32", ("steps", m)), b_scale)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    left, right = operands(problem, generator, device)
    a, a_scale = block_rows(left)
    b, b_scale = block_rows(right) if problem["over_rows"] else block_squares(right)
    return {
        "a": a, "b": b, "a_scale": a_scale[:, : len(a)],
        "b_scale": b_scale[:, : len(b)] if problem["over_rows"] else b_scale,
    }  # fmt: skip


def _reference(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any = None, addend: Any = None, *, over_rows: bool
) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    wide = wide_rows if over_rows else wide_squares
    return {"c": multiplied(wide_rows(a, a_scale, torch.float64), wide(b, b_scale, torch.float64), bias, addend)}


def block_product(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, dtype: Any, *, over_rows: bool) -> Any:
    """Return the product [a's rows, b's rows] by torch's operations, of float32 numbers.

    Args:
        a: [m, k] of e4m3.
        b: [n, k] of e4m3.
        a_scale: [k / 128, m].
        b_scale: [k / 128, n] if ``over_rows``, else [n / 128, k / 128].
        bias: [n], or None.
        dtype: that of the result.
        over_rows: whether ``b`` has a scale for each 128 terms of a row, as in a weight's gradient.
    """
    import torch

    wide = wide_rows if over_rows else wide_squares
    return multiplied(wide_rows(a, a_scale, torch.float32), wide(b, b_scale, torch.float32), bias).to(dtype)


def _fits_library(m: int, n: int, k: int, over_rows: bool) -> bool:
    """Return whether ``torch._scaled_mm`` takes a product: rows of scales must be whole 16 bytes."""
    return k % SIDE == 0 and n % UNIT == 0 and m % 4 == 0 and (over_rows or k // SIDE % 4 == 0)


def _by_torch(problem: Problem, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, dtype: Any) -> Any:
    import torch

    (n, k), over_rows = b.shape, problem["over_rows"]
    if not a.is_cuda or not _fits_library(len(a), n, k, over_rows):
        return block_product(a, b, a_scale, b_scale, bias, dtype, over_rows=over_rows)
    # Scales must follow each other without gaps.
    across = b_scale.contiguous() if over_rows else b_scale.t()
    return torch._scaled_mm(a, b.t(), scale_a=a_scale.contiguous().t(), scale_b=across, bias=bias, out_dtype=dtype)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    m, n, _ = sizes_of(problem)
    return {
        "implementation": ["tile", "torch"],
        "schedule": ["persistent", "block"],
        "tile_m": sides(min(m, SIDE)),
        "tile_n": sides(min(n, SIDE)),
        "group_m": [8, 16],
        "occupancy": [1, 2],
        "num_worker_warps": [0, 8],
    }


def _library_takes(problem: Problem, config: Config, target: Target) -> bool:
    fits = _fits_library(*sizes_of(problem), problem["over_rows"]) and problem["dtype"] == "bfloat16"
    return is_tile(config) or (fits and unit_of(target) == "wgmma")


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    stage = (config["tile_m"] + config["tile_n"]) * (SIDE + ITEM_BYTES["float32"])
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


def _suits_size(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether a tile is large, and alone on its SM, on a problem whose tiles of 128 x 128 fill the GPU twice.

    If they fill it once, a tile has half of their sums at least.
    """
    m, n, _ = sizes_of(problem)
    waves = 0.0 if min(m, n) < SIDE else cdiv(m, SIDE) * cdiv(n, SIDE) / target.sm_count
    if waves >= 2:
        return config["occupancy"] == 1 and sums(config) >= SIDE * (64 if unit_of(target) == "mma" else SIDE)
    return waves < 1 or sums(config) >= SIDE * 64


def _feeds_warps(problem: Problem, config: Config, target: Target) -> bool:
    return sums(config) >= 32 * threads(config)


def _bands(problem: Problem, config: Config, target: Target) -> bool:
    return config["group_m"] == 8 or cdiv(sizes_of(problem)[0], config["tile_m"]) > 32


SPACE = Space(
    _axes,
    (
        HAS_FP8,
        one_for_library(_axes),
        Constraint("torch's product is Hopper's, of whole blocks along the sums, and makes bfloat16", _library_takes),
        HOLDS_STEPS,
        of_tiles("two stages of operands and scales exceed shared memory", _fits_shared),
        of_tiles("a small tile, or a second block on an SM, is for small problems", _suits_size),
        of_tiles("a thread of eight warps has 32 sums or more", _feeds_warps),
        of_tiles("bands of 16 rows of tiles are for more than 32 of them", _bands),
    ),
)


def _config(tile_m: int, tile_n: int, warps: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=tile_m, tile_n=tile_n, group_m=8, occupancy=1,
        num_worker_warps=warps,
    )  # fmt: skip


def _default(problem: Problem, target: Target) -> Config:
    """Return the first tile that gives each SM one, or the smallest."""
    check_target(target)
    m, n, _ = sizes_of(problem)
    fitting = [_config(*tile) for tile in STEP_TILES if tile[0] in sides(m) and tile[1] in sides(n)]
    fitting = [config for config in fitting if holds_steps(problem, config, target)]
    return next((config for config in fitting if tiles(problem, config) >= target.sm_count), fitting[-1])


SPEC = product_spec(
    "fp8_block_matmul",
    "c = a @ b^T of e4m3 numbers, scaled by blocks of 1 x 128 and 128 x 128",
    _arrays,
    _reference,
    _by_torch,
    function=lambda problem, config: _FUNCTIONS[problem["biased"], problem["accumulated"]],
    sizes=_sizes,
    constants=lambda problem, config: {"squares": not problem["over_rows"], **whole_rows(problem, config)},
    grid=lambda sizes, config, sm_count: grid_of(tiles(sizes, config), config, sm_count),
    space=SPACE,
    default=_default,
    generic=lambda problem: _config(32, 32, 8),
    given=_inputs,
)
