"""Products of MXFP8 matrices, ``c = a @ b^T + bias + addend``, by tensor cores that take scales: sm_100 and newer.

Both operands are stored along the sums, with a scale for each 32 terms (:mod:`tilekern.kernels.fp8.mx_scales`). One
spec serves a linear layer's three products, as :mod:`tilekern.kernels.fp8.block_product` says; with ``'`` as a matrix
that was rounded along its columns and turned, all of them are ``a @ b^T``. ``rows`` is the number of tokens.

Sums stay in tensor memory, in float32, and are scaled by the tensor core, so nothing is added between. If a problem is
``accumulated``, ``c`` may be the memory of ``addend``: only the block that stores a tile of ``c`` reads this tile of
``addend``, and reads it first.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.fp8.block_scales import SIDE, UNIT
from tilekern.kernels.fp8.mx_scales import EACH, GROUP, HAS_MX, SCALES, check_target, mx_rows, wide_mx
from tilekern.kernels.fp8.product import arrays_of, multiplied, operands, product_spec
from tilekern.kernels.fp8.space import sizes_of, tiles
from tilekern.kernels.matmul.product import place_and_column
from tilekern.kernels.matmul.space import is_tile, of_tiles, one_for_library, unit_of
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import Array, Config, Constraint, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target


def _scales(array, outer, step, side):
    """Load the scales of ``side`` rows at one step, [side, 4]."""
    tile = load(array, (outer, step, 0, 0), (side // SIDE, 1, *SCALES), True, 0, True)
    tile = ct.reshape(ct.bitcast(tile, ct.float8_e8m0fnu), (side // SIDE, 1, GROUP, EACH, EACH))
    return ct.reshape(ct.permute(tile, (0, 3, 2, 1, 4)), (side, EACH))


def _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, group_m, whole_rows):
    """Compute tile number ``item`` of the result."""
    i, j = place_and_column(item, ct.cdiv(c.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n), group_m)
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for step in range(ct.cdiv(a.shape[1], SIDE)):
        left = load(a, (i, step), (tile_m, SIDE), True, 0, True)
        right = load(b, (j, step), (tile_n, SIDE), True, 0, True)
        down, across = _scales(a_scale, i, step, tile_m), _scales(b_scale, j, step, tile_n)
        total = ct.mma_scaled(left, down, right.transpose(), across.transpose(), total)
    if ct.static_eval(bias is not None):
        total = total + load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
    if ct.static_eval(addend is not None):
        total = total + load(addend, (i, j), (tile_m, tile_n), True, 0, True).astype(ct.float32)
    # TMA writes whole 16 bytes, so the ends of other rows are stored without it.
    if ct.static_eval(whole_rows) or (j + 1) * tile_n <= c.shape[1]:
        ct.store(c, (i, j), total.astype(c.dtype))
    else:
        ct.store(c, (i, j), total.astype(c.dtype), allow_tma=False)


def _product(a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, group_m, whole_rows):
    if ct.static_eval(persistent):
        count = ct.cdiv(c.shape[0], tile_m) * ct.cdiv(c.shape[1], tile_n)
        for item in range(ct.bid(0), count, ct.num_blocks(0)):
            _tile(a, b, a_scale, b_scale, bias, addend, c, item, tile_m, tile_n, group_m, whole_rows)
    else:
        _tile(a, b, a_scale, b_scale, bias, addend, c, ct.bid(0), tile_m, tile_n, group_m, whole_rows)


@ct.kernel
def mxfp8_plain(
    a, b, a_scale, b_scale, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    whole_rows: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; a [m, k], b [n, k], c [m, n], scales as of ``mx_rows``.

    ``whole_rows`` means that the rows of c are whole 16 bytes.
    """
    _product(a, b, a_scale, b_scale, None, None, c, persistent, tile_m, tile_n, group_m, whole_rows)


@ct.kernel
def mxfp8_biased(
    a, b, a_scale, b_scale, bias, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    whole_rows: ConstBool,
):  # fmt: skip
    """With a bias [n]; others as in :func:`mxfp8_plain`."""
    _product(a, b, a_scale, b_scale, bias, None, c, persistent, tile_m, tile_n, group_m, whole_rows)


@ct.kernel
def mxfp8_accumulated(
    a, b, a_scale, b_scale, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt, group_m: ConstInt,
    whole_rows: ConstBool,
):  # fmt: skip
    """With an addend [m, n], which may be ``c``; others as in :func:`mxfp8_plain`."""
    _product(a, b, a_scale, b_scale, None, addend, c, persistent, tile_m, tile_n, group_m, whole_rows)


@ct.kernel
def mxfp8_biased_accumulated(
    a, b, a_scale, b_scale, bias, addend, c, persistent: ConstBool, tile_m: ConstInt, tile_n: ConstInt,
    group_m: ConstInt, whole_rows: ConstBool,
):  # fmt: skip
    """With both."""
    _product(a, b, a_scale, b_scale, bias, addend, c, persistent, tile_m, tile_n, group_m, whole_rows)


# By whether there are a bias and an addend.
_FUNCTIONS = {
    (False, False): mxfp8_plain, (True, False): mxfp8_biased, (False, True): mxfp8_accumulated,
    (True, True): mxfp8_biased_accumulated,
}  # fmt: skip


def _sizes(problem: Problem) -> dict[str, int]:
    m, n, k = sizes_of(problem)
    return {"down": cdiv(m, SIDE), "across": cdiv(n, SIDE), "steps": cdiv(k, SIDE)}


def _arrays(problem: Problem) -> Arrays:
    shape = "steps", *map(str, SCALES)
    return arrays_of(problem, Array("a_scale", "int8", ("down", *shape)), Array("b_scale", "int8", ("across", *shape)))


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    (a, a_scale), (b, b_scale) = map(mx_rows, operands(problem, generator, device))
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}


def _reference(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any = None, addend: Any = None) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    return {"c": multiplied(wide_mx(a, a_scale, torch.float64), wide_mx(b, b_scale, torch.float64), bias, addend)}


def mx_product(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, dtype: Any) -> Any:
    """Return the product [a's rows, b's rows] by torch's operations, of float32 numbers."""
    import torch

    return multiplied(wide_mx(a, a_scale, torch.float32), wide_mx(b, b_scale, torch.float32), bias).to(dtype)


def _by_torch(problem: Problem, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, dtype: Any) -> Any:
    import torch

    if not a.is_cuda or a.shape[1] % UNIT or len(b) % UNIT:
        return mx_product(a, b, a_scale, b_scale, bias, dtype)
    down, across = (scale.view(torch.float8_e8m0fnu) for scale in (a_scale, b_scale))
    return torch._scaled_mm(a, b.t(), scale_a=down, scale_b=across, bias=bias, out_dtype=dtype)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["tile", "torch"],
        "schedule": ["persistent", "block"],
        "tile_m": [SIDE],
        "tile_n": [SIDE, 2 * SIDE],
        "group_m": [8, 16],
        "occupancy": [1, 2],
        "num_worker_warps": [0, 8],
    }


def _library_takes(problem: Problem, config: Config, target: Target) -> bool:
    _, n, k = sizes_of(problem)
    fits = n % UNIT == 0 and k % UNIT == 0 and problem["dtype"] == "bfloat16"
    return is_tile(config) or (fits and unit_of(target) == "tcgen05")


def _holds_sums(problem: Problem, config: Config, target: Target) -> bool:
    """Return whether tensor memory holds the sums of all blocks of an SM; or eight warps' registers do."""
    columns = config["tile_n"] * config["occupancy"]
    if unit_of(target) == "mma":
        return bool(columns <= SIDE and config["num_worker_warps"])
    return bool(columns <= 2 * SIDE)


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    stage = (config["tile_m"] + config["tile_n"]) * (SIDE + EACH)
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


SPACE = Space(
    _axes,
    (
        HAS_MX,
        one_for_library(_axes),
        Constraint("torch's product is for sm_100, of multiples of 16, and makes bfloat16", _library_takes),
        of_tiles("the sums exceed half of tensor memory, or eight warps' registers", _holds_sums),
        of_tiles("two stages of operands exceed shared memory", _fits_shared),
    ),
)


def _config(tile_n: int, warps: int) -> Config:
    return Config(
        implementation="tile", schedule="persistent", tile_m=SIDE, tile_n=tile_n, group_m=8, occupancy=1,
        num_worker_warps=warps,
    )  # fmt: skip


def _default(problem: Problem, target: Target) -> Config:
    """Return the wide tile if there is one for each SM and its sums are stored as they are."""
    check_target(target)
    wide, narrow = _config(2 * SIDE, 0), _config(SIDE, 8)
    is_plain = unit_of(target) != "mma" and not problem["biased"] and not problem["accumulated"]
    return wide if is_plain and tiles(problem, wide) >= target.sm_count else narrow


SPEC = product_spec(
    "mxfp8_matmul",
    "c = a @ b^T of e4m3 numbers, of which 32 have a scale of e8m0",
    _arrays,
    _reference,
    _by_torch,
    function=lambda problem, config: _FUNCTIONS[problem["biased"], problem["accumulated"]],
    sizes=_sizes,
    grid=lambda sizes, config, sm_count: grid_of(tiles(sizes, config), config, sm_count),
    space=SPACE,
    default=_default,
    generic=lambda problem: _config(SIDE, 8),
    given=_inputs,
)
