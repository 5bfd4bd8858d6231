"""Linear layers of few rows with int8 weights: ``y = act(x @ (scale * weight)^T + bias) * (x @ (up_scale * up)^T)``.

Weights of :mod:`tilekern.kernels.quantize`, with a scale for each row. The kernel is that of
:mod:`tilekern.kernels.skinny.linear` without an addend, with half of the bytes to read: int8 tiles are loaded, widened
to the dtype of ``x`` in registers, which is exact, and multiplied as rows of the matrix units' products. A scale is a
factor of a whole sum, so each sum in float32 is multiplied once.

Reading takes half the time only if widening keeps up. ``widening`` says how: ``direct`` leaves it to the compiler,
``float32`` makes each number a float32 first. The compiler's code for sm_90 has five to six instructions for a number
by the first and three by the second, one of which runs at a quarter of the others' rate or less; for sm_100 three by
both, and that slow one by the second alone. Both are exact.

Bits: a row of the result depends on its own row of ``x`` alone. ``tile_k``, and ``tile_n`` below 64 or not, can change
them.
"""

from __future__ import annotations

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
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Dimension, Problem, Space, Value
from tilekern.spec.targets import INTERPRETED, Target

FLAGS = ("gated", "rounded", "biased", "gelu_tanh", "silu")


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
    """Load a number for each of a tile's columns, which are the rows of its sums."""
    return ct.reshape(load(array, (j,), (tile_n,), True, 0, False).astype(ct.float32), (tile_n, 1))


def _tile(
    item, x, weight, scale, up, up_scale, bias, y, gated, rounded, biased, gelu_tanh, silu, tile_m, tile_n, tile_k,
    latency, by_float32,
):  # fmt: skip
    """Compute tile number ``item`` of the result: ``tile_m`` tokens of ``tile_n`` columns."""
    down = ct.cdiv(y.shape[0], tile_m)
    i, j = item % down, item // down
    total, factor = _sums(x, weight, up, i, j, gated, tile_m, tile_n, tile_k, latency, by_float32)
    total = total * _of_columns(scale, j, tile_n)
    if ct.static_eval(gated):
        factor = factor * _of_columns(up_scale, j, tile_n)
    if ct.static_eval(biased):
        total = total + _of_columns(bias, j, tile_n)
    if ct.static_eval(rounded):
        total, factor = total.astype(y.dtype).astype(ct.float32), factor.astype(y.dtype).astype(ct.float32)
    z = activated(total, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    ct.store(y, (i, j), z.transpose().astype(y.dtype), allow_tma=False)


@ct.kernel
def skinny_linear_int8(
    x, weight, scale, up, up_scale, bias, y, gated: ConstBool, rounded: ConstBool, biased: ConstBool,
    gelu_tanh: ConstBool, silu: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt,
    by_float32: ConstBool, persistent: ConstBool,
):  # fmt: skip
    """x [rows, inner], weight and up [columns, inner], scales and bias [columns], y [rows, columns]."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    tiles = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n)
    arguments = (
        x, weight, scale, up, up_scale, bias, y, gated, rounded, biased, gelu_tanh, silu, tile_m, tile_n, tile_k,
        latency, by_float32,
    )  # fmt: skip
    each_step(_tile, tiles, persistent, arguments)


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "int8", ("columns", "inner")),
    Array("scale", "float32", ("columns",)),
    Array("up", "int8", ("columns", "inner"), flag="gated"),
    Array("up_scale", "float32", ("columns",), flag="gated"),
    Array("bias", "dtype", ("columns",), flag="biased"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    if problem["dtype"] == "float32":
        return {name: [value] for name, value in generic(problem).items()}
    return {
        "schedule": ["block", "persistent"],
        "tile_m": sorted({tokens_of(problem["rows"], tile_n) for tile_n in WIDTHS}),
        "tile_n": list(WIDTHS),
        "tile_k": [256, 128],
        "occupancy": [2, 1, 4],
        "num_worker_warps": [0, 8],
        "latency": [0],
        "widening": ["float32", "direct"],
    }


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds two stages of operands."""
    of_weights = config["tile_n"] * (2 if problem["gated"] else 1)
    stage = (config["tile_m"] * ITEM_BYTES[problem["dtype"]] + of_weights) * config["tile_k"]
    return bool(2 * stage * config["occupancy"] <= target.shared_bytes)


def _is_read_by_most(problem: Problem, config: Config, target: Target) -> bool:
    tiles = count(problem, config)
    if config["tile_n"] < USUAL:
        return tiles <= 4 * target.sm_count
    return config["tile_n"] == USUAL or tiles >= target.sm_count


def _usual(problem: Problem, tile_n: int, **changes: Value) -> Config:
    """Return a config without the axis that skinny_linear alone has, of its implementations."""
    found = config_of(problem["rows"], tile_n, **changes)
    return Config({name: value for name, value in found.items() if name != "implementation"})


def default(problem: Problem, target: Target) -> Config:
    """Return the widest of the narrow tiles with which three quarters of the SMs read; any tile is exact in float32."""
    if problem["dtype"] == "float32":
        return generic(problem)
    found = [_usual(problem, tile_n, tile_k=256, widening="float32") for tile_n in WIDTHS if tile_n <= USUAL]
    if unit_of(target) == "tcgen05":
        found = [c.but(widening="direct") if c["tile_n"] == USUAL else c for c in found]
    found = [c if _fits_shared(problem, c, target) else c.but(tile_k=128) for c in found]
    found = [c if _fits_shared(problem, c, target) else c.but(occupancy=1) for c in found]
    return next((c for c in found if 4 * count(problem, c) >= 3 * target.sm_count), found[-1])


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
    function=skinny_linear_int8,
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    constants=lambda problem, config: {"by_float32": config["widening"] == "float32"},
    space=Space(
        _axes,
        (
            Constraint(TOO_SMALL, has_tokens),
            Constraint(TOO_LARGE, _fits_shared),
            Constraint(
                "narrow tiles are for SMs that wider ones leave idle, wide ones for more columns", _is_read_by_most
            ),
            Constraint(
                "two blocks with 128 columns each read as much at a time as four with 64",
                lambda problem, config, target: config["tile_n"] <= USUAL or config["occupancy"] <= 2,
            ),
            Constraint(
                "narrower tiles have the same code by both ways of widening",
                lambda problem, config, target: (
                    config["widening"] == "float32" or config["tile_n"] >= USUAL or problem["dtype"] == "float32"
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
        ),
    ),
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: (4 if problem["gated"] else 2) * problem["rows"] * problem["inner"] * problem["columns"],
    roundings=2,  # of a rounded gate: its products, and their product
    dependent=True,
    streamed=True,
)

SPECS = (SPEC,)
