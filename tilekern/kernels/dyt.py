"""Dynamic Tanh (Zhu et al. 2025, arXiv:2503.10622), in the place of a norm: ``gamma * tanh(alpha * x) + beta``.

alpha is one number, gamma and beta have one for each column, and beta may be missing. With t = tanh(alpha * x) and its
slope s = 1 - t^2 the gradients are ``dx = dy * gamma * s * alpha``, ``dalpha = sum(dy * gamma * s * x)``,
``dgamma = sum over rows of dy * t`` and ``dbeta = sum over rows of dy``. All in float32, rounded once.

No row depends on its other columns, so the backward cuts rows into stripes of columns, the same ones for any config. A
block goes down one stripe of its share of the rows, and stores one row of sums for that stripe: the partial sums of all
blocks are some hundred rows of a stripe's width, not of the row's. The spec ``dyt_sums`` adds them up.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import rows
from tilekern.kernels.families.arrays import COLUMNS, PRODUCT, ROWS, Arrays, bytes_of, drawn, tensors
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, hints, load, power_of_two
from tilekern.spec import (
    Array,
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
    outputs_of,
    parameters_of,
)
from tilekern.spec.targets import Target

_TWICE_LOG2_E = 2.8853900817779268
# The odd terms of tanh's series from the third: below 1/4 they leave 1e-8, where 1 - exp(-2 u) has lost digits.
_THIRD, _FIFTH, _SEVENTH, _NINTH = -0.3333333333, 0.1333333333, -0.0539682540, 0.0218694885
# Below this u is tanh(u) but for 5e-6 of it, and above it 1 - 2 / (1 + exp(2 u)) but for 1e-4.
_LINEAR = 0.00390625


def _tanh(u, dtype):
    """tanh of float32 tiles, and a quarter of its slope, as exact as results in a dtype need them."""
    if ct.static_eval(dtype == ct.float32):
        return _exact_tanh(u)
    e = ct.exp2(u * _TWICE_LOG2_E, flush_to_zero=True)
    r = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return ct.where(ct.abs(u) < _LINEAR, u, 1.0 - 2.0 * r), r - r * r


def _exact_tanh(u):
    size = ct.abs(u)
    e = ct.exp2(size * -_TWICE_LOG2_E, flush_to_zero=True)
    r = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    square = u * u
    series = (((_NINTH * square + _SEVENTH) * square + _FIFTH) * square + _THIRD) * square
    far = (1.0 - e) * r
    t = ct.where(size < 0.25, u + u * series, ct.where(u < 0.0, -far, far))
    return t, e * r * r


def _none(held, columns, alpha, dtype):
    """No statistics."""
    return ()


def _scaled(tiles, weights, known):
    return (_tanh(tiles[0] * known[0], known[1])[0] * weights[0],)


def _shifted(tiles, weights, known):
    return (_tanh(tiles[0] * known[0], known[1])[0] * weights[0] + weights[1],)


@ct.kernel
def dyt_forward(
    x, alpha, gamma, beta, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    persistent: ConstBool, long: ConstBool, bounded: ConstBool, tma: ConstBool, shifted: ConstBool,
):  # fmt: skip
    """One step of rows a block, or resident blocks; x and y [rows, columns], alpha [1], gamma and beta [columns]."""
    factor = ct.load(alpha, (0,), (1,)).astype(ct.float32).reshape((1, 1))
    if ct.static_eval(shifted):
        rows.forward(
            _none, _shifted, (x,), (gamma, beta), (y,), (factor, y.dtype), columns, tile_m, tile_n, chunks, persistent,
            long, bounded, tma,
        )  # fmt: skip
    else:
        rows.forward(
            _none, _scaled, (x,), (gamma,), (y,), (factor, y.dtype), columns, tile_m, tile_n, chunks, persistent,
            long, bounded, tma,
        )  # fmt: skip


@ct.kernel
def dyt_backward(
    dy, x, alpha, gamma, dx, partial, slopes, columns: ConstInt, stripe: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    bounded: ConstBool, tma: ConstBool, shifted: ConstBool,
):  # fmt: skip
    """dy, x and dx [rows, columns], alpha [1], gamma [columns], slopes [groups * stripes].

    partial [groups, columns or twice that] has the sums for dgamma, and behind them those for dbeta where there is a
    beta; slopes has dalpha's sum over each stripe.
    """
    factor = ct.load(alpha, (0,), (1,)).astype(ct.float32).reshape((1, 1))
    across = ct.cdiv(columns, stripe)
    groups = ct.cdiv(ct.num_blocks(0), across)
    for item in range(ct.bid(0), across * groups, ct.num_blocks(0)):
        group, first = item // across, (item % across) * (stripe // tile_n)
        slope = ct.zeros((1, tile_n), ct.float32)
        for c in range(first, ct.minimum(first + stripe // tile_n, ct.cdiv(columns, tile_n))):
            # Four times the weight, for a quarter of the slope.
            weight = load(gamma, (c,), (tile_n,), True, 0, tma).astype(ct.float32).reshape((1, tile_n)) * 4.0
            scale = weight * factor
            scales, shifts = ct.zeros((tile_m, tile_n), ct.float32), ct.zeros((tile_m, tile_n), ct.float32)
            pulls = ct.zeros((tile_m, tile_n), ct.float32)
            for step in range(group, ct.cdiv(x.shape[0], tile_m), groups):
                above = load(dy, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                below = load(x, (step, c), (tile_m, tile_n), bounded, 0, tma).astype(ct.float32)
                t, s = _tanh(below * factor, dy.dtype)
                pull = above * s
                ct.store(dx, (step, c), (pull * scale).astype(dx.dtype), check_bounds=bounded, allow_tma=tma)
                scales, pulls = scales + above * t, pulls + pull * below
                if ct.static_eval(shifted):
                    shifts = shifts + above
            ct.store(partial.slice(1, 0, columns), (group, c), ct.sum(scales, axis=0, keepdims=True))
            if ct.static_eval(shifted):
                ct.store(partial.slice(1, columns, 2 * columns), (group, c), ct.sum(shifts, axis=0, keepdims=True))
            slope = slope + ct.sum(pulls, axis=0, keepdims=True) * weight
        ct.store(slopes, (item,), ct.sum(slope, axis=1))


@ct.kernel
def dyt_sums(
    partial, slopes, slope, sums, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tma: ConstBool
):  # fmt: skip
    """Each block adds up ``tile_n`` columns of partial, [rows, columns], and one of them all slopes."""
    # Its launch overlaps the end of the kernel that writes them.
    ct.grid_dependency_control_wait()
    across = ct.cdiv(columns, tile_n)
    for c in range(ct.bid(0), across + 1, ct.num_blocks(0)):
        if c < across:
            total = ct.zeros((tile_m, tile_n), ct.float32)
            for r in range(ct.cdiv(partial.shape[0], tile_m)):
                total = total + load(partial, (r, c), (tile_m, tile_n), True, 0, tma)
            ct.store(sums, (c,), ct.sum(total, axis=0).astype(sums.dtype))
        else:
            each = ct.zeros((tile_m * tile_n,), ct.float32)
            for r in range(ct.cdiv(slopes.shape[0], tile_m * tile_n)):
                each = each + load(slopes, (r,), (tile_m * tile_n,), True, 0, False)
            ct.store(slope, (0,), ct.sum(each, axis=0, keepdims=True).astype(slope.dtype))


def stripe_of(columns: int) -> int:
    """The widest stripe of which the last one of a row wastes little."""
    widths = [width for width in (1024, 512, 256) if cdiv(columns, width) * width <= 1.125 * columns]
    return widths[0] if widths else min(256, power_of_two(columns))


def sums_of(shifted: bool) -> int:
    """Sums for each column in ``partial``."""
    return 2 if shifted else 1


def stripes_of(columns: int) -> int:
    """The number of stripes of a row."""
    return cdiv(columns, stripe_of(columns))


def groups_of(blocks: int, columns: int) -> int:
    """Rows of partial sums that a number of blocks leaves."""
    return cdiv(blocks, stripes_of(columns))


_X, _ALPHA = Array("x", "dtype", ROWS), Array("alpha", "weight_dtype", ())
_GAMMA, _BETA = (Array(name, "weight_dtype", COLUMNS) for name in ("gamma", "beta"))


def reference_forward(x: Any, alpha: Any, gamma: Any, beta: Any, shifted: bool) -> dict[str, Any]:
    """The formula in float64."""
    y = gamma.double() * (alpha.double() * x.double()).tanh()
    return {"y": y + beta.double() if shifted else y}


def reference_backward(dy: Any, x: Any, alpha: Any, gamma: Any, shifted: bool) -> dict[str, Any]:
    """The gradients of :func:`reference_forward` in float64.

    Those of alpha, gamma and beta are one vector: alone, a sum of terms of both signs may be 0 but for its rounding.
    """
    import torch

    wide, slope, factor = x.double(), dy.double(), alpha.double()
    t = (factor * wide).tanh()
    pull = slope * gamma.double() * (1 - t * t)
    sums = ((pull * wide).sum().reshape(1), (slope * t).sum(0), *([slope.sum(0)] if shifted else []))
    return {"dx": pull * factor, "sums": torch.cat(sums)}


FORWARD = rows.spec(
    dyt_forward,
    "y = gamma * tanh(alpha * x) + beta, or without beta",
    (_X, _ALPHA, _GAMMA, _BETA, Array("y", PRODUCT, ROWS, "output")),
    reference_forward,
    flags=("shifted",),
    live=2,
    flops=20,
    default=lambda problem, target: rows.default_in_blocks(3, 8, problem, target, 1024, 8),
    cute=False,
)

_BACKWARD_ARRAYS = (
    Array("dy", PRODUCT, ROWS), _X, _ALPHA, _GAMMA, Array("dx", "dtype", ROWS, "output"),
    Array("partial", "float32", ("blocks", "width"), "scratch"), Array("slopes", "float32", ("slopes",), "scratch"),
)  # fmt: skip
_DIMENSIONS = rows.dimensions_of(_BACKWARD_ARRAYS, ("shifted",))


def _sized(problem: Problem, groups: int = 1) -> Problem:
    """A problem with the sizes that arrays of sums have."""
    columns = problem["columns"]
    width, slopes = sums_of(problem["shifted"]) * columns, groups * stripes_of(columns)
    return Problem(problem, width=width, slopes=slopes)


def _parameters(arrays: Arrays, problem: Problem) -> tuple[ArrayParameter | ScalarParameter, ...]:
    return parameters_of(arrays, (*_DIMENSIONS, Dimension("width", "exact")), _sized(problem))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    stripe = stripe_of(problem["columns"])
    widths = sorted({min(stripe, width) for width in (256, 512, 1024)})
    return {
        "schedule": ["persistent"],
        "tile_m": sorted({max(1, size // width) for size in (1024, 2048, 4096) for width in widths}),
        "tile_n": list(widths),
        "occupancy": [1, 2, 3, 4],
        "num_worker_warps": [0, 8],
        "tma": [True, False],
    }


_SIZED = Constraint(
    "a tile of fewer than 1024 elements starves the memory system, and of more than 4096 spills",
    lambda problem, config, target: (
        min(1024, 16 * stripe_of(problem["columns"])) <= config["tile_m"] * config["tile_n"] <= 4096
    ),
)
_FITS = Constraint(
    "6 live values for each element of a tile exceed the SM's registers at this occupancy",
    lambda problem, config, target: (
        6 * config["tile_m"] * config["tile_n"] * max(1, config["occupancy"]) <= 1.25 * target.registers
    ),
)


def _grid(problem: Problem, config: Config, sm_count: int) -> int:
    """As many groups of rows as keep all blocks resident, times the stripes of each."""
    stripes = stripes_of(problem["columns"])
    groups = max(1, sm_count * max(1, config["occupancy"]) // stripes)
    return min(cdiv(problem["rows"], config["tile_m"]), groups) * stripes


# A public name, for other kernels: renamed where it is written, the records of this one would be stale.
grid = _grid


def _implement(problem: Problem, config: Config) -> Implementation:
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    stripe = stripe_of(columns)
    return Implementation(
        function=dyt_backward,
        parameters=_parameters(_BACKWARD_ARRAYS, problem),
        constants=(
            ("columns", columns),
            ("stripe", stripe),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("bounded", tile_m > 1 or columns % stripe != 0),
            ("tma", config["tma"]),
            ("shifted", problem["shifted"]),
        ),
        grid=lambda sizes, sm_count: _grid(sizes, config, sm_count),
        hints=hints(config),
    )


def _default(problem: Problem, target: Target) -> Config:
    # The exact tanh leaves fewer registers for loads that run ahead.
    width = min(stripe_of(problem["columns"]), 512 if problem["dtype"] == "float32" else 1024)
    return Config(
        schedule="persistent", tile_m=max(1, 2048 // width), tile_n=width, occupancy=2, num_worker_warps=0,
        tma=target.has_tma,
    )  # fmt: skip


def _generic(problem: Problem) -> Config:
    width = min(256, stripe_of(problem["columns"]))
    return Config(
        schedule="persistent", tile_m=max(1, 256 // width), tile_n=width, occupancy=1, num_worker_warps=0, tma=False
    )


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    groups = groups_of(blocks, problem["columns"])
    return outputs_of(_BACKWARD_ARRAYS)(_sized(problem, groups), groups)


def _results(outputs: dict[str, Any]) -> dict[str, Any]:
    """The sums, added up."""
    import torch

    total = outputs["slopes"].double().sum().reshape(1)
    return {"dx": outputs["dx"], "sums": torch.cat((total, outputs["partial"].double().sum(0)))}


BACKWARD = KernelSpec(
    name="dyt_backward",
    summary="gradients of dyt: dx, and the sums for alpha, gamma and beta as one float32 row for each group of rows",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=Space(_axes, (_SIZED, _FITS, TMA_NEEDS_HOPPER)),
    implement=_implement,
    default=_default,
    generic=_generic,
    inputs=functools.partial(drawn, _BACKWARD_ARRAYS),
    outputs=_outputs,
    reference=reference_backward,
    results=_results,
    bytes_moved=lambda problem: bytes_of(_BACKWARD_ARRAYS, _sized(problem)),
    flops=lambda problem: 30 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: str(problem["dtype"]),
)


def _sums_arrays(problem: Problem) -> Arrays:
    # A store by 16 bytes would reach beyond a result that is shorter.
    return (
        Array("partial", "float32", ("rows", "width")),
        Array("slopes", "float32", ("slopes",)),
        Array("slope", "dtype", ("1",), "output", aligned=False),
        Array("sums", "dtype", ("width",), "output", aligned=_sized(problem)["width"] >= 8),
    )


def _implement_sums(problem: Problem, config: Config) -> Implementation:
    width = _sized(problem)["width"]
    return Implementation(
        function=dyt_sums,
        parameters=_parameters(_sums_arrays(problem), problem),
        constants=(
            ("columns", width),
            ("tile_m", config["tile_m"]),
            ("tile_n", config["tile_n"]),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: cdiv(width, config["tile_n"]) + 1,
        hints=hints(config),
        dependent=True,
    )


def reference_sums(partial: Any, slopes: Any) -> dict[str, Any]:
    """The sums in float64, as one vector."""
    import torch

    return {"sums": torch.cat((slopes.double().sum().reshape(1), partial.double().sum(0)))}


def _all_sums(outputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"sums": torch.cat((outputs["slope"], outputs["sums"]))}


SUMS = KernelSpec(
    name="dyt_sums",
    summary="the sums of dyt_backward added up in a fixed order: one for alpha, and those for gamma and beta",
    module=__name__,
    dimensions=rows.dimensions_of((), ("shifted",)),
    space=Space(
        lambda problem: {
            "schedule": ["block"],
            "tile_m": [16, 32, 64, 128],
            "tile_n": [16, 32, 64],
            "occupancy": [1],
            "num_worker_warps": [0],
            "tma": [True, False],
        },
        (
            TMA_NEEDS_HOPPER,
            Constraint(
                "a tile of fewer than 512 or more than 4096 elements starves or spills",
                lambda problem, config, target: 512 <= config["tile_m"] * config["tile_n"] <= 4096,
            ),
        ),
    ),
    implement=_implement_sums,
    default=lambda problem, target: Config(
        schedule="block", tile_m=min(64, max(16, power_of_two(problem["rows"]))), tile_n=32, occupancy=1,
        num_worker_warps=0, tma=False,
    ),
    generic=lambda problem: Config(
        schedule="block", tile_m=32, tile_n=16, occupancy=1, num_worker_warps=0, tma=False
    ),
    inputs=lambda problem, generator, device: drawn(
        _sums_arrays(problem), _sized(problem, problem["rows"]), generator, device
    ),
    outputs=lambda problem, blocks: outputs_of(_sums_arrays(problem))(_sized(problem), blocks),
    reference=reference_sums,
    results=_all_sums,
    bytes_moved=lambda problem: bytes_of(tensors(_sums_arrays(problem)), _sized(problem, problem["rows"])),
    flops=lambda problem: problem["rows"] * _sized(problem)["width"],
    result_dtype=lambda problem: str(problem["dtype"]),
    inputs_in_l2=True,
)  # fmt: skip
SPECS = (FORWARD, BACKWARD, SUMS)
