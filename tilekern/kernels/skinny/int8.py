"""Linear layers of few rows with int8 weights: ``y = act(x @ (scale * weight)^T + bias) * (x @ (up_scale * up)^T)``.

Weights of :mod:`tilekern.kernels.quantize`, with a scale for each row. A scale is a factor of a whole sum, so each sum
is multiplied once. Reading int8 takes half the time of a half type only if the products keep up. ``widening`` says how
matrix units get two operands of one dtype:

- ``no``: weights stay as they are, and each number of ``x``, of at most 16 rows, becomes four int8 digits, which are
  rows of their own. All sums are exact, in int32.
- ``direct`` and ``float32``: weights become numbers of the dtype of ``x`` in registers, which is exact too. The
  compiler does it, or each is made a float32 first. The compiler's code for sm_90 has five to six instructions for a
  number by the first and three by the second, one of which runs at a quarter of the others' rate or less; for sm_100
  three by both, and that slow one by the second alone. With ``no`` it is one for a row of ``x``, two for eight (sm_90).

Digits: a row is multiplied by the power of two that brings its largest magnitude to 2^29 or above, but below 2^30, and
cut to whole numbers, whose digits of base 256 are -128 to 127. So a number of bfloat16 is exact from 2^-22 of its row's
largest magnitude on, one of float16 from 2^-19 on. Others are off by less than 2^-29 of that magnitude, which is less
than a sum in float32 is. The power is 2^126 at most, so rows below 2^-97 are off by up to 2^-126. A row with NaN or an
infinity has NaN for all of its results.

Weights and scales must be constants: the kernel that runs right before must not write them. With ``no`` a block loads
its scales, and the weights of its first ``ahead`` terms, before it waits.

Bits: a row of the result depends on its own row of ``x`` alone. With ``no`` no axis changes them. With the others
``tile_k``, and ``tile_n`` below 64 or not, can.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn, tensors
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.matmul.space import unit_of
from tilekern.kernels.quantize import SPREAD, int8_numbers
from tilekern.kernels.skinny.tiles import (
    TOO_LARGE,
    TOO_SMALL,
    USUAL,
    WIDTHS,
    activated,
    config_of,
    count,
    has_tokens,
    tokens_of,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Dimension, Problem, Space, Value
from tilekern.spec.targets import INTERPRETED, Target

FLAGS = ("gated", "rounded", "biased", "gelu_tanh", "silu")
# The most rows that are split into digits: further ones are more work than widening the weights.
MOST_SPLIT = 16
# Digits of base 256 of a number, and the bits of its magnitude, which leave the last digit room for a carry.
_DIGITS, _BITS = 4, 30
# Sums of more products of int8 can exceed int32.
_MOST_TERMS = (1 << 31) // (1 << 14) - 1
# Bytes of weights that a step of digits loads at least.
_STEP = 1 << 14
# Numbers of a piece of rows whose magnitudes are compared at once; threads hold no more of them.
_PIECE = 8192


def _widened(tile, dtype, by_float32):
    if ct.static_eval(by_float32):
        tile = tile.astype(ct.float32)
    return tile.astype(dtype)


def _sums(x, weight, up, i, j, gated, tile_m, tile_n, tile_k, latency, by_float32):
    """Return the sums of x @ weight^T and x @ up^T, [tile_n, tile_m] each, without their scales."""
    total, factor = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_n, tile_m), ct.float32)
    for step in range(ct.cdiv(x.shape[1], tile_k)):
        tokens = load(x, (i, step), (tile_m, tile_k), True, latency, True).transpose()
        tile = load(weight, (j, step), (tile_n, tile_k), True, latency, True)
        total = ct.mma(_widened(tile, x.dtype, by_float32), tokens, total)
        if ct.static_eval(gated):
            tile = load(up, (j, step), (tile_n, tile_k), True, latency, True)
            factor = ct.mma(_widened(tile, x.dtype, by_float32), tokens, factor)
    return total, factor


def _of_columns(array, j, tile_n):
    """Load a number for each of a tile's columns."""
    return ct.reshape(load(array, (j,), (tile_n,), True, 0, False).astype(ct.float32), (1, tile_n))


def _scales(scale, up_scale, bias, j, gated, biased, tile_n):
    """Load the numbers of a tile's columns that the flags ask for."""
    return (
        _of_columns(scale, j, tile_n),
        _of_columns(up_scale, j, tile_n) if ct.static_eval(gated) else None,
        _of_columns(bias, j, tile_n) if ct.static_eval(biased) else None,
    )


def _finished(total, factor, scales, dtype, gated, rounded, biased, gelu_tanh, silu):
    """Return the result of sums [tile_m, tile_n] without their scales."""
    total = total * scales[0]
    if ct.static_eval(gated):
        factor = factor * scales[1]
    if ct.static_eval(biased):
        total = total + scales[2]
    if ct.static_eval(rounded):
        total, factor = total.astype(dtype).astype(ct.float32), factor.astype(dtype).astype(ct.float32)
    z = activated(total, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    return z.astype(dtype)


def _tile(
    item, x, weight, scale, up, up_scale, bias, y, gated, rounded, biased, gelu_tanh, silu, tile_m, tile_n, tile_k,
    latency, by_float32,
):  # fmt: skip
    """Compute tile number ``item`` of the result: ``tile_m`` tokens of ``tile_n`` columns."""
    down = ct.cdiv(y.shape[0], tile_m)
    i, j = item % down, item // down
    total, factor = _sums(x, weight, up, i, j, gated, tile_m, tile_n, tile_k, latency, by_float32)
    scales = _scales(scale, up_scale, bias, j, gated, biased, tile_n)
    z = _finished(
        total.transpose(), factor.transpose(), scales, y.dtype, gated, rounded, biased, gelu_tanh, silu
    )  # fmt: skip
    ct.store(y, (i, j), z, allow_tma=False)


@ct.kernel
def skinny_linear_int8(
    x, weight, scale, up, up_scale, bias, y, gated: ConstBool, rounded: ConstBool, biased: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt,
    by_float32: ConstBool, persistent: ConstBool,
):  # fmt: skip
    """Widens weights: x [rows, inner], weight and up [columns, inner], scales and bias [columns], y [rows, columns]."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    tiles = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n)
    arguments = (
        x, weight, scale, up, up_scale, bias, y, gated, rounded, biased, gelu_tanh, silu, tile_m, tile_n, tile_k,
        latency, by_float32,
    )  # fmt: skip
    each_step(_tile, tiles, persistent, arguments)


def _rows(x, i, step, shape, whole):
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


def _powers(x, i, tile_m, piece, whole):
    """Return the power of two of each row that makes its numbers whole, and its inverse, [tile_m, 1] each."""
    # Magnitudes are in the order of their bits, and those of NaN are the largest.
    largest = ct.zeros((tile_m, piece), ct.int32)
    for c in range(ct.cdiv(x.shape[1], piece)):
        bits = ct.bitcast(_rows(x, i, c, (tile_m, piece), whole).astype(ct.float32), ct.int32)
        largest = ct.maximum(largest, bits & 0x7FFFFFFF)
    largest = ct.max(largest, 1, keepdims=True)
    # The exponent of float32 is in the bits from 23 on, with 127 added.
    exponent = ct.maximum(largest >> 23, 30)
    power = ct.bitcast((2 * 127 + _BITS - 1 - exponent) << 23, ct.float32)
    inverse = ct.bitcast((exponent - _BITS + 1) << 23, ct.float32)
    return power, ct.where(largest < 0x7F800000, inverse, math.nan)


def _digits(tile, power, wide):
    """Return the digits of rows as columns [tile_k, wide]: those of a row together, all again and again."""
    count, width = tile.shape[0] * _DIGITS, tile.shape[1]
    # With half of the base added to each digit but the last, none is negative, and none is carried into the next.
    whole = (tile.astype(ct.float32) * power).astype(ct.int32) + 0x808080
    place = ct.reshape(8 * ct.arange(_DIGITS, dtype=ct.int32), (1, _DIGITS, 1))
    digits = ct.reshape(whole ^ 0x808080, (tile.shape[0], 1, width)) >> place
    rows = ct.reshape(digits.astype(ct.int8), (1, count, width))
    return ct.reshape(ct.broadcast_to(rows, (wide // count, count, width)), (wide, width)).transpose()


def _of_digits(sums, inverse):
    """Return the sums of rows, [tile_m, tile_n], of those of their digits, [tile_n, wide]."""
    rows, columns = inverse.shape[0], sums.shape[0]
    found = ct.extract(sums.transpose(), (0, 0), (_DIGITS * rows, columns)).astype(ct.float32)
    found = ct.reshape(found, (rows, _DIGITS, columns))
    total = ct.zeros((rows, 1, columns), ct.float32)
    for place in ct.static_iter(range(_DIGITS - 1, -1, -1)):
        total = total + ct.extract(found, (0, place, 0), (rows, 1, columns)) * float(256**place)
    return ct.reshape(total, (rows, columns)) * inverse


def _begun(x, first, total, factor, power, i, gated, wide, whole):
    """Return the sums and the products of the first terms, whose weights are there already."""
    tokens = _digits(_rows(x, i, 0, (power.shape[0], first[0].shape[1]), whole), power, wide)
    total = ct.mma(first[0], tokens, total)
    return total, ct.mma(first[1], tokens, factor) if ct.static_eval(gated) else factor


def _digit_sums(x, weight, up, first, i, j, gated, tile_m, tile_n, tile_k, ahead, wide, piece, whole, latency):
    """Return the sums of x @ weight^T and x @ up^T, [tile_m, tile_n] each, without the columns' scales."""
    power, inverse = _powers(x, i, tile_m, piece, whole)
    # Several rows whose indices are computed take 3 to 5 times as many instructions in narrow tiles (sm_90).
    whole = ct.static_eval(whole and (tile_m == 1 or tile_n >= 64))
    total, factor = ct.zeros((tile_n, wide), ct.int32), ct.zeros((tile_n, wide), ct.int32)
    if ct.static_eval(ahead > 0):
        total, factor = _begun(x, first, total, factor, power, i, gated, wide, whole)
    for step in range(ahead // tile_k, ct.cdiv(x.shape[1], tile_k)):
        # By TMA, rows would take the place of weights in shared memory.
        tokens = _digits(_rows(x, i, step, (tile_m, tile_k), whole), power, wide)
        total = ct.mma(load(weight, (j, step), (tile_n, tile_k), True, latency, True), tokens, total)
        if ct.static_eval(gated):
            factor = ct.mma(load(up, (j, step), (tile_n, tile_k), True, latency, True), tokens, factor)
    return _of_digits(total, inverse), _of_digits(factor, inverse)


@ct.kernel
def skinny_linear_int8_by_digits(
    x, weight, scale, up, up_scale, bias, y, gated: ConstBool, rounded: ConstBool, biased: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, ahead: ConstInt,
    wide: ConstInt, piece: ConstInt, whole: ConstBool, latency: ConstInt,
):  # fmt: skip
    """Splits rows into digits, one tile a block: arrays as those of :func:`skinny_linear_int8`."""
    down = ct.cdiv(y.shape[0], tile_m)
    i, j = ct.bid(0) % down, ct.bid(0) // down
    # They are constants, so that they are on their way while the predecessor ends.
    first = (
        load(weight, (j, 0), (tile_n, ahead), True, 0, True) if ct.static_eval(ahead > 0) else None,
        load(up, (j, 0), (tile_n, ahead), True, 0, True) if ct.static_eval(ahead > 0 and gated) else None,
    )
    scales = _scales(scale, up_scale, bias, j, gated, biased, tile_n)
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    total, factor = _digit_sums(
        x, weight, up, first, i, j, gated, tile_m, tile_n, tile_k, ahead, wide, piece, whole, latency
    )  # fmt: skip
    z = _finished(total, factor, scales, y.dtype, gated, rounded, biased, gelu_tanh, silu)
    ct.store(y, (i, j), z, allow_tma=False)


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "int8", ("columns", "inner"), constant=True),
    Array("scale", "float32", ("columns",), constant=True),
    Array("up", "int8", ("columns", "inner"), flag="gated", constant=True),
    Array("up_scale", "float32", ("columns",), flag="gated", constant=True),
    Array("bias", "dtype", ("columns",), flag="biased", constant=True),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def _is_split(config: Config) -> bool:
    return bool(config["widening"] == "no")


def _axes(problem: Problem) -> dict[str, list[Value]]:
    if problem["dtype"] == "float32":
        return {name: [value] for name, value in generic(problem).items()}
    rows = problem["rows"]
    return {
        "schedule": ["block", "persistent"],
        "tile_m": sorted({power_of_two(rows), *(tokens_of(rows, tile_n) for tile_n in WIDTHS)}),
        "tile_n": list(WIDTHS),
        "tile_k": [256, 512, 128],
        "ahead": [512, 256, 128, 1024, 0],
        "occupancy": [2, 1, 4],
        "num_worker_warps": [0, 8],
        "latency": [0],
        "widening": ["no", "float32", "direct"],
    }


def _gates(problem: Problem) -> int:
    return 2 if problem["gated"] else 1


def _wide(config: Config) -> int:
    """Return the columns of a tile of digits, of which a product has as many as it needs at least."""
    return max(_DIGITS * int(config["tile_m"]), tokens_of(1, config["tile_n"]))


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    inner, tiles = problem["inner"], (config["tile_k"], config["ahead"] or 1)
    # A piece that divides the rows, if it is not much smaller than one that does not.
    most, divisor = _PIECE // config["tile_m"], inner & -inner
    piece = min(most, divisor) if divisor >= min(most, 1024) else min(most, power_of_two(inner))
    return {
        "by_float32": config["widening"] == "float32",
        "wide": _wide(config),
        "piece": piece,
        "whole": all(inner % width == 0 for width in (piece, *tiles)),
    }


def _is_split_if_few(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether the rows are split if they can be, and ``tile_m`` is theirs."""
    rows, dtype, inner = (problem[name] for name in ("rows", "dtype", "inner"))
    if rows <= MOST_SPLIT and dtype != "float32" and inner <= _MOST_TERMS:
        return _is_split(config) and bool(config["tile_m"] == power_of_two(rows))
    return _is_widened(problem, config, target)


def _is_widened(problem: Problem, config: Config, target: Target) -> bool:
    return not _is_split(config) and has_tokens(problem, config, target)


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds two stages of operands, and of digits also what is loaded before."""
    across = config["tile_n"] * _gates(problem)
    if _is_split(config):
        held = (across + _wide(config)) * (2 * config["tile_k"] + config["ahead"])
    else:
        held = 2 * (config["tile_m"] * ITEM_BYTES[problem["dtype"]] + across) * config["tile_k"]
    return bool(held * config["occupancy"] <= target.shared_bytes)


def _suits_digits(problem: Problem, config: Config, target: Target) -> bool:
    across, ahead, tile_k = config["tile_n"] * _gates(problem), config["ahead"], config["tile_k"]
    if not _is_split(config):
        return bool(ahead == 0 and tile_k <= 256)
    is_step = across * tile_k in (_STEP, 2 * _STEP) or (config["tile_n"] < USUAL and across * tile_k == _STEP // 2)
    is_ahead = ahead == 0 or (ahead % tile_k == 0 and across * ahead in (_STEP, 2 * _STEP))
    return bool(config["schedule"] == "block" and is_step and is_ahead)


def _suits_occupancy(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether blocks are 2 on an SM, or 1 or 4 where the compiler gives each more than one stage (sm_90)."""
    occupancy, tile_n = config["occupancy"], config["tile_n"]
    if not _is_split(config):
        return bool(tile_n <= USUAL or occupancy <= 2)
    has_room = (tile_n, config["tile_k"], config["ahead"]) == (32, 256, 0) and problem["rows"] <= 4
    others = 1 if tile_n >= USUAL else 4 if has_room else 2
    return occupancy in (2, others)


def _is_read_by_most(problem: Problem, config: Config, target: Target) -> bool:
    tiles = count(problem, config)
    if config["tile_n"] < USUAL:
        return tiles <= 4 * target.sm_count
    return config["tile_n"] == USUAL or tiles >= target.sm_count


def _usual(problem: Problem, tile_n: int, **changes: Value) -> Config:
    """Return a config without the axis that skinny_linear alone has, of its implementations."""
    found = config_of(problem["rows"], tile_n, ahead=0, **changes)
    return Config({name: value for name, value in found.items() if name != "implementation"})


def _widest(problem: Problem, found: Sequence[Config], target: Target) -> Config:
    """Return the first config with which three quarters of the SMs read, or the last."""
    return next((c for c in found if 4 * count(problem, c) >= 3 * target.sm_count), found[-1])


def _default_that_widens(problem: Problem, target: Target) -> Config:
    if problem["dtype"] == "float32":
        return generic(problem)
    found = [_usual(problem, tile_n, tile_k=256, widening="float32") for tile_n in WIDTHS if tile_n <= USUAL]
    if unit_of(target) == "tcgen05":
        found = [c.but(widening="direct") if c["tile_n"] == USUAL else c for c in found]
    found = [c if _fits_shared(problem, c, target) else c.but(tile_k=128) for c in found]
    found = [c if _fits_shared(problem, c, target) else c.but(occupancy=1) for c in found]
    return _widest(problem, found, target)


def default(problem: Problem, target: Target) -> Config:
    """Return the widest of the narrow tiles with which three quarters of the SMs read, split if the space says so.

    With more than four rows, digits take six instructions for a weight of a narrower tile (sm_90).
    """
    found = []
    for tile_n in (width for width in WIDTHS if width == USUAL or (width < USUAL and problem["rows"] <= 4)):
        terms = min(512, _STEP // (tile_n * _gates(problem)))
        split = _usual(problem, tile_n, tile_k=terms, widening="no").but(tile_m=power_of_two(problem["rows"]))
        ways = (split.but(ahead=_STEP // (tile_n * _gates(problem)), occupancy=2), split, split.but(occupancy=1))
        found += [c for c in ways if SPACE.violated(problem, c, target) is None][:1]
    return _widest(problem, found, target) if found else _default_that_widens(problem, target)


def generic(problem: Problem) -> Config:
    """Return a tile that any GPU holds, on any grid; eight warps share its loads of single elements."""
    return _usual(
        problem, USUAL, schedule="persistent", tile_k=32, occupancy=1, num_worker_warps=8, widening="direct"
    )  # fmt: skip


def _reference(
    x: Any, weight: Any, scale: Any, up: Any, up_scale: Any, bias: Any, *, gated: bool, biased: bool, gelu_tanh: bool,
    silu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, where ``rounded`` changes nothing."""
    import torch

    z = (x.double() @ weight.double().t()) * scale.double()
    z = z + bias.double() if biased else z
    z = torch.nn.functional.gelu(z, approximate="tanh") if gelu_tanh else z
    z = torch.nn.functional.silu(z) if silu else z
    return {"y": z * ((x.double() @ up.double().t()) * up_scale.double()) if gated else z}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    weights = {x.name: x for x in tensors(_ARRAYS) if x.dtype == "int8"}
    others = tuple(x for x in tensors(_ARRAYS) if x.name not in weights)
    found = drawn(others, problem, generator, device, about_one=False)
    found |= {name: int8_numbers(x.shape_in(problem), generator, device) for name, x in weights.items()}
    of_row = (SPREAD * problem["inner"] ** 0.5) ** -1
    return found | {name: of_row * (1 + found[name].abs() / 4) for name in ("scale", "up_scale")}


_CONSTRAINTS = (
    Constraint(TOO_LARGE, _fits_shared),
    Constraint(
        "a block of digits has one tile, steps of 16 or 32 KB of weights, or 8 KB of narrow tiles, and 16 or 32 KB "
        "before them, or none",
        _suits_digits,
    ),
    Constraint("narrow tiles are for SMs that wider ones leave idle, wide ones for more columns", _is_read_by_most),
    Constraint(
        "two blocks with 128 columns each, or with digits, read as much at a time as four with 64; narrow tiles with "
        "digits get no more stages alone on an SM, and one if four share it, unless it is small",
        _suits_occupancy,
    ),
    Constraint(
        "narrower tiles have the same code by both ways of widening",
        lambda problem, config, target: (
            config["widening"] != "direct" or config["tile_n"] >= USUAL or problem["dtype"] == "float32"
        ),
    ),
    Constraint(
        "blocks loop if there are more tiles than stay resident",
        lambda problem, config, target: (
            config["schedule"] == "block"
            or problem["dtype"] == "float32"
            or count(problem, config) > target.sm_count * config["occupancy"]
            or target == INTERPRETED
        ),
    ),
    Constraint(
        "eight warps are two groups of Hopper's four, with 64 of a tile's columns each",
        lambda problem, config, target: (
            not config["num_worker_warps"]
            or problem["dtype"] == "float32"
            or (unit_of(target) == "wgmma" and config["tile_n"] >= 128)
        ),
    ),
)
SPACE = Space(
    _axes,
    (
        *_CONSTRAINTS,
        Constraint(
            f"up to {MOST_SPLIT} rows of half types are split, unless int32 cannot hold their sums; {TOO_SMALL}",
            _is_split_if_few,
        ),
    ),
)
SPEC = spec(
    "skinny_linear_int8",
    "y = act(x @ weight^T + bias) * (x @ up^T) for few rows, of int8 weights with a scale for each of their rows",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("inner", "columns")),
        *flags_of(FLAGS),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    _reference,
    function=lambda problem, config: skinny_linear_int8_by_digits if _is_split(config) else skinny_linear_int8,
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    constants=_constants,
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: (4 if problem["gated"] else 2) * problem["rows"] * problem["inner"] * problem["columns"],
    roundings=2,  # of a rounded gate: its products, and their product
    dependent=True,
    streamed=True,
)

# The same without digits, for products of other dtypes.
WIDENED = dataclasses.replace(
    SPEC,
    space=Space(_axes, (*_CONSTRAINTS, Constraint(f"weights are widened; {TOO_SMALL}", _is_widened))),
    default=_default_that_widens,
)

SPECS = (SPEC,)
