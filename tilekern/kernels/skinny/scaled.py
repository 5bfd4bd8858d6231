"""Linear layers of few long rows with the RMSNorm before them, whose factor is taken out of the product.

``total = cast(residual + x)`` and ``y = act(rstd * (t @ weight^T) + bias) * (rstd * (t @ up^T))``, where ``t`` is
``cast(total * norm_weight)`` and ``rstd = 1 / sqrt(mean(total^2) + eps)``, row by row. Without ``added`` there is no
residual, and ``total`` is x. The others of a problem's flags are those of :mod:`tilekern.kernels.skinny.linear`.

A launch costs a token about as much as reading 10 MB, and a block that normalised its rows first would read them twice.
Here a step multiplies terms that are not normalised yet and adds up their squares, and the sums are scaled in the end.
The weights stream as in ``skinny_linear``: they are loaded by TMA, and the rows, which are in L2, by plain loads, some
steps ahead. By TMA the compiler kept a single step of rows, and each step waited for them (sm_90).

Rounding: a term is rounded once, where a launch for the norm rounds ``total * rstd`` and then its product with the
weight. Terms that are not normalised may leave the range of float16, so all arrays are bfloat16.

With ``early`` a block loads the first step's weights before it waits for its predecessor, and multiplies them last, so
that the other steps' loads follow at once. The weights, of the norm too, must be constants: the kernel that runs right
before must not write them.

Bits: a row of the result depends on its own row of ``residual`` and ``x`` alone. ``tile_k``, ``early``, and ``tile_n``
below 64 or not can change them.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.matmul.space import unit_of
from tilekern.kernels.rms_norm import EPS
from tilekern.kernels.skinny import linear
from tilekern.kernels.skinny.tiles import TOO_LARGE, TOO_SMALL, USUAL, WIDTHS, activated, count, tokens_of
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value
from tilekern.spec.targets import INTERPRETED, Target

FLAGS = ("added", "gated", "rounded", "biased", "gelu_tanh", "silu")
# The most rows of a tile, for which the terms that each block computes by itself cost little.
MOST_ROWS = 8
_BYTES = 2


def _weights(weight, up, j, step, gated, tile_n, tile_k):
    """Return a step's tiles of the weights, [tile_n, tile_k] each."""
    tile = load(weight, (j, step), (tile_n, tile_k), True, 0, True)
    if ct.static_eval(gated):
        return tile, load(up, (j, step), (tile_n, tile_k), True, 0, True)
    return (tile,)


def _loaded(x, i, step, shape, whole):
    """Load a tile of rows. If columns are ``whole``, it lies inside, and rows beyond the last are that one again.

    The compiler has a branch around each vector whose bounds it checks, and so waits for one after the other (sm_90).
    """
    if ct.static_eval(not whole):
        return load(x, (i, step), shape, True, 0, False)
    if ct.static_eval(shape[0] == 1):
        return load(x, (i, step), shape, False, 0, False)
    row = ct.minimum(i * shape[0] + ct.arange(shape[0], dtype=ct.int32), x.shape[0] - 1)
    column = step * shape[1] + ct.arange(shape[1], dtype=ct.int32)
    return ct.gather(x, (ct.reshape(row, (shape[0], 1)), ct.reshape(column, (1, shape[1]))), check_bounds=False)


def _rows(residual, x, norm_weight, i, step, added, tile_r, tile_k, whole):
    """Return a step's tiles of x and the residual, [tile_r, tile_k] each, behind that of the norm's weight."""
    of_norm = load(norm_weight, (step,), (tile_k,), not whole, 0, False)
    tile = _loaded(x, i, step, (tile_r, tile_k), whole)
    if ct.static_eval(added):
        return of_norm, tile, _loaded(residual, i, step, (tile_r, tile_k), whole)
    return of_norm, tile


def _repeated(tile, tile_m):
    """Return rows again and again, until there are ``tile_m``: results of rows that do not exist are not stored."""
    rows, width = tile.shape
    if ct.static_eval(rows == tile_m):
        return tile
    shape = (tile_m // rows, rows, width)
    return ct.reshape(ct.broadcast_to(ct.reshape(tile, (1, rows, width)), shape), (tile_m, width))


def _store_if(is_first, total, index, tile):
    if is_first:
        ct.store(total, index, tile, allow_tma=False)


def _terms(squares, rows, total, i, j, step, added):
    """Return the squares with those of a step, and its terms; tiles of the first columns store the step's total."""
    tile = rows[1]
    if ct.static_eval(added):
        tile = (rows[2].astype(ct.float32) + tile.astype(ct.float32)).astype(tile.dtype)
        _store_if(j == 0, total, (i, step), tile)
    wide = tile.astype(ct.float32)
    return squares + wide * wide, (wide * rows[0].astype(ct.float32)).astype(tile.dtype)


def _multiplied(sums, weights, terms, tile_m):
    """Return the sums with the products of a step."""
    tokens, found = _repeated(terms, tile_m).transpose(), ()
    for k in ct.static_iter(range(len(weights))):
        found = (*found, ct.mma(weights[k], tokens, sums[k]))
    return found


def _tile(
    item, first, residual, x, norm_weight, eps, weight, up, bias, total, y, added, gated, rounded, biased, gelu_tanh,
    silu, inner, whole, tile_r, tile_m, tile_n, tile_k, early,
):  # fmt: skip
    """Compute tile number ``item`` of the result; ``first`` are the first step's weights if they are there."""
    down, steps = ct.cdiv(y.shape[0], tile_m), ct.cdiv(x.shape[1], tile_k)
    i, j = item % down, item // down
    zeros, squares = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_r, tile_k), ct.float32)
    sums = (zeros, zeros) if ct.static_eval(gated) else (zeros,)
    terms_of_first = None
    if ct.static_eval(early):
        rows = _rows(residual, x, norm_weight, i, 0, added, tile_r, tile_k, whole)
        squares, terms_of_first = _terms(squares, rows, total, i, j, 0, added)
    for step in range(early, steps):
        weights = _weights(weight, up, j, step, gated, tile_n, tile_k)
        rows = _rows(residual, x, norm_weight, i, step, added, tile_r, tile_k, whole)
        squares, terms = _terms(squares, rows, total, i, j, step, added)
        sums = _multiplied(sums, weights, terms, tile_m)
    if ct.static_eval(early):
        sums = _multiplied(sums, first, terms_of_first, tile_m)
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / inner + eps)
    rstd = _repeated(rstd, tile_m).transpose()
    z, factor = sums[0] * rstd, sums[len(sums) - 1] * rstd
    if ct.static_eval(biased):
        row = load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
        z = z + ct.reshape(row, (tile_n, 1))
    if ct.static_eval(rounded):
        z, factor = z.astype(y.dtype).astype(ct.float32), factor.astype(y.dtype).astype(ct.float32)
    z = activated(z, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    ct.store(y, (i, j), z.astype(y.dtype).transpose(), allow_tma=False)


@ct.kernel
def skinny_scaled_linear(
    residual, x, norm_weight, eps, weight, up, bias, total, y, added: ConstBool, gated: ConstBool, rounded: ConstBool,
    biased: ConstBool, gelu_tanh: ConstBool, silu: ConstBool, inner: ConstInt, whole: ConstBool, tile_r: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, early: ConstInt, persistent: ConstBool,
):  # fmt: skip
    """residual, x and total [rows, inner], norm_weight [inner], weight and up [columns, inner], bias [columns], y
    [rows, columns].
    """
    first = None
    if ct.static_eval(early):
        # They are constants, so that they are on their way while the predecessor ends.
        first = _weights(weight, up, ct.bid(0) // ct.cdiv(y.shape[0], tile_m), 0, gated, tile_n, tile_k)
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    tiles = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n)
    arguments = (
        first, residual, x, norm_weight, eps, weight, up, bias, total, y, added, gated, rounded, biased, gelu_tanh,
        silu, inner, whole, tile_r, tile_m, tile_n, tile_k, early,
    )  # fmt: skip
    each_step(_tile, tiles, persistent, arguments)


_ARRAYS: Arrays = (
    Array("residual", "bfloat16", ("rows", "inner"), flag="added"),
    Array("x", "bfloat16", ("rows", "inner")),
    Array("norm_weight", "bfloat16", ("inner",), constant=True),
    EPS,
    Array("weight", "bfloat16", ("columns", "inner"), constant=True),
    Array("up", "bfloat16", ("columns", "inner"), flag="gated", constant=True),
    Array("bias", "bfloat16", ("columns",), flag="biased", constant=True),
    Array("total", "bfloat16", ("rows", "inner"), "output", flag="added"),
    Array("y", "bfloat16", ("rows", "columns"), "output"),
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_m": sorted({tokens_of(1, tile_n) for tile_n in WIDTHS}),
        "tile_n": list(WIDTHS),
        "tile_k": [128, 64, 256, 512],
        "occupancy": [2, 1, 4],
        "early": [0, 1],
        "num_worker_warps": [0, 8],
    }


def _config(tile_n: int, **changes: Value) -> Config:
    known: dict[str, Value] = {
        "schedule": "block", "tile_m": tokens_of(1, tile_n), "tile_n": tile_n, "tile_k": 128, "occupancy": 2,
        "early": 0, "num_worker_warps": 0,
    }  # fmt: skip
    return Config(known | changes)


def _stays_resident(problem: Problem, config: Config, target: Target) -> bool:
    return count(problem, config) <= target.sm_count * int(config["occupancy"])


def _has_rows(problem: Problem, config: Config, target: Target) -> bool:
    is_few = problem["rows"] <= MOST_ROWS or config["tile_n"] >= USUAL
    return bool(is_few and config["tile_m"] == tokens_of(1, config["tile_n"]))


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds two stages of operands, and the early weights."""
    weights = config["tile_n"] * (2 if problem["gated"] else 1)
    numbers = (2 * (config["tile_m"] + weights) + config["early"] * weights) * config["tile_k"]
    return bool(numbers * _BYTES * config["occupancy"] <= target.shared_bytes)


def _is_read_by_most(problem: Problem, config: Config, target: Target) -> bool:
    if config["tile_n"] == USUAL:
        return True
    found = count(problem, config)
    return found <= 4 * target.sm_count if config["tile_n"] < USUAL else found >= target.sm_count


SPACE = Space(
    _axes,
    (
        Constraint(TOO_SMALL, _has_rows),
        Constraint(TOO_LARGE, _fits_shared),
        Constraint(
            "as many as 512 terms are for a block that has an SM to itself, 64 for one that has not",
            lambda problem, config, target: (
                (config["tile_k"] < 512 or (config["tile_n"] == USUAL and config["occupancy"] == 1))
                and (config["tile_k"] > 64 or config["occupancy"] > 1)
            ),
        ),
        Constraint(
            "eight warps are two groups of Hopper's four, with 64 columns each of a tile that has an SM to itself",
            lambda problem, config, target: (
                not config["num_worker_warps"]
                or (unit_of(target) == "wgmma" and config["tile_n"] >= 128 and config["occupancy"] == 1)
            ),
        ),
        Constraint("narrow tiles are for SMs that wider ones leave idle, wide ones for more columns", _is_read_by_most),
        Constraint(
            "blocks loop if there are more tiles than stay resident",
            lambda problem, config, target: (
                config["schedule"] == "block" or target == INTERPRETED or not _stays_resident(problem, config, target)
            ),
        ),
        Constraint(
            "a block that starts after others, or loops, would only wait for its early weights",
            lambda problem, config, target: (
                not config["early"]
                or (
                    config["schedule"] == "block"
                    and (target == INTERPRETED or _stays_resident(problem, config, target))
                )
            ),
        ),
    ),
)


def _default(problem: Problem, target: Target) -> Config:
    """Return tiles of 64 columns: of 512 terms a step if each SM has one tile at most, else of 128.

    Narrower tiles have 500 instructions in a step of eight rows that reads 8 KB (sm_90), which is no longer the time of
    memory. Weights are early if they may be.
    """
    ways = [(128, 2, 1), (128, 2, 0), (128, 1, 0)]
    if count(problem, _config(USUAL)) <= target.sm_count:
        ways.insert(0, (512, 1, 1))
    found = (_config(USUAL, tile_k=tile_k, occupancy=occupancy, early=early) for tile_k, occupancy, early in ways)
    return next(config for config in found if SPACE.violated(problem, config, target) is None)


def generic(problem: Problem) -> Config:
    """Return a tile that any GPU holds, on any grid; eight warps share its loads of single elements."""
    return _config(USUAL, schedule="persistent", tile_k=32, occupancy=1, num_worker_warps=8)


def _reference(
    residual: Any, x: Any, norm_weight: Any, eps: float, weight: Any, up: Any, bias: Any, *, added: bool, gated: bool,
    rounded: bool, biased: bool, gelu_tanh: bool, silu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, with the cast of the total. ``rounded`` changes nothing."""
    wide = residual.double() + x.double() if added else x.double()
    rows = wide.to(x.dtype).double()
    normal = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight.double()
    flags = {"gated": gated, "rounded": rounded, "biased": biased, "gelu_tanh": gelu_tanh, "silu": silu}
    found = linear.reference(normal, weight, up, bias, None, accumulated=False, **flags)
    return found | ({"total": wide} if added else {})


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    of_products = tuple(array for array in _ARRAYS if array.name in ("weight", "up"))
    found = drawn(of_products, problem, generator, device, about_one=False)
    return {name: value * problem["inner"] ** -0.5 for name, value in found.items()}


SPEC = spec(
    "skinny_scaled_linear",
    "y = act(rstd * (t @ weight^T) + bias) * (rstd * (t @ up^T)) for few rows, where t is (residual + x) * norm_weight",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("inner", "columns")),
        *flags_of(FLAGS),
    ),
    _ARRAYS,
    _reference,
    function=skinny_scaled_linear,
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    constants=lambda problem, config: {
        "tile_r": min(MOST_ROWS, power_of_two(problem["rows"])),
        "whole": problem["inner"] % config["tile_k"] == 0,
    },
    space=SPACE,
    default=_default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: (4 if problem["gated"] else 2) * problem["rows"] * problem["inner"] * problem["columns"],
    roundings=2,  # of a rounded gate: its products, and their product
    dependent=True,
    streamed=True,
)

SPECS = (SPEC,)
