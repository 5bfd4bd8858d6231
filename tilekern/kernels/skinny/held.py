"""Linear layers of few rows that load weights before their rows are there, as in decoding; a norm may belong to them.

``total = cast(residual + x)``, ``t = cast(norm(total))`` and ``y = act(t @ weight^T + bias) * (t @ up^T)``. Without
``normed``, t is ``total``. The norm is RMSNorm or, with ``layer``, layer normalisation. Without ``added`` there is no
residual, and ``total`` is x. The others of a problem's flags are those of :mod:`tilekern.kernels.skinny.linear`. All
casts are those of launches apart, so a result differs from theirs by the order of sums alone.

A launch costs a token about as much as reading 10 MB. So each block computes the norm of its rows by itself, which are
few and in L2; the blocks of the first columns also write ``total``. ``held`` says where a block has its whole weights:

- ``registers``: a block loads them before it waits for its predecessor, and adds up by scalar units, row by row.
- ``shared``: it loads them before it waits, too, into shared memory; the products are those of matrix units.
- ``no``: it waits, computes the statistics of its rows first, then products by steps, each of which normalises its
  terms. If blocks loop over columns, they keep the statistics.

Rows to normalise are held as one tile, padded to a power of two. Others may be taken in slices of ``tile_k`` that need
no padding, as 3072 has 3 of 1024; all slices of the weights are on their way before the block waits.

The weights, of the norm too, must be constants: the kernel that runs right before must not write them. One before that
may, since each kernel of a chain waits for its own predecessor before it lets the next one be launched.

Bits: a row of the result depends on its own row of ``residual`` and ``x`` alone. ``held``, ``tile_n``, ``tile_k`` and
``num_worker_warps`` can change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn, tensors
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.rms_norm import EPS, reference_forward
from tilekern.kernels.skinny import linear
from tilekern.kernels.skinny.tiles import TOO_LARGE, TOO_SMALL, USUAL, activated, count, is_exact, tokens_of
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Dimension, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

FLAGS = ("normed", "layer", "added", "gated", "rounded", "biased", "gelu_tanh", "silu")
# The most rows for which a norm of its own in each block pays.
MOST_ROWS = 8
# Of scalar units' products: each further row is as much code again.
_MOST_SCALAR_ROWS = 4
# The most terms of sums whose weights blocks of 4 columns hold in registers, and those of 16 columns in shared memory.
_MOST_TERMS = {"registers": 4096, "shared": 1024}
# Weights that a thread holds in registers, in bytes, and numbers of a piece of rows.
_WEIGHT_BYTES, _NUMBERS = 256, 64
_WIDTHS = (USUAL, 32, 16, 8, 4)


def _rows(residual, x, i, c, added, shape, tma):
    """Return a tile of the rows to normalise, in their dtype."""
    tile = load(x, (i, c), shape, True, 0, tma)
    if ct.static_eval(added):
        sum_of_both = load(residual, (i, c), shape, True, 0, tma).astype(ct.float32) + tile.astype(ct.float32)
        tile = sum_of_both.astype(x.dtype)
    return tile


def _store_if(is_first, total, index, tile):
    if is_first:
        ct.store(total, index, tile, allow_tma=False)


def _normal(tile, weight, bias, known, normed, layer, dtype):
    """Return the norm of a tile of rows, rounded as by a launch of its own; the tile if there is none."""
    if ct.static_eval(not normed):
        return tile
    wide, of_row = tile.astype(ct.float32), weight.astype(ct.float32)
    if ct.static_eval(layer):
        return ((wide - known[0]) * known[1] * of_row + bias.astype(ct.float32)).astype(dtype)
    return ((wide * known[0]).astype(dtype).astype(ct.float32) * of_row).astype(dtype)


def _square_and_mean(tile, first, inner, layer):
    """Return the sum of the squares of a tile of columns from ``first`` on, and 0, [rows, 1] each.

    With ``layer`` it is that of the distances from their mean, and the mean. Columns beyond ``inner`` are 0 and do not
    count.
    """
    wide, width = tile.astype(ct.float32), tile.shape[1]
    if ct.static_eval(not layer):
        return ct.sum(wide * wide, axis=1, keepdims=True), ct.zeros((tile.shape[0], 1), ct.float32)
    mean = ct.sum(wide, axis=1, keepdims=True) / min(inner - first, width)
    left = wide - mean
    if ct.static_eval(inner % width != 0):
        place = first + ct.arange(width, dtype=ct.int32)[None, :]
        left = ct.where(place < inner, left, 0.0)
    return ct.sum(left * left, axis=1, keepdims=True), mean


def _known(square, mean, inner, eps, layer):
    """Return the statistics as the norms' formulas take them."""
    rstd = ct.rsqrt(square / inner + eps)
    return (mean, rstd) if ct.static_eval(layer) else (rstd,)


def _statistics(residual, x, total, eps, i, is_first, inner, normed, layer, added, tile_r, piece):
    """Return the statistics of a tile of rows, piece by piece; store the sum of both if this ``is_first``."""
    if ct.static_eval(not normed and not added):
        return None
    square, mean = ct.zeros((tile_r, 1), ct.float32), ct.zeros((tile_r, 1), ct.float32)
    for c in range(ct.cdiv(x.shape[1], piece)):
        tile = _rows(residual, x, i, c, added, (tile_r, piece), False)
        if ct.static_eval(added):
            _store_if(is_first, total, (i, c), tile)
        more, mean_of_piece = _square_and_mean(tile, c * piece, inner, layer)
        square = square + more
        if ct.static_eval(layer):
            # Chan, Golub and LeVeque 1979: the distances from both means' mean.
            before, number = c * piece, min(inner - c * piece, piece)
            apart, share = mean_of_piece - mean, number / (before + number)
            square = square + apart * apart * (before * share)
            mean = mean + apart * share
    return _known(square, mean, inner, eps, layer)


def _repeated(tile, tile_m):
    """Return rows again and again, until there are ``tile_m``: results of rows that do not exist are not stored."""
    count, width = tile.shape
    if ct.static_eval(count == tile_m):
        return tile
    shape = (tile_m // count, count, width)
    return ct.reshape(ct.broadcast_to(ct.reshape(tile, (1, count, width)), shape), (tile_m, width))


def _finished(total, factor, bias, dtype, gated, rounded, biased, gelu_tanh, silu):
    """Return the result of sums in float32."""
    if ct.static_eval(biased):
        total = total + bias.astype(ct.float32)
    if ct.static_eval(rounded):
        total, factor = total.astype(dtype).astype(ct.float32), factor.astype(dtype).astype(ct.float32)
    z = activated(total, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    return z.astype(dtype)


def _row(array, j, width):
    return load(array, (j,), (width,), True, 0, False)


def _product_in_steps(
    residual, x, norm_weight, norm_bias, weight, up, bias, y, known, i, j, normed, layer, added, flags, tile_r, tile_m,
    tile_n, tile_k,
):  # fmt: skip
    total, factor = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_n, tile_m), ct.float32)
    for c in range(ct.cdiv(x.shape[1], tile_k)):
        tile = _rows(residual, x, i, c, added, (tile_r, tile_k), True)
        of_norm = _row(norm_weight, c, tile_k) if ct.static_eval(normed) else None
        of_bias = _row(norm_bias, c, tile_k) if ct.static_eval(normed and layer) else None
        tile = _normal(tile, of_norm, of_bias, known, normed, layer, x.dtype)
        tokens = _repeated(tile, tile_m).transpose()
        total = ct.mma(load(weight, (j, c), (tile_n, tile_k), True, 0, True), tokens, total)
        if ct.static_eval(flags[0]):
            factor = ct.mma(load(up, (j, c), (tile_n, tile_k), True, 0, True), tokens, factor)
    column = ct.reshape(_row(bias, j, tile_n), (tile_n, 1)) if ct.static_eval(flags[2]) else None
    ct.store(y, (i, j), _finished(total, factor, column, y.dtype, *flags).transpose(), allow_tma=False)


def _columns_of(
    residual, x, norm_weight, norm_bias, eps, weight, up, bias, total, y, i, normed, layer, added, flags, inner, tile_r,
    tile_m, tile_n, tile_k, piece,
):  # fmt: skip
    """Compute a block's tiles in a tile of rows, as far apart as there are blocks."""
    known = _statistics(residual, x, total, eps, i, ct.bid(0) == 0, inner, normed, layer, added, tile_r, piece)
    for j in range(ct.bid(0), ct.cdiv(y.shape[1], tile_n), ct.num_blocks(0)):
        _product_in_steps(
            residual, x, norm_weight, norm_bias, weight, up, bias, y, known, i, j, normed, layer, added, flags, tile_r,
            tile_m, tile_n, tile_k,
        )  # fmt: skip


@ct.kernel
def skinny_held_linear_in_steps(
    residual, x, norm_weight, norm_bias, eps, weight, up, bias, total, y, normed: ConstBool, layer: ConstBool,
    added: ConstBool, gated: ConstBool, rounded: ConstBool, biased: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
    inner: ConstInt, tile_r: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, piece: ConstInt,
    several: ConstBool, persistent: ConstBool,
):  # fmt: skip
    """By steps: residual, x and total [rows, inner], weights of the norm [inner], weight and up [columns, inner], bias
    [columns], y [rows, columns].
    """
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    flags, down = (gated, rounded, biased, gelu_tanh, silu), ct.cdiv(y.shape[0], tile_m)
    if ct.static_eval(not persistent):
        i, j = ct.bid(0) % down, ct.bid(0) // down
        known = _statistics(residual, x, total, eps, i, j == 0, inner, normed, layer, added, tile_r, piece)
        _product_in_steps(
            residual, x, norm_weight, norm_bias, weight, up, bias, y, known, i, j, normed, layer, added, flags, tile_r,
            tile_m, tile_n, tile_k,
        )  # fmt: skip
    elif ct.static_eval(several):
        for i in range(down):
            _columns_of(
                residual, x, norm_weight, norm_bias, eps, weight, up, bias, total, y, i, normed, layer, added, flags,
                inner, tile_r, tile_m, tile_n, tile_k, piece,
            )  # fmt: skip
    else:
        # A loop around it would make three times as much code.
        _columns_of(
            residual, x, norm_weight, norm_bias, eps, weight, up, bias, total, y, 0, normed, layer, added, flags, inner,
            tile_r, tile_m, tile_n, tile_k, piece,
        )  # fmt: skip


def _slices(array, j, count, shape, tma):
    """Return the tiles of a matrix that lie side by side, which need not be there yet."""
    found = ()
    for c in ct.static_iter(range(count)):
        found = (*found, load(array, (j, c), shape, True, 0, tma))
    return found


def _rows_at_once(residual, x, total, norm, eps, i, is_first, inner, normed, layer, added, count, shape):
    """Return rows, normalised, in as many slices as there are; store the sum of both if this ``is_first``."""
    found = ()
    for c in ct.static_iter(range(count)):
        tile = _rows(residual, x, i, c, added, shape, False)
        if ct.static_eval(added):
            _store_if(is_first, total, (i, c), tile)
        found = (*found, tile)
    if ct.static_eval(not normed):
        return found
    square, mean = _square_and_mean(found[0], 0, inner, layer)
    known = _known(square, mean, inner, eps, layer)
    return (_normal(found[0], norm[0], norm[1], known, normed, layer, x.dtype),)


def _sums_at_once(weights, tiles, tile_m):
    """Return weight @ tile^T, [tile_n, tile_m], added up over slices, by matrix units."""
    columns, inner = weights[0].shape
    # Operands of narrow tiles go through registers, which do not hold them at once.
    width = inner if ct.static_eval(columns >= 64) else min(inner, 128)
    sums = ct.zeros((columns, tile_m), ct.float32)
    for s in ct.static_iter(range(len(weights))):
        weight, tile = weights[s], tiles[s]
        for c in ct.static_iter(range(inner // width)):
            tokens = _repeated(ct.extract(tile, (0, c), (tile.shape[0], width)), tile_m).transpose()
            sums = ct.mma(ct.extract(weight, (0, c), (columns, width)), tokens, sums)
    return sums


def _sums_by_rows(weights, tiles, tile_m):
    """Return the same by scalar units; as many rows as the tile has."""
    columns, row_of = weights[0].shape[0], ct.arange(tile_m, dtype=ct.int32)[None, :]
    sums = ct.zeros((columns, tile_m), ct.float32)
    for r in ct.static_iter(range(tile_m)):
        terms = 0.0
        for s in ct.static_iter(range(len(weights))):
            row = ct.extract(tiles[s], (r, 0), (1, tiles[s].shape[1])).astype(ct.float32)
            terms = terms + weights[s].astype(ct.float32) * row
        sums = ct.where(row_of == r, ct.sum(terms, axis=1, keepdims=True), sums)
    return sums


@ct.kernel
def skinny_held_linear(
    residual, x, norm_weight, norm_bias, eps, weight, up, bias, total, y, normed: ConstBool, layer: ConstBool,
    added: ConstBool, gated: ConstBool, rounded: ConstBool, biased: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
    inner: ConstInt, tile_r: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, slices: ConstInt,
    scalar: ConstBool,
):  # fmt: skip
    """Of weights that a block holds, one tile a block: arrays as those of :func:`skinny_held_linear_in_steps`."""
    flags, down = (gated, rounded, biased, gelu_tanh, silu), ct.cdiv(y.shape[0], tile_m)
    i, j = ct.bid(0) % down, ct.bid(0) // down
    # They are constants, so that they are on their way while the predecessor ends.
    of_weight = _slices(weight, j, slices, (tile_n, tile_k), not scalar)
    of_up = _slices(up, j, slices, (tile_n, tile_k), not scalar) if ct.static_eval(gated) else None
    of_bias = _row(bias, j, tile_n) if ct.static_eval(biased) else None
    norm = (
        _row(norm_weight, 0, tile_k) if ct.static_eval(normed) else None,
        _row(norm_bias, 0, tile_k) if ct.static_eval(normed and layer) else None,
    )
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    tiles = _rows_at_once(
        residual, x, total, norm, eps, i, j == 0, inner, normed, layer, added, slices, (tile_r, tile_k)
    )  # fmt: skip
    sums = _sums_by_rows if ct.static_eval(scalar) else _sums_at_once
    total_of_rows = sums(of_weight, tiles, tile_m)
    factor = sums(of_up, tiles, tile_m) if ct.static_eval(gated) else total_of_rows
    column = ct.reshape(of_bias, (tile_n, 1)) if ct.static_eval(biased) else None
    z = _finished(total_of_rows, factor, column, y.dtype, *flags)
    ct.store(y, (i, j), z.transpose(), allow_tma=False)


_ARRAYS: Arrays = (
    Array("residual", "dtype", ("rows", "inner"), flag="added"),
    Array("x", "dtype", ("rows", "inner")),
    Array("norm_weight", "dtype", ("inner",), flag="normed", constant=True),
    Array("norm_bias", "dtype", ("inner",), flag="layer", constant=True),
    EPS,
    Array("weight", "dtype", ("columns", "inner"), constant=True),
    Array("up", "dtype", ("columns", "inner"), flag="gated", constant=True),
    Array("bias", "dtype", ("columns",), flag="biased", constant=True),
    Array("total", "dtype", ("rows", "inner"), "output", flag="added"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def most_held(rows: int) -> int:
    """Return the most terms of sums in ``rows`` rows, 8 at most, of which a block holds the weights."""
    return _MOST_TERMS["registers" if power_of_two(rows) <= _MOST_SCALAR_ROWS else "shared"]


def _is_of_steps(config: Config) -> bool:
    return bool(config["held"] == "no")


def _rows_of(problem: Problem, config: Config) -> int:
    """Return the rows of a tile that a block normalises; the generic config's code is short if none are repeated."""
    return int(config["tile_m"] if config["tile_k"] < 128 else min(MOST_ROWS, power_of_two(problem["rows"])))


def _widths_held(problem: Problem, held: str) -> set[int]:
    """Return the widths of the tiles in which a block holds whole weights.

    Scalar units take slices that need no padding: wide ones, whose weights are where rows are loaded, or narrow ones,
    which a warp adds up by itself. Where one tile of all terms is not wide, it may be padded. Of tiles for matrix units
    that are wider than 256, registers do not hold what goes through them.
    """
    inner, whole = problem["inner"], power_of_two(problem["inner"])
    if problem["normed"]:
        return {whole}
    if held == "shared":
        return {min(256, whole)}
    widest = min(1024, inner & -inner)
    if widest < 128 or inner > 16 * widest:
        return {whole}
    return {widest, min(256, widest), whole if whole <= 1024 else widest}


def _slices_of(problem: Problem, config: Config) -> int:
    return cdiv(problem["inner"], config["tile_k"])


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    rows, tile_k = _rows_of(problem, config), config["tile_k"]
    # A piece of statistics; the generic config loads single elements, which is long code.
    numbers = _NUMBERS * 128 if tile_k >= 128 else 512
    piece = max(tile_k, min(power_of_two(problem["inner"]), numbers // rows))
    return {
        "tile_r": rows,
        "piece": piece,
        "several": power_of_two(problem["rows"]) > config["tile_m"],
        "slices": _slices_of(problem, config),
        "scalar": config["held"] == "registers",
    }


def _axes(problem: Problem) -> dict[str, list[Value]]:
    rows, held = problem["rows"], {width for held in ("registers", "shared") for width in _widths_held(problem, held)}
    return {
        "held": ["registers", "shared", "no"],
        "schedule": ["block", "persistent"],
        "tile_m": sorted({power_of_two(rows), *(tokens_of(1, tile_n) for tile_n in (USUAL, 32, 16))}),
        "tile_n": list(_WIDTHS),
        "tile_k": sorted({128, 256, *held, *([32] if problem["dtype"] == "float32" else [])}),
        "occupancy": [2, 1, 4],
        "num_worker_warps": [0, 8],
    }


def _is_only_one(problem: Problem, config: Config) -> bool:
    """Tell whether a config is the one of float32 for rows or weights that registers do not hold."""
    return problem["dtype"] == "float32" and config == generic(problem)


def _of(held: str, reason: str, holds: Callable[[Problem, Config, Target], bool]) -> Constraint:
    """Make a constraint on the configs that hold their weights in one place."""
    return Constraint(reason, lambda problem, config, target: config["held"] != held or holds(problem, config, target))


def _gates(problem: Problem) -> int:
    return 2 if problem["gated"] else 1


def _has_rows(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a tile has the rows that its products need; by scalar units each row is code of its own."""
    if config["held"] == "registers":
        return bool(config["tile_m"] == power_of_two(problem["rows"]) <= _MOST_SCALAR_ROWS)
    is_few = problem["rows"] <= MOST_ROWS or (_is_of_steps(config) and config["tile_n"] == USUAL)
    return bool(is_few and config["tile_n"] >= 16 and config["tile_m"] == tokens_of(1, config["tile_n"]))


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a thread holds as many weights as it should, or half of these, and has room for its rows.

    An eighth suffices if there are few blocks.
    """
    threads, slices = 32 * (config["num_worker_warps"] or 4), _slices_of(problem, config)
    tile = config["tile_n"] * config["tile_k"]
    of_weights = _gates(problem) * slices * tile * ITEM_BYTES[problem["dtype"]] // threads
    # Rows, weights and biases of the norm are float32; a sum of each column and 16 other values are beside them.
    others = 2 * config["tile_m"] * slices * config["tile_k"] // threads + _gates(problem) * config["tile_n"] + 16
    # So are the terms of a sum over slices for each row, or of one tile if there are several; and places of slices.
    others += tile // threads * (config["tile_m"] if slices > 1 else min(1, config["tile_m"] - 1)) + slices
    room = min(255, target.registers // (threads * config["occupancy"]))
    least = _WEIGHT_BYTES // (8 if count(problem, config) <= 4 * target.sm_count else 2)
    is_full = of_weights >= least or target == INTERPRETED
    return bool(is_full and of_weights <= _WEIGHT_BYTES and of_weights // 4 + others <= room)


def _stage(problem: Problem, config: Config) -> int:
    """Return the bytes of operands [tile_n, tile_k] and [tile_k, tile_m]."""
    across = config["tile_m"] + config["tile_n"] * _gates(problem)
    of_all = 1 if _is_of_steps(config) else _slices_of(problem, config)
    return int(across * of_all * config["tile_k"] * ITEM_BYTES[problem["dtype"]])


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds all operands, and registers what goes through them."""
    numbers, is_wide = _rows_of(problem, config) * config["tile_k"] // 128, config["tile_n"] == USUAL
    fits = _stage(problem, config) * config["occupancy"] <= target.shared_bytes
    return bool(fits and numbers <= _NUMBERS and (is_wide or not problem["gated"]))


def _needs_room(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a block that holds weights has others beside it where they fit; the code is the same, or spills."""
    fits = {"registers": _fits_registers, "shared": _fits_shared}.get(config["held"])
    return config["occupancy"] > 1 or fits is None or not fits(problem, config.but(occupancy=2), target)


def _fits_stages(problem: Problem, config: Config, target: Target) -> bool:
    return bool(2 * _stage(problem, config) * config["occupancy"] <= target.shared_bytes)


def _loops(problem: Problem, config: Config, target: Target) -> bool:
    if config["schedule"] == "block" or target == INTERPRETED or _is_only_one(problem, config):
        return True
    return config["tile_n"] == USUAL and count(problem, config) > target.sm_count * int(config["occupancy"])


def _is_exact(problem: Problem, config: Config, target: Target) -> bool:
    return is_exact(problem, config, target) or config["held"] == "registers" or _is_only_one(problem, config)


def _config(held: str, tile_m: int, tile_n: int, tile_k: int, **changes: Value) -> Config:
    known: dict[str, Value] = {
        "held": held, "schedule": "block", "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "occupancy": 2,
        "num_worker_warps": 0,
    }  # fmt: skip
    return Config(known | changes)


def _default(problem: Problem, target: Target) -> Config:
    """Return the widest tile with which three quarters of the SMs read: held in registers, else in shared memory, else
    by steps.
    """
    rows, of_scalar, of_shared = problem["rows"], *(max(_widths_held(problem, x)) for x in ("registers", "shared"))
    ways = (
        [
            _config("registers", power_of_two(rows), n, of_scalar, occupancy=o, num_worker_warps=w)
            for n in _WIDTHS
            for o in (2, 1)
            for w in (0, 8)
        ],
        [_config("shared", tokens_of(1, n), n, of_shared, occupancy=o) for n in (USUAL, 32, 16) for o in (2, 1)],
        [
            _config("no", tokens_of(1, n), n, k, schedule=schedule, occupancy=o)
            for n in (USUAL, 32, 16)
            for o, k in ((2, 256), (2, 128), (1, 128))
            for schedule in ("persistent", "block")
        ],
    )
    for found in ways:
        allowed = [config for config in found if SPACE.violated(problem, config, target) is None]
        if allowed:
            return next((c for c in allowed if 4 * count(problem, c) >= 3 * target.sm_count), allowed[-1])
    return generic(problem)


def generic(problem: Problem) -> Config:
    """Return steps that any GPU holds, on any grid; eight warps share their loads of single elements."""
    return _config("no", tokens_of(1, USUAL), USUAL, 32, schedule="persistent", occupancy=1, num_worker_warps=8)


SPACE = Space(
    _axes,
    (
        Constraint("float32 products run on a GPU's scalar units, since TF32 would round the inputs", _is_exact),
        Constraint(
            "a block holds whole weights of its columns; steps take 128 or 256 terms",
            lambda problem, config, target: (
                config["tile_k"] <= 256
                if _is_of_steps(config)
                else config["tile_k"] in _widths_held(problem, config["held"])
            ),
        ),
        Constraint(
            "blocks that hold weights have one tile each",
            lambda problem, config, target: _is_of_steps(config) or config["schedule"] == "block",
        ),
        Constraint(
            "eight warps are for weights in registers",
            lambda problem, config, target: (
                not config["num_worker_warps"] or config["held"] == "registers" or _is_only_one(problem, config)
            ),
        ),
        Constraint(
            "four blocks on an SM leave a thread of eight warps 64 registers, which spill",
            lambda problem, config, target: (
                config["occupancy"] < 4 or (config["held"] == "registers" and not config["num_worker_warps"])
            ),
        ),
        Constraint(TOO_SMALL, _has_rows),
        _of(
            "registers",
            "a thread holds 128 to 256 bytes of weights, 32 in few blocks, and its registers are enough for rows too",
            _fits_registers,
        ),
        _of(
            "shared",
            "shared memory exceeded, or registers by more than 64 numbers of rows or by narrow tiles of a gate",
            _fits_shared,
        ),
        Constraint("a block has an SM to itself if it needs the room of two", _needs_room),
        _of("no", TOO_LARGE, _fits_stages),
        _of(
            "no",
            "steps of rows without a norm are those of skinny_linear: 128 terms and two blocks on an SM stand for them",
            lambda problem, config, target: (
                problem["normed"]
                or _is_only_one(problem, config)
                or target == INTERPRETED
                or (config["tile_k"], config["occupancy"]) == (128, 2)
            ),
        ),
        _of("no", "blocks loop over wide tiles, if there are more than stay resident", _loops),
        Constraint(
            "narrow tiles are for SMs that wider ones leave idle",
            lambda problem, config, target: (
                config["held"] == "registers"
                or config["tile_n"] == USUAL
                or count(problem, config) <= 4 * target.sm_count
            ),
        ),
    ),
)


def _reference(
    residual: Any, x: Any, norm_weight: Any, norm_bias: Any, eps: float, weight: Any, up: Any, bias: Any, *,
    normed: bool, layer: bool, added: bool, gated: bool, rounded: bool, biased: bool, gelu_tanh: bool, silu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, with the casts of the sum and of the norm.

    ``rounded`` changes nothing, nor does ``layer`` without a norm.
    """
    wide = residual.double() + x.double() if added else x.double()
    rows = wide.to(x.dtype)
    if not normed:
        t = rows
    elif layer:
        left = rows.double() - rows.double().mean(-1, keepdim=True)
        rstd = (left.square().mean(-1, keepdim=True) + eps).rsqrt()
        t = left * rstd * norm_weight.double() + norm_bias.double()
    else:
        t = reference_forward(rows, norm_weight, eps)["y"]
    flags = {"gated": gated, "rounded": rounded, "biased": biased, "gelu_tanh": gelu_tanh, "silu": silu}
    found = linear.reference(t.to(x.dtype), weight, up, bias, None, accumulated=False, **flags)
    return found | ({"total": wide} if added else {})


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    found = drawn(_ARRAYS, problem, generator, device)
    return found | {
        name: drawn((array,), problem, generator, device, about_one=False)[name] * problem["inner"] ** -0.5
        for name, array in ((x.name, x) for x in tensors(_ARRAYS, "input"))
        if name in ("weight", "up")
    }


SPEC = spec(
    "skinny_held_linear",
    "y = act(t @ weight^T + bias) * (t @ up^T) for few rows, where t is residual + x, or its norm",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("inner", "columns")),
        *flags_of(FLAGS),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    _reference,
    function=lambda problem, config: skinny_held_linear_in_steps if _is_of_steps(config) else skinny_held_linear,
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    constants=_constants,
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
