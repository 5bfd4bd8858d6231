"""Group normalisation (Wu and He 2018, arXiv:1803.08494) forward and backward, statistics in float32.

The channels of each batch entry are cut into groups, and the numbers of a group, which are contiguous, have
one mean and one rstd: ``y = (x - mean) * rstd * weight + bias`` with a weight and a bias for each channel. Backward,
with g = dy * weight: ``dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * mean(g * (x - mean)))``. A channel's sums of dy
and of ``dy * (x - mean)`` give the means over its group, and, added up over the batch, ``dbias`` and ``dweight``: the
backward stores both for each channel of each batch entry, and the spec ``column_sum`` adds them up.

A group that fits registers is read once, by one block, which may compute several groups a step. A longer group is read
in pieces, again for each sum, out of the L2 cache. Arrays of x's shape are [batch, groups, channels of a group,
positions].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import PRODUCT, Arrays, bytes_of, gradients, tensors
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import (
    ITEM_BYTES,
    Array,
    Config,
    Constraint,
    Dimension,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
    name_of,
)
from tilekern.spec.targets import Target


def _tile(array, b, g, piece, shape):
    """Load a piece of some groups, [tile_g, tile_c, tile_n] in float32."""
    tile_g, tile_c, tile_n, across, bounded, tma = shape
    index = (b, g, piece // across, piece % across)
    return load(array, index, (1, tile_g, tile_c, tile_n), bounded, 0, tma).astype(ct.float32).reshape(
        (tile_g, tile_c, tile_n)
    )  # fmt: skip


def _each(array, g, c, shape):
    """Load a number for each channel of some groups, [tile_g, tile_c, 1] in float32."""
    tile_g, tile_c, _, _, _, _ = shape
    return load(array, (g, c), (tile_g, tile_c), True, 0, False).astype(ct.float32).reshape((tile_g, tile_c, 1))


def _inside(x, piece, channels, positions, shape):
    """Return which elements of a piece lie inside the group."""
    tile_g, tile_c, tile_n, across, _, _ = shape
    c = piece // across * tile_c + ct.arange(tile_c, dtype=ct.int32).reshape((1, tile_c, 1))
    n = piece % across * tile_n + ct.arange(tile_n, dtype=ct.int32).reshape((1, 1, tile_n))
    return ct.broadcast_to((c < channels) & (n < positions), (tile_g, tile_c, tile_n))


def _less(x, mean, piece, channels, positions, shape):
    """Return the difference from the mean; 0 beyond a group's edges."""
    _, tile_c, tile_n, _, _, _ = shape
    left = x - mean
    if ct.static_eval(channels % tile_c != 0 or positions % tile_n != 0):
        left = ct.where(_inside(x, piece, channels, positions, shape), left, 0.0)
    return left


def _sum(x):
    if ct.static_eval(x.shape[0] == 1):
        # As one row, so that a block's warps wait for one reduction.
        row = x.reshape((1, x.shape[1] * x.shape[2]))
        return ct.sum(row, axis=1, keepdims=True).reshape((1, 1, 1))
    return ct.sum(ct.sum(x, axis=2, keepdims=True), axis=1, keepdims=True)


def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


def _sums(x, y, z, axis):
    """Sum three tiles along an axis, by one reduction if a step is one group: for several it compiles for minutes."""
    if ct.static_eval(x.shape[0] == 1):
        return ct.reduce((x, y, z), axis, _add_three, (0.0, 0.0, 0.0), keepdims=True)
    return (
        ct.sum(x, axis=axis, keepdims=True), ct.sum(y, axis=axis, keepdims=True), ct.sum(z, axis=axis, keepdims=True)
    )  # fmt: skip


def _store(array, tile, b, g, piece, shape):
    tile_g, tile_c, tile_n, across, bounded, tma = shape
    ct.store(
        array, (b, g, piece // across, piece % across), tile.reshape((1, tile_g, tile_c, tile_n)).astype(array.dtype),
        check_bounds=bounded, allow_tma=tma,
    )  # fmt: skip


def _mean(x, b, g, pieces, channels, positions, shape):
    tile_g, tile_c, tile_n, _, _, _ = shape
    total = ct.zeros((tile_g, tile_c, tile_n), ct.float32)
    for piece in range(pieces):
        total = total + _tile(x, b, g, piece, shape)
    return _sum(total) / (channels * positions)


def _rstd(x, b, g, mean, pieces, channels, positions, eps, shape):
    tile_g, tile_c, tile_n, _, _, _ = shape
    total = ct.zeros((tile_g, tile_c, tile_n), ct.float32)
    for piece in range(pieces):
        left = _less(_tile(x, b, g, piece, shape), mean, piece, channels, positions, shape)
        total = total + left * left
    return ct.rsqrt(_sum(total) / (channels * positions) + eps)


@ct.kernel
def group_norm_forward(
    x, weight, bias, y, eps, channels: ConstInt, positions: ConstInt, tile_g: ConstInt, tile_c: ConstInt,
    tile_n: ConstInt, persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """A step of groups of a batch entry a block, or resident blocks; weight and bias [groups, channels of a group]."""
    shape = (tile_g, tile_c, tile_n, ct.cdiv(positions, tile_n), bounded, tma)
    arrays, steps = (x, weight, bias, y), ct.cdiv(x.shape[1], tile_g)
    if ct.static_eval(persistent):
        for item in range(ct.bid(0), x.shape[0] * steps, ct.num_blocks(0)):
            _forward(arrays, item // steps, item % steps, channels, positions, eps, long, shape)
    else:
        _forward(arrays, ct.bid(0) // steps, ct.bid(0) % steps, channels, positions, eps, long, shape)


def _forward(arrays, b, g, channels, positions, eps, long, shape):
    x, weight, bias, y = arrays
    _, tile_c, tile_n, across, _, _ = shape
    if ct.static_eval(long):
        pieces = ct.cdiv(x.shape[2], tile_c) * ct.cdiv(x.shape[3], tile_n)
        mean = _mean(x, b, g, pieces, channels, positions, shape)
        rstd = _rstd(x, b, g, mean, pieces, channels, positions, eps, shape)
        for piece in range(pieces):
            left = _tile(x, b, g, piece, shape) - mean
            scale, shift = _each(weight, g, piece // across, shape), _each(bias, g, piece // across, shape)
            _store(y, left * rstd * scale + shift, b, g, piece, shape)
    else:
        tile, share = _tile(x, b, g, 0, shape), 1.0 / (channels * positions)
        scale, shift = _each(weight, g, 0, shape), _each(bias, g, 0, shape)
        left = _less(tile, _sum(tile) * share, 0, channels, positions, shape)
        rstd = ct.rsqrt(_sum(left * left) * share + eps)
        _store(y, left * (rstd * scale) + shift, b, g, 0, shape)


def _keep(array, sums, b, g, c, shape):
    """Store a number for each channel."""
    tile_g, tile_c, _, _, _, _ = shape
    ct.store(array, (b, g, c), sums.reshape((1, tile_g, tile_c)), allow_tma=False)


@ct.kernel
def group_norm_backward(
    dy, x, weight, dx, scales, shifts, eps, channels: ConstInt, positions: ConstInt, tile_g: ConstInt,
    tile_c: ConstInt, tile_n: ConstInt, persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool,
):  # fmt: skip
    """A step of groups of one batch entry a block, or resident blocks.

    scales and shifts [batch, groups, channels of a group] have each channel's share of dweight and dbias.
    """
    shape = (tile_g, tile_c, tile_n, ct.cdiv(positions, tile_n), bounded, tma)
    arrays, steps = (dy, x, weight, dx, scales, shifts), ct.cdiv(x.shape[1], tile_g)
    if ct.static_eval(persistent):
        for item in range(ct.bid(0), x.shape[0] * steps, ct.num_blocks(0)):
            _backward(arrays, item // steps, item % steps, channels, positions, eps, long, shape)
    else:
        _backward(arrays, ct.bid(0) // steps, ct.bid(0) % steps, channels, positions, eps, long, shape)


def _backward(arrays, b, g, channels, positions, eps, long, shape):
    dy, x, weight, dx, scales, shifts = arrays
    tile_g, tile_c, tile_n, across, _, _ = shape
    if ct.static_eval(long):
        down, wide = ct.cdiv(x.shape[2], tile_c), ct.cdiv(x.shape[3], tile_n)
        mean = _mean(x, b, g, down * wide, channels, positions, shape)
        slope, pull = ct.zeros((tile_g, 1, 1), ct.float32), ct.zeros((tile_g, 1, 1), ct.float32)
        square = ct.zeros((tile_g, tile_c, tile_n), ct.float32)
        for c in range(down):
            shift = ct.zeros((tile_g, tile_c, tile_n), ct.float32)
            scale = ct.zeros((tile_g, tile_c, tile_n), ct.float32)
            for n in range(wide):
                above, tile = _tile(dy, b, g, c * across + n, shape), _tile(x, b, g, c * across + n, shape)
                left = _less(tile, mean, c * across + n, channels, positions, shape)
                shift, scale, square = shift + above, scale + above * left, square + left * left
            sums, products = ct.sum(shift, axis=2, keepdims=True), ct.sum(scale, axis=2, keepdims=True)
            _keep(shifts, sums, b, g, c, shape)
            _keep(scales, products, b, g, c, shape)
            each = _each(weight, g, c, shape)
            slope = slope + ct.sum(sums * each, axis=1, keepdims=True)
            pull = pull + ct.sum(products * each, axis=1, keepdims=True)
        rstd = ct.rsqrt(_sum(square) / (channels * positions) + eps)
        for c in range(down):
            # The block reads its own stores; neither goes through TMA's other memory proxy.
            products = load(scales, (b, g, c), (1, tile_g, tile_c), True, 0, False).reshape((tile_g, tile_c, 1))
            _keep(scales, products * rstd, b, g, c, shape)
        pull = pull * rstd
        slope, pull = slope / (channels * positions), pull * rstd / (channels * positions)
        for piece in range(down * wide):
            left = _tile(x, b, g, piece, shape) - mean
            above = _tile(dy, b, g, piece, shape) * _each(weight, g, piece // across, shape)
            _store(dx, (above - slope - left * pull) * rstd, b, g, piece, shape)
    else:
        tile, above = _tile(x, b, g, 0, shape), _tile(dy, b, g, 0, shape)
        each, share = _each(weight, g, 0, shape), 1.0 / (channels * positions)
        left = _less(tile, _sum(tile) * share, 0, channels, positions, shape)
        squares, sums, products = _sums(left * left, above, above * left, 2)
        square, slope, pull = _sums(squares, sums * each, products * each, 1)
        rstd = ct.rsqrt(square * share + eps)
        slope, pull = slope * share, pull * rstd * rstd * share
        _store(dx, (above * each - slope - left * pull) * rstd, b, g, 0, shape)
        _keep(shifts, sums, b, g, 0, shape)
        _keep(scales, products * rstd, b, g, 0, shape)


_SHAPE, _CHANNELS = ("batch", "groups", "channels", "positions"), ("groups", "channels")
# Rows of a few channels are not aligned.
_X, _WEIGHT = Array("x", "dtype", _SHAPE), Array("weight", "weight_dtype", _CHANNELS, aligned=False)
_EPS = ScalarParameter("eps", "float32", 1e-6)
_DIMENSIONS = (
    Dimension("batch", "bucketed"),
    Dimension("groups", "bucketed"),
    Dimension("channels", "exact"),
    Dimension("positions", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("weight_dtype", "dtype"),
)
# Elements of a group, padded to powers of two, that a step may hold in registers.
_MOST_HELD = 8192
# Elements of a tile.
_SIZES = (1024, 2048, 4096)


def _widths(problem: Problem) -> tuple[int, int]:
    return power_of_two(problem["channels"]), power_of_two(problem["positions"])


def _is_long(problem: Problem) -> bool:
    channels, positions = _widths(problem)
    return channels * positions > _MOST_HELD


def _piece(problem: Problem, size: int) -> dict[str, int]:
    """Return the sizes of a tile of about ``size`` elements: some groups, or a part of one."""
    channels, positions = _widths(problem)
    tile_n = min(positions, size) if _is_long(problem) else positions
    tile_c = min(channels, max(1, size // tile_n)) if _is_long(problem) else channels
    tile_g = 1 if _is_long(problem) else max(1, min(size // (channels * positions), power_of_two(problem["groups"])))
    return {"tile_g": tile_g, "tile_c": tile_c, "tile_n": tile_n}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    pieces = [_piece(problem, size) for size in _SIZES]
    return {
        "schedule": ["persistent", "block"],
        **{name: sorted({piece[name] for piece in pieces}) for name in ("tile_g", "tile_c", "tile_n")},
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


_WHOLE = Constraint(
    "a tile is a group, a part of one or some groups, of about 1024 to 4096 elements",
    lambda problem, config, target: any(
        all(config[name] == size for name, size in _piece(problem, most).items()) for most in _SIZES
    ),
)


def _fits(live: int) -> Constraint:
    return Constraint(
        f"{live} live values for each element of a tile exceed the SM's registers at this occupancy",
        lambda problem, config, target: (
            config["tile_g"] * config["tile_c"] * config["tile_n"] * live * config["occupancy"]
            <= 1.25 * target.registers
        ),
    )


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    tile_c, tile_n, channels, positions = config["tile_c"], config["tile_n"], problem["channels"], problem["positions"]
    return {
        "long": channels > tile_c or positions > tile_n,
        "bounded": config["tile_g"] > 1 or channels % tile_c != 0 or positions % tile_n != 0,
    }


def _default(problem: Problem, target: Target, live: int, schedule: str) -> Config:
    piece = _piece(problem, 2048)
    elements, whole = math.prod(piece.values()), piece["tile_g"] == 1 and not _is_long(problem)
    most = 4 if schedule == "block" else 8
    held = (n for n in (8, 4, 2) if n <= most and elements * live * n <= target.registers and live * n <= 16)
    warps = 8 if elements > 4096 else 0
    config = Config(
        {"schedule": "persistent", **piece, "occupancy": next(held, 1), "num_worker_warps": warps, "tma": False}
    )
    if not whole:
        return config
    return config.but(schedule=schedule, tma=schedule == "persistent" and target.has_tma)


def _generic(problem: Problem) -> Config:
    channels, positions = _widths(problem)
    tile_n = min(64, positions)
    return Config(
        schedule="persistent", tile_g=1, tile_c=min(channels, 64 // tile_n), tile_n=tile_n, occupancy=1,
        num_worker_warps=8, tma=False,
    )  # fmt: skip


def _results(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients, with the shares of weight and bias added up over the batch."""
    sums = {"dweight": outputs["scales"].double().sum(0), "dbias": outputs["shifts"].double().sum(0)}
    return {"dx": outputs["dx"], **sums}


def _beside(weight: Any, x: Any) -> Any:
    """Shape a number for each channel to broadcast over x [batch, ...]."""
    return weight.reshape(*weight.shape, *[1] * (x.dim() - 1 - weight.dim()))


def reference_forward(x: Any, weight: Any, bias: Any, eps: float) -> dict[str, Any]:
    """Return the formula in float64; the weight's last dimension has the channels of a group."""
    wide, dims = x.double(), tuple(range(weight.dim(), x.dim()))
    left = wide - wide.mean(dims, keepdim=True)
    rstd = (left.square().mean(dims, keepdim=True) + eps).rsqrt()
    return {"y": left * rstd * _beside(weight.double(), x) + _beside(bias.double(), x)}


def reference_backward(dy: Any, x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Return the gradients of :func:`reference_forward`, which are the same for any bias."""
    return gradients(reference_forward, {"y": dy}, x=x, weight=weight, bias=weight, eps=eps)


def _spec(
    function: Any, summary: str, arrays: Arrays, reference: Any, *, live: int, flops: int, schedule: str, **more: Any
) -> KernelSpec:
    def placed(problem: Problem) -> Arrays:
        """Return the arrays, not aligned if that number of positions leaves channels unaligned."""
        size = problem["positions"]
        whole = {x.name for x in tensors(arrays) if size * ITEM_BYTES[x.dtype_in(problem)] % 16 == 0}
        return tuple(
            x if x.name in whole or isinstance(x, ScalarParameter) else dataclasses.replace(x, aligned=False)
            for x in arrays
        )

    def bytes_moved(problem: Problem) -> int:
        # Shares of sums count as one row, their sum.
        scratch = tensors(arrays, "scratch")
        return bytes_of(tensors(arrays, "input", "output"), problem) + bytes_of(scratch, problem.but(batch=1))

    return spec(
        name_of(function),
        summary,
        _DIMENSIONS,
        placed,
        reference,
        function=function,
        constants=_constants,
        grid=lambda sizes, config, sm_count: grid_of(
            sizes["batch"] * cdiv(sizes["groups"], config["tile_g"]), config, sm_count
        ),
        space=Space(_axes, (_WHOLE, _fits(live), TMA_NEEDS_HOPPER)),
        default=lambda problem, target: _default(problem, target, live, schedule),
        generic=_generic,
        bytes_moved=bytes_moved,
        flops=lambda problem: flops * math.prod(problem[name] for name in _SHAPE),
        result_dtype=tensors(arrays, "output")[0].dtype_in,
        arrays=arrays,
        **more,
    )


FORWARD = _spec(
    group_norm_forward,
    "y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, group by group",
    (_X, _WEIGHT, Array("bias", "weight_dtype", _CHANNELS, aligned=False), Array("y", PRODUCT, _SHAPE, "output"), _EPS),
    reference_forward,
    live=2,
    flops=8,
    schedule="persistent",
)
BACKWARD = _spec(
    group_norm_backward,
    "gradients of group_norm: dx, and each batch entry's share of dweight and dbias in float32",
    (
        Array("dy", PRODUCT, _SHAPE), _X, _WEIGHT, Array("dx", "dtype", _SHAPE, "output"),
        Array("scales", "float32", ("batch", *_CHANNELS), "scratch", aligned=False),
        Array("shifts", "float32", ("batch", *_CHANNELS), "scratch", aligned=False), _EPS,
    ),
    reference_backward,
    live=3,
    flops=18,
    schedule="block",
    results=_results,
)  # fmt: skip
SPECS = (FORWARD, BACKWARD)
